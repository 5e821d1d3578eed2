"""What ranks want of each other, by hand or at random, for tests that count and time schedules."""

import numpy as np

from megatron_burst.schedule import cost
from megatron_burst.schedule.bundles import bundled
from megatron_burst.schedule.demand import Visibility, visibility_of


def whole(visible, rows):
    """Whole chunks of so many rows; visible: bool [G, G], who sees whose keys."""
    return in_bundles(visible, np.array([rows]), np.ones((1, *np.shape(visible)), bool))


def in_bundles(visible, rows, who):
    """Chunks of `rows` [n] in n runs; who: bool [n, G, G], which ranks (by owner and rank) want
    each, of those that see a chunk."""
    visible = np.asarray(visible, dtype=bool)
    size, count = len(visible), len(rows)
    owner = np.repeat(np.arange(size), count)
    first = np.tile(np.cumsum(rows) - rows, size)
    by_owner = who.transpose(1, 0, 2).reshape(-1, size)
    queries, keys = (
        bundled(owner, first, np.tile(rows, size), by_owner & seen[owner])
        for seen in (visible, visible.T)
    )
    return Visibility(visible, queries, keys)


def at_random(random, visible):
    """Three to six runs of one to five rows, of which every rank wants some."""
    rows = random.integers(1, 6, int(random.integers(3, 7)))
    return in_bundles(visible, rows, random.random((len(rows), *np.shape(visible))) < 0.6)


def of(mask, layout, topology, seq_len):
    """What the ranks of a ring want of each other under a mask."""
    spans = cost.ring_spans(layout, topology, seq_len)
    return visibility_of(mask, spans, spans)
