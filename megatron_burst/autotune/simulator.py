# SPDX-License-Identifier: Apache-2.0
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

from ..schedule.cost import Sizes
from ..schedule.head_shares import deferred_chunks
from ..schedule.rings import Schedule
from .exchanges import ONE_NIC, TimedExchange, Wave, Wires
from .prepared import Prepared
from .rates import Rates


class GridBoundary(NamedTuple):
    """One boundary of all ranks: the exchanges that start there, and the seconds that each rank
    then computes [G].
    """

    starting: Sequence[TimedExchange]
    seconds: np.ndarray


class PassTime(NamedTuple):
    """Seconds of a pass, and for how many the busiest rank's device and links are in use; host:
    what launching takes of its processor, which runs beside it.
    """

    seconds: float
    compute: float
    intra: float
    inter: float
    host: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTime(*(a + b for a, b in zip(self, other, strict=True)))

    def __rmul__(self, times: float) -> PassTime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTime(*(times * each for each in self))


IDLE = PassTime(0.0, 0.0, 0.0, 0.0)


class Adding(NamedTuple):
    """Seconds, of all heads: queries, keys: of adding a row of a call's results to what is there;
    joined: of bringing a row of keys of others into a call for several chunks.
    """

    queries: float = 0.0
    keys: float = 0.0
    joined: float = 0.0


NOTHING = Adding()


class _Clocks:
    """Until when every rank and every port of its links is occupied.

    taken: seconds of each transfer; handled: of its sender's own time. busy: until when each rank's
    links carry something, as sender and as receiver; counted where that slows it down.
    """

    def __init__(
        self,
        prepared: Prepared,
        taken: np.ndarray,
        handled: np.ndarray | None,
        rates: Rates,
    ):
        size, ports = prepared.schedule.grid.size, int(prepared.ports.max(initial=0)) + 1
        self.free = np.zeros(size + ports)  # of ranks, then of ports
        self.clock = self.free[:size]
        self.busy = np.zeros(2 * size)
        self.taken, self.posting, self.slowdown = taken, rates.posting, rates.slowdown
        self.handled, self.together = handled, prepared.wires.together

    def start(self, exchange: TimedExchange) -> None:
        """What starting it takes of the ranks' own time."""
        self.clock[exchange.ranks] += self.posting  # once also to those listed twice
        if self.handled is not None:
            for wave in exchange.waves:
                self.clock[wave.clocks[0]] += self.handled[wave.which]

    def send(self, wave: Wave, done: np.ndarray) -> None:
        """done: when each rank is done with what it sends, and with what it receives [2 G]."""
        end = self.free[wave.clocks].max(axis=0) + self.taken[wave.which]
        self.free[wave.clocks[2:]] = end
        done[wave.ends] = np.maximum(done[wave.ends], end)

    def share(self, exchanges: Sequence[TimedExchange], landing: dict[int, np.ndarray]) -> None:
        """Messages that started together end together: when the last one at their ports does."""
        for exchange in exchanges:
            done = landing[exchange.land]
            for wave in exchange.waves:
                end = self.free[wave.clocks[2:]].max(axis=0)
                done[wave.ends] = np.maximum(done[wave.ends], end)

    def compute(self, seconds: np.ndarray) -> None:
        """seconds: of each rank without traffic; with it they are 1 + slowdown times as long."""
        if self.slowdown:
            until = self.busy.reshape(2, -1).max(axis=0)
            beside = np.maximum(until - self.clock, 0.0) / (1 + self.slowdown)
            seconds = seconds + self.slowdown * np.minimum(seconds, beside)
        self.clock += seconds

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
                self.start(exchange)
                done = landing.setdefault(exchange.land, np.zeros(2 * len(self.clock)))
                for wave in exchange.waves:
                    self.send(wave, done)
                if self.slowdown:
                    np.maximum(self.busy, done, out=self.busy)
            if self.together:
                self.share(boundary.starting, landing)
            yield
            land(index)
            self.compute(boundary.seconds)


def pass_time(
    schedule: Schedule | Prepared,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    wires: Wires = ONE_NIC,
    least: float = 0.0,
    adding: Adding = NOTHING,
) -> PassTime:
    """The time from the common start of all ranks to the end of the last rank's pass.

    schedule: where it is `Prepared`, the wires are its own. seconds: float [G, G], what a device
    needs for the pair of query chunk i and key chunk j, all heads; each head chunk computes its
    share of it. least: seconds that a call takes at least; where the schedule joins the pairs of a
    step, they are one. adding: of its results.
    """
    prepared = schedule if isinstance(schedule, Prepared) else Prepared(schedule, wires)
    pairs, between = prepared.schedule.tables.pairs, prepared.between
    of_pair, sent, taken = _costs(prepared, sizes, seconds, rates, head_chunks, least, adding)
    programs = [_program(prepared, of_pair, last) for last in (False, True)]
    handled = rates.handling * sent if rates.handling else None
    clocks = _Clocks(prepared, taken, handled, rates)
    deferred = deferred_chunks(head_chunks)
    _staggered(
        [clocks.run(programs[index >= head_chunks - deferred]) for index in range(head_chunks)]
    )
    computing = np.bincount(pairs.rank, of_pair, 1).max()
    sending = (
        np.bincount(prepared.ports[0], np.where(between == link, taken, 0.0), 1).max()
        for link in (0, 1)
    )
    busy = (head_chunks * float(each) for each in (computing, *sending))
    host = host_seconds(prepared, seconds, rates, head_chunks)
    return PassTime(float(clocks.clock.max()) + rates.start, *busy)._replace(host=host)


