# SPDX-License-Identifier: Apache-2.0
"""The settings that could run a workload, each with its simulated times and its bytes.

Decides which algorithms, sides, numbers of head chunks and ulysses groups are tried; `select`
decides which one is taken.
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
from ..schedule.demand import Wanted, row_cuts, wanted
from ..schedule.head_shares import shareable
from ..schedule.rings import Schedule
from ..schedule.tables import SIDES, Grid
from ..schedule.topology import PLACEMENTS, Topology
from . import simulator
from .exchanges import ONE_NIC, Wires
from .pair_counts import pairs_attended, pairs_seen
from .places import Nodes, places
from .prepared import Prepared
from .rates import Rates
from .simulator import IDLE, NOTHING, Adding, PassTime

HEAD_CHUNKS = (1, 2, 4, 8)
WORSE = 0.002  # of a call: by how much more chunks are slower before the rest may not be tried
ROUNDING = 1e-9  # by which a sum of floats may exceed another one of the same numbers
HELD = 24  # a rank may hold for others so many times the bytes of its own queries or keys
ROOM = 0.5  # of the memory that is known to be left


@dataclass(frozen=True)
class Workload:
    """The attention that all ranks compute together, whatever settings run it.

    sizes: of one rank, before heads are shared. chunks, blocks: of rows, as `sequence_chunks` and
    `row_blocks` of a call. attended: a query attends to at most so many keys, which its rank knows
    alone, so that keys travel; None: to all that it sees. latent: values are columns of the keys,
    which are wider by as many.
    """

    sizes: Sizes
    mask: Mask
    layout: Layout
    chunks: int = 1
    blocks: int = 1
    attended: int | None = None
    latent: bool = False

    @property
    def seq_len(self) -> int:
        """Positions of the whole sequence."""
        return self.sizes.tokens * self.layout.cp_size


@dataclass(frozen=True)
class Fixed:
    """The settings that the user has fixed; None where the selection is free.

    algorithm: that of the ring, with or without ulysses groups.
    """

    algorithm: str | None = None
    side: str | None = None
    head_chunks: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to run a workload, with its predicted times and the bytes that it sends.

    forward and backward include the all-to-all of ulysses groups; sent counts all ranks.
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
        """Predicted for one forward and one backward pass, each at least as long as its launches
        take.
        """
        return sum(max(each.seconds, each.host) for each in (self.forward, self.backward))

    @property
    def bottleneck(self) -> str:
        """What is busy for the longest time: "compute", "intra" or "inter"; "host" where a pass
        waits for its launches.
        """
        if any(each.host > each.seconds for each in (self.forward, self.backward)):
            return "host"
        both = (self.forward + self.backward)._asdict()
        return max(("compute", "intra", "inter"), key=lambda name: both[name])

    @property
    def name(self) -> str:
        """For messages: the algorithm, and how many ranks share heads if any do."""
        shared = f", {self.ulysses} sharing heads ({self.placement})"
        return self.algorithm + shared * (self.ulysses > 1 and self.algorithm != "ulysses")


def on_grid(
    workload: Workload, topology: Topology, rates: Rates, fixed: Fixed, nodes: Nodes | None = None
) -> Iterator[Candidate]:
    """Every algorithm, side and number of head chunks on one grid, no more chunks than shorten a
    call; rates with `compute` stated.

    nodes: whose NICs are shared, with the rates of a rank alone; None: those of the rates.
    """
    work = GridWork.of(workload, topology, rates, fixed, nodes)
    left = work.algorithms()[::-1]
    while left:
        for made in left.pop().by_chunks():
            yield from made
        work.schedules.forget()  # of 1,024 ranks those of one algorithm take hundreds of MB


class GridSchedules:
    """What neither rates nor the batch change of a workload on a grid: who wants what, and the
    schedules, which are the same for all heads in the same proportion. wants: of each chunk of
    rows; seen: visible pairs [G, G].

    nodes: as of `on_grid`.
    """

    def __init__(self, workload: Workload, topology: Topology, nodes: Nodes | None = None):
        spans = cost.ring_spans(workload.layout, topology, workload.seq_len)
        joined = workload.attended is not None or None  # else as the algorithm has it
        self.want = wanted(workload.mask, spans, spans, joined)
        self.wants = [self.want]
        if workload.chunks > 1:
            cuts = row_cuts(
                workload.layout, topology, workload.seq_len, workload.chunks, workload.blocks
            )
            self.wants = [wanted(workload.mask, shards, spans, joined) for _, shards, _ in cuts]
        if workload.attended is None:
            self.seen = pairs_seen(workload.mask, spans)
        else:
            self.seen = pairs_attended(workload.mask, spans, workload.attended)
        self.grid = Grid(topology.inter_size, topology.intra_size)
        self.wires = ONE_NIC if nodes is None else Wires(places=places(topology, nodes))
        self._made: dict[tuple[Any, ...], list[Prepared]] = {}

    def forward(self, algorithm: str, sizes: Sizes) -> list[Prepared]:
        """One for each chunk of rows."""
        least = _fewest_heads(sizes)
        return self._prepared(
            (algorithm, least),
            lambda want: cost.forward_schedule(algorithm, self.grid, want, least),
        )

    def backward(self, algorithm: str, sizes: Sizes, side: str) -> list[Prepared]:
        """One for each chunk of rows."""
        least = _fewest_heads(sizes)
        return self._prepared(
            (algorithm, least, side),
            lambda want: cost.backward_schedule(algorithm, self.grid, want, least, side=side),
        )

    def forget(self) -> None:
        """Let go of the schedules that were made, and of what they have in common."""
        self._made.clear()
        for want in self.wants:
            want.common.clear()

    def _prepared(self, key: tuple[Any, ...], made: Callable[[Wanted], Schedule]) -> list[Prepared]:
        if key not in self._made:
            self._made[key] = [Prepared(made(want), self.wires) for want in self.wants]
        return self._made[key]


def _fewest_heads(sizes: Sizes) -> Sizes:
    """With one sequence and the fewest heads in the same proportion."""
    least = math.gcd(sizes.heads, sizes.kv_heads)
    heads, kv_heads = sizes.heads // least, sizes.kv_heads // least
    return replace(sizes, batch=1, heads=heads, kv_heads=kv_heads)


SchedulesOf = Callable[[Workload, Topology, Nodes | None], GridSchedules]


@dataclass(frozen=True, eq=False)
class PassWork:
    """The work of one pass, forward or backward, on one grid, for any algorithm.

    pair_seconds: [G, G], seconds of computation of each rank with each chunk. call_seconds: the
    least that a kernel call takes. adding: memory traffic besides computation. head_exchange: the
    all-to-alls of ulysses groups.
    """

    pair_seconds: np.ndarray
    call_seconds: float
    adding: Adding
    head_exchange: PassTime


@dataclass(frozen=True, eq=False)
class GridWork:
    """A workload on one grid: what all algorithms have in common there.

    sizes: of one rank, after ulysses groups shared the heads. few_rows: the result of `_few_rows`.
    """

    workload: Workload
    topology: Topology
    rates: Rates
    fixed: Fixed
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
        fixed: Fixed,
        nodes: Nodes | None = None,
        schedules_of: SchedulesOf = GridSchedules,
    ) -> GridWork:
        """Prepare a workload on a grid.

        Args:
            workload, topology, rates, fixed, nodes: Same as in `on_grid`.
            schedules_of: Makes a `GridSchedules`, or returns one that was made before.
        """
        nodes = nodes or rates.shared
        sizes = workload.sizes.shared(topology.ulysses)
        schedules = schedules_of(workload, topology, nodes)
        row_chunks = len(schedules.wants)
        if workload.attended is not None:
            # The time of a call depends on its queries, not on the rows of the chunk.
            rates = replace(rates, half_rows=0.0)
        forward, backward = pass_works(
            topology, sizes, rates, schedules.seen, row_chunks, nodes,
            sparse=workload.attended is not None, latent=workload.latent,
        )  # fmt: skip
        few_rows = _few_rows(schedules.want, workload.sizes, sizes, rates.room)
        return cls(workload, topology, rates, fixed, sizes, schedules, forward, backward, few_rows)

    @property
    def trained(self) -> bool:
        """Does a backward follow?"""
        return any(self.sizes.needs_grad)

    @cached_property
    def at_least(self) -> float:
        """Lower bound on the seconds of every candidate: ranks share the pairs evenly, and nothing
        that travels takes time except the all-to-alls.
        """
        rates, trained, wants = self.rates, self.trained, self.schedules.wants
        mean = self.forward.pair_seconds / self.schedules.grid.size
        computed = sum(float(mean[each.visible].sum()) for each in wants)
        computed *= 1 + trained * rates.backward
        computed *= 1 + rates.half_rows / max(1, self.sizes.tokens)
        heads = self.forward.head_exchange.seconds
        heads += trained * self.backward.head_exchange.seconds
        return (computed + (1 + trained) * rates.start * len(wants) + heads) * (1 - ROUNDING)

    def algorithms(self) -> list[AlgorithmOnGrid]:
        """Those that are tried on this grid."""
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
    """Return the work of forward and of backward for any algorithm on one grid.

    Args:
        topology: The grid.
        sizes: Sizes of one rank after ulysses groups shared the heads.
        rates: Rates of one rank, with `compute` stated.
        seen: Visible pairs of each rank with each chunk, [G, G].
        row_chunks: Number of row chunks, which are balanced.
        nodes: Nodes whose NICs are shared; None: those of the rates.
        sparse: A query attends to selected keys only.
        latent: Values are columns of the keys.
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
    """One algorithm for the workload on a grid."""

    on: GridWork
    algorithm: str

    @property
    def counts(self) -> Sequence[int]:
        """Numbers of head chunks that may be tried, in order."""
        return _head_chunks(self.on.sizes, self.on.fixed, self.on.schedules.grid.size == 1)

    @property
    def at_least(self) -> float:
        """Seconds that no candidate stays below: with a launch of every call, where each pair of
        chunks is one.
        """
        on = self.on
        if on.workload.attended is not None or ALGORITHMS[self.algorithm].joins:
            return on.at_least
        wants, computes = on.schedules.wants, on.forward.pair_seconds > 0
        calls = sum(int(computes[each.visible].sum()) for each in wants)
        launches = (1 + on.trained) * on.rates.launch * calls / on.schedules.grid.size
        return on.at_least + launches * (1 - ROUNDING)

    @cached_property
    def busy(self) -> float:
        """Lower bound on the seconds of every candidate, from the schedules: the busiest rank or
        port of each pass.
        """
        seconds = self._busy(self._forward, self.on.forward)
        if self.on.trained:
            seconds += min(self._busy(each, self.on.backward) for each in self._backwards)
        return seconds * (1 - ROUNDING)

    def _busy(self, passes: Sequence[Prepared], work: PassWork) -> float:
        """Seconds of the passes of all row chunks together."""
        rates, count = self.on.rates, self.counts[0]
        return work.head_exchange.seconds + sum(
            simulator.pass_at_least(
                each, self.on.sizes, work.pair_seconds, rates, count, work.call_seconds,
                work.adding,
            )
            for each in passes
        )  # fmt: skip

    @cached_property
    def _forward(self) -> list[Prepared]:
        """The schedules of forward, one for each chunk of rows."""
        return self.on.schedules.forward(self.algorithm, self.on.sizes)

    @cached_property
    def _backwards(self) -> list[list[Prepared]]:
        """Those of backward, for each side that is tried."""
        on, fixed = self.on, self.on.fixed.side
        sided = ALGORITHMS[self.algorithm].sided and on.schedules.grid.size > 1
        sides = [fixed] if fixed else SIDES if sided else ["kv"]
        made = on.schedules.backward
        return [made(self.algorithm, on.sizes, side) for side in sides]

    def by_chunks(self) -> Iterator[list[Candidate]]:
        """The candidates of each number of head chunks, one for each side; no more chunks than
        shorten a call.
        """
        on, topology = self.on, self.on.topology
        again = len(on.schedules.wants) > 1
        sent = [
            _sent([one.schedule for one in (*self._forward, *each)], topology, on.sizes, again)
            for each in self._backwards
        ]
        before = [math.inf] * len(self._backwards)
        for count in self.counts:
            forward = self._time(self._forward, on.forward, count)
            made = []
            for each, bytes_ in zip(self._backwards, sent, strict=True):
                backward = self._time(each, on.backward, count) if on.trained else IDLE
                side = each[0].schedule.side
                made.append(Candidate(
                    _named(self.algorithm, topology), side, count, topology.ulysses,
                    topology.placement, forward, backward, bytes_,
                ))  # fmt: skip
            yield made
            times = [candidate.seconds for candidate in made]
            # More chunks hide more of the first hops and cost more messages. Where these outweigh
            # what is hidden by more than a little, more chunks were rarely found to be faster; but
            # with joined calls eight were, by up to 1.3, where two were slower than one.
            worse = all(now > then * (1 + WORSE) for now, then in zip(times, before, strict=True))
            if worse and not ALGORITHMS[self.algorithm].joins:
                break
            before = times

    def _time(self, passes: Sequence[Prepared], work: PassWork, count: int) -> PassTime:
        """The time of the passes of all row chunks, one after another, and of the all-to-alls."""
        total = IDLE
        for each in passes:
            total += simulator.pass_time(
                each, self.on.sizes, work.pair_seconds, self.on.rates, count,
                least=work.call_seconds, adding=work.adding,
            )  # fmt: skip
        return total + work.head_exchange


