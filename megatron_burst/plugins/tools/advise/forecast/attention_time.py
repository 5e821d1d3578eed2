# SPDX-License-Identifier: Apache-2.0
"""Predicted time of core attention of one layer, in forward and backward.

`autotune.simulator` simulates the schedules that the run would execute on the links of the cluster.
The placement of ranks decides which ranks share a NIC. A search caches the schedules of a ring by
`RingKey`, so they are computed only once.
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
from ..shapes.layer_kinds import HYBRID
from ..shapes.models import Model
from .hybrid_time import hybrid_passes

CACHED_RINGS = 128  # rings with cached schedules
LARGEST = 256  # maximum ranks of a cached ring; schedules of larger rings need too much memory


class RingKey(NamedTuple):
    """Cache key of a ring's schedules: all values from which the schedules are computed.

    Attributes:
        algorithm: Algorithm of the ring.
        side: Tensors that ranks send in backward: "kv" or "query".
        route: Route of chunks: "ring", "direct" or "auto".
        layout: Name of the layout.
        topology: Topology of the context-parallel ranks.
        inner: Number of ranks of an inner ring.
        seq: Tokens of a sequence.
        nodes: Nodes of the ranks, with their NICs.
        chunks: Number of row chunks.
        sizes: Sizes of one rank's tensors. The numbers of heads are divided by their greatest
            common divisor, because schedules depend only on the ratio of query to key heads.
        window: Tokens that a query may attend to (sliding window); 0 for full causal attention.
        attended: Maximum number of keys that a query attends to (sparse attention); 0 for no limit.
        joined: True if one kernel call reads all keys of a step; None if the algorithm decides.
        host: Whether keys of other ranks are in host memory between row chunks.
        streams: Whether received rows are sent on a relay stream; see `Visibility.streams`.
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
    streams: bool = False


class RingPasses(NamedTuple):
    """Schedules of a ring, and the number of visible pairs.

    With row chunks, these are the schedules of the last row chunk. If keys of other ranks are kept
    in host memory, the forward schedule sends the keys that all row chunks need.

    Attributes:
        pairs: Number of visible pairs of queries of rank i and keys of rank j, float [i, j].
        forward: Schedule of forward.
        backward: Schedule of backward.
    """

    pairs: np.ndarray
    forward: PreparedSchedule
    backward: PreparedSchedule


