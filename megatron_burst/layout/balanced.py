# SPDX-License-Identifier: Apache-2.0
"""Layout `balanced`: packed documents of mixed lengths, with equal tokens and nearly equal work.

This module assigns documents, and shares of documents, to nodes and ranks. Most documents are whole
on one rank.

In *mirror order*, the tokens of a document alternate between its two ends: 0, l - 1, 1, l - 2, ...
In a causal document of length l, the tokens of any run in mirror order see l / 2 keys on average.
So a document has a constant density (visible pairs per token).

The solver fills each rank to the mean density of the pack. Documents are sorted by density. Every
rank gets one run of tokens from the dense end and one from the sparse end of this order. One
equation with one unknown gives the lengths of the two runs, so that ranks have equal work. A
document is cut only where a run ends. Nodes are filled first, then the ranks of each node. Runs are
cut by integer arithmetic, so every process computes the same layout.

With equal work, nearly every boundary between ranks cuts a document, and ranks exchange rows of
this document. If links are slow, an assignment of whole documents with unequal work can be faster.
Such assignments are tried if the caller passes `row_cost`, the cost of sending a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from .layouts import (
    Layout,
    Span,
    document_bounds,
    integer,
    padding_documents,
    tree_mask,
)

Window = tuple[int | None, int | None]  # visible keys before a query, and after it; None for all
CAUSAL: Window = (None, 0)
# Largest relative error of the pairs of a bin (a node or a rank) that is accepted to keep a
# document whole. The second value is for slow links.
SLACK, MORE_SLACK = 1 / 64, 1 / 4
# Work is balanced if the busiest rank has at most this multiple of the mean.
EVEN = 1.05
# Windows can make the ends of a document lighter than its middle. The document is then cut into
# parts of nearly constant density, at these offsets in mirror order, in multiples of the window.
# Later entries are tried only if earlier entries do not balance the work.
PARTS = ((), (2.0,), (1.0, 2.0), (0.5, 1.0, 1.5, 2.0))
# Shares with unequal work are used if their estimated time is below this fraction of the time of
# equal work.
CLEARLY = 0.8
LONGEST = 1 << 28  # longest document whose pairs, summed over many kinds of layers, fit int64


class DocumentShare(NamedTuple):
    """Tokens `first` to `stop` (exclusive) of a document in mirror order.

    In mirror order, tokens alternate between both ends of the document: 0, l - 1, 1, l - 2, ...
    """

    document: int
    first: int
    stop: int


class DocumentCosts:
    """Numbers of visible pairs of documents and of their shares.

    Args:
        lengths: Lengths of the documents.
        windows: Window (left, right) of each kind of layer; None for no limit.
        padding: Indices of documents that are padding, which have no visible pairs.
        bases: If documents are segments of a tree: number of ancestor tokens of each segment, which
            all tokens of the segment see. Default: 0.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        windows: Sequence[Window],
        padding: Sequence[int] = (),
        bases: Sequence[int] | None = None,
    ):
        self.lengths = list(lengths)
        self.windows = tuple(Counter(windows).items())
        self.padding = frozenset(padding)
        sizes = np.array(self.lengths, dtype=np.int64)
        self.bases = [0] * len(sizes) if bases is None else list(bases)
        pairs: Any = sum(
            count * document_pairs(sizes, window, np.array(self.bases, dtype=np.int64))
            for window, count in self.windows
        )
        pairs[list(self.padding)] = 0
        self.whole = pairs.tolist()

    def before(self, document: int, place: int) -> int:
        """Return the number of visible pairs of the first `place` tokens in mirror order.

        The number is summed over all kinds of layers.
        """
        length = self.lengths[document]
        if place >= length:
            return self.whole[document]
        if document in self.padding:
            return 0
        front, back, base = (place + 1) // 2, place // 2, self.bases[document]
        pairs = 0
        for (left, right), count in self.windows:
            if left is None and right == 0:  # same result as `else`, three times as fast
                seen = (front * (front + 1) - back * (back - 1)) // 2 + back * length + place * base
            else:
                left, right = (base + length if reach is None else reach for reach in (left, right))
                seen = place + _reached(base + front, left) - _reached(base, left)
                seen += _reached(back, right)
                seen += _reached(length, right) - _reached(length - front, right)
                seen += _reached(base + length, left) - _reached(base + length - back, left)
            pairs += count * seen
        return pairs

    def of(self, share: DocumentShare) -> int:
        """Return the number of visible pairs of a share, summed over all kinds of layers."""
        return self.before(share.document, share.stop) - self.before(share.document, share.first)


