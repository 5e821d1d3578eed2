"""Simulates a schedule: how long one forward or backward pass of attention will take.

The simulator runs the tables that the executor would run, boundary by boundary, for all ranks of
a ring at once. Three things take time: a message occupies the sender's and the receiver's end of
a link class (both directions at once; messages of one direction follow one another in the order
in which they start), a pair of chunks occupies the device, and a rank waits for the chunks that
must have landed. Overlap, exposed hops and staggered head chunks therefore follow from the
schedule and from no formula of their own.

Messages that one rank sends in the same exchange go to the nearest rank first, as collectives of
many point-to-point messages order them, so that no two ranks wait for a third at the same time.
Of a pair of chunks that is computed in parts, each part takes its share, by rows.

Times are in seconds, sizes in bytes; inputs are plain numbers, so no torch is needed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..schedule.cost import Sizes, message_bytes, pair_shares
from ..schedule.head_shares import deferred_chunks
from ..schedule.rings import Schedule
from ..schedule.tables import ALL, Grid, Tables, Transfers
from .rates import Rates


class Wave(NamedTuple):
    """Messages of one exchange of which no two have the same sender or the same receiver.

    clocks: [4, n], of each its sender, its receiver and their ports, as indices of `_Clocks.free`;
    ends: [2, n], its sender and its receiver, as of `done` of `_Clocks.send`; seconds: it takes.
    """

    clocks: np.ndarray
    ends: np.ndarray
    seconds: np.ndarray


class Exchange(NamedTuple):
    """Messages of all ranks that start and land together on one communicator.

    ranks: which take part, some of them twice.
    """

    waves: Sequence[Wave]
    ranks: np.ndarray
    land: int


class GridBoundary(NamedTuple):
    """One boundary of all ranks: the exchanges that start there, and the seconds that each rank
    then computes [G]."""

    starting: Sequence[Exchange]
    seconds: np.ndarray


@dataclass(frozen=True)
class Wires:
    """How ranks are connected.

    pairs: within a node any two ranks have a link of their own; otherwise, and between nodes, a
    rank has one NIC.
    """

    pairs: bool = False


ONE_NIC = Wires()


class PassTime(NamedTuple):
    """Seconds of a pass, and for how many the busiest rank's device and links are in use."""

    seconds: float
    compute: float
    intra: float
    inter: float

    def __add__(self, other: PassTime) -> PassTime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTime(*(a + b for a, b in zip(self, other, strict=True)))


class _Clocks:
    """Until when every rank and every port of its links is occupied."""

    def __init__(self, size: int, ports: int, posting: float):
        self.free = np.zeros(size + ports)  # of ranks, then of ports
        self.clock = self.free[:size]
        self.posting = posting

    def send(self, wave: Wave, done: np.ndarray) -> None:
        """done: when each rank is done with what it sends, and with what it receives [2 G]."""
        end = self.free[wave.clocks].max(axis=0) + wave.seconds
        self.free[wave.clocks[2:]] = end
        done[wave.ends] = np.maximum(done[wave.ends], end)

    def run(self, program: Sequence[GridBoundary]) -> Generator[None, None, None]:
        """The pass of one head chunk; yields where the executor does, to be staggered like it."""
        landing: dict[int, np.ndarray] = {}

        def land(index: int) -> None:
            if index in landing:
                sent, received = landing.pop(index).reshape(2, -1)
                np.maximum(self.clock, np.maximum(sent, received), out=self.clock)

        for index, boundary in enumerate(program):
            land(index)
            for exchange in boundary.starting:
                self.clock[exchange.ranks] += self.posting  # once also to those listed twice
                done = landing.setdefault(exchange.land, np.zeros(2 * len(self.clock)))
                for wave in exchange.waves:
                    self.send(wave, done)
            yield
            land(index)
            self.clock += boundary.seconds


def pass_time(
    schedule: Schedule,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    wires: Wires = ONE_NIC,
) -> PassTime:
    """The time from the common start of all ranks to the end of the last rank's pass.

    seconds: float [G, G], what a device needs for the pair of query chunk i and key chunk j, all
    heads; each head chunk computes its share of it.
    """
    tables, grid = schedule.tables, schedule.grid
    moved = tables.transfers
    between = moved.between(grid)
    per_byte = np.where(between, 1 / rates.inter, 1 / rates.intra)
    taken = rates.latency + message_bytes(schedule, moved, sizes) / head_chunks * per_byte
    ports = _ports(moved, grid, wires)
    starting = _exchanges(moved, grid, ports, taken)
    of_pair = seconds[tables.pairs.query, tables.pairs.key] * pair_shares(tables)
    of_pair = of_pair / head_chunks + rates.launch * (of_pair > 0)
    programs = [_program(tables, grid, starting, of_pair, last) for last in (False, True)]
    clocks = _Clocks(grid.size, int(ports.max(initial=0)) + 1, rates.posting)
    deferred = deferred_chunks(head_chunks)
    _staggered(
        [clocks.run(programs[index >= head_chunks - deferred]) for index in range(head_chunks)]
    )
    computing = np.bincount(tables.pairs.rank, of_pair, 1).max()
    sending = (
        np.bincount(ports[0], np.where(between == link, taken, 0.0), 1).max() for link in (0, 1)
    )
    busy = (head_chunks * float(each) for each in (computing, *sending))
    return PassTime(float(clocks.clock.max()), *busy)