def _algorithms(workload: Workload, topology: Topology, fixed: Fixed) -> Sequence[str]:
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


def _few_rows(want: Wanted, own: Sizes, shared: Sizes, room: float) -> bool:
    """Does a rank see so few rows of others that it can hold all of them at once: at most half of
    them, and what it holds of them (`held_of_row`) in HELD times the bytes of what it has itself,
    and in ROOM of the memory that is left? own, shared: before and after ranks share heads, of
    which they take copies where there are few; room: bytes, math.inf where nobody knows.
    """
    keys = want.keys
    rows = int(np.bincount(keys.owner, keys.rows, 1).max())
    most = int((keys.rows @ keys.wanted).max(initial=0))
    mine = max(own.forward.query, own.forward.kv) * own.tokens
    few = most * held_of_row(shared) <= min(HELD * mine, ROOM * room)
    return few and most <= (keys.size - 1) / 2 * rows


def held_of_row(sizes: Sizes) -> int:
    """The most bytes that a rank holds at a time for each row of keys of others in one call, as
    `execution.joined` does: what arrived beside its copy; the copy beside gradients; these, which
    are summed in one dtype, beside what travels of them.
    """
    keys, travels = sizes.backward.kv, sizes.backward.dkv
    sums = travels // sizes.wire_itemsize * sizes.stat_itemsize
    return max(2 * keys, keys + sums, sums + travels)


