"""Runs of all cells: every rival in turn, several times, and plain transfers between them.

This module decides the order (rivals are interleaved, so that other load affects all of them) and
which rivals continue after the first round. `record` decides what is stored, and `table` how times
are evaluated.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from megatron_burst.autotune.rates import Rates

from . import groups, measure, predict, record
from .cells import CHOSEN, REGIMES, Cell, Rival
from .mail import LINKS
from .network import Network
from .ranks import RankError, Ranks
from .record import Record, Run, Work
from .suites import Suite

TRANSFER = 0.2  # seconds that a plain transfer takes at the nominal rate
TIMEOUT = 240.0  # seconds that a rank waits for others; ranks of a busy machine differ in speed
CLEARLY = 1.1  # slowdown relative to another rival of the same algorithm
Say = Callable[[str], None]
Runs = dict[str, list[list[Run]]]  # rival -> its runs, each on all ranks


@contextmanager
def cluster(network: Network, preload: Sequence[str] = ()) -> Iterator[Ranks]:
    """Build a network, yield its ranks, and destroy the network."""
    with built(network), Ranks(network, TIMEOUT, preload) as ranks:
        yield ranks


@contextmanager
def built(network: Network) -> Iterator[Network]:
    network.build()
    try:
        yield network
    finally:
        network.destroy()


def in_turn(
    ranks: Ranks, names: Iterable[str], repeats: int, call: Sequence[Any], say: Say,
    slow: Callable[[Runs], Iterable[str]] = lambda _: (),
) -> tuple[Runs, Record]:  # fmt: skip
    """Return the runs of every rival, and the "plain" rates and the "load" of each round.

    Args:
        call: Function of a rank and its arguments after the rival's name.
        slow: Rivals for which one round is enough.
    """
    runs: Runs = {name: [] for name in names}
    record: Record = {"plain": {link: [] for link in LINKS}, "load": []}
    for repeat in range(repeats):
        record["load"].append(round(os.getloadavg()[0], 1))
        for link, rate in plain_rates(ranks).items():
            record["plain"][link].append(rate)
        for name, rounds in runs.items():
            say(f"{name} ({repeat + 1}/{repeats})")
            rounds.append(ranks.run(call[0], name, *call[1:]))
        if repeat == 0:
            slow_names = set(slow(runs))
            runs = {name: rounds for name, rounds in runs.items() if name not in slow_names}
    return runs, record


def plain_rates(ranks: Ranks) -> dict[str, float]:
    """Return payload bits per second of each link class, from first start to last end.

    The result is the best of three, because other load can only slow transfers.
    """
    best: dict[str, float] = {}
    sizes = {link: int(TRANSFER * ranks.network.rates.of(link) / 8) for link in LINKS}
    for _ in range(3):
        clocks = ranks.run(measure.transfer, sizes)
        for link in clocks[0]:
            rate = 8 * sizes[link] / record.span([clock[link] for clock in clocks])
            best[link] = max(best.get(link, 0.0), rate)
    return best


def run_cells(
    cells: Iterable[Cell], suite: Suite, repeats: int, forecast: bool, say: Say
) -> Iterator[Record]:
    """Yield one record per cell.

    Args:
        forecast: Measure rates as `auto` does, and add the prediction.
        say: Called before each run with its name.
    """
    for network, cells_of_network in groupby(cells, lambda c: c.network):
        with cluster(network) as ranks:
            for _, group in groupby(cells_of_network, lambda c: c.problem()):
                same = list(group)  # the plans are made once
                works, refused = _prepared(ranks, same[0], suite.rivals, say)
                for cell in same:
                    cell_record = _one_cell(ranks, cell, suite, works, repeats, forecast, say)
                    cell_record["refused"] = refused + cell_record["refused"]
                    yield cell_record


def _prepared(
    ranks: Ranks, cell: Cell, rivals: Sequence[Rival], say: Say
) -> tuple[dict[Rival, list[Work]], list[Record]]:
    """Warm up and check every rival whose settings do not depend on the cell.

    Return the rivals that can run, and name, reason and `wrong` of each refused rival.
    """
    problem = cell.problem()
    works: dict[Rival, list[Work]] = {}
    refused: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        say(f"{cell.grid} {cell.heads}: the truth, in one process")
        measure.write_problem(problem, ranks.network, Path(folder))
        ranks.run(measure.load, problem, Path(folder))
    for rival in rivals:
        if _chosen(rival):
            continue
        say(f"{cell.grid} {cell.heads}: {rival.name}, warming up")
        with refusal(rival.name, refused):
            works[rival] = ranks.run(measure.prepare, rival)
    return works, refused


REFUSALS = {"ValueError": False, "Inaccurate": True}  # error of a rank -> True if results are wrong


@contextmanager
def refusal(name: str, refused: list[Record]) -> Iterator[None]:
    """Add a rival that cannot run or has wrong results to `refused`, with the reason.

    Other errors end the benchmark, because the ranks cannot continue after them.
    """
    try:
        yield
    except record.WrongRun as error:
        refused.append({"name": name, "reason": str(error), "wrong": True})
    except RankError as error:
        if error.ended or len(set(error.kinds)) != 1 or error.kinds[0] not in REFUSALS:
            raise
        wrong = REFUSALS[error.kinds[0]]
        reason = error.words[0] if wrong else f"cannot run here: {error.words[0]}"
        refused.append({"name": name, "reason": reason, "wrong": wrong})


def _one_cell(
    ranks: Ranks, cell: Cell, suite: Suite, works: Mapping[Rival, list[Work]], repeats: int,
    forecast: bool, say: Say,
) -> Record:  # fmt: skip
    label = f"{cell.grid} {cell.heads} {cell.mask} {cell.regime}"
    autos = [rival for rival in suite.rivals if _chosen(rival)]
    speed, rates, refused = None, None, []
    if works:  # equal for all rivals of a layout
        speed = _speed(cell, *next(iter(works.items())))
    if forecast or autos:
        rates_by_rank = ranks.run(measure.rates, speed)  # only the oversleep differs between ranks
        rates = dataclasses.replace(
            rates_by_rank[0], launch=median(rank_rates.launch for rank_rates in rates_by_rank)
        )
    for rival in autos:
        say(f"{label}: {rival.name}, choosing")
        with refusal(rival.name, refused):
            works = works | {rival: _late(ranks, cell, rival, rates)}
    of_name, left_out = {rival.name: rival for rival in works}, []

    def slow(runs: Runs) -> Iterator[str]:
        if not suite.best:
            return
        for name, (times, faster_name) in slower({of_name[n]: x for n, x in runs.items()}).items():
            left_out.append(f"{name}: {times:.2f} times {faster_name}, once")
            yield name

    call = measure.timed, speed
    runs, turn_record = in_turn(ranks, of_name, repeats, call, lambda x: say(f"{label}: {x}"), slow)
    rival_records = []
    for name, rounds in runs.items():
        rival = of_name[name]
        with refusal(name, refused):
            rival_records.append(
                record.of(ranks.network, name, works[rival], rounds)
                | {"predicted": rates and _predicted(cell, rival, rates)}
            )
    return turn_record | {
        "cell": cell._asdict() | {"rates": str(cell.rates)},
        "speed": speed,
        "rates": rates and dataclasses.asdict(rates),
        "left out": left_out,
        "refused": refused,
        "rivals": rival_records,
    }


def _chosen(rival: Rival) -> bool:
    """Return True if the rival's settings are chosen in each cell."""
    return rival.algorithm == "auto" or rival.layout in (CHOSEN, groups.DYNAMIC)


