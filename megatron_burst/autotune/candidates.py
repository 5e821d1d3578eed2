# SPDX-License-Identifier: Apache-2.0
"""Candidates: settings that can run an attention workload, with their predicted times.

A candidate is an algorithm, a side (the tensors that backward sends), a number of head chunks and a
grid of ulysses groups (ranks that exchange tokens for heads by all-to-all). This module decides
which candidates are simulated. `select` compares the candidates and selects one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..layout import Layout
from ..masks import Mask
from ..schedule import cost
from ..schedule.algorithms import ALGORITHMS
from ..schedule.cost import Sizes, Traffic
from ..schedule.demand import Visibility, row_chunk_spans, visibility_of
from ..schedule.head_shares import shareable
from ..schedule.rings import Schedule
from ..schedule.tables import SIDES, Grid
from ..schedule.topology import PLACEMENTS, Topology
from . import simulator
from .exchanges import ONE_NIC, Wires
from .pair_counts import pairs_attended, pairs_seen
from .places import Nodes, places
from .prepared import PreparedSchedule
from .rates import Rates
from .simulator import IDLE, NOTHING, AccumulationTimes, PassTime

HEAD_CHUNKS = (1, 2, 4, 8)
WORSE = 0.002  # relative slowdown of more head chunks at which the search stops
ROUNDING = 1e-9  # largest relative difference of two sums of the same floats, caused by rounding
MOST_RECEIVED = 24  # largest bytes of received rows, as a multiple of own queries or keys
ROOM = 0.5  # fraction of the free memory that rows of other ranks may use


@dataclass(frozen=True)
class Workload:
    """The attention call that all ranks compute together, without its settings.

    Attributes:
        sizes: Sizes of one rank's tensors, before ulysses groups exchange heads.
        mask: The mask.
        layout: The layout.
        chunks: Number of row chunks; argument `sequence_chunks` of a call.
        blocks: Number of blocks of rows; argument `row_blocks` of a call.
        attended: Largest number of keys that sparse attention selects per query. Only the query's
            rank knows the selected keys, so ranks send keys and never queries. None for dense
            attention.
        key_layout: Layout of keys that are another sequence; None for `layout`.
        latent: True if values are columns of the keys. The width of the keys is then `sizes.width`
            + `sizes.value_width`.
        streams: True if the device runs a relay stream; see `Visibility.streams`.
    """

    sizes: Sizes
    mask: Mask
    layout: Layout
    chunks: int = 1
    blocks: int = 1
    attended: int | None = None
    latent: bool = False
    key_layout: Layout | None = None
    streams: bool = False

    @property
    def seq_len(self) -> int:
        """Number of positions of the whole sequence."""
        return self.sizes.tokens * self.layout.cp_size


@dataclass(frozen=True)
class FixedSettings:
    """The settings that the user has chosen; None for settings that the search chooses.

    Attributes:
        algorithm: Algorithm of the ring; ulysses groups are still searched.
        side: Tensors that backward sends, "kv" or "query".
        head_chunks: Number of head chunks.
    """

    algorithm: str | None = None
    side: str | None = None
    head_chunks: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to run a workload, with its predicted times and the bytes that it sends.

    Attributes:
        algorithm: Argument `algorithm` of `mb.attention`.
        side: Tensors that backward sends, "kv" or "query".
        head_chunks: Number of head chunks.
        ulysses: Number of ranks that share heads.
        placement: Placement of ulysses groups; see `Topology`.
        forward: Time of forward, including the all-to-all of ulysses groups.
        backward: Time of backward, including the all-to-all of ulysses groups.
        sent: Bytes that all ranks send in both passes.
    """

    algorithm: str
    side: str
    head_chunks: int
    ulysses: int
    placement: str
    forward: PassTime
    backward: PassTime
    sent: Traffic

    @property
    def seconds(self) -> float:
        """Predicted seconds of forward and backward, each at least the CPU time of its launches."""
        return sum(max(time.seconds, time.host) for time in (self.forward, self.backward))

    @property
    def bottleneck(self) -> str:
        """Resource that is busy longest: "compute", "intra", "inter", or "host" for launches."""
        if any(time.host > time.seconds for time in (self.forward, self.backward)):
            return "host"
        busy = (self.forward + self.backward)._asdict()
        return max(("compute", "intra", "inter"), key=lambda name: busy[name])

    @property
    def name(self) -> str:
        """Name for messages: the algorithm, and the size of ulysses groups if it is above 1."""
        shared = f", {self.ulysses} sharing heads ({self.placement})"
        return self.algorithm + shared * (self.ulysses > 1 and self.algorithm != "ulysses")


