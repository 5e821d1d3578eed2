# SPDX-License-Identifier: Apache-2.0
"""Layout `balanced`: packed documents of mixed lengths, equal tokens and nearly equal work on every
rank, most documents whole on one rank.

Decides how documents lie in a pack and on nodes, and which share of which document each rank gets.

The solver: in *mirror order* a document's tokens are taken from both ends in turn: 0, l - 1, 1,
l - 2, ... A run of a causal document in mirror order has half the document's length of visible keys
per token, wherever it lies: a liquid of that density, and a rank has to be filled to the batch's
mean density. Documents are sorted by density; every rank takes a run from the dense end and a run
from the sparse end. How long the two are follows from one equation in one unknown, so ranks come
out even; only where a run ends is a document cut. Nodes are filled first, then the ranks of each
node. Runs are cut by integers alone, so that every process finds the same.

Even ranks cut a document nearly everywhere where one begins, and ranks exchange its rows. Where
links are slow, uneven ranks with whole documents are faster: `row_cost` says what a row takes, and
less even ranks are tried.
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

Window = tuple[int | None, int | None]  # keys seen before a query, and after it; None: all
CAUSAL: Window = (None, 0)
# By which part of its share of the pairs a bin may miss it, to leave a document whole; and where it
# is known that rows take long.
SLACK, MORE_SLACK = 1 / 64, 1 / 4
# Ranks are even where the busiest has at most so many times the mean.
EVEN = 1.05
# Where windows make the ends of a document lighter than its middle, it is cut into parts of about
# one density: at these places of mirror order, in window lengths. Later ones are tried as needed.
PARTS = ((), (2.0,), (1.0, 2.0), (0.5, 1.0, 1.5, 2.0))
# Of the estimated time of even ranks: what less even ones have to stay below.
CLEARLY = 0.8
LONGEST = 1 << 28  # tokens of a document whose pairs, in many kinds of layers, int64 surely holds


class DocumentShare(NamedTuple):
    """Tokens first..stop (exclusive) of a document in mirror order."""

    document: int
    first: int
    stop: int


class DocumentCosts:
    """Visible pairs of documents: of all their tokens, and of those before a place in mirror order.

    lengths: of the documents; windows: (left, right) of each kind of layer, None for no limit;
    padding: of these documents no pair is visible. bases: of segments of a tree, how many ancestors
    the first token of each has, which all of its tokens see; default: none.
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
        found: Any = sum(
            count * document_pairs(sizes, window, np.array(self.bases, dtype=np.int64))
            for window, count in self.windows
        )
        found[list(self.padding)] = 0
        self.whole = found.tolist()

    def before(self, document: int, place: int) -> int:
        """Pairs of the first `place` tokens of a document in mirror order."""
        length = self.lengths[document]
        if place >= length:
            return self.whole[document]
        if document in self.padding:
            return 0
        front, back, base = (place + 1) // 2, place // 2, self.bases[document]
        pairs = 0
        for (left, right), count in self.windows:
            if left is None and right == 0:  # what the other lines come to, in a third of the time
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
        """Pairs of a share."""
        return self.before(share.document, share.stop) - self.before(share.document, share.first)


def _reached(n: int, reach: int) -> int:
    """min(0, reach) + min(1, reach) + ... + min(n - 1, reach)."""
    m = min(n, reach + 1)
    return m * (m - 1) // 2 + (n - m) * reach


