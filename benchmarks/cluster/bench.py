"""Runs the cells: every rival in turn, again and again, and between them the plain links.

Decides the order (rivals interleaved, so that whatever else the machine does hits all alike) and
what is written down. What a time means is `table`'s.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from megatron_burst.autotune.rates import Rates
from megatron_burst.cli.trace.files import Trace

from . import measure, predict
from .cells import REGIMES, Cell, Rival
from .measure import Run, Work
from .network import Network
from .ranks import RankError, Ranks

TRANSFER = 0.2  # seconds that a plain transfer takes at the nominal rate
PASSES = ("forward", "backward")
LINKS = ("intra", "inter")
BYTES_WITHIN = 0.03  # of the formula: the kernel also counts headers and acknowledgements
Record = dict[str, Any]
Say = Callable[[str], None]


def run_cells(
    cells: Iterable[Cell], rivals: Sequence[Rival], repeats: int, say: Say
) -> Iterator[Record]:
    """One record per cell; `say` is told before each run what it will be."""
    for (nodes, per_node, rates), some in groupby(cells, lambda c: (c.nodes, c.per_node, c.rates)):
        network = Network(nodes, per_node, rates)
        with built(network), Ranks(network) as ranks:
            for _, group in groupby(some, lambda c: (c.heads, c.tokens)):
                yield from _one_problem(ranks, list(group), rivals, repeats, say)


@contextmanager
def built(network: Network) -> Iterator[Network]:
    network.build()
    try:
        yield network
    finally:
        network.destroy()


def trace_cell(cell: Cell, rival: Rival, say: Say) -> Trace:
    """The events of one run of a rival, the second after the warm-up."""
    network = Network(cell.nodes, cell.per_node, cell.rates)
    with built(network), Ranks(network) as ranks:
        works = _prepared(ranks, cell, [rival], say)
        speed = _speed(cell, works)
        ranks.run(measure.timed, rival.name, speed)
        say(f"{rival.name}: traced")
        answers = ranks.run(measure.trace, rival.name, speed)
    runs = [run for _, run in answers]
    _check(rival, _formula(works[rival]), works[rival], runs)
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
        measure.write_problem(problem, ranks.network.size, Path(folder))
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
    ranks: Ranks, cells: list[Cell], rivals: Sequence[Rival], repeats: int, say: Say
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
        yield _one_cell(ranks, cell, works, autos, repeats, say) | {"left out": refused}


def _one_cell(
    ranks: Ranks,
    cell: Cell,
    works: dict[Rival, list[Work]],
    autos: Sequence[Rival],
    repeats: int,
    say: Say,
) -> Record:
    speed = _speed(cell, works)
    found = ranks.run(measure.rates, speed)  # all but the oversleeping is the same on all ranks
    rates = dataclasses.replace(found[0], launch=median(each.launch for each in found))
    for rival in autos:
        say(f"{cell.grid} {cell.heads} {cell.regime}: {rival.name}, choosing")
        works = works | {rival: ranks.run(measure.prepare, rival, rates)}
    plain: dict[str, list[float]] = {link: [] for link in LINKS}
    runs: dict[Rival, list[list[Run]]] = {rival: [] for rival in works}
    for repeat in range(repeats):
        for link, rate in _transfer(ranks).items():
            plain[link].append(rate)
        for rival, done in runs.items():
            say(f"{cell.grid} {cell.heads} {cell.regime}: {rival.name} ({repeat + 1}/{repeats})")
            done.append(ranks.run(measure.timed, rival.name, speed))
    return {
        "cell": cell._asdict() | {"rates": str(cell.rates)},
        "speed": speed,
        "plain": plain,
        "rates": dataclasses.asdict(rates),
        "rivals": [
            _rival_record(rival, works[rival], done) | {"predicted": _predicted(cell, rival, rates)}
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
            rate = 8 * sizes[link] / _span([clock[link] for clock in clocks])
            best[link] = max(best.get(link, 0.0), rate)
    return best


def _rival_record(rival: Rival, works: list[Work], done: list[list[Run]]) -> Record:
    """Times of every run, and by pass and link what the busiest rank must send and compute."""
    wanted = _formula(works)
    for runs in done:
        _check(rival, wanted, works, runs)
    sent = {link: sum(run.sent[link] for run in done[-1]) for link in LINKS}
    return {
        "name": rival.name,
        "seconds": [
            {name: _span([run.clock[name] for run in runs]) for name in PASSES} for runs in done
        ],
        "busiest": {
            name: {link: max(work.bytes[name][link] for work in works) for link in LINKS}
            for name in PASSES
        },
        "flops": {name: max(work.flops[name] for work in works) for name in PASSES},
        "bytes": {link: {"formula": wanted[link], "kernel": sent[link]} for link in LINKS},
        "chosen": works[0].chosen,
        "error": max(run.error for runs in done for run in runs),
    }


def _formula(works: list[Work]) -> dict[str, int]:
    """Payload bytes of all ranks, by link class."""
    return {link: sum(work.bytes[p][link] for work in works for p in PASSES) for link in LINKS}


def _check(rival: Rival, wanted: dict[str, int], works: list[Work], runs: list[Run]) -> None:
    """No run counts unless its result is right and its bytes are those of the formula."""
    for rank, (run, work) in enumerate(zip(runs, works, strict=True)):
        if not run.error <= measure.TOLERANCE:
            raise RankError(f"{rival.name}: rank {rank} is off by {run.error:.3g}")
        mine = {link: sum(work.bytes[p][link] for p in PASSES) for link in LINKS}
        if run.counted != mine:
            raise RankError(
                f"{rival.name}: rank {rank} sent {run.counted}, the formula says {mine}"
            )
    for link, formula in wanted.items():
        sent = sum(run.sent[link] for run in runs)
        # what barriers and the making of connections cost is a few KB, whatever is measured
        if abs(sent - formula) > BYTES_WITHIN * formula + 20_000 * len(runs):
            raise RankError(
                f"{rival.name}: the kernel counted {sent} {link} bytes, the formula says {formula}"
            )


def _speed(cell: Cell, works: dict[Rival, list[Work]]) -> float | None:
    """FLOP/s at which burst's compute takes REGIMES[regime] times as long as its links are busy;
    0.0 for compute that takes no time, None for real compute."""
    if cell.regime == "real":
        return None
    share = REGIMES[cell.regime]
    if share == 0.0:
        return 0.0
    flops = max(sum(work.flops.values()) for work in next(iter(works.values())))  # of any rival
    return flops / (share * predict.busy(cell))


def _span(clocks: list[tuple[float, float]]) -> float:
    """Seconds from the first rank's start to the last one's end; all ranks share one clock."""
    return max(end for _, end in clocks) - min(begin for begin, _ in clocks)


def _reason(report: str) -> str:
    return next(line for line in report.splitlines() if line.startswith("ValueError")).split(
        ": ", 1
    )[1]
