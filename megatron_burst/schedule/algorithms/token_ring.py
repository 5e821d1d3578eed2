# SPDX-License-Identifier: Apache-2.0
"""TokenRing: queries are sent along a ring, and results are sent directly back to their owners.

Source: TokenRing (arXiv 2412.20501). Keys stay on their rank. Queries move along one ring. The
partial output of a step is sent with its lse directly back to the owner of the queries, against the
direction of the ring, during the next step. The owner merges it by online softmax. The algorithm is
for ranks that are all directly connected, so that opposite directions do not share a link.

The published code has no backward. Backward in this module works like forward: the tensors of
`demand.side` move to the next rank, and their gradients are sent directly back. This module also
differs from the publication in two ways. A row is forwarded only if a later rank of the ring uses
it. And the ring runs in the direction that sends fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace

from ..demand import Demand
from ..tables import Tables, transfers
from .two_way import OneWay


def tables(demand: Demand) -> Tables:
    """Return the pairs and transfers of algorithm `token_ring`.

    The algorithm uses one ring over all ranks. The ring ignores the nodes of the ranks.
    """
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
    rank, step, owner, rows = met = ring.entries(ring.users)
    if getattr(demand.row_bytes, family):
        # A result is complete after the step, so it travels during the next step. It is sent
        # directly to the owner, against the direction of the ring, so that results and queries do
        # not share a link.
        parts += [transfers(family, "flat", owner, rows, rank, owner, step + 1, step + 2)]
    return demand.as_tables(ring.size, demand.pairs(*met), parts)
