# SPDX-License-Identifier: Apache-2.0
"""Imbalance of a layout: work of the busiest rank of each step, divided by the mean over ranks."""

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
    """Return the imbalance of a layout; 1.0 is ideal.

    It is the work of the busiest rank of each step, summed over steps, divided by the sum of the
    mean work per step. The unit of work is a visible pair. All ranks wait for the busiest rank of a
    step. The result depends on the algorithm, the nodes and the ulysses groups, because they
    determine the pairs that are computed in the same step.

    Args:
        layout: Layout of the sequence.
        mask: Mask of the sequence.
        seq_len: Number of positions.
        topology: Nodes and ulysses groups; None for one ring over all ranks.
        algorithm: Name of the algorithm.

    Raises:
        ValueError: The arguments are inconsistent.
    """
    size = layout.cp_size
    topology = topology or Topology(size, size)
    if topology.size != size:
        raise ValueError(
            f"topology has {topology.size} ranks, but the layout has {size}; use equal numbers"
        )
    mask.check(seq_len)
    spans = cost.ring_spans(layout, topology, seq_len)
    pairs = np.array([[cost.visible_pairs(mask, q, k) for k in spans] for q in spans])
    grid = Grid(topology.inter_size, topology.intra_size)
    # The visible rows determine the direction of rings.
    schedule = rings.forward(algorithm, grid, visibility=visibility_of(mask, spans, spans))
    return imbalance_of(schedule, pairs)


def imbalance_of(schedule: Schedule, pairs: np.ndarray) -> float:
    """Return the imbalance of a schedule, which `imbalance` defines.

    Args:
        schedule: Schedule of a forward pass over G ranks.
        pairs: Number of visible pairs of queries of rank i (rows) and keys of rank j (columns), int
            [G, G].
    """
    size, tables = schedule.grid.size, schedule.tables
    work = np.zeros((tables.steps, size))
    computed = tables.pairs
    pair_work = pairs[computed.query, computed.key] * pair_shares(tables)
    np.add.at(work, (computed.step, computed.rank), pair_work)
    total = float(pairs.sum(dtype=float))  # int64 would overflow above 3e9 positions
    return float(work.max(axis=1).sum()) * size / total if total else 1.0