def on_grid(
    workload: Workload,
    topology: Topology,
    rates: Rates,
    fixed: FixedSettings,
    nodes: Nodes | None = None,
) -> Iterator[Candidate]:
    """Yield the candidates of every algorithm, side and number of head chunks on one grid.

    For each algorithm, more head chunks are tried as long as they shorten the call.

    Args:
        workload: The attention.
        topology: The grid.
        rates: Rates of each rank, with `compute`.
        fixed: Settings that the user has chosen.
        nodes: Nodes on which ranks share NICs. `rates.inter` must then be the rate of a rank that
            is alone on its NIC. Default: `rates.shared`.
    """
    work = GridWork.of(workload, topology, rates, fixed, nodes)
    left = work.algorithms()[::-1]
    while left:
        for made in left.pop().by_chunks():
            yield from made
        work.schedules.forget()  # schedules of one algorithm have hundreds of MB at 1,024 ranks


class GridSchedules:
    """Visibility and schedules of a workload on a grid, cached for searches with several rates.

    Schedules do not depend on the batch size. They depend on heads only by the ratio of query heads
    to key/value heads.

    Args:
        workload: The attention.
        topology: The grid.
        nodes: Same as in `on_grid`.

    Attributes:
        visibility: Visibility of the whole shards.
        row_chunks: Visibility of each row chunk.
        seen: [G, G], number of visible pairs of the queries of rank i and the keys of rank j.
    """

    def __init__(self, workload: Workload, topology: Topology, nodes: Nodes | None = None):
        queries = cost.ring_spans(workload.layout, topology, workload.seq_len)
        keys = queries
        if workload.key_layout is not None:
            key_len = workload.sizes.key_rows * workload.layout.cp_size
            keys = cost.ring_spans(workload.key_layout, topology, key_len)
        joined = workload.attended is not None or None  # None selects the algorithm's default
        self.visibility = visibility_of(
            workload.mask, queries, keys, joined, streams=workload.streams
        )
        self.row_chunks = [self.visibility]
        if workload.chunks > 1:
            cuts = row_chunk_spans(
                workload.layout, topology, workload.seq_len, workload.chunks, workload.blocks
            )
            self.row_chunks = [
                visibility_of(workload.mask, shards, keys, joined, streams=workload.streams)
                for _, shards, _ in cuts
            ]
        if workload.attended is None:
            self.seen = pairs_seen(workload.mask, queries, keys)
        else:
            self.seen = pairs_attended(workload.mask, queries, workload.attended, keys)
        self.grid = Grid(topology.inter_size, topology.intra_size)
        self.wires = ONE_NIC if nodes is None else Wires(places=places(topology, nodes))
        self._made: dict[tuple[Any, ...], list[PreparedSchedule]] = {}

    def forward(self, algorithm: str, sizes: Sizes) -> list[PreparedSchedule]:
        """Return the schedules of forward, one per row chunk."""
        least = _fewest_heads(sizes)
        return self._prepared(
            (algorithm, least),
            lambda visibility: cost.forward_schedule(algorithm, self.grid, visibility, least),
        )

    def backward(self, algorithm: str, sizes: Sizes, side: str) -> list[PreparedSchedule]:
        """Return the schedules of backward that sends `side`, one per row chunk."""
        least = _fewest_heads(sizes)
        return self._prepared(
            (algorithm, least, side),
            lambda visibility: cost.backward_schedule(
                algorithm, self.grid, visibility, least, side=side
            ),
        )

    def forget(self) -> None:
        """Free the cached schedules and the results in `Visibility.common`."""
        self._made.clear()
        for visibility in self.row_chunks:
            visibility.common.clear()

    def _prepared(
        self, key: tuple[Any, ...], made: Callable[[Visibility], Schedule]
    ) -> list[PreparedSchedule]:
        if key not in self._made:
            self._made[key] = [
                PreparedSchedule(made(visibility), self.wires) for visibility in self.row_chunks
            ]
        return self._made[key]