def sizes_of(model: Model, run: Settings) -> Sizes:
    """Return the sizes of one rank's q, k and v. In sparse attention, k and v are latents."""
    if model.indexer is not None and (low := model.latent) is not None:
        return Sizes(run.seq // run.cp, run.micro_batch, model.heads // run.tp, 1, low.rope,
                     low.kv_rank, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    return Sizes(run.seq // run.cp, run.micro_batch, heads, kv_heads, model.head_dim,
                 model.value_dim, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip


def index_sizes(model: Model, run: Settings) -> Sizes:
    """Return the sizes of one rank's index queries and index keys in sparse attention.

    Every tensor-parallel rank computes the scores of all index heads, so these are not split.
    """
    assert model.indexer is not None
    return Sizes(run.seq // run.cp, run.micro_batch, model.indexer.heads, 1, model.indexer.width, 0,
                 2, 4, BYTES[run.wire], (False, False, False))  # fmt: skip


def topology_of(cluster: Cluster, run: Settings) -> Topology:
    """Return the topology of the context-parallel ranks.

    Args:
        cluster: Cluster of GPUs.
        run: Settings of the run.

    Raises:
        ValueError: The context-parallel size is not a multiple of the ranks per node, or of the
            number of ranks that share heads.
    """
    return Topology(run.cp, cluster.cp_per_node(run.tp, run.cp), run.ulysses, run.placement)


def ring_of(model: Model, cluster: Cluster, run: Settings, window: int = 0) -> RingKey:
    """Return the cache key of the schedules of a run's rings.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run.
        window: Tokens that a query attends to (sliding window); 0 for full causal attention.

    Raises:
        ValueError: The size of a ring is not a multiple of the size of its inner rings.
    """
    topology, sizes = topology_of(cluster, run), sizes_of(model, run).shared(run.ulysses)
    inner = min(run.inner or topology.intra_size, topology.ring_size)
    if inner < 1 or topology.ring_size % inner:
        raise ValueError(
            f"inner {run.inner} does not divide the {topology.ring_size} ranks of a ring; use a "
            f"divisor of {topology.ring_size}"
        )
    side = side_by_bytes(run, sizes) if model.indexer is None else "kv"
    least = gcd(sizes.heads, sizes.kv_heads)
    sizes = replace(sizes, batch=1, heads=sizes.heads // least, kv_heads=sizes.kv_heads // least)
    return RingKey(ring_algorithm(run.algorithm), side, run.route, run.layout, topology, inner,
                run.seq, cluster.nodes(run.tp), run.sequence_chunks, sizes, window,
                model.indexer.top_k if model.indexer else 0,
                joins(model.indexer is not None), run.keys_on_host, run.relay_stream)  # fmt: skip


def ring_passes(ring: RingKey) -> RingPasses:
    """Return the schedules and visible pairs of a ring."""
    topology, layout = ring.topology, make(ring.layout, cp_size=ring.topology.size)
    mask = Window(ring.window - 1, 0) if ring.window else Causal()
    queries = spans = ring_spans(layout, topology, ring.seq)
    if ring.chunks > 1:
        *_, (_, queries, _) = row_chunk_spans(layout, topology, ring.seq, ring.chunks)
    grid = Grid(topology.ring_size // ring.inner, ring.inner)
    want = visibility_of(mask, queries, spans, ring.joined, ring.streams)
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
    """Return the rates with infinitely fast links."""
    return replace(rates, intra=math.inf, inter=math.inf, nic=None, latency=0.0)


RingsOf = Callable[[RingKey], RingPasses]  # called as `ring_passes`


def cached_ring_passes() -> RingsOf:
    """Return the function `ring_passes` with a cache.

    The cache keeps the results of `CACHED_RINGS` rings. Rings of more than `LARGEST` ranks are not
    cached.
    """
    cached = lru_cache(CACHED_RINGS)(ring_passes)
    return lambda ring: ring_passes(ring) if ring.topology.ring_size > LARGEST else cached(ring)


@dataclass(frozen=True)
class AttentionTime:
    """Predicted time of one attention call: one layer, all sequences of a micro-batch, on one rank.

    Attributes:
        forward: Seconds of forward, including the all-to-all of ranks that share heads.
        backward: Seconds of backward, including the all-to-all.
        exchange: Seconds of the all-to-all in forward and in backward.
        busy: Resource -> seconds for which the busiest rank uses it, in forward and backward
            together. Resources are the device ("compute"), links within a node ("intra") and links
            between nodes ("inter").
        host: CPU seconds spent launching kernels, in forward and in backward. They overlap with
            device time.
        planning: CPU seconds before the first layer of each micro-batch, if every micro-batch needs
            a new plan; otherwise 0.
        kernel: Attention kernel whose published rate is assumed; None if the rate was measured or
            stated. Only `simulate` sets it.
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
        """Return the time of an attention call from the times of its forward and backward.

        Args:
            forward: Time of forward, including the all-to-all.
            backward: Time of backward, including the all-to-all.
            exchange: Time of the all-to-all in forward and in backward.
            planning: CPU seconds of planning.
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
        """Seconds of forward and backward; each takes at least the CPU seconds of its launches."""
        return sum(map(max, (self.forward, self.backward), self.host))

    @property
    def bottleneck(self) -> str:
        """Resource that is busy for the longest time: "compute", "intra" or "inter".

        "host" if forward or backward waits for kernel launches.
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
    kind: str = "",
) -> AttentionTime:
    """Return the time of one causal attention call.

    Forward of sparse or hybrid attention includes the selection of keys, but not the indexer's
    loss.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run.
        rings: `ring_passes`, or a cached version of it.
        window: Tokens that a query attends to (sliding window); 0 for full causal attention.
        kind: Kind of the layer, if the model has hybrid attention.

    Raises:
        ValueError: The ranks cannot form these rings with this number of ranks per node, or `kind`
            is missing.
    """
    if model.hybrid is not None:
        if kind not in HYBRID:
            raise ValueError(
                "part='attention' predicts one kind of attention layer, but "
                f"{model.name} has several kinds; use part='layer' or part='step'"
            )
        idle = simulator.IDLE, simulator.IDLE
        passes = hybrid_passes(model, cluster, run, topology_of(cluster, run), kind)
        return AttentionTime.of(*passes, idle)
    rates, topology = cluster.rank_rates(), topology_of(cluster, run)
    sizes, chunks = sizes_of(model, run).shared(run.ulysses), run.sequence_chunks
    ring = ring_of(model, cluster, run, window)
    passes = rings(ring)
    latent = model.indexer is not None
    if latent:  # the time of a call is proportional to the number of queries
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
    """Return the time in which sparse attention scores keys; `IDLE` if attention is dense."""
    if model.indexer is None:
        return simulator.IDLE
    assert rates.compute is not None
    sizes = index_sizes(model, run)
    passes = rings(ring._replace(attended=0, sizes=replace(sizes, batch=1)))
    flops = 2.0 * model.indexer.heads * sizes.width * sizes.batch
    scores = passes.pairs * (flops / rates.compute)
    return simulator.pass_time(passes.forward, sizes, scores, rates)
