# SPDX-License-Identifier: Apache-2.0
"""How long the core attention of one layer takes, forward and backward, on a run's ranks.

The schedules that the run would execute are timed by `autotune.simulator` with the links of the
cluster: which ranks share a NIC follows from where they are. `RingKey` is what tells one ring from
another, so that a search or a fit makes each schedule once. `Settings` say which algorithm, side
and groups there are.
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

KEPT = 128  # rings whose schedules are remembered
LARGEST = 256  # ranks of a ring whose schedules are: of a larger one they take too much memory


class RingKey(NamedTuple):
    """What decides the schedules of a run's rings, and where their ranks are.

    inner: ranks of an inner ring; chunks: of rows; sizes: of a rank, with the fewest heads in the
    same proportion, as other numbers of heads have the same schedules. window: tokens that a query
    sees, 0: all before it; attended: keys that it attends to at most, 0: all that it sees. joined:
    as of `account.rings.joins`. host: keys of other ranks are in host memory between row chunks.
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
    """Visible pairs [G, G] of the queries of each rank and the keys of each, and the schedules.

    Of row chunks, which all have equally many pairs, the schedules are those of the last one; with
    keys in host memory its forward brings the keys for all of them.
    """

    pairs: np.ndarray
    forward: PreparedSchedule
    backward: PreparedSchedule


def sizes_of(model: Model, run: Settings) -> Sizes:
    """What one rank brings to a call: of sparse attention the latents of its rows."""
    if model.indexer is not None and (low := model.latent) is not None:
        return Sizes(run.seq // run.cp, run.micro_batch, model.heads // run.tp, 1, low.rope,
                     low.kv_rank, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    return Sizes(run.seq // run.cp, run.micro_batch, heads, kv_heads, model.head_dim,
                 model.value_dim, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip


def index_sizes(model: Model, run: Settings) -> Sizes:
    """What one rank brings to a selection; every tensor-parallel rank makes it for all heads."""
    assert model.indexer is not None
    return Sizes(run.seq // run.cp, run.micro_batch, model.indexer.heads, 1, model.indexer.width, 0,
                 2, 4, BYTES[run.wire], (False, False, False))  # fmt: skip


def topology_of(cluster: Cluster, run: Settings) -> Topology:
    """Where context-parallel ranks are. ValueError where nodes or groups do not divide them."""
    return Topology(run.cp, cluster.cp_per_node(run.tp, run.cp), run.ulysses, run.placement)


def ring_of(model: Model, cluster: Cluster, run: Settings, window: int = 0) -> RingKey:
    """The ring of a run. ValueError where inner rings do not divide it."""
    topology, sizes = topology_of(cluster, run), sizes_of(model, run).shared(run.ulysses)
    inner = min(run.inner or topology.intra_size, topology.ring_size)
    if inner < 1 or topology.ring_size % inner:
        raise ValueError(
            f"inner: rings of {topology.ring_size} ranks cannot be cut into inner rings of "
            f"{run.inner}: take a divisor of {topology.ring_size}"
        )
    side = side_by_bytes(run, sizes) if model.indexer is None else "kv"
    least = gcd(sizes.heads, sizes.kv_heads)
    sizes = replace(sizes, batch=1, heads=sizes.heads // least, kv_heads=sizes.kv_heads // least)
    return RingKey(ring_algorithm(run.algorithm), side, run.route, run.layout, topology, inner,
                run.seq, cluster.nodes(run.tp), run.sequence_chunks, sizes, window,
                model.indexer.top_k if model.indexer else 0,
                joins(model.indexer is not None), run.keys_on_host)  # fmt: skip


def made(ring: RingKey) -> RingPasses:
    """The schedules of a ring."""
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


RingsOf = Callable[[RingKey], RingPasses]  # called as `made`


def remembered() -> RingsOf:
    """`made` that remembers the schedules of the last rings; of large ones it does not."""
    kept = lru_cache(KEPT)(made)
    return lambda ring: made(ring) if ring.topology.ring_size > LARGEST else kept(ring)


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of one attention call: all sequences of a micro-batch, one layer, one rank.

    forward, backward: with the all-to-all of ranks that share heads; exchange: that part of each.
    busy: for how long of both the busiest rank's device ("compute") and links ("intra", "inter")
    are in use. host: seconds of forward and of backward that launching takes of the processor,
    beside all this; planning: that it takes before the first layer of each micro-batch, where
    every one has its own plan.
    kernel: of attention, whose published rate is assumed; None if the rate was measured or stated,
    and where `simulate` did not set it.
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
        """Return the time of both passes. exchange: the part of each that shares heads."""
        both = forward + backward
        busy = {"compute": both.compute, "intra": both.intra, "inter": both.inter}
        moved = exchange[0].seconds, exchange[1].seconds
        host = forward.host, backward.host
        return cls(forward.seconds, backward.seconds, moved, busy, host, planning)

    @property
    def seconds(self) -> float:
        """Seconds of one forward and one backward, each at least what its launches take."""
        return sum(map(max, (self.forward, self.backward), self.host))

    @property
    def bottleneck(self) -> str:
        """What is busy for the longest time: "compute", "intra" or "inter"; "host" where a pass
        waits for its launches.
        """
        if self.host[0] > self.forward or self.host[1] > self.backward:
            return "host"
        return max(self.busy, key=lambda name: self.busy[name])


def attention_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    rings: RingsOf = made,
    window: int = 0,
) -> AttentionTime:
    """The time of one attention call of a run, with causal sequences; of sparse attention with the
    selection before it, in forward, without the indexer's loss.

    rings: `made`, or one that remembers. window: tokens that a query of the layer sees, 0: all
    before it.

    Raises ValueError for groups that the ranks of a node do not allow.
    """
    rates, topology = cluster.rank_rates(), topology_of(cluster, run)
    sizes, chunks = sizes_of(model, run).shared(run.ulysses), run.sequence_chunks
    ring = ring_of(model, cluster, run, window)
    passes = rings(ring)
    latent = model.indexer is not None
    if latent:  # the time of a call depends on its queries, not on the rows of the chunk
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