def _reached(n: int, reach: int) -> int:
    """Return min(0, reach) + min(1, reach) + ... + min(n - 1, reach).

    This is the number of earlier tokens that n tokens see if each sees at most `reach`.
    """
    m = min(n, reach + 1)
    return m * (m - 1) // 2 + (n - m) * reach


def document_pairs(
    lengths: Sequence[int] | np.ndarray, window: Window = CAUSAL, bases: np.ndarray | int = 0
) -> np.ndarray:
    """Return the number of visible pairs of each document.

    Args:
        lengths: Lengths of the documents.
        window: Window (left, right) of the layer; None for no limit.
        bases: Number of tokens before each document that all tokens of the document also see.

    Returns:
        int64 [documents]. If a document has more than `LONGEST` tokens, the dtype is object with
        Python integers, which cannot overflow.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if (sizes + bases).max(initial=0) > LONGEST:
        sizes = sizes.astype(object)
    left, right = window
    before = _reached_all(sizes + bases, left) - _reached_all(0 * sizes + bases, left)
    return sizes + before + _reached_all(sizes, right)


def _reached_all(n: np.ndarray, reach: int | None) -> np.ndarray:
    m = n if reach is None else np.minimum(n, reach + 1)
    return m * (m - 1) // 2 + (n - m) * (reach or 0)


def mix(
    shares: Sequence[DocumentShare], bins: int, costs: DocumentCosts, slack: float = SLACK
) -> list[list[DocumentShare]]:
    """Divide shares among `bins` bins with equal tokens and nearly equal visible pairs.

    Args:
        shares: Shares of documents; their total number of tokens is a multiple of `bins`.
        bins: Number of bins (nodes or ranks).
        costs: Visible pairs of documents.
        slack: Largest relative error of a bin's pairs that is accepted to keep a document whole.

    Returns:
        The shares of each bin.
    """
    pool = _Pool(shares, costs, slack)
    room = pool.left // bins
    return [pool.take(room, pool.pairs // (bins - index)) for index in range(bins)]


class _Pool:
    """Shares of documents sorted by density (visible pairs per token).

    Offsets are indices of tokens in this order. The tokens from offset `low` to `high` (exclusive)
    are not assigned yet. `take` removes tokens from both ends of this range.
    """

    def __init__(self, shares: Sequence[DocumentShare], costs: DocumentCosts, slack: float):
        pairs = [costs.of(share) for share in shares]
        sizes = [share.stop - share.first for share in shares]
        density = np.array(pairs, dtype=np.float64) / np.maximum(sizes, 1)
        order = np.lexsort((np.arange(len(sizes)), density)).tolist()
        self.shares = [shares[i] for i in order]
        self.costs, self.slack = costs, slack
        self.starts = [0, *np.cumsum([sizes[i] for i in order]).tolist()]
        self.sums = [0, *accumulate(pairs[i] for i in order)]
        self.low, self.high = 0, self.starts[-1]

    @property
    def left(self) -> int:
        return self.high - self.low

    @property
    def pairs(self) -> int:
        """Number of visible pairs of the tokens that are not assigned yet."""
        return self._before(self.high) - self._before(self.low)

    def take(self, room: int, need: int) -> list[DocumentShare]:
        """Remove tokens from the two ends of the unassigned tokens, and return them.

        Args:
            room: Number of tokens to remove from both ends together.
            need: Number of visible pairs that these tokens have, approximately.
        """
        goal = need - self.pairs

        def excess(dense: int) -> int:
            """Return the visible pairs minus `need` if `dense` tokens are from the dense end."""
            # Pairs of the two runs: all unassigned pairs minus the pairs between the runs.
            return self._before(self.low + room - dense) - self._before(self.high - dense) - goal

        dense = self._whole(room, _root(excess, room), excess, int(need * self.slack))
        low, high = self.low + room - dense, self.high - dense
        taken = [*self._between(self.low, low), *self._between(high, self.high)]
        self.low, self.high = low, high
        return taken

    def _before(self, place: int) -> int:
        """Return the number of visible pairs of all tokens before offset `place`."""
        index = bisect_right(self.starts, place) - 1
        if index == len(self.shares):
            return self.sums[-1]
        document, first, _ = self.shares[index]
        inside = place - self.starts[index]
        if not inside:
            return self.sums[index]
        costs = self.costs
        return (
            self.sums[index]
            + costs.before(document, first + inside)
            - costs.before(document, first)
        )

    def _whole(self, room: int, dense: int, excess: Callable[[int], int], tolerance: int) -> int:
        """Return the number of tokens to remove from the dense end: `dense`, or a number near it.

        A number near `dense` is returned if one of the two cuts is then between documents.

        Args:
            room: Number of tokens to remove from both ends together.
            dense: Number of tokens from the dense end with which work is equal.
            excess: Function from the number of tokens from the dense end to the error in visible
                pairs.
            tolerance: Largest accepted error, in visible pairs.
        """
        for end in (self.high, self.low + room):
            place = bisect_left(self.starts, end - dense)
            counts = [end - start for start in self.starts[max(0, place - 1) : place + 1]]
            off = {count: abs(excess(count)) for count in counts if 0 <= count <= room}
            nearest = min(off, key=off.__getitem__, default=dense)
            if off.get(nearest, math.inf) <= tolerance:
                return nearest
        return dense

    def _between(self, first: int, stop: int) -> list[DocumentShare]:
        """Return the shares of the tokens from offset `first` to `stop`."""
        shares, index = [], bisect_right(self.starts, first) - 1
        while first < stop:
            document, begin, _ = self.shares[index]
            end, start = min(stop, self.starts[index + 1]), self.starts[index]
            if end > first:
                shares.append(DocumentShare(document, begin + first - start, begin + end - start))
            first, index = end, index + 1
        return shares


def _root(excess: Callable[[int], int], top: int) -> int:
    """Return the integer x in 0..top at which the increasing function `excess` is nearest to 0.

    The search uses false position, which is fast for piecewise linear functions, and bisection
    after a slow step.
    """
    low, high, below, above = 0, top, excess(0), excess(top)
    if below >= 0 or above <= 0:
        return low if abs(below) <= abs(above) else high
    halve = False
    while high - low > 1:
        before = high - low
        guess = before // 2 if halve else before * -below // (above - below)
        guess = low + min(max(guess, 1), before - 1)
        value = excess(guess)
        if not value:
            return guess
        if value < 0:
            low, below = guess, value
        else:
            high, above = guess, value
        halve = (high - low) * 2 > before
    return low if -below <= above else high


def keep_whole(costs: DocumentCosts, ranks: int, per_node: int) -> list[list[DocumentShare]]:
    """Return the shares of each rank, with equal tokens, and with whole documents if possible.

    Documents are assigned in descending order of visible pairs. Each document is assigned to the
    rank with the fewest pairs among the ranks with enough free tokens. A document that is longer
    than a rank's shard first fills empty ranks, of one node if possible. Documents that fit on no
    rank are assigned last, in parts, to the ranks with the most free tokens.

    Args:
        costs: Visible pairs of documents.
        ranks: Number of ranks, which divides the total number of tokens.
        per_node: Number of ranks on each node.
    """
    lengths, room = costs.lengths, sum(costs.lengths) // ranks
    free, pairs, node = np.full(ranks, room), np.zeros(ranks), np.arange(ranks) // per_node
    shares: list[list[DocumentShare]] = [[] for _ in range(ranks)]
    late = []

    def give(rank: int, document: int, first: int) -> int:
        """Assign tokens of a document, from `first` on, to a rank; return the end of the share."""
        share = DocumentShare(document, first, min(lengths[document], first + int(free[rank])))
        shares[rank].append(share)
        free[rank] -= share.stop - first
        pairs[rank] += costs.of(share)
        return share.stop

    for document in sorted(range(len(lengths)), key=lambda i: (-costs.whole[i], -lengths[i], i)):
        first, near = 0, -1
        while lengths[document] - first >= room and (empty := free == room).any():
            count = np.bincount(node[empty], minlength=ranks // per_node)
            empty_ranks = min((lengths[document] - first) // room, per_node)
            enough = np.where(count >= empty_ranks, count, ranks + 1)
            near = int(enough.argmin() if enough.min() <= ranks else count.argmax())
            for rank in np.flatnonzero(empty & (node == near))[:empty_ranks].tolist():
                first = give(rank, document, first)
        if first == lengths[document]:
            continue
        fits = free >= lengths[document] - first
        fits = on_node if (on_node := fits & (node == near)).any() else fits
        if fits.any():
            give(int(np.where(fits, pairs, np.inf).argmin()), document, first)
        else:
            late.append((document, first, near))
    for document, first, near in late:
        while first < lengths[document]:
            on_node = free * (node == near)
            rank = int((on_node if on_node.any() else free).argmax())
            first, near = give(rank, document, first), rank // per_node
    return shares


class Balanced(Layout):
    """Layout of packed documents with equal tokens and nearly equal visible pairs on every rank.

    The longest documents are divided among neighbouring ranks, if possible of one node. Each of
    these ranks gets tokens from both ends of the document. Nearly all other documents are whole on
    one rank. Spans are sorted by position.

    Args:
        cp_size: Number of ranks.
        cu_seqlens: Cumulative lengths of the documents. Documents may have any length; the sum must
            be a multiple of `cp_size`.
        per_node: Number of ranks per node. The layout keeps documents within a node if possible.
            Default: the greatest common divisor of `cp_size` and 8.
        windows: Window (left, right) within a document for each kind of layer, as in
            `masks.Window`. The layout balances the sum of the visible pairs over all kinds of
            layers. (None, 0) is causal; with (None, None) a token sees its whole document. Default:
            one causal window, or the window of the tree.
        padding: Indices of documents that are padding and attend to nothing.
        tree: Prefix tree in place of `cu_seqlens` and `padding`: the result of `mb.trees.pack`, or
            a `masks.Tree`. Its segments are laid out like documents. Each token also sees the
            ancestors of its segment. Windows must be (left, 0).
        row_cost: Two costs of receiving a row: from a rank of the same node, and from another node.
            The unit is the number of visible pairs that a rank computes in the same time. With
            `row_cost`, ranks get whole documents and unequal work if this is estimated to be
            faster. Not supported for trees.

    Raises:
        ValueError: An argument is invalid.

    Example:
        >>> layout = mb.layout.make("balanced", cp_size=2, cu_seqlens=[0, 4, 6, 8])
        >>> layout.balance
        1.0
    """

    name = "balanced"

    def __init__(
        self,
        cp_size: int,
        cu_seqlens: Sequence[int] | np.ndarray | None = None,
        *,
        per_node: int | None = None,
        windows: Sequence[Window] | None = None,
        padding: Sequence[int] = (),
        tree: Any = None,
        row_cost: Sequence[float] | None = None,
    ):
        super().__init__(cp_size)
        self.bases: tuple[int, ...] = ()  # bases of a tree's segments
        if tree is not None:
            if cu_seqlens is not None or len(padding):
                raise ValueError(
                    "tree: mutually exclusive with cu_seqlens and padding, which a tree defines; "
                    "remove them"
                )
            mask = tree_mask(tree)
            cu_seqlens, padding = mask.bounds, mask.padding.tolist()
            self.bases = tuple(mask.bases.tolist())
            if windows is None:
                windows = [(mask.window, 0)]
        windows = (CAUSAL,) if windows is None else windows
        bounds = document_bounds([] if cu_seqlens is None else cu_seqlens)
        self.bounds = tuple(bounds.tolist())
        total = self.bounds[-1]
        if not total or total % self.cp_size:
            padded = max(1, -(-total // self.cp_size)) * self.cp_size
            name, remedy = "cu_seqlens", f"pad the pack to {padded}"
            if tree is not None:
                name, remedy = "tree", f"mb.trees.pack(..., multiple={cp_size}) pads it"
            raise ValueError(
                f"{name}: layout balanced on {cp_size} ranks needs a positive multiple of "
                f"{cp_size} tokens, got {total}; {remedy}"
            )
        self.per_node = self._per_node(per_node)
        if not isinstance(windows, Sequence) or not windows:
            raise ValueError(
                f"windows must be a list with (left, right) for each kind of layer, got {windows!r}"
            )
        self.windows = tuple(_window(window) for window in windows)
        self.padding = padding_documents(padding, len(self.bounds) - 1)
        ahead = [window for window in self.windows if window[1] != 0]
        if self.bases and ahead:
            raise ValueError(
                f"windows: a row of a tree does not see later rows, so each window must be "
                f"(left, 0), got {ahead[0]}"
            )
        self.row_cost = None if row_cost is None else _row_cost(row_cost)
        if tree is not None and row_cost is not None:
            raise ValueError(
                "row_cost: mutually exclusive with tree; remove row_cost, or pass cu_seqlens"
            )

    def _per_node(self, per_node: int | None) -> int:
        if per_node is None:
            return math.gcd(self.cp_size, 8)
        size = integer("per_node", per_node)
        if size < 1 or self.cp_size % size:
            raise ValueError(f"per_node must divide the {self.cp_size} ranks, got {per_node}")
        return size

    def __repr__(self) -> str:
        return (
            f"Balanced(cp_size={self.cp_size}, cu_seqlens={list(self.bounds)}, "
            f"per_node={self.per_node}, windows={self.windows}, padding={self.padding}"
            f"{f', bases={list(self.bases)}' if self.bases else ''}"
            f"{f', row_cost={self.row_cost}' if self.row_cost else ''})"
        )

    def describe(self) -> str:
        """Return a text with the name of the layout and its imbalance."""
        why = "" if self._taken[0] else ", to keep documents whole"
        return f"{self.name} (busiest rank {self.balance:.2f} x the mean{why})"

    def check(self, seq_len: int) -> None:
        if seq_len != self.bounds[-1]:
            raise ValueError(
                f"seq_len must be {self.bounds[-1]}, the total length of the documents, got "
                f"{seq_len}"
            )

    @property
    def pairs(self) -> tuple[int, ...]:
        """Number of visible pairs of each rank's queries, summed over `windows`."""
        return self._pairs(self.shares)

    @property
    def balance(self) -> float:
        """Visible pairs of the busiest rank, divided by the mean over ranks; 1 if all are 0."""
        pairs = self.pairs
        return max(pairs) * len(pairs) / (sum(pairs) or 1) or 1.0

    @cached_property
    def _costs(self) -> DocumentCosts:
        return DocumentCosts(
            np.diff(self.bounds).tolist(), self.windows, self.padding, self.bases or None
        )

    @property
    def shares(self) -> tuple[list[DocumentShare], ...]:
        """Shares of documents on each rank."""
        return self._taken[1]

    @cached_property
    def _taken(self) -> tuple[bool, tuple[list[DocumentShare], ...]]:
        """A pair: whether all ranks have equal work, and the shares of documents of each rank."""
        tried = self._evenly()
        even = min(tried, key=lambda shares: max(self._pairs(shares)))
        if self.row_cost is None or self.cp_size == 1:
            return True, even
        # Documents that are cut into parts send more rows than whole documents.
        busy, even = self._least_busy([even] if even is tried[0] else [even, tried[0]])
        limit = CLEARLY * busy
        if max(self._pairs(even)) >= limit:  # computation alone exceeds the limit
            return True, even
        whole_documents = tuple(keep_whole(self._costs, self.cp_size, self.per_node))
        busy, uneven = self._least_busy([self._mixed(MORE_SLACK), whole_documents])
        return (False, uneven) if busy < limit else (True, even)

    def _evenly(self) -> list[tuple[list[DocumentShare], ...]]:
        """Return assignments of document shares to ranks, with equal work.

        Each assignment cuts documents into more parts than the previous one.
        """
        windowed = any(left is not None for left, _ in self.windows)
        limit, tried = EVEN * sum(self._costs.whole), []
        for parts in PARTS if windowed else PARTS[:1]:
            tried.append(self._mixed(SLACK, parts))
            if max(self._pairs(tried[-1])) * self.cp_size <= limit:
                break
        return tried

    def _mixed(self, slack: float, parts: Sequence[float] = ()) -> tuple[list[DocumentShare], ...]:
        costs = self._costs
        windows = {left for left, _ in self.windows if left is not None}
        inner = sorted({int(part * left) // 2 * 2 for part in parts for left in windows} - {0})
        documents = [
            DocumentShare(i, a, b)
            for i, n in enumerate(costs.lengths)
            if n
            for a, b in pairwise([0, *inner[: bisect_left(inner, n)], n])
        ]
        nodes = mix(documents, self.cp_size // self.per_node, costs, slack)
        ranks = [shares for node in nodes for shares in mix(node, self.per_node, costs, slack)]
        return tuple(map(_merged, ranks) if parts else ranks)

    def _least_busy(
        self, candidates: Iterable[tuple[list[DocumentShare], ...]]
    ) -> tuple[float, tuple[list[DocumentShare], ...]]:
        """Return the shortest estimated time (`_busy`), and the candidate with this time.

        Args:
            candidates: Assignments: each has the shares of documents of every rank.
        """
        return min(
            ((self._busy(shares), shares) for shares in candidates), key=lambda entry: entry[0]
        )

    def _busy(self, shares: Sequence[Sequence[DocumentShare]]) -> float:
        """Estimate the time of an assignment of shares to ranks.

        The unit is the time in which a rank computes one visible pair. The estimate is the pairs of
        the busiest rank plus the cost of the rows on the busiest links. Overlap of computation and
        communication is ignored. A row that several ranks of a node need is sent to the node once.
        The links of all ranks of the node share these rows.
        """
        assert self.row_cost is not None
        within, between = self.row_cost
        nodes = [
            _merged(chain.from_iterable(shares[first : first + self.per_node]))
            for first in range(0, self.cp_size, self.per_node)
        ]
        alone, together = (max(map(self._rows, holders)) for holders in (shares, nodes))
        return max(self._pairs(shares)) + max(within * alone, between * together / self.per_node)

    def _pairs(self, shares: Sequence[Sequence[DocumentShare]]) -> tuple[int, ...]:
        """Return the number of visible pairs of each rank if ranks have these shares."""
        return tuple(sum(map(self._costs.of, rank_shares)) for rank_shares in shares)

    def _rows(self, shares: Iterable[DocumentShare]) -> int:
        """Return how many rows a rank with these shares of documents needs from other ranks.

        The result is a sum over `windows` and over shares, so a row may be counted several times.
        """
        rows, lengths, padding = 0, self._costs.lengths, self._costs.padding
        for document, first, stop in shares:
            length = lengths[document]
            if stop - first < length and document not in padding:
                for window in self.windows:
                    left, right = (length if reach is None else reach for reach in window)
                    # Rows before the first run, between the two runs, and after the last run.
                    rows += min((first + 1) // 2, left) + min(length - stop, left + right)
                    rows += min(first // 2, right)
        return rows

    @cached_property
    def _all_spans(self) -> tuple[tuple[Span, ...], ...]:
        starts, stops, owners = self._pieces()
        order = np.lexsort((starts, owners))
        starts, stops, owners = starts[order], stops[order], owners[order]
        new = np.ones(len(starts), dtype=bool)  # false for pieces that continue the previous piece
        new[1:] = (starts[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        last = np.append(np.flatnonzero(new)[1:], len(starts)) - 1
        starts, stops, owners = starts[new], stops[last], owners[new]
        edges = np.searchsorted(owners, np.arange(self.cp_size + 1))
        spans = [Span(a, 1, b - a) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        return tuple(
            tuple(spans[a:b]) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        )

    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return start, stop and rank of all intervals of positions, as parallel arrays.

        A share of a document has one or two intervals: one from each end of the document.
        """
        owners = np.repeat(
            np.arange(self.cp_size), [len(rank_shares) for rank_shares in self.shares]
        )
        fields = np.array(
            [share for rank_shares in self.shares for share in rank_shares], dtype=np.int64
        )
        document, first, stop = fields.reshape(-1, 3).T
        begin, end = (np.array(self.bounds)[document + i] for i in (0, 1))
        starts = np.concatenate([begin + (first + 1) // 2, end - stop // 2])
        stops = np.concatenate([begin + (stop + 1) // 2, end - first // 2])
        owners, nonempty = np.tile(owners, 2), stops > starts
        return starts[nonempty], stops[nonempty], owners[nonempty]

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        return self._all_spans[rank]


def _merged(shares: Iterable[DocumentShare]) -> list[DocumentShare]:
    """Return the sorted shares, with adjacent shares of a document joined into one."""
    merged: list[DocumentShare] = []
    for share in sorted(shares):
        if merged and merged[-1][::2] == share[:2]:  # continues the last share
            share = DocumentShare(share.document, merged.pop().first, share.stop)
        merged.append(share)
    return merged


def _row_cost(row_cost: object) -> tuple[float, float]:
    costs = tuple(row_cost) if isinstance(row_cost, Sequence) else ()
    if len(costs) != 2 or not all(
        isinstance(cost, (int, float)) and 0 <= cost < math.inf for cost in costs
    ):
        raise ValueError(
            "row_cost must be two numbers >= 0, the cost of a row from the same node and from "
            f"another node, got {row_cost!r}"
        )
    return float(costs[0]), float(costs[1])


def _window(window: object) -> Window:
    sides = tuple(window) if isinstance(window, Sequence) else ()
    right = len(sides) == 2 and all(
        side is None or (type(side) is int and side >= 0) for side in sides
    )
    if not right:
        raise ValueError(
            "windows must hold (left, right) for each kind of layer: integers >= 0, or None for "
            f"no limit, got {window!r}"
        )
    return sides  # pyright: ignore[reportReturnType]