def host_seconds(
    prepared: Prepared, seconds: np.ndarray, rates: Rates, head_chunks: int = 1
) -> float:
    """What launching a pass takes of the busiest rank's processor. Arguments as of `pass_time`."""
    if rates.host is None:
        return 0.0
    pairs, moved = prepared.schedule.tables.pairs, prepared.schedule.tables.transfers
    # Pairs of a call have its rank in common; of those without keys that are seen none is made.
    first, of = prepared.calls
    made = np.bincount(of, seconds[pairs.query, pairs.key] > 0) > 0
    calls, sent = (
        np.bincount(rank, minlength=1).max() for rank in (pairs.rank[first[made]], moved.src)
    )
    backward = prepared.schedule.gradients
    return rates.host.of_pass(int(calls), int(sent), head_chunks, backward)


def pass_at_least(
    prepared: Prepared,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    least: float = 0.0,
    adding: Adding = NOTHING,
) -> float:
    """Seconds that no pass stays below: those of the busiest rank or port, as if none ever waited.
    Arguments as of `pass_time`; more head chunks take no less.
    """
    of_pair, _, taken = _costs(prepared, sizes, seconds, rates, head_chunks, least, adding)
    computing = np.bincount(prepared.schedule.tables.pairs.rank, of_pair, 1).max()
    sending = np.bincount(prepared.ports.reshape(-1), np.tile(taken, 2), 1).max()
    return head_chunks * float(max(computing, sending)) + rates.start


class _Costs(NamedTuple):
    """What one head chunk costs. of_pair: seconds of each pair; sent: bytes of each transfer;
    taken: its seconds.
    """

    of_pair: np.ndarray
    sent: np.ndarray
    taken: np.ndarray


def _costs(
    prepared: Prepared,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int,
    least: float,
    adding: Adding,
) -> _Costs:
    """Arguments as of `pass_time`."""
    pairs = prepared.schedule.tables.pairs
    per_byte = _per_byte(prepared, rates)
    of_pair = seconds[pairs.query, pairs.key] * prepared.shares / head_chunks
    if rates.half_rows:
        of_pair = of_pair * (1 + rates.half_rows / np.maximum(prepared.pair_rows, 1))
    of_pair = _of_calls(prepared, of_pair, least, rates.launch)
    if any(adding):
        rows = sum(each * n for each, n in zip(adding, prepared.added, strict=True))
        of_pair = of_pair + rows / head_chunks
    sent = prepared.bytes_of(sizes) / head_chunks
    taken = rates.latency + sent * per_byte
    return _Costs(of_pair, sent, taken)


def _of_calls(prepared: Prepared, of_pair: np.ndarray, least: float, launch: float) -> np.ndarray:
    """float: seconds of each pair, what its call takes besides with the first of the call."""
    if not prepared.schedule.joined:
        return np.where(of_pair > 0, np.maximum(of_pair, least) + launch, 0.0)
    first, of = prepared.calls
    total, found = np.bincount(of, of_pair), of_pair.copy()
    found[first] += np.where(total > 0, np.maximum(total, least) + launch - total, 0.0)
    return found


def _per_byte(prepared: Prepared, rates: Rates) -> np.ndarray:
    """float: seconds per byte of each transfer, by its link and by who shares its NIC."""
    inter = rates.between(1.0 if prepared.load is None else prepared.load)
    # Of rates next to nothing, which are refused where they matter.
    with np.errstate(over="ignore"):
        return np.where(prepared.between, 1 / inter, 1 / rates.intra)


def _staggered(runs: Sequence[Generator[None, None, None]]) -> None:
    """Start one pass more at every boundary, as `execution.ring.run` does."""
    # Head chunks run one boundary apart, so that the hops of one travel while another computes.
    waiting, running = list(runs), []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        running = [run for run in running if next(run, True) is None]


def _program(prepared: Prepared, seconds: np.ndarray, own_last: bool) -> list[GridBoundary]:
    """`Schedule.program` of all ranks at once; seconds: of each row of `tables.pairs`."""
    schedule, starting = prepared.schedule, prepared.starting
    size, tables = schedule.grid.size, schedule.tables
    at = prepared.own_last if own_last else tables.pairs.step
    end = max(tables.steps, int(tables.transfers.land.max(initial=0)), int(at.max(initial=0)))
    end += own_last and at is not tables.pairs.step
    work = np.bincount(at * size + tables.pairs.rank, seconds, (end + 1) * size).reshape(-1, size)
    return [GridBoundary(starting.get(index, ()), work[index]) for index in range(end + 1)]