def _fewest_heads(sizes: Sizes) -> Sizes:
    """Return the sizes with batch size 1 and as few heads as the ratio of heads permits."""
    least = math.gcd(sizes.heads, sizes.kv_heads)
    heads, kv_heads = sizes.heads // least, sizes.kv_heads // least
    return replace(sizes, batch=1, heads=heads, kv_heads=kv_heads)


SchedulesOf = Callable[[Workload, Topology, Nodes | None], GridSchedules]


@dataclass(frozen=True, eq=False)
class PassWork:
    """Costs of a pass (forward or backward) on one grid that are the same for all algorithms.

    Attributes:
        pair_seconds: [G, G], seconds to compute attention of the queries of rank i to the keys of
            rank j.
        call_seconds: Minimum seconds of a kernel call.
        adding: Times to add up results, which are not part of `pair_seconds`.
        head_exchange: Time of the all-to-alls in ulysses groups.
    """

    pair_seconds: np.ndarray
    call_seconds: float
    adding: AccumulationTimes
    head_exchange: PassTime


@dataclass(frozen=True, eq=False)
class GridWork:
    """A workload on one grid, with all data that does not depend on the algorithm.

    Attributes:
        workload: The attention.
        topology: The grid.
        rates: Rates of each rank.
        fixed: Settings that the user has chosen.
        sizes: Sizes of one rank after the all-to-all of ulysses groups.
        schedules: Schedules of the workload on this grid.
        forward: Costs of forward.
        backward: Costs of backward.
        few_rows: True if a rank can hold all rows of other ranks that it uses (`_few_rows`).
    """

    workload: Workload
    topology: Topology
    rates: Rates
    fixed: FixedSettings
    sizes: Sizes
    schedules: GridSchedules
    forward: PassWork
    backward: PassWork
    few_rows: bool

    @classmethod
    def of(
        cls,
        workload: Workload,
        topology: Topology,
        rates: Rates,
        fixed: FixedSettings,
        nodes: Nodes | None = None,
        schedules_of: SchedulesOf = GridSchedules,
    ) -> GridWork:
        """Return the `GridWork` of a workload on a grid.

        Args:
            workload: The attention.
            topology: The grid.
            rates: Rates of each rank.
            fixed: Settings that the user has chosen.
            nodes: Nodes on which ranks share NICs; see `on_grid`.
            schedules_of: Function that makes a `GridSchedules` or returns a cached one.
        """
        nodes = nodes or rates.shared
        sizes = workload.sizes.shared(topology.ulysses)
        schedules = schedules_of(workload, topology, nodes)
        row_chunks = len(schedules.row_chunks)
        if workload.attended is not None:
            # The time of a call depends on its queries, not on the rows of the chunk.
            rates = replace(rates, half_rows=0.0)
        forward, backward = pass_works(
            topology, sizes, rates, schedules.seen, row_chunks, nodes,
            sparse=workload.attended is not None, latent=workload.latent,
        )  # fmt: skip
        few_rows = _few_rows(schedules.visibility, workload.sizes, sizes, rates.room)
        return cls(workload, topology, rates, fixed, sizes, schedules, forward, backward, few_rows)

    @property
    def trained(self) -> bool:
        """True if the call has a backward pass."""
        return any(self.sizes.needs_grad)

    @cached_property
    def at_least(self) -> float:
        """Lower bound on the seconds of every candidate.

        The bound has the computation, divided equally among the ranks, the start of each pass, and
        the all-to-alls of ulysses groups. Messages on rings are assumed to need no time.
        """
        rates, trained, row_chunks = self.rates, self.trained, self.schedules.row_chunks
        mean = self.forward.pair_seconds / self.schedules.grid.size
        computed = sum(float(mean[chunk.visible].sum()) for chunk in row_chunks)
        computed *= 1 + trained * rates.backward
        computed *= 1 + rates.half_rows / max(1, self.sizes.tokens)
        heads = self.forward.head_exchange.seconds
        heads += trained * self.backward.head_exchange.seconds
        return (computed + (1 + trained) * rates.start * len(row_chunks) + heads) * (1 - ROUNDING)

    def algorithms(self) -> list[AlgorithmOnGrid]:
        """Return the algorithms to simulate on this grid."""
        names = _algorithms(self.workload, self.topology, self.fixed)
        if self.fixed.algorithm is None and not self.few_rows:
            names = [name for name in names if not ALGORITHMS[name].few_rows]
        return [AlgorithmOnGrid(self, name) for name in names]