def document_pairs(
    lengths: Sequence[int] | np.ndarray, window: Window = CAUSAL, bases: np.ndarray | int = 0
) -> np.ndarray:
    """Pairs (query, key) that see each other in documents of these lengths, int64 [documents].

    bases: how many tokens before the first one of each its tokens see besides. With documents of
    more than `LONGEST` tokens, they are Python's integers, which cannot overflow.
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
    """The shares cut into `bins` with equally many tokens each, and nearly as many pairs.

    The tokens of all shares must be a multiple of `bins`. slack: by which part of its share of the
    pairs a bin may miss it, to leave a document whole.
    """
    pool = _Pool(shares, costs, slack)
    room = pool.left // bins
    return [pool.take(room, pool.pairs // (bins - index)) for index in range(bins)]


class _Pool:
    """Shares sorted by density, of which runs at both ends have been taken.

    A place counts tokens in that order. Taken are those before `low` and those from `high` on.
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
        """Pairs of the documents that are not taken yet."""
        return self._before(self.high) - self._before(self.low)

    def take(self, room: int, need: int) -> list[DocumentShare]:
        """Take `room` tokens with about `need` pairs."""
        goal = need - self.pairs

        def excess(dense: int) -> int:
            """Pairs beyond `need` with so many tokens from the dense end, the others from the
            sparse one: all that are left, less those in between.
            """
            return self._before(self.low + room - dense) - self._before(self.high - dense) - goal

        dense = self._whole(room, _root(excess, room), excess, int(need * self.slack))
        low, high = self.low + room - dense, self.high - dense
        taken = [*self._between(self.low, low), *self._between(high, self.high)]
        self.low, self.high = low, high
        return taken

    def _before(self, place: int) -> int:
        """Pairs of all tokens before a place."""
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
        """`dense`, or a number next to it with which no document is cut at the dense end, else none
        at the sparse end.
        """
        for end in (self.high, self.low + room):
            place = bisect_left(self.starts, end - dense)
            others = [end - start for start in self.starts[max(0, place - 1) : place + 1]]
            off = {other: abs(excess(other)) for other in others if 0 <= other <= room}
            nearest = min(off, key=off.__getitem__, default=dense)
            if off.get(nearest, math.inf) <= tolerance:
                return nearest
        return dense

    def _between(self, first: int, stop: int) -> list[DocumentShare]:
        """The shares of the tokens from one place to another."""
        found, index = [], bisect_right(self.starts, first) - 1
        while first < stop:
            document, begin, _ = self.shares[index]
            end, start = min(stop, self.starts[index + 1]), self.starts[index]
            if end > first:
                found.append(DocumentShare(document, begin + first - start, begin + end - start))
            first, index = end, index + 1
        return found


def _root(excess: Callable[[int], int], top: int) -> int:
    """Where in 0..top an increasing function comes nearest to 0: by false position, which meets the
    pieces of straight lines after a few steps, and by halves after a step that was slow.
    """
    low, high, below, above = 0, top, excess(0), excess(top)
    if below >= 0 or above <= 0:
        return low if abs(below) <= abs(above) else high
    halve = False
    while high - low > 1:
        before = high - low
        guess = before // 2 if halve else before * -below // (above - below)
        guess = low + min(max(guess, 1), before - 1)
        found = excess(guess)
        if not found:
            return guess
        if found < 0:
            low, below = guess, found
        else:
            high, above = guess, found
        halve = (high - low) * 2 > before
    return low if -below <= above else high


