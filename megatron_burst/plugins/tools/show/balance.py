# SPDX-License-Identifier: Apache-2.0
"""How even a layout leaves the ranks: the cost of waiting for the busiest rank at every step."""

from __future__ import annotations

import numpy as np

from ....autotune.prepared import pair_shares
from ....layout import Layout
from ....masks import Mask
from ....schedule import cost, rings
from ....schedule.demand import visibility_of
from ....schedule.rings import Schedule
from ....schedule.tables import Grid
from ....schedule.topology import Topology


def imbalance(
    layout: Layout,
    mask: Mask,
    seq_len: int,
    *,
    topology: Topology | None = None,
    algorithm: str = "ring",
) -> float:
    """The busiest rank's work over the mean, summed over steps: 1.0 is perfect balance.

    Every step waits for its slowest rank. The algorithm, the nodes and the ulysses groups decide
    which pairs are computed at the same step, so all of them matter. topology: default one ring
    over all ranks. Raises ValueError where the arguments do not fit each other.
    """
    size = layout.cp_size
    topology = topology or Topology(size, size)
    if topology.size != size:
        raise ValueError(f"topology has {topology.size} ranks, the layout {size}")
    mask.check(seq_len)
    spans = cost.ring_spans(layout, topology, seq_len)
    pairs = np.array([[cost.visible_pairs(mask, q, k) for k in spans] for q in spans])
    grid = Grid(topology.inter_size, topology.intra_size)
    # What is seen decides which way rings turn.
    schedule = rings.forward(algorithm, grid, visibility=visibility_of(mask, spans, spans))
    return imbalance_of(schedule, pairs)


def imbalance_of(schedule: Schedule, pairs: np.ndarray) -> float:
    """`imbalance` of a given schedule; pairs: int [G, G], visible pairs of shards i and j."""
    size, tables = schedule.grid.size, schedule.tables
    work = np.zeros((tables.steps, size))
    computed = tables.pairs
    each = pairs[computed.query, computed.key] * pair_shares(tables)
    np.add.at(work, (computed.step, computed.rank), each)
    total = float(pairs.sum(dtype=float))  # of S^2 pairs int64 holds those of 3e9 positions
    return float(work.max(axis=1).sum()) * size / total if total else 1.0
