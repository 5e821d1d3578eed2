"""Simulates a schedule: how long one forward or backward pass of attention will take.

The simulator runs the tables that the executor would run, boundary by boundary, for all ranks of
a ring at once. Three things take time: a message occupies the sender's and the receiver's end of
a link class (both directions at once; messages of one direction follow one another in the order
in which they start), a pair of chunks occupies the device, and a rank waits for the chunks that
must have landed. Overlap, exposed hops and staggered head chunks therefore follow from the
schedule and from no formula of their own.

Of a pair of chunks that is computed in parts, each part takes its share, by rows.

Times are in seconds, sizes in bytes; inputs are plain numbers, so no torch is needed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from ..schedule.cost import Sizes, message_bytes, pair_shares
from ..schedule.head_shares import deferred_chunks
from ..schedule.rings import Schedule
from ..schedule.tables import ALL, Grid, Tables
from .disturbance import Disturbance
from .exchanges import ONE_NIC, Exchange, Wave, Wires, exchanges, ports_of
from .rates import Rates


class GridBoundary(NamedTuple):
    """One boundary of all ranks: the exchanges that start there, and the seconds that each rank
    then computes [G]."""

    starting: Sequence[Exchange]
    seconds: np.ndarray


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
    disturbed: Disturbance | None = None,
) -> PassTime:
    """The time from the common start of all ranks to the end of the last rank's pass.

    seconds: float [G, G], what a device needs for the pair of query chunk i and key chunk j, all
    heads; each head chunk computes its share of it. disturbed: ranks and messages that are slower.
    """
    tables, grid = schedule.tables, schedule.grid
    moved = tables.transfers
    between = moved.between(grid)
    per_byte = np.where(between, 1 / rates.inter, 1 / rates.intra)
    if disturbed is not None:
        per_byte = per_byte * disturbed.of_bytes(moved)
    taken = rates.latency + message_bytes(schedule, moved, sizes) / head_chunks * per_byte
    ports = ports_of(moved, grid, wires)
    of_pair = seconds[tables.pairs.query, tables.pairs.key] * pair_shares(tables)
    of_pair = of_pair / head_chunks + rates.launch * (of_pair > 0)
    if disturbed is not None:
        taken = taken * disturbed.of_messages(moved)
        of_pair = of_pair * disturbed.of_pairs(tables.pairs)
    starting = exchanges(moved, grid, ports, taken)
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
