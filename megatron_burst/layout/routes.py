# SPDX-License-Identifier: Apache-2.0
"""Routes: which rows of every shard go to which rank, and where they land.

Two things need rows of others: a piece that looks back a few positions (`preceding`), and work that
wants another layout than the rows have (`relayout`). Decides the order in which rows travel between
two ranks, so that sender and receiver agree without a word. Works on runs, not on positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .layouts import (
    Layout,
    Pieces,
    Span,
    Spans,
    counted,
    document_bounds,
    integer,
    pieces_of,
)
from .pieces import Chains


class Route(NamedTuple):
    """One rank's part of an exchange of rows.

    sends: per rank, int64: the rows of this rank's shard that go there, its own rank included, and
    a row as often as it is wanted. receives: per rank, int64: which rows of the result come from
    it, in the order in which it sends them. rows: of the result; those that nobody sends are zero.
    """

    sends: tuple[np.ndarray, ...]
    receives: tuple[np.ndarray, ...]
    rows: int

    def leaving(self, rank: int, per_node: int) -> tuple[int, int]:
        """How many rows `rank`, whose route this is, sends to others of its node, and to other
        nodes, with `per_node` consecutive ranks on each.
        """
        counts = np.array([len(rows) for rows in self.sends])
        counts[rank] = 0
        within = np.arange(len(counts)) // per_node == rank // per_node
        return int(counts[within].sum()), int(counts[~within].sum())


def preceding(chains: Chains, width: int, rank: int) -> Route:
    """The `width` - 1 rows before each piece of `rank`, from the ranks that hold them.

    The result has width - 1 rows for each piece in the order of the rank's rows, the nearest ones
    last; rows before the document's first are zero. chains: as of `chains`. width: of the window
    that ends at a row, 1 or more. Raises ValueError for an invalid width or rank.
    """
    return preceding_and_most(chains, width, rank)[0]


def preceding_and_most(chains: Chains, width: int, rank: int) -> tuple[Route, int]:
    """`preceding`, and the rows of the longest message between any two ranks."""
    moves = _preceding(chains, width)
    _check_rank(rank, chains.ranks)
    pairs = (moves.source * chains.ranks + moves.destination)[moves.source != moves.destination]
    most = int(np.unique(pairs, return_counts=True)[1].max(initial=0))
    rows = (width - 1) * int((chains.rank == rank).sum())
    return moves.route(rank, chains.ranks, rows), most


def _preceding(chains: Chains, width: int) -> _RowMoves:
    """The moves of all ranks."""
    count = integer("width", width) - 1
    if count < 0:
        raise ValueError(f"width must be at least 1, got {width}")
    owner, first, length = chains.table[:, :3].T
    before, piece = chains.before, np.arange(len(chains))
    found, offset = piece, np.zeros_like(piece)  # the row that was reached from each piece
    moves = []
    for column in reversed(range(count)):
        begun = offset > 0
        found = np.where(begun, found, before[found])
        piece, begun, offset, found = (x[found >= 0] for x in (piece, begun, offset, found))
        offset = np.where(begun, offset, length[found]) - 1
        landing = chains.order[piece] * count + column
        moves.append((owner[found], first[found] + offset, owner[piece], landing))
    empty = np.zeros((4, 0), dtype=np.int64)
    return _RowMoves(*np.concatenate([empty, *(np.stack(each) for each in moves)], axis=1))


class Lineage(NamedTuple):
    """What one rank needs to follow a tree of pieces to its own.

    pieces: int64, those of the rank and all that they continue, in order. route: brings what
    belongs to each piece, one row for each of `pieces`; rows are sent in the order of a rank's
    pieces. parents: int64, of each of `pieces` the index in it of the one that it continues, -1 for
    none; own: those of the rank, in the order of its rows. longest: rows of the longest message
    between any two ranks.
    """

    pieces: np.ndarray
    route: Route
    parents: np.ndarray
    own: np.ndarray
    longest: int


def lineage(chains: Chains, rank: int) -> Lineage:
    """The pieces that `rank` needs to know: its own, and those before them on their paths.

    chains: as of `chains`. Raises ValueError for an invalid rank.
    """
    _check_rank(rank, chains.ranks)
    before, every = chains.before, np.arange(len(chains))
    needs = chains.rank[:, None] == np.arange(chains.ranks)
    for piece in reversed(every.tolist()):  # a piece comes after those that it continues
        if before[piece] >= 0:
            needs[before[piece]] |= needs[piece]
    piece, to = np.nonzero(needs)
    landing = (np.cumsum(needs, axis=0) - 1)[piece, to]
    source = chains.rank[piece]
    pairs = np.bincount((source * chains.ranks + to)[source != to], minlength=1)
    mine = needs[:, rank]
    pieces, place = every[mine], np.cumsum(mine) - 1
    return Lineage(
        pieces,
        _RowMoves(source, chains.order[piece], to, landing).route(rank, chains.ranks, len(pieces)),
        np.where(before[pieces] < 0, -1, place[before[pieces]]),
        place[chains.of(rank)],
        int(pairs.max()),
    )


def relayout(source: Layout, target: Layout, seq_len: int, rank: int) -> Route:
    """How `rank` gets its shard under `target` when all ranks hold theirs under `source`.

    seq_len: positions of the sequence. Raises ValueError for what is no layout, for layouts over
    different numbers of ranks, a length that one of them cannot split, and an invalid rank.
    """
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise ValueError(f"{name}: give a layout that mb.layout.make made, got {layout!r}")
    if source.cp_size != target.cp_size:
        raise ValueError(
            f"target: has {target.cp_size} ranks, and source {source.cp_size}; give two layouts "
            "over the same ranks"
        )
    _check_rank(rank, source.cp_size)
    before, after = _runs(source, seq_len), _runs(target, seq_len)
    strides = set(before.span.stride) != set(after.span.stride)
    if _strided(before) and _strided(after) and strides:
        before = _one_by_one(before)
    own = _of(after, rank)
    sends, receives = _meet(_of(before, rank), after), _meet(before, own)
    return Route(
        _grouped(sends.other_rank, sends.mine, source.cp_size),
        _grouped(receives.rank, receives.others, source.cp_size),
        int(own.span.length.sum()),
    )


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= integer("rank", rank) < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")


class _RowMoves(NamedTuple):
    """Row `row` of `source` lands in row `landing` of `destination`: int64 [moves] each."""

    source: np.ndarray
    row: np.ndarray
    destination: np.ndarray
    landing: np.ndarray

    def route(self, rank: int, ranks: int, rows: int) -> Route:
        """The moves of one rank; between two ranks they go in the order of landing."""
        out, into = self.source == rank, self.destination == rank
        sends = _split(self.destination[out], self.landing[out], self.row[out], ranks)
        return Route(
            sends, _split(self.source[into], self.landing[into], self.landing[into], ranks), rows
        )


def _split(
    group: np.ndarray, key: np.ndarray, rows: np.ndarray, groups: int
) -> tuple[np.ndarray, ...]:
    """`rows` of each group, sorted by `key`."""
    order = np.lexsort((key, group))
    cuts = np.searchsorted(group[order], np.arange(1, groups))
    return tuple(np.split(rows[order], cuts))


def _runs(layout: Layout, seq_len: int) -> Pieces:
    """The runs of a layout, sorted by their first position."""
    runs = pieces_of([layout.spans(rank, seq_len) for rank in range(layout.cp_size)])
    start, stride, length = runs.span
    runs = runs._replace(span=Spans(start, np.where(length > 1, stride, 1), length))
    return runs.at(np.argsort(start, kind="stable"))


def _strided(runs: Pieces) -> bool:
    return bool((runs.span.stride > 1).any())


def _of(runs: Pieces, rank: int) -> Pieces:
    return runs.at(np.flatnonzero(runs.owner == rank))


def _one_by_one(runs: Pieces) -> Pieces:
    """The same rows, each a run."""
    of = np.repeat(np.arange(len(runs.owner)), runs.span.length)
    owner, first, (start, stride, _) = runs.at(of)
    nth, one = counted(0, runs.span.length), np.ones_like(of)
    return Pieces(owner, first + nth, Spans(start + nth * stride, one, one))


class _RunOverlaps(NamedTuple):
    """Where runs of two layouts meet: `mine` rows on one side and `others` on the other, as (first,
    step, count), int64 [meetings, 3]; by runs of the one side, then of the other.
    """

    rank: np.ndarray
    other_rank: np.ndarray
    mine: np.ndarray
    others: np.ndarray


def _meet(mine: Pieces, others: Pieces) -> _RunOverlaps:
    """The positions that runs of both sides have. Strides above 1 must be the same on both."""
    i, j = _pairs(mine, others)
    a, b = mine.span.at(i), others.span.at(j)
    stride = np.maximum(a.stride, b.stride)
    anchor = np.where(a.stride >= b.stride, a.start, b.start)
    low, high = np.maximum(a.start, b.start), np.minimum(a.last, b.last)
    low = low + (anchor - low) % stride  # the first position on the steps of the strided one
    count = (high - low) // stride + 1
    apart = (a.stride == b.stride) & ((a.start - b.start) % stride != 0)
    some = np.flatnonzero((count > 0) & ~apart)
    low, stride, count = low[some], stride[some], count[some]
    sides = mine.at(i[some]), others.at(j[some])
    rows = (
        np.stack([x.first + (low - x.span.start) // x.span.stride, stride // x.span.stride, count])
        for x in sides
    )
    return _RunOverlaps(*(x.owner for x in sides), *(each.T for each in rows))


def _pairs(mine: Pieces, others: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Which runs may meet: where neither side is strided those that do, else all."""
    if _strided(mine) or _strided(others):
        i, j = np.indices((len(mine.owner), len(others.owner))).reshape(2, -1)
        return i, j
    # Sorted by position, and no two of one layout overlap.
    low = np.searchsorted(others.span.last, mine.span.start)
    count = np.searchsorted(others.span.start, mine.span.last, side="right") - low
    count = np.maximum(count, 0)
    return np.repeat(np.arange(len(count)), count), counted(low, count)


def _grouped(rank: np.ndarray, rows: np.ndarray, ranks: int) -> tuple[np.ndarray, ...]:
    """Per rank the rows of its meetings, in their order."""
    order = np.argsort(rank, kind="stable")
    first, step, count = rows[order].T
    flat = np.repeat(first, count) + np.repeat(step, count) * counted(0, count)
    ends = np.cumsum(np.bincount(rank[order], weights=count, minlength=ranks).astype(np.int64))
    return tuple(np.split(flat, ends[:-1]))


def successors(
    layout: Layout, cu_seqlens: Sequence[int] | np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of a shard find the token after theirs: (sent, taken), int64 [n] and [s].

    Every rank sends its rows `sent`, n on each rank (the last is repeated to fill up). `taken`
    counts through the s rows that `rank` holds under `layout`, then the cp_size * n rows sent, rank
    by rank, then one row of zeros, which the last token of a document takes. cu_seqlens: cumulative
    lengths of the documents; [0, length] for one sequence. Raises ValueError for lengths that are
    none or that the layout cannot split, and for an invalid rank.
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
    row = counted(np.cumsum(length) - length, count)
    return row, np.repeat(start, count) + np.repeat(stride, count) * counted(0, count)
