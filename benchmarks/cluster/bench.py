"""Runs the cells: every rival in turn, again and again, and between them the plain links.

Decides the order (rivals interleaved, so that whatever else the machine does hits all alike) and
what is written down. What a time means is `table`'s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from . import measure
from .cells import REGIMES, Cell, Rival
from .measure import Run, Work
from .network import Network
from .ranks import RankError, Ranks

TRANSFER = 4 * 2**20  # bytes of a plain transfer
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
            for (_, tokens), group in groupby(some, lambda c: (c.heads, c.tokens)):
                yield from _one_problem(ranks, list(group), rivals, repeats, say)
                del tokens


@contextmanager
def built(network: Network) -> Iterator[Network]:
    network.build()
    try:
        yield network
    finally:
        network.destroy()


def _one_problem(
    ranks: Ranks, cells: list[Cell], rivals: Sequence[Rival], repeats: int, say: Say
) -> Iterator[Record]:
    """All regimes of one problem: the plans are made once."""
    problem = cells[0].problem()
    works: dict[Rival, list[Work]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        say(f"{cells[0].grid} {cells[0].heads}: the truth, in one process")
        measure.write_problem(problem, ranks.network.size, Path(folder))
        ranks.run(measure.load, problem, Path(folder))
    for rival in rivals:
        say(f"{cells[0].grid} {cells[0].heads}: {rival.name}, warming up")
        try:
            works[rival] = ranks.run(measure.prepare, rival)
        except RankError as error:
            if "ValueError" not in str(error):
                raise
            left_out[rival.name] = _reason(str(error))
    for cell in cells:
        yield _one_cell(ranks, cell, works, repeats, say) | {"left out": left_out}


def _one_cell(
    ranks: Ranks, cell: Cell, works: dict[Rival, list[Work]], repeats: int, say: Say
) -> Record:
    speed = _speed(cell, works)
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
        "rivals": [_rival_record(rival, works[rival], done) for rival, done in runs.items()],
    }


def _transfer(ranks: Ranks) -> dict[str, float]:
    """Payload bits per second that each link class carries, from first start to last end; the
    best of three, because what else the machine does can only slow it."""
    best: dict[str, float] = {}
    for _ in range(3):
        clocks = ranks.run(measure.transfer, TRANSFER)
        for link in clocks[0]:
            rate = 8 * TRANSFER / _span([clock[link] for clock in clocks])
            best[link] = max(best.get(link, 0.0), rate)
    return best


def _rival_record(rival: Rival, works: list[Work], done: list[list[Run]]) -> Record:
    """Times of every run, and by pass and link what the busiest rank must send and compute."""
    wanted = {link: sum(work.bytes[p][link] for work in works for p in PASSES) for link in LINKS}
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
        "error": max(run.error for runs in done for run in runs),
    }


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
    busy, flops = min(
        (_busy(cell, some), max(sum(work.flops.values()) for work in some))
        for rival, some in works.items()
        if rival.algorithm == "burst"
    )
    return flops / (share * busy)


def _busy(cell: Cell, works: list[Work]) -> float:
    """Seconds for which the busier link class of the busiest rank is busy at its nominal rate."""
    return sum(
        max(8 * max(w.bytes[name][link] for w in works) / cell.rates.of(link) for link in LINKS)
        for name in PASSES
    )


def _span(clocks: list[tuple[float, float]]) -> float:
    """Seconds from the first rank's start to the last one's end; all ranks share one clock."""
    return max(end for _, end in clocks) - min(begin for begin, _ in clocks)


def _reason(report: str) -> str:
    return next(line for line in report.splitlines() if line.startswith("ValueError")).split(
        ": ", 1
    )[1]
