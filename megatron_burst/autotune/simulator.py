"""Simulates a schedule: how long one forward or backward pass of attention will take.

The simulator runs the tables that the executor would run, boundary by boundary, for all ranks of
a ring at once. Three things take time: a message occupies the sender's and the receiver's end of
a link class (both directions at once; messages of one direction follow one another in the order
in which they start), a pair of chunks occupies the device, and a rank waits for the chunks that
must have landed. Overlap, exposed hops and staggered head chunks therefore follow from the
schedule and from no formula of their own.

Times are in seconds, sizes in bytes; inputs are plain numbers, so no torch is needed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..schedule.cost import Sizes
from ..schedule.head_shares import deferred_chunks
from ..schedule.rings import Schedule
from ..schedule.tables import Chunk
from .rates import Rates


class Hops(NamedTuple):
    """The hops of all ranks that start and land together on one ring, from `src` to `dst`."""

    src: np.ndarray
    dst: np.ndarray
    between: np.ndarray  # int: 0 within a node, 1 between nodes
    gradient: bool
    land: int


class GridBoundary(NamedTuple):
    """One boundary of all ranks: the hops that start there, and the seconds that each rank then
    computes [G]."""

    starting: Sequence[Hops]
    seconds: np.ndarray


@dataclass(frozen=True)
class Wires:
    """How ranks are connected: a what-if for rings that send both ways round (TokenRing).

    halves: every chunk travels in two halves, one each way round the ring. pairs: within a node a
    rank has a separate link to each neighbour; otherwise, and between nodes, it has one NIC.
    """

    halves: bool = False
    pairs: bool = False


ONE_WAY = Wires()


class PassTime(NamedTuple):
    """Seconds of a pass, and for how many the busiest rank's device and links are in use."""

    seconds: float
    compute: float
    intra: float
    inter: float

    def __add__(self, other: PassTime) -> PassTime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTime(*(a + b for a, b in zip(self, other, strict=True)))


class _RankClocks:
    """The clock of every rank, and until when both ends of its links are occupied."""

    def __init__(self, size: int, rates: Rates, wires: Wires):
        self.clock = np.zeros(size)
        self.wires, self.latency, self.posting = wires, rates.latency, rates.posting
        self.per_byte = np.array([1 / rates.intra, 1 / rates.inter])
        self.leaving, self.arriving = (np.zeros((2, 2, size)) for _ in range(2))
        self.computing, self.sending = np.zeros(size), np.zeros((2, size))

    def send(self, hops: Hops, size: float) -> np.ndarray:
        """When each rank is done with its part of a hops of `size` bytes per message."""
        done = np.zeros_like(self.clock)
        if not self.wires.halves:
            self._one_way(hops.src, hops.dst, hops.between, size, 0, done)
            return done
        self._one_way(hops.src, hops.dst, hops.between, size / 2, 0, done)
        own_links = np.where(hops.between == 0, int(self.wires.pairs), 0)
        self._one_way(hops.dst, hops.src, hops.between, size / 2, own_links, done)
        return done

    def _one_way(self, src, dst, between, size: float, way: Any, done: np.ndarray) -> None:
        begin = np.maximum(self.clock[src], self.clock[dst])
        begin = np.maximum(begin, self.leaving[way, between, src])
        begin = np.maximum(begin, self.arriving[way, between, dst])
        taken = self.latency + size * self.per_byte[between]
        self.sending[between, src] += taken
        end = begin + taken
        self.leaving[way, between, src] = self.arriving[way, between, dst] = end
        done[src] = np.maximum(done[src], end)
        done[dst] = np.maximum(done[dst], end)

    def run(
        self, program: Sequence[GridBoundary], sizes: dict[bool, float]
    ) -> Generator[None, None, None]:
        """The pass of one head chunk; yields where the executor does, to be staggered like it."""
        landing: dict[int, np.ndarray] = {}

        def land(index: int) -> None:
            if index in landing:
                np.maximum(self.clock, landing.pop(index), out=self.clock)

        for index, boundary in enumerate(program):
            land(index)
            for hops in boundary.starting:
                if self.posting:
                    self.clock[np.union1d(hops.src, hops.dst)] += self.posting
                done = self.send(hops, sizes[hops.gradient])
                landing[hops.land] = np.maximum(landing.get(hops.land, 0.0), done)
            yield
            land(index)
            self.clock += boundary.seconds
            self.computing += boundary.seconds


def pass_time(
    schedule: Schedule,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    wires: Wires = ONE_WAY,
) -> PassTime:
    """The time from the common start of all ranks to the end of the last rank's pass.

    seconds: float [G, G], what a device needs for the pair of query chunk i and key chunk j, all
    heads; each head chunk computes its share of it.
    """
    clocks = _RankClocks(schedule.grid.size, rates, wires)
    each = seconds / head_chunks + rates.launch * (seconds > 0)
    starting = _starting_hops(schedule)
    deferred = deferred_chunks(head_chunks)
    bytes_of = {
        gradient: sizes.chunk_bytes(Chunk("d" * gradient + schedule.side, 0)) / head_chunks
        for gradient in (False, True)
    }
    runs = [
        clocks.run(program, bytes_of)
        for program in (
            _program(schedule, starting, each, own_last=index >= head_chunks - deferred)
            for index in range(head_chunks)
        )
    ]
    _staggered(runs)
    busy = clocks.computing.max(), *clocks.sending.max(axis=1)
    return PassTime(float(clocks.clock.max()), *map(float, busy))


def _staggered(runs: Sequence[Generator[None, None, None]]) -> None:
    """Start one pass more at every boundary, as `execution.executor.staggered` does."""
    waiting, running = list(runs), []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        running = [run for run in running if next(run, True) is None]


def _starting_hops(schedule: Schedule) -> dict[int, list[Hops]]:
    """Boundary -> the hops that start there, in the order in which ranks start them."""
    moved = schedule.tables.transfers
    keys = moved.post, moved.ring, moved.gradient, moved.land
    order = np.lexsort(keys[::-1])
    sorted_keys = np.stack([key[order] for key in keys])
    new = np.flatnonzero((sorted_keys[:, 1:] != sorted_keys[:, :-1]).any(axis=0)) + 1
    starting: dict[int, list[Hops]] = {}
    for rows in np.split(order, new) if len(order) else ():
        some = moved.where(rows)
        post, gradient, land = int(some.post[0]), bool(some.gradient[0]), int(some.land[0])
        between = some.between(schedule.grid).astype(int)
        starting.setdefault(post, []).append(Hops(some.src, some.dst, between, gradient, land))
    return starting


def _program(
    schedule: Schedule, starting: dict[int, list[Hops]], seconds: np.ndarray, own_last: bool
) -> list[GridBoundary]:
    """`Schedule.program` of all ranks at once."""
    size, (steps, pairs, moved, _) = schedule.grid.size, schedule.tables
    at, end = pairs.step, int(moved.land.max(initial=steps))
    if own_last and moved.gradient.any():
        last = np.full(size, steps)  # the boundary at which each rank posts its last gradient
        gradients = moved.where(moved.gradient)
        np.maximum.at(last, gradients.src, gradients.post)
        at = np.where(pairs.query == pairs.key, last[pairs.rank], pairs.step)
        end = max(end, int(last.max()) + 1)
    work = np.zeros((end + 1, size))
    np.add.at(work, (at, pairs.rank), seconds[pairs.query, pairs.key])
    return [GridBoundary(starting.get(index, ()), work[index]) for index in range(end + 1)]
