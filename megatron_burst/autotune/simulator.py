# SPDX-License-Identifier: Apache-2.0
"""Simulator of a schedule: the time of one forward or backward pass of attention.

The simulator runs the tables that the executor would run, boundary by boundary, for all ranks of a
ring at once. Messages, computation and waits need time. A message occupies the sender's and the
receiver's end of a link class. Both directions are used at once, and messages of one direction
follow one another in the order of their start. The computation of a pair of chunks occupies the
device. At a boundary, a rank waits for the chunks that must have landed. Overlap, exposed hops and
staggered head chunks therefore follow from the schedule, without a separate formula.

If a pair of chunks is computed in parts, the time of a part is in proportion to its query rows
times its key rows.

Times are in seconds, sizes in bytes. Inputs are plain numbers, so no torch is needed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from ..schedule.cost import Sizes
from ..schedule.head_shares import deferred_chunks
from ..schedule.rings import Schedule
from .exchanges import ONE_NIC, TimedExchange, Wave, Wires
from .prepared import PreparedSchedule
from .rates import Rates


class GridBoundary(NamedTuple):
    """One boundary of the schedule, for all ranks.

    Attributes:
        starting: Exchanges that start at the boundary.
        seconds: [G], seconds that each rank computes between this boundary and the next.
    """

    starting: Sequence[TimedExchange]
    seconds: np.ndarray


class PassTime(NamedTuple):
    """Predicted times of a pass.

    Attributes:
        seconds: Seconds from start to end of the pass.
        compute: Busy seconds of the busiest rank's device.
        intra: Busy seconds of the busiest rank's links within its node.
        inter: Busy seconds of the busiest rank's links between nodes.
        host: CPU seconds spent launching kernels; overlaps with device time.
    """

    seconds: float
    compute: float
    intra: float
    inter: float
    host: float = 0.0

    def __add__(self, addend: PassTime) -> PassTime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTime(*(a + b for a, b in zip(self, addend, strict=True)))

    def __rmul__(self, times: float) -> PassTime:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTime(*(times * seconds for seconds in self))


IDLE = PassTime(0.0, 0.0, 0.0, 0.0)


class AccumulationTimes(NamedTuple):
    """Seconds per row to add up results of kernel calls in memory, for all heads.

    Attributes:
        queries: Seconds to add a row of outputs or of query gradients.
        keys: Seconds to add a row of key and value gradients.
        joined: Seconds to copy a received row of keys to the buffer of a joined call.
    """

    queries: float = 0.0
    keys: float = 0.0
    joined: float = 0.0


NOTHING = AccumulationTimes()


class _Clocks:
    """The clocks of a simulation, in seconds from the start of the pass.

    Attributes:
        free: Time until which each rank and each port is occupied.
        clock: [G], time until which each rank is occupied; a view of `free`.
        streams: [G], time until which the relay stream of each rank is occupied.
        busy: [2 G], end time of the sends of each rank, then of the receives of each rank. Updated
            only if the rates have a slowdown.
        taken: Seconds of each transfer.
        handled: Seconds of computation time that each transfer costs its sender; None for 0.
        chains: Boundaries at which the relay streams start chains; empty without relay streams.
    """

    def __init__(
        self,
        prepared: PreparedSchedule,
        taken: np.ndarray,
        handled: np.ndarray | None,
        rates: Rates,
    ):
        size, ports = prepared.schedule.grid.size, int(prepared.ports.max(initial=0)) + 1
        self.free = np.zeros(size + ports)  # ranks, then ports
        self.clock, self.streams = self.free[:size], np.zeros(size)
        self.busy = np.zeros(2 * size)
        self.taken, self.posting, self.slowdown = taken, rates.posting, rates.slowdown
        self.handled, self.together = handled, prepared.wires.together
        self.chains = prepared.schedule.chains

    def start(self, exchange: TimedExchange) -> None:
        """Add the time that ranks need to start an exchange to their clocks."""
        self.clock[exchange.ranks] += self.posting  # added once to ranks that are listed twice
        if self.handled is not None:
            for wave in exchange.waves:
                self.clock[wave.clocks[0]] += self.handled[wave.rows]

    def send(self, wave: Wave, done: np.ndarray) -> None:
        """Send the messages of a wave: occupy their ports, and note when they end.

        Args:
            wave: The wave.
            done: [2 G], end time of each rank's sends, then of its receives, for all messages with
                the landing boundary of the wave; updated in place.
        """
        end = self.free[wave.clocks].max(axis=0) + self.taken[wave.rows]
        self.free[wave.clocks[2:]] = end
        done[wave.ends] = np.maximum(done[wave.ends], end)

    def relay(self, exchange: TimedExchange, done: np.ndarray) -> None:
        """Send the messages of an exchange of the relay streams.

        Each message starts as soon as both streams have reached it and both ports are free. So a
        message to or from a late rank does not delay other messages, because NCCL sends all
        messages of a group at the same time.

        Args:
            exchange: The exchange.
            done: Same as in `send`.
        """
        clocks, ends = (
            np.concatenate(parts, axis=1)
            for parts in zip(*(wave[:2] for wave in exchange.waves), strict=True)
        )
        rows = np.concatenate([wave.rows for wave in exchange.waves])
        ready = self.streams[clocks[:2]].max(axis=0)
        left = np.arange(len(rows))
        while len(left):
            ports = clocks[2:, left]
            start = np.maximum(ready[left], self.free[ports].max(axis=0))
            place = np.empty_like(left)
            place[np.argsort(start, kind="stable")] = np.arange(len(left))
            first = np.full(len(self.free), len(left))
            for ends_of in ports:
                np.minimum.at(first, ends_of, place)
            now = (first[ports] == place).all(axis=0)  # nothing on these ports starts earlier
            self.free[ports[:, now]] = end = start[now] + self.taken[rows[left[now]]]
            for of_end in ends[:, left[now]]:
                np.maximum.at(done, of_end, end)
            left = left[~now]

    def share(self, exchanges: Sequence[TimedExchange], landing: dict[int, np.ndarray]) -> None:
        """Note when messages end that share ports: at the time when both ports are free.

        Args:
            exchanges: Exchanges that started at one boundary.
            landing: `done` of `send`, by landing boundary; updated in place.
        """
        for exchange in exchanges:
            done = landing[exchange.land]
            for wave in exchange.waves:
                end = self.free[wave.clocks[2:]].max(axis=0)
                done[wave.ends] = np.maximum(done[wave.ends], end)

    def compute(self, seconds: np.ndarray) -> None:
        """Add the seconds that each rank computes to its clock.

        While a rank's links are busy, its computation needs 1 + slowdown times as long.
        """
        if self.slowdown:
            until = self.busy.reshape(2, -1).max(axis=0)
            beside = np.maximum(until - self.clock, 0.0) / (1 + self.slowdown)
            seconds = seconds + self.slowdown * np.minimum(seconds, beside)
        self.clock += seconds

    def run(self, program: Sequence[GridBoundary]) -> Generator[None, None, None]:
        """Run the pass of one head chunk; yield at each boundary, so that head chunks alternate."""
        landing: dict[int, np.ndarray] = {}

        def land(index: int) -> None:
            if index in landing:
                sent, received = landing.pop(index).reshape(2, -1)
                np.maximum(self.clock, np.maximum(sent, received), out=self.clock)

        for index, boundary in enumerate(program):
            land(index)
            if index in self.chains:
                self.relay_chain(program, index, landing)
            for exchange in () if self.chains else boundary.starting:
                self.start(exchange)
                done = landing.setdefault(exchange.land, np.zeros(2 * len(self.clock)))
                for wave in exchange.waves:
                    self.send(wave, done)
                if self.slowdown:
                    np.maximum(self.busy, done, out=self.busy)
            if self.together and not self.chains:
                self.share(boundary.starting, landing)
            yield
            land(index)
            self.compute(boundary.seconds)

    def relay_chain(
        self, program: Sequence[GridBoundary], begin: int, landing: dict[int, np.ndarray]
    ) -> None:
        """Run the chain of transfers of the relay streams that starts at boundary `begin`."""
        np.maximum(self.streams, self.clock, out=self.streams)
        for index in range(len(program))[self.chains[begin]]:
            if index in landing:
                ended = landing[index].reshape(2, -1).max(axis=0)
                np.maximum(self.streams, ended, out=self.streams)
            for exchange in program[index].starting:
                self.start(exchange)
                done = landing.setdefault(exchange.land, np.zeros(2 * len(self.clock)))
                self.relay(exchange, done)
                if self.slowdown:
                    np.maximum(self.busy, done, out=self.busy)


def pass_time(
    schedule: Schedule | PreparedSchedule,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    wires: Wires = ONE_NIC,
    least: float = 0.0,
    adding: AccumulationTimes = NOTHING,
) -> PassTime:
    """Return the predicted time of a pass: from the common start to the end of the last rank.

    Args:
        schedule: The schedule. If it is a `PreparedSchedule`, its own `wires` are used.
        sizes: Sizes of the attention call.
        seconds: float [G, G], seconds to compute attention of the queries of rank i to the keys of
            rank j, for all heads. Each head chunk needs an equal share of these seconds.
        rates: Rates of each rank.
        head_chunks: Number of head chunks.
        wires: Properties of the links between ranks.
        least: Minimum seconds of a kernel call. Pairs that the schedule joins count as one call.
        adding: Times to add up results of kernel calls in memory.
    """
    prepared = (
        schedule if isinstance(schedule, PreparedSchedule) else PreparedSchedule(schedule, wires)
    )
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
    busy = (head_chunks * float(seconds_in_use) for seconds_in_use in (computing, *sending))
    host = host_seconds(prepared, seconds, rates, head_chunks)
    return PassTime(float(clocks.clock.max()) + rates.start, *busy)._replace(host=host)


def host_seconds(
    prepared: PreparedSchedule, seconds: np.ndarray, rates: Rates, head_chunks: int = 1
) -> float:
    """Return the CPU seconds of the busiest rank's launches. Arguments are as in `pass_time`."""
    if rates.host is None:
        return 0.0
    pairs, transfers = prepared.schedule.tables.pairs, prepared.schedule.tables.transfers
    # The pairs of a call have one rank. A call without visible keys is not made.
    first, call = prepared.calls
    made = np.bincount(call, seconds[pairs.query, pairs.key] > 0) > 0
    calls, sent = (
        np.bincount(rank, minlength=1).max() for rank in (pairs.rank[first[made]], transfers.src)
    )
    backward = prepared.schedule.gradients
    return rates.host.of_pass(int(calls), int(sent), head_chunks, backward)


