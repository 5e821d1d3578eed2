"""The schedules of a run's rings: made of the run, and remembered.

Decides what tells one ring from another, so that a search or a fit makes each schedule once.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import NamedTuple

import numpy as np

from ...autotune.candidates import shared_sizes
from ...autotune.exchanges import Wires
from ...autotune.pair_counts import pairs_seen
from ...autotune.places import Nodes, places
from ...autotune.prepared import Prepared
from ...layout import make
from ...masks import Causal
from ...options import ring_algorithm
from ...schedule.cost import backward_schedule, forward_schedule, ring_spans
from ...schedule.demand import wanted
from ...schedule.row_cut import row_cuts
from ...schedule.sizes import Sizes
from ...schedule.tables import Grid
from ...schedule.topology import Topology
from ..clusters import Cluster
from ..settings import BYTES, Settings
from ..shapes.models import Model

KEPT = 128  # rings whose schedules are remembered
LARGEST = 256  # ranks of a ring whose schedules are: of a larger one they take too much memory


class Ring(NamedTuple):
    """What decides the schedules of a run's rings, and where their ranks are.

    inner: ranks of an inner ring; chunks: of rows; sizes: of a rank, with the fewest heads in the
    same proportion, as other numbers of heads have the same schedules.
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


class Passes(NamedTuple):
    """Visible pairs [G, G] of the queries of each rank and the keys of each, and the schedules.

    Of row chunks, which all have equally many pairs, the schedules are those of the last one.
    """

    pairs: np.ndarray
    forward: Prepared
    backward: Prepared


class Rings:
    """The schedules of the last rings that were asked for."""

    def __init__(self) -> None:
        self._made: dict[Ring, Passes] = {}

    def of(self, ring: Ring) -> Passes:
        """Those of one ring, made when it is first asked for."""
        if ring.topology.ring_size > LARGEST:
            return made(ring)
        found = self._made.pop(ring) if ring in self._made else made(ring)
        if len(self._made) >= KEPT:
            del self._made[next(iter(self._made))]
        self._made[ring] = found
        return found


def sizes_of(model: Model, run: Settings) -> Sizes:
    """What one rank brings to a call."""
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    return Sizes(run.seq // run.cp, run.micro_batch, heads, kv_heads, model.head_dim,
                 model.value_dim, 2, 4, BYTES[run.wire], (True, True, True))  # fmt: skip


def nodes_of(cluster: Cluster, run: Settings) -> Nodes:
    """What the ranks of a run share on each node."""
    return Nodes(cluster.ranks_per_node, min(cluster.nics, cluster.ranks_per_node), run.tp)


def topology_of(cluster: Cluster, run: Settings) -> Topology:
    """Of the context-parallel ranks. ValueError where nodes or groups do not divide them."""
    return Topology(run.cp, cluster.cp_per_node(run.tp, run.cp), run.ulysses, run.placement)


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
        keys = run.sequence_chunks * (back.kv + back.dkv)  # they go round once for each chunk
        side = "kv" if keys <= back.query + back.dquery else "query"
    least = gcd(sizes.heads, sizes.kv_heads)
    sizes = replace(sizes, batch=1, heads=sizes.heads // least, kv_heads=sizes.kv_heads // least)
    return Ring(ring_algorithm(run.algorithm), side, run.route, run.layout, topology, inner,
                run.seq, nodes_of(cluster, run), run.sequence_chunks, sizes)  # fmt: skip


def made(ring: Ring) -> Passes:
    """The schedules of a ring, anew."""
    topology, mask, layout = ring.topology, Causal(), make(ring.layout, cp_size=ring.topology.size)
    queries = spans = ring_spans(layout, topology, ring.seq)
    if ring.chunks > 1:
        *_, (_, queries) = row_cuts(layout, topology, ring.seq, ring.chunks)
    grid = Grid(topology.ring_size // ring.inner, ring.inner)
    want = wanted(mask, queries, spans)
    wires = Wires(places=places(topology, ring.nodes))
    name, sizes, route = ring.algorithm, ring.sizes, ring.route
    forward = forward_schedule(name, grid, want, sizes, route=route)
    backward = backward_schedule(name, grid, want, sizes, side=ring.side, route=route)
    return Passes(pairs_seen(mask, spans), Prepared(forward, wires), Prepared(backward, wires))
