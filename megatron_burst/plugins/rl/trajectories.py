# SPDX-License-Identifier: Apache-2.0
"""Assignment of trajectories to micro-batches that keeps shared prefixes together.

Trajectories are ordered so that those with a shared prefix are neighbours
(`mb.trees.neighbours`). A micro-batch is a range of consecutive trajectories. A prefix is computed
twice only if two micro-batches contain it. A bisection over the maximum work determines the ranges:
for a given number of ranges, the work of the busiest micro-batch is minimal. All values are
integers, so that ranks with the same trajectories compute the same ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...packing.work import Work


def cut_trajectories(
    lengths: Sequence[int],
    shared: Sequence[int],
    work: Work,
    *,
    ranks: int,
    capacity: int | None = None,
    multiple: int = 1,
) -> list[list[range]]:
    """Assign trajectories to the micro-batches of data-parallel ranks.

    Return one list per rank, with the range of trajectories of each micro-batch. A range contains
    indices into `lengths`. Every rank has the same number of micro-batches; some may be empty.

    Args:
        lengths: Number of tokens of each trajectory.
        shared: Length of the prefix that each trajectory shares with the previous one.
        work: Cost function of the model: work of tokens and of attention.
        ranks: Number of data-parallel ranks.
        capacity: Maximum number of distinct tokens in a micro-batch. The number of micro-batches is
            then as small as possible. None for `multiple` micro-batches per rank.
        multiple: The number of micro-batches per rank is a multiple of this number.

    Raises:
        ValueError: A trajectory is longer than `capacity`.
    """
    size = np.asarray(lengths, dtype=np.int64)
    common = np.asarray(shared, dtype=np.int64)
    if capacity is not None and len(size) and size.max() > capacity:
        i = int(size.argmax())
        raise ValueError(
            f"max_tokens {capacity:,} is smaller than the longest trajectory, which has "
            f"{size[i]:,} tokens; increase max_tokens"
        )
    full_work = (work.token * size + work.attention(size)).tolist()
    added_work = [
        a - b for a, b in zip(full_work, work.token * common + work.attention(common), strict=True)
    ]
    rows, fresh = size.tolist(), (size - common).tolist()

    def runs(bound: float) -> list[range]:
        """Return the smallest number of ranges such that each range has at most `bound` work."""
        closed, start, load, used = [], 0, 0, 0
        for i in range(len(rows)):
            full = load + added_work[i] > bound or (
                capacity is not None and used + fresh[i] > capacity
            )
            if i > start and full:
                closed.append(range(start, i))
                start, load, used = i, 0, 0
            load, used = (
                (load + added_work[i], used + fresh[i]) if i > start else (full_work[i], rows[i])
            )
        return [*closed, range(start, len(rows))]

    per_rank = -(-len(runs(np.inf)) // (ranks * multiple)) * multiple
    low, high = max(full_work, default=0), sum(full_work)
    while low < high:
        middle = (low + high) // 2
        if len(runs(middle)) <= ranks * per_rank:
            high = middle
        else:
            low = middle + 1
    cut = runs(low)
    cut += [range(len(rows), len(rows))] * (ranks * per_rank - len(cut))
    return [cut[rank::ranks] for rank in range(ranks)]