def _sent(
    schedules: Sequence[Schedule], topology: Topology, sizes: Sizes, again: bool = False
) -> Traffic:
    """The bytes that all ranks send, on all rings and within all ulysses groups."""
    total = Traffic()
    for schedule in schedules:
        ring = cost.traffic(schedule, None, sizes)
        total += Traffic(ring.intra * topology.ulysses, ring.inter * topology.ulysses)
    for rank in range(topology.size):
        group = topology.ulysses_group(rank)
        links = [topology.link(rank, peer) for peer in group]
        for sent in cost.head_traffic(links, group.index(rank), sizes, again):
            total += sent
    return total


def _head_chunks(sizes: Sizes, fixed: Fixed, alone: bool) -> Sequence[int]:
    if fixed.head_chunks is not None:
        return [fixed.head_chunks]
    return [1] if alone else [n for n in HEAD_CHUNKS if sizes.kv_heads % n == 0]


def _named(algorithm: str, topology: Topology) -> str:
    """The name under which `attention` takes this algorithm on these ulysses groups."""
    if 1 < topology.ulysses == topology.size:
        return "ulysses"
    return "hybrid" if topology.ulysses > 1 and algorithm == "burst" else algorithm


def sharing(
    topology: Topology, sizes: Sizes, rates: Rates, again: bool = False, per_nic: float = 1.0
) -> tuple[PassTime, PassTime]:
    """The times of the all-to-alls before and after the ring, of forward and of backward.

    Nothing is computed beside them, and both link classes are busy at the same time, as are the
    copies. per_nic: how many ranks send by one NIC at once. Launched are an exchange before and one
    after, each with the copies around it as one call.
    """
    links = [topology.link(0, peer) for peer in topology.ulysses_group(0)[1:]]
    if not links:
        return IDLE, IDLE
    passes = []
    messages = 4, 1 + sum(sizes.needs_grad)  # q, k, v and out; dout and what it becomes
    for size, count in zip(sizes.scattered_bytes(topology.ulysses, again), messages, strict=True):
        busy = [
            links.count(link) * (count * rates.latency + size / (rate * rates.exchange))
            for link, rate in (("intra", rates.intra), ("inter", float(rates.between(per_nic))))
        ]
        taken = max(*busy, size * topology.ulysses / rates.copying)
        taken += 2 * (rates.posting + rates.exchange_start)
        host = 2 * (rates.host.call + rates.host.exchange) if rates.host else 0.0
        passes.append(PassTime(taken, 0.0, *busy)._replace(host=host))
    return passes[0], passes[1]


