# SPDX-License-Identifier: Apache-2.0
"""Counts the visible pairs of all pairs of shards of a ring at once, for the simulator.

Exact where the mask shows all, nothing or a band, within documents too; elsewhere an estimate from
a sample of positions, because this runs for large grids. `schedule.cost.visible_pairs` counts one
pair of shards exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..layout import Span, Spans
from ..masks import Cover, Mask
from ..masks.seen import meeting

AT_ONCE = 1 << 18  # pairs of spans, so that memory stays small
LONGEST = 1 << 30  # rows of a span that are counted in integers
PIECES = 4096  # of all shards, above which a shard is looked at as a whole
SAMPLES = 48  # rows and columns of a rectangle that are looked at where nothing better is known


def pairs_seen(mask: Mask, shards: Sequence[Sequence[Span]]) -> np.ndarray:
    """Float [G, G]: visible (query, key) pairs of the queries of shard i and the keys of j.

    Only spans that may see each other are looked at: of packed documents those of one document.
    """
    queries, keys, i, j = meeting(mask, shards)
    total = np.zeros(len(shards) ** 2)
    for first in range(0, len(i), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        where = queries.owner[i[some]] * len(shards) + keys.owner[j[some]]
        count = _counted(mask, queries.span.at(i[some]), keys.span.at(j[some]))
        total += np.bincount(where, count, len(total))
    return total.reshape(len(shards), -1)


def pairs_attended(mask: Mask, shards: Sequence[Sequence[Span]], most: int) -> np.ndarray:
    """As `pairs_seen`, where a query attends to at most `most` of the keys that it sees, which are
    taken to lie evenly among them, and the queries of a span to see as many.
    """
    pieces = [(span,) for shard in shards for span in shard]
    owner = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    if len(pieces) > PIECES:
        pieces, owner = list(shards), np.arange(len(shards))
    seen = pairs_seen(mask, pieces)
    rows = np.array([sum(span.length for span in piece) for piece in pieces])
    seen *= np.minimum(1.0, most * rows / np.maximum(seen.sum(axis=1), 1.0))[:, None]
    total = np.zeros((len(shards), len(shards)))
    np.add.at(total, (owner[:, None], owner[None, :]), seen)
    return total


def _counted(mask: Mask, q: Spans, k: Spans) -> np.ndarray:
    """Visible pairs of each two spans."""
    rows, columns = q.length, k.length
    if max(rows.max(initial=0), columns.max(initial=0)) > LONGEST:  # whose products leave int64
        rows, columns = rows.astype(float), columns.astype(float)
    covers, bands = mask.covers(q, k), mask.bands(q, k)
    count = _below(bands.right, rows, columns) - _below(-bands.left - 1, rows, columns)
    count = np.where(bands.known, np.maximum(count, 0), 0).astype(float)
    count = np.where(covers == Cover.FULL, rows * columns, count)
    count = np.where(covers == Cover.EMPTY, 0, count)
    for at in np.flatnonzero((covers == Cover.PARTIAL) & ~bands.known):
        one = (Span(*(int(field[at]) for field in spans)) for spans in (q, k))
        count[at] = _sampled(mask, *one)
    return count


def _below(limit: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """How many (row, column) of each rectangle have column - row <= limit."""
    limit = np.clip(limit, -rows - 1, columns)

    def summed(t: np.ndarray) -> np.ndarray:
        """1 + 2 + ... + t, no summand above `columns`."""
        t = np.maximum(t, 0)
        low = np.minimum(t, columns)
        return low * (low + 1) // 2 + (t - low) * columns

    return summed(limit + rows) - summed(limit)


def _sampled(mask: Mask, q: Span, k: Span) -> float:
    """Visible pairs of a rectangle, by an even sample of its rows and columns."""
    positions = []
    for span in (q, k):
        count = min(SAMPLES, span.length)
        # The middle of `count` equal parts; a fixed step could keep pace with a repeating mask.
        index = (2 * np.arange(count) + 1) * span.length // (2 * count)
        positions.append(span.start + span.stride * index)
    seen = mask.visible(positions[0][:, None], positions[1][None, :])
    return float(np.mean(seen) * q.length * k.length)
