"""How long the core attention of one layer takes, forward and backward, on a run's ranks.

From the schedules that the run would execute, timed by `autotune.simulator`, with the links of the
cluster: who shares a NIC follows from where ranks are. Decides nothing: `Settings` say which
algorithm, side and groups there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from ..autotune import simulator
from ..autotune.candidates import shared_sizes, sharing
from ..autotune.exchanges import Wires
from ..autotune.pair_counts import pairs_seen
from ..autotune.places import places
from ..autotune.prepared import Prepared
from ..layout import make
from ..masks import Causal
from ..options import ring_algorithm
from ..schedule.cost import backward_schedule, forward_schedule, ring_spans
from ..schedule.demand import wanted
from ..schedule.sizes import Sizes
from ..schedule.tables import Grid
from ..schedule.topology import Topology
from .clusters import Cluster
from .disturbed import UNDISTURBED, Disturbed, Group, draws
from .faults import Faults
from .models import Model
from .settings import BYTES, Settings

KEPT = 128  # rings whose schedules are kept
LARGEST = 256  # ranks of a ring whose schedules are kept: larger ones take memory


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of one attention call: all sequences of a micro-batch, one layer, one rank.

    forward, backward: with the all-to-all of ranks that share heads; exchange: that part of each.
    busy: for how long of both the busiest rank's device ("compute") and links ("intra", "inter")
    are in use. spread: standard deviation of the seconds over the draws of jitter.
    """

    forward: float
    backward: float
    exchange: tuple[float, float]
    busy: Mapping[str, float]
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """Of one forward and one backward."""
        return self.forward + self.backward

    @property
    def bottleneck(self) -> str:
        """What is busy for the longest time: "compute", "intra" or "inter"."""
        return max(self.busy, key=lambda name: self.busy[name])


class Ring(NamedTuple):
    """What decides the schedules of a run's rings, and where their ranks are.

    inner: ranks of an inner ring; per_node, nics: GPUs and NICs of a node; sizes: of a rank, with
    the fewest heads in the same proportion, as other numbers of heads have the same schedules.
    """

    algorithm: str
    side: str
    route: str
    layout: str
    topology: Topology
    inner: int
    seq: int
    tp: int
    per_node: int
    nics: int
    sizes: Sizes


class Passes(NamedTuple):
    """Visible pairs [G, G] of the queries of each rank and the keys of each, and the schedules."""

    pairs: np.ndarray
    forward: Prepared
    backward: Prepared


def attention_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    faults: Faults | None = None,
    group: Group | None = None,
) -> AttentionTime:
    """The time of one attention call of a run, with causal sequences.

    faults: what is slower; then of the slowest of all rings, or of those of one group.

    Raises ValueError for groups that the ranks of a node do not allow.
    """
    rates = cluster.rank_rates()
    sizes = shared_sizes(sizes_of(model, run), run.ulysses)
    passes = passes_of(ring_of(model, cluster, run))
    assert rates.compute is not None
    flops = 2.0 * sizes.heads * sizes.batch * (sizes.width + sizes.value_width)
    seconds = passes.pairs * (flops / rates.compute)
    both_passes = ((passes.forward, 1.0), (passes.backward, rates.backward))
    topology = topology_of(cluster, run)
    exchange = sharing(topology, sizes, rates, per_nic=1 / cluster.nic_share)

    def timed(ring: Disturbed) -> AttentionTime:
        there, back = (
            simulator.pass_time(each, sizes, scale * seconds, rates, run.head_chunks, disturbed=how)
            for (each, scale), how in zip(both_passes, ring.passes, strict=True)
        )
        shared = [f * each.seconds for f, each in zip(ring.exchange, exchange, strict=True)]
        both = there + back + exchange[0] + exchange[1]
        busy = {"compute": both.compute, "intra": both.intra, "inter": both.inter}
        return AttentionTime(
            there.seconds + shared[0], back.seconds + shared[1], (shared[0], shared[1]), busy
        )

    if faults is None:
        return timed(UNDISTURBED)
    found = draws(faults, cluster, run, topology, group)
    return _mean([[timed(ring) for ring in rings] for rings in found])


def _mean(drawn: Sequence[Sequence[AttentionTime]]) -> AttentionTime:
    """Over draws, each of several rings: of forward and of backward the slowest counts, as ranks
    wait for one another after either."""
    forward = np.array([max(ring.forward for ring in rings) for rings in drawn])
    backward = np.array([max(ring.backward for ring in rings) for rings in drawn])
    slowest = max(drawn[0], key=lambda ring: ring.seconds)
    return replace(
        slowest,
        forward=float(forward.mean()),
        backward=float(backward.mean()),
        spread=float((forward + backward).std()),
    )


def sizes_of(model: Model, run: Settings) -> Sizes:
    """What one rank brings to a call."""
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    width, rows = model.head_dim, run.seq // run.cp
    return Sizes(rows, run.micro_batch, heads, kv_heads, width, width, 2, 4, BYTES[run.wire],
                 (True, True, True))  # fmt: skip


def cp_per_node(cluster: Cluster, run: Settings) -> int:
    """Ranks of one context-parallel group on each node; tensor-parallel ranks are neighbours."""
    return min(run.cp, max(1, cluster.ranks_per_node // run.tp))


def topology_of(cluster: Cluster, run: Settings) -> Topology:
    """Of the context-parallel ranks. ValueError where nodes or groups do not divide them."""
    return Topology(run.cp, cp_per_node(cluster, run), run.ulysses, run.placement)


def ring_of(model: Model, cluster: Cluster, run: Settings) -> Ring:
    """The ring of a run. ValueError where inner rings do not divide it."""
    topology, sizes = topology_of(cluster, run), shared_sizes(sizes_of(model, run), run.ulysses)
    inner = min(run.inner or topology.intra_size, topology.ring_size)
    if inner < 1 or topology.ring_size % inner:
        raise ValueError(
            f"inner: rings of {topology.ring_size} ranks cannot be cut into inner rings of "
            f"{run.inner}: take a divisor of {topology.ring_size}"
        )
    side = run.side
    if side == "auto":
        back = sizes.backward
        side = "kv" if back.kv + back.dkv <= back.query + back.dquery else "query"
    per_node, nics = cluster.ranks_per_node, min(cluster.nics, cluster.ranks_per_node)
    least = gcd(sizes.heads, sizes.kv_heads)
    sizes = replace(sizes, batch=1, heads=sizes.heads // least, kv_heads=sizes.kv_heads // least)
    return Ring(ring_algorithm(run.algorithm), side, run.route, run.layout, topology, inner,
                run.seq, run.tp, per_node, nics, sizes)  # fmt: skip


def passes_of(ring: Ring) -> Passes:
    """The schedules of a ring; those of the last ones are kept."""
    return _kept(ring) if ring.topology.ring_size <= LARGEST else _made(ring)


@lru_cache(KEPT)
def _kept(ring: Ring) -> Passes:
    return _made(ring)


def _made(ring: Ring) -> Passes:
    topology, mask = ring.topology, Causal()
    spans = ring_spans(make(ring.layout, cp_size=topology.size), topology, ring.seq)
    grid, want = Grid(topology.ring_size // ring.inner, ring.inner), wanted(mask, spans, spans)
    wires = Wires(places=places(topology, ring.per_node, ring.nics, ring.tp))
    name, sizes, route = ring.algorithm, ring.sizes, ring.route
    forward = forward_schedule(name, grid, want, sizes, route=route)
    backward = backward_schedule(name, grid, want, sizes, side=ring.side, route=route)
    return Passes(pairs_seen(mask, spans), Prepared(forward, wires), Prepared(backward, wires))