def pass_at_least(
    prepared: PreparedSchedule,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    least: float = 0.0,
    adding: AccumulationTimes = NOTHING,
) -> float:
    """Return a lower bound on the seconds of a pass: the busy time of the busiest rank or port.

    Arguments are the same as in `pass_time`. The bound does not decrease with more head chunks.
    """
    of_pair, _, taken = _costs(prepared, sizes, seconds, rates, head_chunks, least, adding)
    computing = np.bincount(prepared.schedule.tables.pairs.rank, of_pair, 1).max()
    sending = np.bincount(prepared.ports.reshape(-1), np.tile(taken, 2), 1).max()
    return head_chunks * float(max(computing, sending)) + rates.start


class _HeadChunkCosts(NamedTuple):
    """Costs of one head chunk, one array entry per pair or transfer.

    Attributes:
        of_pair: Seconds of each pair.
        sent: Bytes of each transfer.
        taken: Seconds of each transfer.
    """

    of_pair: np.ndarray
    sent: np.ndarray
    taken: np.ndarray


def _costs(
    prepared: PreparedSchedule,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int,
    least: float,
    adding: AccumulationTimes,
) -> _HeadChunkCosts:
    """Return the costs of one head chunk. Arguments are the same as in `pass_time`."""
    pairs = prepared.schedule.tables.pairs
    per_byte = _per_byte(prepared, rates)
    of_pair = seconds[pairs.query, pairs.key] * prepared.shares / head_chunks
    if rates.half_rows:
        of_pair = of_pair * (1 + rates.half_rows / np.maximum(prepared.pair_rows, 1))
    of_pair = _of_calls(prepared, of_pair, least, rates.launch)
    if any(adding):
        rows = sum(
            row_seconds * row_count
            for row_seconds, row_count in zip(adding, prepared.added, strict=True)
        )
        of_pair = of_pair + rows / head_chunks
    sent = prepared.bytes_of(sizes) / head_chunks
    taken = rates.latency + sent * per_byte
    return _HeadChunkCosts(of_pair, sent, taken)


