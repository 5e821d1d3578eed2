# SPDX-License-Identifier: Apache-2.0
"""TokenRing: what travels goes one way round, and what is computed with it goes back the other way.

Source: TokenRing (arXiv 2412.20501). Keys stay. Queries go from neighbour to neighbour round one
ring; the partial output of a step goes with its lse straight back to the owner of the queries, as
many ranks the other way as these had come, while the next step is computed; the owner merges it by
online softmax. It is meant for ranks that are all directly connected, where what travels in
opposite directions does not share a link. Its published code has no backward; here backward does
the same: the side that travels goes on to the next rank, and its gradients straight back. Other
than there, a row moves on only while a rank further along has something to do with it, and the way
round is the one that sends fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace

from ..demand import Demand
from ..tables import Tables, transfers
from .two_way import OneWay


def tables(demand: Demand) -> Tables:
    """One ring over all ranks, whatever the links between them."""
    family = "out"
    if demand.row_bytes.out > 0:
        demand = replace(demand, side="query")
    else:
        family = "d" + demand.side
    bundles = demand.travelling
    ring = min(
        (OneWay(demand, bundles, way) for way in (1, -1)),
        key=lambda ring: (ring.moves(demand.side).sum(axis=1) * bundles.rows).sum(),
    )
    parts = [ring.hops(demand.side)]
    rank, step, owner, rows = met = ring.entries(ring.wanted)
    if getattr(demand.row_bytes, family):
        # Complete after the step, so it travels beside the next one; straight to the owner, the
        # other way than the ring goes, so that the two do not share a link.
        parts += [transfers(family, "flat", owner, rows, rank, owner, step + 1, step + 2)]
    return demand.as_tables(ring.size, demand.pairs(*met), parts)