def adding(sizes: Sizes, rate: float) -> tuple[Adding, Adding]:
    """What dense attention moves in memory besides computing, forward and backward, at so many
    bytes per second: a call reads its results in the dtype of q, and reads and writes the sums to
    which it adds them. Keys of several chunks are copied to their places, and gradients of such
    keys are zeroed, read again and written for each chunk (`execution.joined`).
    """
    of_sums, batch = 2 * sizes.stat_itemsize + sizes.itemsize, sizes.batch / rate
    of_keys = batch * sizes.kv_heads * (sizes.width + sizes.value_width)
    copied, heads = 2 * sizes.itemsize * of_keys, batch * sizes.heads
    return (
        Adding(queries=heads * sizes.value_width * of_sums, joined=copied),
        Adding(
            queries=heads * sizes.width * of_sums,
            keys=of_keys * of_sums,
            joined=copied + 3 * sizes.stat_itemsize * of_keys,
        ),
    )


def reading(sizes: Sizes, memory: float, latent: bool) -> tuple[float, float]:
    """Seconds that a call of sparse attention, forward and backward, takes at least: queries,
    results and gradients of all its rows pass through memory, of so many bytes per second, however
    few keys of the call a row has selected. Forward reads q, and reads and writes out in the dtype
    of sums; backward reads q and its output's gradient, and reads and writes dq as forward out.
    latent: are values columns of the keys, which are wider by as many?
    """
    rows = sizes.tokens * sizes.batch * sizes.heads
    out, each, both = sizes.value_width, sizes.itemsize, 2 * sizes.stat_itemsize
    q = sizes.width + out * latent
    forward, backward = each * q + both * out, each * (q + out) + both * q
    return rows * forward / memory, rows * backward / memory


def grids(ranks: int, intra: int, sizes: Sizes) -> list[Topology]:
    """Every grid of these ranks on which ulysses groups can share these heads.

    Placements with the same rings and ulysses groups are listed once.
    """
    found: dict[tuple, Topology] = {}
    for ulysses in (n for n in range(1, ranks + 1) if ranks % n == 0):
        if ulysses > 1 and not shareable(sizes.heads, sizes.kv_heads, ulysses):
            continue
        for placement in PLACEMENTS:
            try:
                grid = Topology(ranks, intra, ulysses, placement)
            except ValueError:  # rings whose nodes hold unequal numbers of ranks
                continue
            found.setdefault((ulysses, tuple(grid.ring(0)), tuple(grid.ulysses_group(0))), grid)
    return list(found.values())
