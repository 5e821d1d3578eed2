# SPDX-License-Identifier: Apache-2.0
"""Which trajectory goes to which micro-batch, so that shared prefixes stay together.

Trajectories lie in an order in which those that share a prefix are neighbours
(`mb.trees.neighbours`), and a micro-batch is a run of neighbours: a prefix is computed again only
where a run ends inside it. Of all ways to cut that order into so many runs, the one whose busiest
micro-batch has the least work is found by trying bounds. All in integers: ranks that pack the same
trajectories find the same.
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
    """Runs of trajectories, `found[rank][micro_batch]`, on every rank the same number of them.

    lengths: tokens of each trajectory. shared: how many of them each has in common with the one
    before. work: of the model. capacity: the most distinct tokens of a micro-batch; there are as
    few micro-batches as it allows, one per rank without it. multiple: what divides their number on
    a rank. Runs may be empty. Raises ValueError for a trajectory that does not fit.
    """
    size = np.asarray(lengths, dtype=np.int64)
    common = np.asarray(shared, dtype=np.int64)
    if capacity is not None and len(size) and size.max() > capacity:
        i = int(size.argmax())
        raise ValueError(
            f"max_tokens: a micro-batch of {capacity:,} tokens has no room for the longest "
            f"trajectory, of {size[i]:,}"
        )
    whole = (work.token * size + work.attention(size)).tolist()
    more = [a - b for a, b in zip(whole, work.token * common + work.attention(common), strict=True)]
    rows, fresh = size.tolist(), (size - common).tolist()

    def runs(most: float) -> list[range]:
        """As few as possible with at most so much work each."""
        found, start, load, held = [], 0, 0, 0
        for i in range(len(rows)):
            full = load + more[i] > most or (capacity is not None and held + fresh[i] > capacity)
            if i > start and full:
                found.append(range(start, i))
                start, load, held = i, 0, 0
            load, held = (load + more[i], held + fresh[i]) if i > start else (whole[i], rows[i])
        return [*found, range(start, len(rows))]

    each = -(-len(runs(np.inf)) // (ranks * multiple)) * multiple
    low, high = max(whole, default=0), sum(whole)
    while low < high:
        middle = (low + high) // 2
        if len(runs(middle)) <= ranks * each:
            high = middle
        else:
            low = middle + 1
    found = runs(low)
    found += [range(len(rows), len(rows))] * (ranks * each - len(found))
    return [found[rank::ranks] for rank in range(ranks)]