def _of_calls(
    prepared: PreparedSchedule, of_pair: np.ndarray, least: float, launch: float
) -> np.ndarray:
    """Return the seconds of each pair. The first pair of a call includes the call's fixed time."""
    if not prepared.schedule.joined:
        return np.where(of_pair > 0, np.maximum(of_pair, least) + launch, 0.0)
    first, call = prepared.calls
    total, with_calls = np.bincount(call, of_pair), of_pair.copy()
    with_calls[first] += np.where(total > 0, np.maximum(total, least) + launch - total, 0.0)
    return with_calls


def _per_byte(prepared: PreparedSchedule, rates: Rates) -> np.ndarray:
    """Return the seconds per byte of each transfer, by its link class and shared NICs."""
    inter = rates.between(1.0 if prepared.load is None else prepared.load)
    # Extremely small rates overflow here; `select` refuses the resulting times.
    with np.errstate(over="ignore"):
        return np.where(prepared.between, 1 / inter, 1 / rates.intra)


def _staggered(runs: Sequence[Generator[None, None, None]]) -> None:
    """Run the passes of all head chunks; each starts one boundary after the previous one."""
    # Head chunks are one boundary apart, so that the hops of one head chunk overlap with
    # computation of another.
    waiting, running = list(runs), []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        running = [run for run in running if next(run, True) is None]


def _program(prepared: PreparedSchedule, seconds: np.ndarray, own_last: bool) -> list[GridBoundary]:
    """Return the boundaries of a pass for all ranks; `Schedule.program` does this for one rank.

    Args:
        prepared: The schedule.
        seconds: Seconds of each pair.
        own_last: Same as in `Schedule.program`.
    """
    schedule, starting = prepared.schedule, prepared.starting
    size, tables = schedule.grid.size, schedule.tables
    steps = prepared.own_last if own_last else tables.pairs.step
    end = max(tables.steps, int(tables.transfers.land.max(initial=0)), int(steps.max(initial=0)))
    end += own_last and steps is not tables.pairs.step
    work = np.bincount(steps * size + tables.pairs.rank, seconds, (end + 1) * size).reshape(
        -1, size
    )
    return [GridBoundary(starting.get(index, ()), work[index]) for index in range(end + 1)]
