# SPDX-License-Identifier: Apache-2.0
"""Counts of the visible pairs between all shards of a ring, for the simulator.

Counts are exact if a query span sees all of a key span, nothing or a band, also within documents.
Other counts are estimated from a sample of positions, because exact counts are too slow for large
grids. `schedule.cost.visible_pairs` counts the pairs of two shards exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..layout import Span, Spans
from ..masks import Cover, Mask
from ..masks.seen import meeting

AT_ONCE = 1 << 18  # pairs of spans that are counted at once, to limit memory
LONGEST = 1 << 30  # longest span whose pairs are counted in integers
PIECES = 4096  # largest number of spans of all shards; above it, a shard is one piece
SAMPLES = 48  # rows and columns of the sample of a rectangle


def pairs_seen(
    mask: Mask, shards: Sequence[Sequence[Span]], keys: Sequence[Sequence[Span]] | None = None
) -> np.ndarray:
    """Return the number of visible pairs of the queries of shard i and the keys of shard j.

    Only spans that may see each other are compared, such as spans of one document.

    Args:
        mask: The mask.
        shards: Query spans of each rank.
        keys: Key spans of each rank. Default: `shards`.

    Returns:
        float [G, G], or [queries, keys] if `keys` has another length.
    """
    if keys is not None and not any(map(len, keys)):
        return np.zeros((len(shards), len(keys)))
    queries, key_pieces, i, j = meeting(mask, shards, shards if keys is None else keys)
    owners = len(shards) if keys is None else len(keys)
    total = np.zeros(len(shards) * owners)
    for first in range(0, len(i), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        cell = queries.owner[i[part]] * owners + key_pieces.owner[j[part]]
        count = _counted(mask, queries.span.at(i[part]), key_pieces.span.at(j[part]))
        total += np.bincount(cell, count, len(total))
    return total.reshape(len(shards), -1)


def pairs_attended(
    mask: Mask,
    shards: Sequence[Sequence[Span]],
    most: int,
    keys: Sequence[Sequence[Span]] | None = None,
) -> np.ndarray:
    """Return the counts of `pairs_seen` if each query attends to at most `most` selected keys.

    The selected keys are assumed to be evenly distributed over the visible keys. All queries of a
    span are assumed to see equally many keys.

    Args:
        mask: The mask.
        shards: Query spans of each rank.
        most: Largest number of selected keys.
        keys: Key spans of each rank. Default: `shards`.
    """
    pieces, owner = _spans_or_shards(shards)
    key_pieces, key_owner = (pieces, owner) if keys is None else _spans_or_shards(keys)
    seen = pairs_seen(mask, pieces, key_pieces)
    rows = np.array([sum(span.length for span in piece) for piece in pieces])
    seen *= np.minimum(1.0, most * rows / np.maximum(seen.sum(axis=1), 1.0))[:, None]
    total = np.zeros((len(shards), len(shards)))
    np.add.at(total, (owner[:, None], key_owner[None, :]), seen)
    return total


def _spans_or_shards(
    shards: Sequence[Sequence[Span]],
) -> tuple[Sequence[Sequence[Span]], np.ndarray]:
    """Return pieces of the shards, and the index of the shard of each piece.

    A piece is one span, or a whole shard if there are more than `PIECES` spans.
    """
    pieces = [(span,) for shard in shards for span in shard]
    if len(pieces) > PIECES:
        return list(shards), np.arange(len(shards))
    return pieces, np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])


def _counted(mask: Mask, q: Spans, k: Spans) -> np.ndarray:
    """Return the number of visible pairs of each pair of spans."""
    rows, columns = q.length, k.length
    if max(rows.max(initial=0), columns.max(initial=0)) > LONGEST:  # products overflow int64
        rows, columns = rows.astype(float), columns.astype(float)
    covers, bands = mask.covers(q, k), mask.bands(q, k)
    count = _below(bands.right, rows, columns) - _below(-bands.left - 1, rows, columns)
    count = np.where(bands.known, np.maximum(count, 0), 0).astype(float)
    count = np.where(covers == Cover.FULL, rows * columns, count)
    count = np.where(covers == Cover.EMPTY, 0, count)
    for at in np.flatnonzero((covers == Cover.PARTIAL) & ~bands.known):
        spans_at = (Span(*(int(field[at]) for field in spans)) for spans in (q, k))
        count[at] = _sampled(mask, *spans_at)
    return count


def _below(limit: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Count the pairs (row, column) of a rectangle with column - row <= limit.

    Args:
        limit: Limit of each rectangle.
        rows: Number of rows of each rectangle.
        columns: Number of columns of each rectangle.

    Returns:
        Number of pairs of each rectangle.
    """
    limit = np.clip(limit, -rows - 1, columns)

    def summed(t: np.ndarray) -> np.ndarray:
        """Return 1 + 2 + ... + t, with each term limited to `columns`."""
        t = np.maximum(t, 0)
        low = np.minimum(t, columns)
        return low * (low + 1) // 2 + (t - low) * columns

    return summed(limit + rows) - summed(limit)


def _sampled(mask: Mask, q: Span, k: Span) -> float:
    """Return an estimate of the visible pairs of two spans, from a sample of their positions."""
    positions = []
    for span in (q, k):
        count = min(SAMPLES, span.length)
        # The middle of `count` equal parts: a fixed step could match the period of a mask.
        index = (2 * np.arange(count) + 1) * span.length // (2 * count)
        positions.append(span.start + span.stride * index)
    seen = mask.visible(positions[0][:, None], positions[1][None, :])
    return float(np.mean(seen) * q.length * k.length)
