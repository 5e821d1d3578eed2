# SPDX-License-Identifier: Apache-2.0
"""The time of the core attention of one layer, forward and backward, on a run's ranks.

`autotune.simulator` times the schedules that the run would execute, with the links of the cluster.
The placement of ranks decides which of them share a NIC. A `RingKey` identifies a ring, so a search
or a fit makes each schedule once. `Settings` contain the algorithm, side and groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from .....autotune import simulator
from .....autotune.candidates import PassWork, pass_works
from .....autotune.clusters import Cluster
from .....autotune.exchanges import Wires
from .....autotune.pair_counts import pairs_attended, pairs_seen
from .....autotune.places import Nodes, places
from .....autotune.prepared import PreparedSchedule
from .....autotune.rates import Rates
from .....layout import make
from .....masks import Causal, Window
from .....options import ring_algorithm
from .....schedule.cost import backward_schedule, forward_schedule, ring_spans
from .....schedule.demand import row_chunk_spans, visibility_of
from .....schedule.sizes import Sizes
from .....schedule.tables import Grid
from .....schedule.topology import Topology
from ..account.rings import joins, side_by_bytes, visiting_rows
from ..settings import BYTES, Settings
from ..shapes.models import Model

CACHED_RINGS = 128  # rings with cached schedules
LARGEST = 256  # maximum ranks of a cached ring; schedules of larger ones need too much memory


class RingKey(NamedTuple):
    """The inputs of the schedules of a run's rings, and the places of their ranks.

    Attributes:
        algorithm: Algorithm of the ring.
        side: The side that is sent in backward.
        route: Route of `Settings`.
        layout: Layout of the rows.
        topology: Groups of the context-parallel ranks.
        inner: Ranks of an inner ring.
        seq: Tokens of a sequence.
        nodes: Nodes and NICs.
        chunks: Row chunks.
        sizes: Sizes of a rank with the fewest heads in the same proportion. Other numbers of heads
            have the same schedules.
        window: Tokens that a query may attend to, 0: all before it.
        attended: Upper limit of the keys that a query attends to, 0: no limit.
        joined: As in `account.rings.joins`.
        host: Keys of other ranks are in host memory between row chunks.
    """

    algorithm: str
    side: str
    route: str
    layout: str
    topology: Topology
    inner: int
    seq: int
    nodes: Nodes
    chunks: int
    sizes: Sizes
    window: int = 0
    attended: int = 0
    joined: bool | None = None
    host: bool = False


class RingPasses(NamedTuple):
    """The pairs and the schedules of a ring.

    All row chunks have equally many pairs, and the schedules are those of the last chunk. With keys
    in host memory, the schedule of forward includes the keys of all chunks.

    Attributes:
        pairs: Visible pairs [G, G] of each rank's queries and each rank's keys.
        forward: The schedule of forward.
        backward: The schedule of backward.
    """

    pairs: np.ndarray
    forward: PreparedSchedule
    backward: PreparedSchedule


def sizes_of(model: Model, run: Settings) -> Sizes:
    """Return the sizes of one rank's tensors in a call; sparse attention has latents as keys."""
    if model.indexer is not None and (low := model.latent) is not None:
        return Sizes(run.seq // run.cp, run.micro_batch, model.heads // run.tp, 1, low.rope,
                     low.kv_rank, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    return Sizes(run.seq // run.cp, run.micro_batch, heads, kv_heads, model.head_dim,
                 model.value_dim, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip


def index_sizes(model: Model, run: Settings) -> Sizes:
    """Return the sizes of one rank's tensors in a selection.

    Every tensor-parallel rank selects for all heads.
    """
    assert model.indexer is not None
    return Sizes(run.seq // run.cp, run.micro_batch, model.indexer.heads, 1, model.indexer.width, 0,
                 2, 4, BYTES[run.wire], (False, False, False))  # fmt: skip


def topology_of(cluster: Cluster, run: Settings) -> Topology:
    """Return the topology of the context-parallel ranks.

    Args:
        cluster: The cluster.
        run: The run.

    Raises:
        ValueError: Nodes or groups do not divide the ranks.
    """
    return Topology(run.cp, cluster.cp_per_node(run.tp, run.cp), run.ulysses, run.placement)


def ring_of(model: Model, cluster: Cluster, run: Settings, window: int = 0) -> RingKey:
    """Return the ring of a run.

    Args:
        model: The model.
        cluster: The cluster.
        run: The run.
        window: Tokens that a query attends to, 0: all before it.

    Raises:
        ValueError: Inner rings do not divide the ring.
    """
    topology, sizes = topology_of(cluster, run), sizes_of(model, run).shared(run.ulysses)
    inner = min(run.inner or topology.intra_size, topology.ring_size)
    if inner < 1 or topology.ring_size % inner:
        raise ValueError(
            f"inner: rings of {topology.ring_size} ranks cannot be cut into inner rings of "
            f"{run.inner}; use a divisor of {topology.ring_size}"
        )
    side = side_by_bytes(run, sizes) if model.indexer is None else "kv"
    least = gcd(sizes.heads, sizes.kv_heads)
    sizes = replace(sizes, batch=1, heads=sizes.heads // least, kv_heads=sizes.kv_heads // least)
    return RingKey(ring_algorithm(run.algorithm), side, run.route, run.layout, topology, inner,
                run.seq, cluster.nodes(run.tp), run.sequence_chunks, sizes, window,
                model.indexer.top_k if model.indexer else 0,
                joins(model.indexer is not None), run.keys_on_host)  # fmt: skip


def ring_passes(ring: RingKey) -> RingPasses:
    """Return the schedules of a ring."""
    topology, layout = ring.topology, make(ring.layout, cp_size=ring.topology.size)
    mask = Window(ring.window - 1, 0) if ring.window else Causal()
    queries = spans = ring_spans(layout, topology, ring.seq)
    if ring.chunks > 1:
        *_, (_, queries, _) = row_chunk_spans(layout, topology, ring.seq, ring.chunks)
    grid = Grid(topology.ring_size // ring.inner, ring.inner)
    want = visibility_of(mask, queries, spans, ring.joined)
    wires = Wires(places=places(topology, ring.nodes))
    name, sizes, route = ring.algorithm, ring.sizes, ring.route
    brought = want
    if ring.host:
        brought = replace(visibility_of(mask, spans, spans, False), queries=want.queries)
    forward = forward_schedule(name, grid, brought, sizes, route=route)
    backward = backward_schedule(name, grid, want, sizes, side=ring.side, route=route)
    most = ring.attended
    pairs = pairs_attended(mask, spans, most) if most else pairs_seen(mask, spans)
    return RingPasses(pairs, PreparedSchedule(forward, wires), PreparedSchedule(backward, wires))


def without_links(rates: Rates) -> Rates:
    """Return the rates of a pass that sends nothing."""
    return replace(rates, intra=math.inf, inter=math.inf, nic=None, latency=0.0)


RingsOf = Callable[[RingKey], RingPasses]  # called as `ring_passes`


def cached_ring_passes() -> RingsOf:
    """Return `ring_passes` with a cache of the last rings, except large ones."""
    cached = lru_cache(CACHED_RINGS)(ring_passes)
    return lambda ring: ring_passes(ring) if ring.topology.ring_size > LARGEST else cached(ring)


@dataclass(frozen=True)
class AttentionTime:
    """The time of one attention call: all sequences of a micro-batch, one layer, one rank.

    Attributes:
        forward: Seconds of forward with the all-to-all of ranks that share heads.
        backward: Seconds of backward with the all-to-all.
        exchange: Seconds of the all-to-all in forward and in backward.
        busy: Seconds of both passes in which the busiest rank's device ("compute") and links
            ("intra", "inter") are in use.
        host: Seconds of the processor for the launches of forward and of backward, concurrent with
            the rest.
        planning: Seconds of the processor before the first layer of each micro-batch if every
            micro-batch has its own plan.
        kernel: Attention kernel whose published rate is assumed. None if the rate was measured or
            stated, and if `simulate` did not set it.
    """

    forward: float
    backward: float
    exchange: tuple[float, float]
    busy: Mapping[str, float]
    host: tuple[float, float] = (0.0, 0.0)
    planning: float = 0.0
    kernel: str | None = None

    @classmethod
    def of(
        cls,
        forward: simulator.PassTime,
        backward: simulator.PassTime,
        exchange: tuple[simulator.PassTime, simulator.PassTime],
        planning: float = 0.0,
    ) -> AttentionTime:
        """Return the time of both passes.

        Args:
            forward: The time of forward.
            backward: The time of backward.
            exchange: The part of each that shares heads.
            planning: Seconds of planning.
        """
        sum_of_passes = forward + backward
        busy = {
            "compute": sum_of_passes.compute,
            "intra": sum_of_passes.intra,
            "inter": sum_of_passes.inter,
        }
        moved = exchange[0].seconds, exchange[1].seconds
        host = forward.host, backward.host
        return cls(forward.seconds, backward.seconds, moved, busy, host, planning)

    @property
    def seconds(self) -> float:
        """Seconds of one forward and one backward, each at least as long as its launches."""
        return sum(map(max, (self.forward, self.backward), self.host))

    @property
    def bottleneck(self) -> str:
        """The resource that is busy for the longest time: "compute", "intra" or "inter".

        It is "host" if a pass waits for its launches.
        """
        if self.host[0] > self.forward or self.host[1] > self.backward:
            return "host"
        return max(self.busy, key=lambda name: self.busy[name])


def attention_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    rings: RingsOf = ring_passes,
    window: int = 0,
) -> AttentionTime:
    """Return the time of one attention call of a run with causal sequences.

    Forward of sparse attention includes the selection, without the indexer's loss.

    Args:
        model: The model.
        cluster: The cluster.
        run: The run.
        rings: `ring_passes`, or a cached function.
        window: Tokens that a query of the layer attends to, 0: all before it.

    Raises:
        ValueError: The ranks of a node do not allow the groups.
    """
    rates, topology = cluster.rank_rates(), topology_of(cluster, run)
    sizes, chunks = sizes_of(model, run).shared(run.ulysses), run.sequence_chunks
    ring = ring_of(model, cluster, run, window)
    passes = rings(ring)
    latent = model.indexer is not None
    if latent:  # the time of a call depends on its queries only
        rates = replace(rates, half_rows=0.0)
    works = pass_works(
        topology, sizes, rates, passes.pairs, chunks, ring.nodes, sparse=latent, latent=latent
    )

    def timed(prepared: PreparedSchedule, work: PassWork, rates: Rates) -> simulator.PassTime:
        return simulator.pass_time(
            prepared, sizes, work.pair_seconds, rates, run.head_chunks, least=work.call_seconds,
            adding=work.adding,
        )  # fmt: skip

    first = timed(passes.forward, works[0], rates)
    forward, backward = chunks * first, chunks * timed(passes.backward, works[1], rates)
    if ring.host:
        later = timed(passes.forward, works[0], without_links(rates))
        fetched = visiting_rows(run, window) // run.micro_batch * sizes.forward.kv
        later = later._replace(seconds=max(later.seconds, fetched / cluster.link))
        forward = first + (chunks - 1) * later
    forward += _selection(model, run, rings, ring, rates)
    exchange = works[0].head_exchange, works[1].head_exchange
    return AttentionTime.of(forward + exchange[0], backward + exchange[1], exchange)


def _selection(
    model: Model, run: Settings, rings: RingsOf, ring: RingKey, rates: Rates
) -> simulator.PassTime:
    """Compute the time of the indexer's scores, for sparse attention."""
    if model.indexer is None:
        return simulator.IDLE
    assert rates.compute is not None
    sizes = index_sizes(model, run)
    passes = rings(ring._replace(attended=0, sizes=replace(sizes, batch=1)))
    flops = 2.0 * model.indexer.heads * sizes.width * sizes.batch
    scores = passes.pairs * (flops / rates.compute)
    return simulator.pass_time(passes.forward, sizes, scores, rates)