def keep_whole(costs: DocumentCosts, ranks: int, per_node: int) -> list[list[DocumentShare]]:
    """Equally many tokens on every rank, and documents on as few ranks as have room for them.

    The costliest document comes first: to the rank with the fewest pairs of those with room for
    all of it. A document longer than a rank's share fills ranks that are empty, of one node while
    it can. What fits nowhere in one piece goes last into the largest gaps, which are short.
    """
    lengths, room = costs.lengths, sum(costs.lengths) // ranks
    free, pairs, node = np.full(ranks, room), np.zeros(ranks), np.arange(ranks) // per_node
    shares: list[list[DocumentShare]] = [[] for _ in range(ranks)]
    late = []

    def give(rank: int, document: int, first: int) -> int:
        """As much as there is room for, from this place on; returns where it stops."""
        share = DocumentShare(document, first, min(lengths[document], first + int(free[rank])))
        shares[rank].append(share)
        free[rank] -= share.stop - first
        pairs[rank] += costs.of(share)
        return share.stop

    for document in sorted(range(len(lengths)), key=lambda i: (-costs.whole[i], -lengths[i], i)):
        first, near = 0, -1
        while lengths[document] - first >= room and (empty := free == room).any():
            count = np.bincount(node[empty], minlength=ranks // per_node)
            wanted = min((lengths[document] - first) // room, per_node)
            enough = np.where(count >= wanted, count, ranks + 1)
            near = int(enough.argmin() if enough.min() <= ranks else count.argmax())
            for rank in np.flatnonzero(empty & (node == near))[:wanted].tolist():
                first = give(rank, document, first)
        if first == lengths[document]:
            continue
        fits = free >= lengths[document] - first
        fits = here if (here := fits & (node == near)).any() else fits
        if fits.any():
            give(int(np.where(fits, pairs, np.inf).argmin()), document, first)
        else:
            late.append((document, first, near))
    for document, first, near in late:
        while first < lengths[document]:
            here = free * (node == near)
            rank = int((here if here.any() else free).argmax())
            first, near = give(rank, document, first), rank // per_node
    return shares


class Balanced(Layout):
    """Every rank holds S / `cp_size` tokens with nearly equally many visible pairs.

    The longest documents are spread in mirrored shares over neighbouring ranks, those of one node
    where they fit, and nearly all others lie on one rank. Spans are in the order of positions.

    cu_seqlens: cumulative lengths of the documents, of any length; the sum must be a multiple of
    `cp_size`. per_node: ranks per node, for placement only; default: what `cp_size` and 8 have in
    common. windows: (left, right) of every kind of layer, as of `masks.Window` within a document;
    their pairs are summed. (None, 0) is causal, (None, None) sees all; default: causal, within
    the tree's own window. padding: indices of
    documents that are padding, which attend to nothing. tree: in place of `cu_seqlens` and
    `padding`, a prefix tree (what `mb.trees.pack` returns, or a `masks.Tree`): its segments are
    laid out like documents, each token also sees the ancestors of its segment, and windows are
    (left, 0). row_cost: how many pairs a rank computes in the time for which one row of another
    rank is on its link, a row of its node and a row of another node; where given, ranks are less
    even if they are estimated to be done earlier with documents that are whole. Not for trees.
    Raises ValueError for invalid arguments.
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
        self.bases: tuple[int, ...] = ()  # of segments of a tree
        if tree is not None:
            if cu_seqlens is not None or len(padding):
                raise ValueError("tree: goes without cu_seqlens and padding, which it says itself")
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
            wanted = max(1, -(-total // self.cp_size)) * self.cp_size
            name, remedy = "cu_seqlens", f"pad the pack to {wanted}"
            if tree is not None:
                name, remedy = "tree", f"mb.trees.pack(..., multiple={cp_size}) pads it"
            raise ValueError(
                f"{name}: layout balanced over {cp_size} ranks needs a positive multiple of "
                f"{cp_size} tokens, got {total}; {remedy}"
            )
        self.per_node = self._per_node(per_node)
        if not isinstance(windows, Sequence) or not windows:
            raise ValueError(f"windows: name at least one kind of layer, got {windows!r}")
        self.windows = tuple(_window(each) for each in windows)
        self.padding = padding_documents(padding, len(self.bounds) - 1)
        ahead = [window for window in self.windows if window[1] != 0]
        if self.bases and ahead:
            raise ValueError(
                f"windows: no row of a tree sees rows after it, so each must be (left, 0), got "
                f"{ahead[0]}"
            )
        self.row_cost = None if row_cost is None else _row_cost(row_cost)
        if tree is not None and row_cost is not None:
            raise ValueError("row_cost: is for documents, and a tree was given; leave it out")

    def _per_node(self, given: int | None) -> int:
        if given is None:
            return math.gcd(self.cp_size, 8)
        size = integer("per_node", given)
        if size < 1 or self.cp_size % size:
            raise ValueError(f"per_node must divide the {self.cp_size} ranks, got {given}")
        return size

    def __repr__(self) -> str:
        return (
            f"Balanced(cp_size={self.cp_size}, cu_seqlens={list(self.bounds)}, "
            f"per_node={self.per_node}, windows={self.windows}, padding={self.padding}"
            f"{f', bases={list(self.bases)}' if self.bases else ''}"
            f"{f', row_cost={self.row_cost}' if self.row_cost else ''})"
        )

    def describe(self) -> str:
        """Its name, the pairs of the busiest rank over the mean, and why they are not even."""
        why = "" if self._taken[0] else ", which leaves documents whole"
        return f"{self.name} (busiest rank {self.balance:.2f} x the mean{why})"

    def check(self, seq_len: int) -> None:
        if seq_len != self.bounds[-1]:
            raise ValueError(f"seq_len: the documents end at {self.bounds[-1]}, got {seq_len}")

    @property
    def pairs(self) -> tuple[int, ...]:
        """Visible pairs of each rank's queries, summed over `windows`."""
        return self._pairs(self.shares)

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 where there is none."""
        pairs = self.pairs
        return max(pairs) * len(pairs) / (sum(pairs) or 1) or 1.0

    @cached_property
    def _costs(self) -> DocumentCosts:
        return DocumentCosts(
            np.diff(self.bounds).tolist(), self.windows, self.padding, self.bases or None
        )

    @property
    def shares(self) -> tuple[list[DocumentShare], ...]:
        """What each rank takes."""
        return self._taken[1]

    @cached_property
    def _taken(self) -> tuple[bool, tuple[list[DocumentShare], ...]]:
        """Are ranks even, and what each takes."""
        tried = self._evenly()
        even = min(tried, key=lambda shares: max(self._pairs(shares)))
        if self.row_cost is None or self.cp_size == 1:
            return True, even
        # Parts of documents send more rows than the documents.
        spent, even = self._least_busy([even] if even is tried[0] else [even, tried[0]])
        limit = CLEARLY * spent
        if max(self._pairs(even)) >= limit:  # without any rows it would take too long
            return True, even
        whole = tuple(keep_whole(self._costs, self.cp_size, self.per_node))
        spent, less = self._least_busy([self._mixed(MORE_SLACK), whole])
        return (False, less) if spent < limit else (True, even)

    def _evenly(self) -> list[tuple[list[DocumentShare], ...]]:
        """Shares of documents, and of documents in more and more parts until they are even."""
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
        ranks = [each for node in nodes for each in mix(node, self.per_node, costs, slack)]
        return tuple(map(_merged, ranks) if parts else ranks)

    def _least_busy(
        self, tried: Iterable[tuple[list[DocumentShare], ...]]
    ) -> tuple[float, tuple[list[DocumentShare], ...]]:
        """The shares that take least, the first of equal ones, behind what `_busy` says of them."""
        return min(((self._busy(shares), shares) for shares in tried), key=lambda each: each[0])

    def _busy(self, shares: Sequence[Sequence[DocumentShare]]) -> float:
        """An estimate of how long these shares take, in pairs: those of the busiest rank, and what
        the rows on the busiest links come to. How much of these overlaps is left out.

        A row that ranks of a node need is sent to the node once, over the links of all its ranks.
        """
        assert self.row_cost is not None
        within, between = self.row_cost
        nodes = [
            _merged(chain.from_iterable(shares[first : first + self.per_node]))
            for first in range(0, self.cp_size, self.per_node)
        ]
        alone, together = (max(map(self._rows, each)) for each in (shares, nodes))
        return max(self._pairs(shares)) + max(within * alone, between * together / self.per_node)

    def _pairs(self, shares: Sequence[Sequence[DocumentShare]]) -> tuple[int, ...]:
        """Those of each rank with these shares."""
        return tuple(sum(map(self._costs.of, each)) for each in shares)

    def _rows(self, shares: Iterable[DocumentShare]) -> int:
        """How many rows of others these see, summed over `windows`; two shares of a document count
        each by itself.
        """
        found, lengths, padding = 0, self._costs.lengths, self._costs.padding
        for document, first, stop in shares:
            length = lengths[document]
            if stop - first < length and document not in padding:
                for window in self.windows:
                    left, right = (length if reach is None else reach for reach in window)
                    # Before the first run, between it and the last, and behind that.
                    found += min((first + 1) // 2, left) + min(length - stop, left + right)
                    found += min(first // 2, right)
        return found

    @cached_property
    def _all_spans(self) -> tuple[tuple[Span, ...], ...]:
        starts, stops, owners = self._pieces()
        order = np.lexsort((starts, owners))
        starts, stops, owners = starts[order], stops[order], owners[order]
        new = np.ones(len(starts), dtype=bool)  # whether a piece does not go on with the last one
        new[1:] = (starts[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        last = np.append(np.flatnonzero(new)[1:], len(starts)) - 1
        starts, stops, owners = starts[new], stops[last], owners[new]
        edges = np.searchsorted(owners, np.arange(self.cp_size + 1))
        spans = [Span(a, 1, b - a) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        return tuple(
            tuple(spans[a:b]) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        )

    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First position, the one after the last, and rank of the two ends of every share."""
        owners = np.repeat(np.arange(self.cp_size), [len(each) for each in self.shares])
        fields = np.array([share for each in self.shares for share in each], dtype=np.int64)
        document, first, stop = fields.reshape(-1, 3).T
        begin, end = (np.array(self.bounds)[document + i] for i in (0, 1))
        starts = np.concatenate([begin + (first + 1) // 2, end - stop // 2])
        stops = np.concatenate([begin + (stop + 1) // 2, end - first // 2])
        owners, some = np.tile(owners, 2), stops > starts
        return starts[some], stops[some], owners[some]

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        return self._all_spans[rank]


def _merged(shares: Iterable[DocumentShare]) -> list[DocumentShare]:
    """The shares of several ranks as those of one."""
    found: list[DocumentShare] = []
    for share in sorted(shares):
        if found and found[-1][::2] == share[:2]:  # goes on where the last one stops
            share = DocumentShare(share.document, found.pop().first, share.stop)
        found.append(share)
    return found


def _row_cost(given: object) -> tuple[float, float]:
    costs = tuple(given) if isinstance(given, Sequence) else ()
    if len(costs) != 2 or not all(
        isinstance(each, (int, float)) and 0 <= each < math.inf for each in costs
    ):
        raise ValueError(
            "row_cost must hold two numbers from 0 on, the pairs of a row of the same node and of "
            f"another node, got {given!r}"
        )
    return float(costs[0]), float(costs[1])


def _window(given: object) -> Window:
    sides = tuple(given) if isinstance(given, Sequence) else ()
    right = len(sides) == 2 and all(
        side is None or (type(side) is int and side >= 0) for side in sides
    )
    if not right:
        raise ValueError(
            "windows must hold (left, right) of each kind of layer, integers from 0 on or None for "
            f"no limit, got {given!r}"
        )
    return sides  # pyright: ignore[reportReturnType]