def _staggered(runs: Sequence[Generator[None, None, None]]) -> None:
    """Start one pass more at every boundary, as `execution.executor.staggered` does."""
    waiting, running = list(runs), []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        running = [run for run in running if next(run, True) is None]


def _ports(moved: Transfers, grid: Grid, wires: Wires) -> np.ndarray:
    """int [2, n]: the port from which each message leaves, and the one at which it arrives."""
    size, between = grid.size, moved.between(grid)
    leaves, arrives = between * size + moved.src, (2 + between) * size + moved.dst
    if wires.pairs:
        own = 4 * size + moved.src.astype(np.int64) * size + moved.dst
        leaves, arrives = (np.where(between, port, own) for port in (leaves, arrives))
    return np.stack([leaves, arrives]).astype(np.int64)


def _exchanges(
    moved: Transfers, grid: Grid, ports: np.ndarray, taken: np.ndarray
) -> dict[int, list[Exchange]]:
    """Boundary -> the exchanges that start there, in the order in which ranks start them."""
    starting: dict[int, list[Exchange]] = {}
    if not len(moved.src):
        return starting
    keys = np.stack([moved.post, moved.ring, moved.accumulated, moved.land])
    order, exchange = _grouped(keys)
    wave = _waves(moved.where(order), exchange, grid)
    again = np.lexsort((wave, exchange))
    order, exchange, wave = order[again], exchange[again], wave[again]
    src, dst = moved.src[order], moved.dst[order]
    clocks = np.concatenate([[src, dst], grid.size + ports[:, order]])
    ends = np.stack([src, grid.size + dst])
    seconds, post, land = taken[order], moved.post[order], moved.land[order]
    edges = _edges(exchange, wave)
    waves = [Wave(clocks[:, i:j], ends[:, i:j], seconds[i:j]) for i, j in pairwise(edges)]
    bounds = _edges(exchange)
    first = np.searchsorted(edges, bounds).tolist()
    for index, (i, j) in enumerate(pairwise(bounds)):
        some = waves[first[index] : first[index + 1]]
        ranks = clocks[:2, i:j].reshape(-1)
        starting.setdefault(int(post[i]), []).append(Exchange(some, ranks, int(land[i])))
    return starting


def _waves(moved: Transfers, exchange: np.ndarray, grid: Grid) -> np.ndarray:
    """Which wave of its exchange each message belongs to, in columns by exchange.

    All in one where that can be. Else by how far they go, and two of the same two ranks in the
    order of the table.
    """
    clash = np.zeros(int(exchange[-1]) + 1, dtype=bool)
    for end in (moved.src, moved.dst):
        _, index, times = np.unique(
            exchange * grid.size + end, return_inverse=True, return_counts=True
        )
        clash[exchange[times[index] > 1]] = True
    src, dst = moved.src.astype(np.int64), moved.dst.astype(np.int64)
    between = moved.between(grid)
    # Round the node, or round all ranks: at one distance no two have the same sender or receiver.
    away = np.where(between, grid.intra + (dst - src) % grid.size, (dst - src) % grid.intra)
    away *= clash[exchange]
    order, group = _grouped(np.stack([exchange, src, dst]))
    start = np.searchsorted(group, group)
    repeat = np.empty_like(order)
    repeat[order] = np.arange(len(order)) - start
    return repeat * (grid.intra + grid.size) + away


def _grouped(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order of the columns of `keys`, equal ones as they were, and which group each is in."""
    order = np.lexsort(keys[::-1])
    new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
    return order, np.concatenate([[0], np.cumsum(new)])


def _edges(*keys: np.ndarray) -> list[int]:
    """Where the keys, which are sorted, change; with both ends."""
    new = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return [0, *(np.flatnonzero(new) + 1).tolist(), len(keys[0])]


def _program(
    tables: Tables,
    grid: Grid,
    starting: dict[int, list[Exchange]],
    seconds: np.ndarray,
    own_last: bool,
) -> list[GridBoundary]:
    """`Schedule.program` of all ranks at once; seconds: of each row of `tables.pairs`."""
    size, pairs, moved = grid.size, tables.pairs, tables.transfers
    at = pairs.step
    end = max(tables.steps, int(moved.land.max(initial=0)), int(at.max(initial=0)))
    if own_last and moved.accumulated.any():
        # The boundary at which each rank posts its last partial result: its own pair runs beside.
        last = np.full(size, tables.steps)
        sums = moved.where(moved.accumulated)
        np.maximum.at(last, sums.src, sums.post)
        own = (pairs.query == pairs.rank) & (pairs.key == pairs.rank)
        own &= (pairs.query_rows == ALL) & (pairs.key_rows == ALL)
        at = np.where(own, last[pairs.rank], at)
        end = max(end, int(last.max()) + 1)
    work = np.bincount(at * size + pairs.rank, seconds, (end + 1) * size).reshape(-1, size)
    return [GridBoundary(starting.get(index, ()), work[index]) for index in range(end + 1)]