def pass_works(
    topology: Topology,
    sizes: Sizes,
    rates: Rates,
    seen: np.ndarray,
    row_chunks: int,
    nodes: Nodes | None = None,
    *,
    sparse: bool = False,
    latent: bool = False,
) -> tuple[PassWork, PassWork]:
    """Return the costs of forward and of backward that are the same for all algorithms on a grid.

    Args:
        topology: The grid.
        sizes: Sizes of one rank after the all-to-all of ulysses groups.
        rates: Rates of one rank, with `compute`.
        seen: [G, G], number of visible pairs of the queries of rank i and the keys of rank j.
        row_chunks: Number of row chunks, which are assumed to have equal work.
        nodes: Nodes on which ranks share NICs, if any.
        sparse: True if a query attends to selected keys only.
        latent: True if values are columns of the keys; see `Workload`.
    """
    assert rates.compute is not None
    columns = sizes.width + sizes.value_width * (1 + latent)
    flops = 2.0 * sizes.heads * sizes.batch * columns
    seconds = seen * (flops / rates.compute / row_chunks)
    call_seconds, memory = (0.0, 0.0), adding(sizes, rates.adding)
    if sparse:
        call_seconds, memory = reading(sizes, rates.memory, latent), (NOTHING, NOTHING)
    per_nic = 1.0 if nodes is None else nodes.per_nic
    exchanges = sharing(topology, sizes, rates, row_chunks > 1, per_nic)
    return (
        PassWork(seconds, call_seconds[0], memory[0], exchanges[0]),
        PassWork(rates.backward * seconds, call_seconds[1], memory[1], exchanges[1]),
    )


