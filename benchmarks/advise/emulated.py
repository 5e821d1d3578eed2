"""Emulated cluster: every cell of docs/cluster.md predicted by the current simulator.

The host of that cluster has two cores, on which all ranks copy and wait. Ten constants, equal for
all cells, describe its costs; links have their shaped rates. The cells were measured with a version
that sent whole chunks, so the schedules here send every chunk to every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from itertools import combinations, groupby
from typing import NamedTuple

import numpy as np

from benchmarks.cluster import results
from benchmarks.cluster.cells import RIVALS, WIRES, Cell, Rival
from benchmarks.cluster.network import Rates as Links
from benchmarks.cluster.predict import RINGS
from megatron_burst.autotune.exchanges import Wires
from megatron_burst.autotune.pair_counts import pairs_seen
from megatron_burst.autotune.prepared import PreparedSchedule
from megatron_burst.autotune.rates import BACKWARD, Rates
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.layout import make
from megatron_burst.masks import Causal
from megatron_burst.schedule import cost
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.demand import all_visible
from megatron_burst.schedule.tables import Grid
from megatron_burst.schedule.topology import Topology

from .fitting import fit
from .section import Figure, Point, Section, spread

CORES = 2
CLEAR = 1.03  # measured times whose ratio is larger must be ranked right
AMID = "all_gather"  # the measured version waited for each gradient a step later
WAYS = {rival.name: rival for rival in RIVALS}
WIRED = Wires(together=True)  # each message is a TCP stream


@dataclass(frozen=True)
class Host:
    """Costs of the machine. If ranks share cores, times of a rank are multiplied by ranks / cores.

    Attributes:
        intra, inter: Fraction of a shaped link's rate that payload reaches.
        latency: Seconds of a link per message.
        posting: Seconds of a rank per exchange that it starts.
        handling: Seconds of a rank per byte that it sends along a ring.
        exchanging: Seconds of a rank per byte that it packs, sends and unpacks in an all-to-all.
        call: Seconds of a rank per kernel call in addition to its compute.
        merging: Seconds of a rank per byte of a call's output, to merge or add it.
        oversleep: Seconds by which a call with emulated compute sleeps too long.
        real: FLOP/s of real attention.
    """

    intra: float = 0.956
    inter: float = 0.973
    latency: float = 8.2e-4
    posting: float = 2.3e-4
    handling: float = 3.3e-10
    exchanging: float = 9.9e-10
    call: float = 9.8e-4
    merging: float = 5.9e-10
    oversleep: float = 9.3e-4
    real: float = 2.57e10


LOW = Host(0.8, 0.8, 1e-5, 1e-5, 1e-11, 1e-11, 1e-5, 1e-11, 1e-5, 1e9)
HIGH = Host(1.0, 1.0, 5e-3, 5e-3, 5e-9, 5e-9, 1e-2, 5e-9, 5e-3, 1e11)
UNITS = {
    "intra": "of the shaped rate within nodes reaches payload",
    "inter": "of the shaped rate between nodes reaches payload",
    "latency": "s of a link per message",
    "posting": "s of a core per exchange started",
    "handling": "s of a core per byte sent round a ring",
    "exchanging": "s of a core per byte of an all-to-all: packed, sent, unpacked",
    "call": "s of a core per call of the kernel",
    "merging": "s of a core per byte of a call's output, which is merged or added",
    "oversleep": "s by which an emulated call sleeps too long",
    "real": "FLOP/s of a rank where attention is computed",
}


class Measured(NamedTuple):
    """One rival in one cell.

    Attributes:
        place: Number of the cell.
        seconds: Measured seconds.
        passes: Measured seconds of forward and backward.
        predicted: Predicted seconds of forward and backward.
    """

    place: int
    cell: Cell
    rival: str
    seconds: float
    passes: tuple[float, float]
    predicted: tuple[float, float] = (0.0, 0.0)
    gflops: float | None = None

    @property
    def point(self) -> Point:
        """Return both passes in seconds, measured and predicted."""
        c = self.cell
        where = f"{c.grid} {c.rates} {c.heads} {c.tokens} {c.regime}"
        return Point(f"{where}: {self.rival}", self.seconds, sum(self.predicted))


class _Ring(NamedTuple):
    """Passes of one rival on one grid.

    Attributes:
        output: Bytes of a rank's rows.
        share: Bytes to each rank that shares heads, by pass.
    """

    passes: tuple[PreparedSchedule, PreparedSchedule]
    sizes: Sizes
    flops: np.ndarray
    output: int
    links: tuple[str, ...]
    share: tuple[int, int]


@cache
def _ring(cell: Cell, rival: Rival) -> _Ring:
    problem, size = cell.problem(), cell.nodes * cell.per_node
    shared = rival.ulysses_size(cell.nodes, cell.per_node)
    topology = Topology(size, cell.per_node, shared, rival.placement)
    own = Sizes(problem.tokens, 1, problem.heads, problem.kv_heads, problem.width, problem.width,
                4, 4, WIRES[problem.wire], (True, True, True))  # fmt: skip
    sizes, grid = own.shared(shared), Grid(topology.inter_size, topology.intra_size)
    name = RINGS.get(rival.algorithm, rival.algorithm)
    want = all_visible(grid.size, sizes.tokens)
    back = cost.backward_schedule(name, grid, want, sizes, side=rival.side)
    spans = cost.ring_spans(make("zigzag", cp_size=size), topology, problem.tokens * size)
    flops = pairs_seen(Causal(), spans) * 4.0 * sizes.heads * sizes.width
    return _Ring(
        (PreparedSchedule(cost.forward_schedule(name, grid, want, sizes), WIRED),
         PreparedSchedule(back, WIRED)),
        sizes, flops, sizes.tokens * sizes.heads * sizes.width * 4,
        tuple(topology.link(0, peer) for peer in topology.ulysses_group(0)[1:]),
        sizes.scattered_bytes(shared),
    )  # fmt: skip


def predict(host: Host, cell: Cell, rival: Rival, gflops: float | None) -> tuple[float, float]:
    """Return seconds of forward and of backward.

    Args:
        gflops: Speed of emulated compute, 0 if it takes no time, None for real attention.
    """
    still = cell._replace(rates=Links(1, 1), regime="")  # neither affects the schedule
    ring, crowd = _ring(still, rival), cell.nodes * cell.per_node / CORES
    links = {link: getattr(host, link) * cell.rates.of(link) / 8 for link in ("intra", "inter")}
    speed = host.real if gflops is None else 1e9 * gflops
    rates = Rates(
        **links, latency=host.latency, compute=speed or math.inf, posting=crowd * host.posting,
        handling=crowd * host.handling, launch=host.oversleep * (speed > 0),
    )  # fmt: skip
    passes = []
    for plan, share, factor in zip(ring.passes, ring.share, (1.0, BACKWARD), strict=True):
        # The emulated time of a call includes its own work, not only compute.
        own = crowd * (host.call * rival.head_chunks + host.merging * ring.output)
        seconds = np.maximum(factor * ring.flops / (speed or math.inf), own * (ring.flops > 0))
        taken = pass_time(plan, ring.sizes, seconds, rates, rival.head_chunks).seconds
        passes.append(taken + _exchange(ring.links, share, links, host, crowd))
    return passes[0], passes[1]


def _exchange(
    peers: tuple[str, ...], share: int, links: Mapping[str, float], host: Host, crowd: float
) -> float:
    """Return seconds of the all-to-alls of a pass, on both link classes at once."""
    if not peers:
        return 0.0
    busy = max(peers.count(link) * share / links[link] for link in links)
    return busy + crowd * (2 * host.posting + host.exchanging * share * len(peers))


def measured() -> list[Measured]:
    """Return every cell and every rival with fixed settings, in the order of the file."""
    rows = []
    for index, (cell, gflops, rivals) in enumerate(results.load(results.MEASURED)):
        for kept in rivals:
            if WAYS[kept.rival].algorithm != "auto":
                passes = kept.forward, kept.backward
                rows.append(Measured(index, cell, kept.rival, kept.seconds, passes, gflops=gflops))
    return rows


def predicted(host: Host, rows: list[Measured]) -> list[Measured]:
    """Return the same rows with their predictions."""
    return [
        row._replace(predicted=predict(host, row.cell, WAYS[row.rival], row.gflops)) for row in rows
    ]


def fitted(start: Host, rows: list[Measured]) -> Host:
    """Return the constants that fit both passes of all rows except `AMID`."""
    rows = [row for row in rows if row.rival != AMID]
    measured_passes = np.array([row.passes for row in rows])

    def off(x: np.ndarray) -> np.ndarray:
        forecast = np.array([row.predicted for row in predicted(Host(*map(float, x)), rows)])
        return np.log(forecast / measured_passes).ravel()

    constants = fit(off, *map(astuple, (start, LOW, HIGH)), rounds=8, tight=0.01)
    return Host(*(float(f"{value:.3g}") for value in constants))


class Ranking(NamedTuple):
    """Pairs of rivals of one cell with clearly different times, and the wrongly ranked pairs.

    Attributes:
        wrong: (cell, rival, other, measured ratio, predicted ratio).
    """

    pairs: int
    wrong: list[tuple[Cell, str, str, float, float]]


def ranking(rows: list[Measured]) -> Ranking:
    """Compare the predicted order of rivals with the measured order."""
    count, wrong = 0, []
    for _, group in groupby(rows, key=lambda row: row.place):
        for row, other in combinations(list(group), 2):
            measured_ratio, forecast_ratio = (
                row.seconds / other.seconds,
                sum(row.predicted) / sum(other.predicted),
            )
            if max(measured_ratio, 1 / measured_ratio) <= CLEAR:
                continue
            count += 1
            if (measured_ratio - 1) * (forecast_ratio - 1) <= 0:
                wrong.append((row.cell, row.rival, other.rival, measured_ratio, forecast_ratio))
    return Ranking(count, wrong)


def run(fit: bool) -> Section:
    """Return the section, with fitted constants if `fit`."""
    rows = measured()
    host = fitted(Host(), rows) if fit else Host()
    return section(host, predicted(host, rows))


def section(host: Host, rows: list[Measured]) -> Section:
    """Return errors by cell and the number of wrong rankings."""
    points, rest = [r.point for r in rows], [r for r in rows if r.rival != AMID]
    order, without = ranking(rows), ranking(rest)
    off, other = spread(points), spread([r.point for r in rest])
    right, right_without = order.pairs - len(order.wrong), without.pairs - len(without.wrong)
    figures = [
        Figure(f"Error of {len(points)} times", str(off), "median 5 %",
               off.median <= 0.05),
        Figure("Pairs at least 3 % apart, in the right order",
               f"{right} of {order.pairs} right", "all", right == order.pairs),
        Figure(f"Without {AMID}, {len(rest)} times",
               f"{other}; {right_without} of {without.pairs} right"),
    ]  # fmt: skip
    return Section(
        "emulated",
        "The emulated cluster",
        INTRO,
        ("cell", "rivals", "median", "worst", "which"),
        list(_by_cell(rows)),
        figures,
        constants=[f"`{name}` {value:.3g} {UNITS[name]}" for name, value in asdict(host).items()],
        notes=NOTES,
    )


def _by_cell(rows: list[Measured]) -> Iterator[list[str]]:
    for _, group in groupby(rows, key=lambda row: row.place):
        cell_rows = list(group)
        off = spread([row.point for row in cell_rows])
        worst = max(cell_rows, key=lambda row: abs(row.point.error))
        label = worst.point.label.split(": ")[0]
        yield [
            label,
            str(len(cell_rows)),
            f"{off.median:.1%}",
            f"{worst.point.error:+.1%}",
            worst.rival,
        ]


assert [field.name for field in fields(Host)] == list(UNITS)
INTRO = [
    "The cells of [](cluster.md): 35 settings of four and eight ranks behind shaped links, with "
    "2 cores for all of them. Links are those that were shaped; ten constants, one set for all "
    "cells, say what the host adds: it copies what it sends, and all ranks do so at once.",
]
NOTES = [
    f"The cells were measured when whole chunks were sent. `{AMID}` then waited for each gradient "
    "one step later than the current schedule. Most wrong rankings are between rivals that differ "
    "in small messages on busy cores, for which the model has a constant cost."
]
