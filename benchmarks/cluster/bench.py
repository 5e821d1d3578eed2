"""Runs the cells: every rival in turn, again and again, and between them the plain links.

Decides the order (rivals interleaved, so that whatever else the machine does hits all alike) and
what goes on after the first round. What is written down is `record`'s, what a time means `table`'s.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megatron_burst.autotune.rates import Rates
from megatron_burst.tools.trace.record import Trace

from . import measure, predict, record
from .cells import REGIMES, Cell, Rival
from .mail import LINKS, PASSES
from .measure import Run, Work
from .network import Network
from .ranks import RankError, Ranks
from .record import Record

TRANSFER = 0.2  # seconds that a plain transfer takes at the nominal rate
TIMEOUT = 240.0  # seconds for which a rank waits for others: a busy machine computes unevenly
CLEARLY = 1.1  # times as slow as another one of its algorithm
Say = Callable[[str], None]


class How(NamedTuple):
    """repeats: runs of each rival. best: after a first round of all, go on only with the fastest
    rivals of each algorithm. forecast: measure rates as `auto` does, and say what it predicts."""

    repeats: int
    best: bool = False
    forecast: bool = True


def run_cells(
    cells: Iterable[Cell], rivals: Sequence[Rival], how: How, say: Say
) -> Iterator[Record]:
    """One record per cell; `say` is told before each run what it will be."""
    for network, some in groupby(cells, lambda c: c.network):
        with built(network), Ranks(network, TIMEOUT) as ranks:
            for _, group in groupby(some, lambda c: c.problem()):
                yield from _one_problem(ranks, list(group), rivals, how, say)


@contextmanager
def built(network: Network) -> Iterator[Network]:
    network.build()
    try:
        yield network
    finally:
        network.destroy()


def trace_cell(cell: Cell, rival: Rival, say: Say) -> Trace:
    """The events of one run of a rival, the second after the warm-up."""
    network = cell.network
    with built(network), Ranks(network) as ranks:
        works = _prepared(ranks, cell, [rival], say)
        speed = _speed(cell, works)
        ranks.run(measure.timed, rival.name, speed)
        say(f"{rival.name}: traced")
        answers = ranks.run(measure.trace, rival.name, speed)
    runs = [run for _, run in answers]
    record.check(rival, works[rival], runs)
    marks = [
        (p, min(run.clock[p][0] for run in runs), max(run.clock[p][1] for run in runs))
        for p in PASSES
    ]
    title = f"{rival.name}, {cell.grid}, {cell.heads}, {cell.rates} bit/s, {cell.regime}"
    return Trace(title, tuple(event for events, _ in answers for event in events), tuple(marks))


def _prepared(
    ranks: Ranks, cell: Cell, rivals: Sequence[Rival], say: Say
) -> dict[Rival, list[Work]]:
    """Every rival warmed up and checked; one that mb.attention refuses here has no works."""
    problem, works = cell.problem(), {}
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        say(f"{cell.grid} {cell.heads}: the truth, in one process")
        layouts = tuple(dict.fromkeys(rival.layout for rival in rivals))
        measure.write_problem(problem, ranks.network, Path(folder), layouts)
        ranks.run(measure.load, problem, Path(folder))
    for rival in rivals:
        if rival.algorithm == "auto":  # chosen in each cell
            continue
        say(f"{cell.grid} {cell.heads}: {rival.name}, warming up")
        try:
            works[rival] = ranks.run(measure.prepare, rival)
        except RankError as error:
            if "ValueError" not in str(error):
                raise
            say(f"{rival.name} cannot run here: {_reason(str(error))}")
            works[rival] = []
    return works


def _one_problem(
    ranks: Ranks, cells: list[Cell], rivals: Sequence[Rival], how: How, say: Say
) -> Iterator[Record]:
    """All regimes of one problem: the plans are made once."""
    refused: list[str] = []

    def listen(text: str) -> None:
        if " cannot run here: " in text:
            refused.append(text)
        say(text)

    works = _prepared(ranks, cells[0], rivals, listen)
    works = {rival: some for rival, some in works.items() if some}
    autos = [rival for rival in rivals if rival.algorithm == "auto"]
    for cell in cells:
        left_out: list[str] = []
        found = _one_cell(ranks, cell, works, autos, how, say, left_out)
        yield found | {"left out": refused + left_out}


def _one_cell(
    ranks: Ranks,
    cell: Cell,
    works: dict[Rival, list[Work]],
    autos: Sequence[Rival],
    how: How,
    say: Say,
    left_out: list[str],
) -> Record:
    where = f"{cell.grid} {cell.heads} {cell.mask} {cell.regime}"
    speed, rates = _speed(cell, works), None
    if how.forecast or autos:
        found = ranks.run(measure.rates, speed)  # all but the oversleeping is alike on all ranks
        rates = dataclasses.replace(found[0], launch=median(each.launch for each in found))
    for rival in autos:
        say(f"{where}: {rival.name}, choosing")
        works = works | {rival: ranks.run(measure.prepare, rival, rates)}
    plain: dict[str, list[float]] = {link: [] for link in LINKS}
    runs: dict[Rival, list[list[Run]]] = {rival: [] for rival in works}
    for repeat in range(how.repeats):
        for link, rate in _transfer(ranks).items():
            plain[link].append(rate)
        for rival, done in runs.items():
            say(f"{where}: {rival.name} ({repeat + 1}/{how.repeats})")
            done.append(ranks.run(measure.timed, rival.name, speed))
        if how.best and repeat == 0:
            slow = record.slower(runs, CLEARLY)
            left_out += [f"{r.name}: {x:.2f} times {o.name}, once" for r, (x, o) in slow.items()]
            runs = {rival: done for rival, done in runs.items() if rival not in slow}
    return {
        "cell": cell._asdict() | {"rates": str(cell.rates)},
        "speed": speed,
        "plain": plain,
        "rates": rates and dataclasses.asdict(rates),
        "rivals": [
            record.of(ranks.network, rival, works[rival], done)
            | {"predicted": rates and _predicted(cell, rival, rates)}
            for rival, done in runs.items()
        ],
    }


def _predicted(cell: Cell, rival: Rival, rates: Rates) -> float | None:
    """Predicted seconds; None of "auto", whose words say it."""
    found = None if rival.algorithm == "auto" else predict.predict(cell, rival, rates)
    return found and found.seconds


def _transfer(ranks: Ranks) -> dict[str, float]:
    """Payload bits per second that each link class carries, from first start to last end; the
    best of three, because what else the machine does can only slow it."""
    best: dict[str, float] = {}
    sizes = {link: int(TRANSFER * ranks.network.rates.of(link) / 8) for link in LINKS}
    for _ in range(3):
        clocks = ranks.run(measure.transfer, sizes)
        for link in clocks[0]:
            rate = 8 * sizes[link] / record.span([clock[link] for clock in clocks])
            best[link] = max(best.get(link, 0.0), rate)
    return best


def _speed(cell: Cell, works: dict[Rival, list[Work]]) -> float | None:
    """FLOP/s at which burst's compute takes REGIMES[regime] times as long as its links are busy, in
    the layout of the first rival; 0.0 for compute that takes no time, None for real compute."""
    if cell.regime == "real":
        return None
    share = REGIMES[cell.regime]
    if share == 0.0:
        return 0.0
    rival, some = next(iter(works.items()))  # of a layout, all rivals compute alike
    flops = max(sum(work.flops.values()) for work in some)
    return flops / (share * predict.busy(cell, rival.layout))


def _reason(report: str) -> str:
    return next(line for line in report.splitlines() if line.startswith("ValueError")).split(
        ": ", 1
    )[1]