@dataclass(frozen=True, eq=False)
class AlgorithmOnGrid:
    """One algorithm for a workload on a grid: its candidates, and lower bounds on their times."""

    on: GridWork
    algorithm: str

    @property
    def counts(self) -> Sequence[int]:
        """Numbers of head chunks to try, in order."""
        return _head_chunks(self.on.sizes, self.on.fixed, self.on.schedules.grid.size == 1)

    @property
    def at_least(self) -> float:
        """Lower bound on the seconds of every candidate, computed without schedules.

        It is `GridWork.at_least`. If the algorithm makes one kernel call per pair of chunks, the
        launches of these calls are added.
        """
        on = self.on
        if on.workload.attended is not None or ALGORITHMS[self.algorithm].joins:
            return on.at_least
        row_chunks, computes = on.schedules.row_chunks, on.forward.pair_seconds > 0
        calls = sum(int(computes[chunk.visible].sum()) for chunk in row_chunks)
        launches = (1 + on.trained) * on.rates.launch * calls / on.schedules.grid.size
        return on.at_least + launches * (1 - ROUNDING)

    @cached_property
    def busy(self) -> float:
        """Lower bound on the seconds of every candidate: busy time of the busiest rank or port."""
        seconds = self._busy(self._forward, self.on.forward)
        if self.on.trained:
            seconds += min(self._busy(passes, self.on.backward) for passes in self._backwards)
        return seconds * (1 - ROUNDING)

    def _busy(self, passes: Sequence[PreparedSchedule], work: PassWork) -> float:
        """Return a lower bound on the total seconds of `passes`, one schedule per row chunk."""
        rates, count = self.on.rates, self.counts[0]
        return work.head_exchange.seconds + sum(
            simulator.pass_at_least(
                schedule, self.on.sizes, work.pair_seconds, rates, count, work.call_seconds,
                work.adding,
            )
            for schedule in passes
        )  # fmt: skip

    @cached_property
    def _forward(self) -> list[PreparedSchedule]:
        """Schedules of forward, one per row chunk."""
        return self.on.schedules.forward(self.algorithm, self.on.sizes)

    @cached_property
    def _backwards(self) -> list[list[PreparedSchedule]]:
        """Schedules of backward: one list per side to try, with one schedule per row chunk.

        A side is the choice of the tensors that backward sends: keys and values, or queries.
        """
        on, fixed = self.on, self.on.fixed.side
        sided = ALGORITHMS[self.algorithm].sided and on.schedules.grid.size > 1
        sides = [fixed] if fixed else SIDES if sided else ["kv"]
        schedules = on.schedules.backward
        return [schedules(self.algorithm, on.sizes, side) for side in sides]

    def by_chunks(self) -> Iterator[list[Candidate]]:
        """Yield, for each number of head chunks, the candidates: one per side.

        A side is the choice of the tensors that backward sends. More head chunks are tried as long
        as they shorten the call.
        """
        on, topology = self.on, self.on.topology
        resends_q = len(on.schedules.row_chunks) > 1
        sent = [
            _sent(
                [prepared.schedule for prepared in (*self._forward, *passes)],
                topology,
                on.sizes,
                resends_q,
            )
            for passes in self._backwards
        ]
        before = [math.inf] * len(self._backwards)
        for count in self.counts:
            forward = self._time(self._forward, on.forward, count)
            candidates = []
            for passes, bytes_ in zip(self._backwards, sent, strict=True):
                backward = self._time(passes, on.backward, count) if on.trained else IDLE
                side = passes[0].schedule.side
                candidates.append(Candidate(
                    _named(self.algorithm, topology), side, count, topology.ulysses,
                    topology.placement, forward, backward, bytes_,
                ))  # fmt: skip
            yield candidates
            times = [candidate.seconds for candidate in candidates]
            # More head chunks hide more of the first hops and cost more messages. If the messages
            # cost more than WORSE of the hidden time, still more chunks are rarely faster. But with
            # joined calls, eight head chunks can be 1.3 times as fast as one, even if two are
            # slower than one.
            worse = all(
                new > previous * (1 + WORSE) for new, previous in zip(times, before, strict=True)
            )
            if worse and not ALGORITHMS[self.algorithm].joins:
                break
            before = times

    def _time(self, passes: Sequence[PreparedSchedule], work: PassWork, count: int) -> PassTime:
        """Return the total time of the all-to-alls and these passes, run one after another."""
        total = IDLE
        for schedule in passes:
            total += simulator.pass_time(
                schedule, self.on.sizes, work.pair_seconds, self.on.rates, count,
                least=work.call_seconds, adding=work.adding,
            )  # fmt: skip
        return total + work.head_exchange