def _late(ranks: Ranks, cell: Cell, rival: Rival, rates: Rates | None) -> list[Work]:
    """Warm up and check a rival whose settings depend on the rates of its cell."""
    assert rates is not None
    if rival.layout == groups.DYNAMIC:
        plan = groups.planned(cell)
        works, choice_words = ranks.run(measure.prepare, rival, None, plan), groups.words(plan)
    elif rival.layout == CHOSEN:
        layout = predict.best_layout(cell, rates)
        works = ranks.run(measure.prepare, rival._replace(layout=layout), rates)
        name, *numbers = layout.split()
        whole = ", whole documents" if numbers else ""
        choice_words = f"{name}{whole}, {works[0].says}"
    else:
        return ranks.run(measure.prepare, rival, rates)
    return [work._replace(says=choice_words) for work in works]


def slower(runs: Mapping[Rival, list[list[Run]]]) -> dict[str, tuple[float, str]]:
    """Return rivals that are clearly slower than another rival of the same algorithm and layout.

    Each maps to its time relative to the faster rival, and the name of the faster rival.
    """
    times = {
        r: median(sum(x.values()) for x in record.seconds(rounds)) for r, rounds in runs.items()
    }
    slow_rivals = {}
    for rival, seconds in times.items():
        same_kind = (r for r in times if (r.algorithm, r.layout) == (rival.algorithm, rival.layout))
        best = min(same_kind, key=times.__getitem__)
        if seconds > CLEARLY * times[best]:
            slow_rivals[rival.name] = seconds / times[best], best.name
    return slow_rivals


def _predicted(cell: Cell, rival: Rival, rates: Rates) -> float | None:
    """Return predicted seconds; None for "auto", whose description contains them."""
    forecast = None if _chosen(rival) else predict.predict(cell, rival, rates)
    return forecast and forecast.seconds


def _speed(cell: Cell, rival: Rival, works: Sequence[Work]) -> float | None:
    """Return the FLOP/s at which burst's compute time is REGIMES[regime] times its link time.

    The layout is the layout of the rival. 0.0 is compute that takes no time, None is real compute.
    """
    if cell.regime == "real":
        return None
    share = REGIMES[cell.regime]
    if share == 0.0:
        return 0.0
    flops = max(sum(work.flops.values()) for work in works)
    return flops / (share * predict.busy(cell, rival.layout))
