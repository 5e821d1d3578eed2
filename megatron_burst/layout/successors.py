"""Where each row of a shard finds the token after its own, which another rank may hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .layouts import Layout, Span, document_bounds


def successors(
    layout: Layout, cu_seqlens: Sequence[int] | np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of a shard find the token after theirs: (sent, taken), int64 [n] and [s].

    Every rank sends its rows `sent`, n on each rank (the last is repeated to fill up). `taken`
    counts through the s rows that `rank` holds under `layout`, then the cp_size * n rows sent, rank
    by rank, then one row of zeros, which the last token of a document takes. cu_seqlens: cumulative
    lengths of the documents; [0, length] for one sequence. Raises ValueError for lengths that are
    none or that the layout cannot cut, and for a rank that is none.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: give one that mb.layout.make made, got {layout!r}")
    ends = document_bounds(cu_seqlens)[1:]
    total = int(ends[-1])
    positions = layout.positions(rank, total)
    firsts = [_firsts(layout.spans(r, total)) for r in range(layout.cp_size)]
    most = max(len(rows) for rows, _ in firsts)
    rows, _ = firsts[rank]
    sent = np.pad(rows, (0, most - len(rows)), mode="edge")

    taken = np.arange(1, len(positions) + 1)
    elsewhere = np.append(rows[1:], len(positions)) - 1  # the row after these holds another token
    number = np.empty(total + 1, dtype=np.int64)  # of each token that is sent
    for r, (row, position) in enumerate(firsts):
        number[position] = r * most + np.arange(len(row))
    number[total] = 0
    taken[elsewhere] = len(positions) + number[positions[elsewhere] + 1]
    taken[np.isin(positions + 1, ends)] = len(positions) + layout.cp_size * most
    return sent, taken


def _firsts(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """(row, position) of each token of a shard that does not follow the token in the row before.

    Tokens of a span with a stride are such each.
    """
    start, stride, length = np.array(spans, dtype=np.int64).T
    count = np.where(stride == 1, 1, length)
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    row = np.repeat(np.cumsum(length) - length, count) + nth
    return row, np.repeat(start, count) + np.repeat(stride, count) * nth