def _algorithms(workload: Workload, topology: Topology, fixed: FixedSettings) -> Sequence[str]:
    if fixed.algorithm is not None:
        return [fixed.algorithm]
    if topology.ring_size == 1:
        return ["ring"]
    one_level = min(topology.inter_size, topology.intra_size) == 1
    return [
        name
        for name, algorithm in ALGORITHMS.items()
        if algorithm.automatic
        and (algorithm.keeps or not workload.attended)
        and not (algorithm.holds_all and topology.ulysses > 1)
        and not (algorithm.two_levels and one_level)
    ]


def _few_rows(visibility: Visibility, own: Sizes, shared: Sizes, room: float) -> bool:
    """Return True if every rank can hold at once all rows of other ranks that it uses.

    A rank must use at most half of the rows of other ranks, unless the keys are a sequence of their
    own with fewer rows than the queries. The memory of these rows (`held_of_row`) must be at most
    MOST_RECEIVED times the bytes of the rank's own rows, and at most ROOM of the free memory.

    Args:
        visibility: The rows that each rank uses.
        own: Sizes of one rank before ulysses groups exchange heads.
        shared: Sizes after the exchange, including copies of key/value heads.
        room: Bytes of free memory; math.inf if unknown.
    """
    keys = visibility.keys
    rows = int(np.bincount(keys.owner, keys.rows, 1).max())
    most = int((keys.rows @ keys.users).max(initial=0))
    own_bytes = max(own.forward.query, own.forward.kv * own.key_rows // own.tokens) * own.tokens
    fits = most * held_of_row(shared) <= min(MOST_RECEIVED * own_bytes, ROOM * room)
    return fits and (own.key_rows < own.tokens or most <= (keys.size - 1) / 2 * rows)


def held_of_row(sizes: Sizes) -> int:
    """Return the peak bytes that a rank needs per received row of keys in one joined call.

    A joined call is one kernel call with several chunks of keys, which are copied to one buffer.
    Its memory is largest at one of three times. First a rank holds the received row and the copy of
    the row. Then it holds the copy and the sums of gradients. At the end it holds these sums, and
    the gradients in the wire dtype.
    """
    keys, sent = sizes.backward.kv, sizes.backward.dkv
    sums = sent // sizes.wire_itemsize * sizes.stat_itemsize
    return max(2 * keys, keys + sums, sums + sent)


def _sent(
    schedules: Sequence[Schedule], topology: Topology, sizes: Sizes, resends_q: bool = False
) -> Traffic:
    """Return the total bytes that all ranks send in these schedules and in ulysses groups."""
    total = Traffic()
    for schedule in schedules:
        ring = cost.traffic(schedule, None, sizes)
        total += Traffic(ring.intra * topology.ulysses, ring.inter * topology.ulysses)
    pairs = topology.ulysses_pairs()
    for size in sizes.scattered_bytes(topology.ulysses, resends_q):
        total += Traffic(pairs["intra"] * size, pairs["inter"] * size)
    return total


def _head_chunks(sizes: Sizes, fixed: FixedSettings, alone: bool) -> Sequence[int]:
    if fixed.head_chunks is not None:
        return [fixed.head_chunks]
    return [1] if alone else [n for n in HEAD_CHUNKS if sizes.kv_heads % n == 0]


def _named(algorithm: str, topology: Topology) -> str:
    """Return the argument `algorithm` of `mb.attention` that selects a ring algorithm on a grid."""
    if 1 < topology.ulysses == topology.size:
        return "ulysses"
    return "hybrid" if topology.ulysses > 1 and algorithm == "burst" else algorithm


def sharing(
    topology: Topology, sizes: Sizes, rates: Rates, resends_q: bool = False, per_nic: float = 1.0
) -> tuple[PassTime, PassTime]:
    """Return the time of the all-to-alls in ulysses groups, for forward and for backward.

    There is one all-to-all before the ring and one after it. They do not overlap with computation.
    Transfers on both link classes and copies overlap with each other. The CPU time of each
    all-to-all is one exchange and one call (for copies).

    Args:
        topology: The grid.
        sizes: Sizes of one rank on the ring, after the all-to-all.
        rates: Rates of each rank.
        resends_q: True if backward sends queries again, as with row chunks.
        per_nic: Number of ranks that send on one NIC at the same time.
    """
    links = [topology.link(0, peer) for peer in topology.ulysses_group(0)[1:]]
    if not links:
        return IDLE, IDLE
    passes = []
    messages = 4, 1 + sum(sizes.needs_grad)  # q, k, v and out; dout and the gradients
    for size, count in zip(
        sizes.scattered_bytes(topology.ulysses, resends_q), messages, strict=True
    ):
        busy = [
            links.count(link) * (count * rates.latency + size / (rate * rates.exchange))
            for link, rate in (("intra", rates.intra), ("inter", float(rates.between(per_nic))))
        ]
        taken = max(*busy, size * topology.ulysses / rates.copying)
        taken += 2 * (rates.posting + rates.exchange_start)
        host = 2 * (rates.host.call + rates.host.exchange) if rates.host else 0.0
        passes.append(PassTime(taken, 0.0, *busy)._replace(host=host))
    return passes[0], passes[1]


def adding(sizes: Sizes, rate: float) -> tuple[AccumulationTimes, AccumulationTimes]:
    """Return the times to add up results of dense attention, in forward and in backward.

    A call reads its results in the dtype of q, and reads and writes the sums to which they are
    added. Keys of several chunks are copied to one buffer. Gradients of such keys are zeroed, and
    read and written again for each chunk (`execution.joined`).

    Args:
        sizes: Sizes of one rank on the ring.
        rate: Bytes per second that the device reads and writes.
    """
    of_sums, batch = 2 * sizes.stat_itemsize + sizes.itemsize, sizes.batch / rate
    of_keys = batch * sizes.kv_heads * (sizes.width + sizes.value_width)
    copy_seconds, heads = 2 * sizes.itemsize * of_keys, batch * sizes.heads
    return (
        AccumulationTimes(queries=heads * sizes.value_width * of_sums, joined=copy_seconds),
        AccumulationTimes(
            queries=heads * sizes.width * of_sums,
            keys=of_keys * of_sums,
            joined=copy_seconds + 3 * sizes.stat_itemsize * of_keys,
        ),
    )


def reading(sizes: Sizes, memory: float, latent: bool) -> tuple[float, float]:
    """Return the minimum seconds of a sparse attention call: in forward, and in backward.

    A call reads and writes queries, results and gradients of all its rows, even if a row has
    selected few keys of the call. Forward reads q, and reads and writes out in the dtype of sums.
    Backward reads q and the gradient of its output, and reads and writes dq in the dtype of sums.

    Args:
        sizes: Sizes of one rank on the ring.
        memory: Bytes per second that the device reads and writes.
        latent: True if values are columns of the keys; see `Workload`.
    """
    rows = sizes.tokens * sizes.batch * sizes.heads
    out, itemsize, read_write = sizes.value_width, sizes.itemsize, 2 * sizes.stat_itemsize
    q = sizes.width + out * latent
    forward, backward = itemsize * q + read_write * out, itemsize * (q + out) + read_write * q
    return rows * forward / memory, rows * backward / memory


def grids(ranks: int, intra: int, sizes: Sizes) -> list[Topology]:
    """Return all grids of `ranks` ranks whose ulysses groups can share the heads.

    If two placements give the same rings and ulysses groups, only one of the grids is returned.
    """
    by_groups: dict[tuple, Topology] = {}
    for ulysses in (n for n in range(1, ranks + 1) if ranks % n == 0):
        if ulysses > 1 and not shareable(sizes.heads, sizes.kv_heads, ulysses):
            continue
        for placement in PLACEMENTS:
            try:
                grid = Topology(ranks, intra, ulysses, placement)
            except ValueError:  # rings whose nodes hold unequal numbers of ranks
                continue
            by_groups.setdefault((ulysses, tuple(grid.ring(0)), tuple(grid.ulysses_group(0))), grid)
    return list(by_groups.values())
