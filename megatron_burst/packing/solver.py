# SPDX-License-Identifier: Apache-2.0
"""Which document goes to which micro-batch.

Every micro-batch has the same number of tokens, the capacity: what its documents leave is padding.
So linear work is the same everywhere, and what has to be made equal is attention. Documents are
placed longest processing time first; then the busiest micro-batch gives a document to another, or
exchanges one, for as long as that makes it less busy. All in integers: ranks that pack the same
documents find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .work import Work


@dataclass(frozen=True)
class Packing:
    """The micro-batches of a step: documents by their index, `places[rank][micro_batch]`.

    loads: work of each micro-batch in pairs (see `Work`), int64 [ranks, micro-batches], the linear
    work of its padding included.
    """

    places: tuple[tuple[tuple[int, ...], ...], ...]
    loads: np.ndarray

    @property
    def count(self) -> int:
        """Micro-batches on every rank."""
        return len(self.places[0])

    @property
    def imbalance(self) -> float:
        """The busiest micro-batch over their mean."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def slowest(self) -> int:
        """Work of a step whose micro-batches wait for the busiest one, as in a pipeline."""
        return self.count * int(self.loads.max())


def pack(
    lengths: Sequence[int] | np.ndarray,
    work: Work,
    *,
    ranks: int,
    capacity: int,
    multiple: int = 1,
    given: Sequence[Sequence[int]] = (),
) -> Packing:
    """Documents into micro-batches of `capacity` tokens, the same number on each of `ranks`.

    lengths: tokens of each document, 1 or more. multiple: the number of micro-batches per rank is
    one of its multiples. given: documents of each micro-batch in which they came, which is kept
    where they fit into as few in no other way that is found. There are as few micro-batches as
    the documents fit into, or one `multiple` more where that is predicted to be faster.

    Raises ValueError for documents longer than the capacity, and for sizes that cannot be.
    """
    lengths = _checked(lengths, ranks, capacity, multiple)
    attention, linear = work.attention(lengths), capacity * work.token
    count = -(-max(1, -(-int(lengths.sum()) // (ranks * capacity))) // multiple) * multiple
    best: Packing | None = None
    while True:
        mean = -(-int(attention.sum()) // (ranks * count))
        bound = count * (max(mean, int(attention.max(initial=0))) + linear)
        if best is not None and bound >= best.slowest:
            return best
        bins = _Bins(lengths, attention, ranks * count, capacity)
        if bins.fill(given):
            bins.exchange()
            found = _dealt(bins, ranks, linear)
            if best is not None:
                return min(best, found, key=lambda packing: packing.slowest)
            best = found
        count += multiple


def _checked(lengths: object, ranks: int, capacity: int, multiple: int) -> np.ndarray:
    for name, value in (("ranks", ranks), ("capacity", capacity), ("multiple", multiple)):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < 1:
            raise ValueError(f"packing: {name} must be an integer from 1 on, got {value!r}")
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"packing: lengths must be a sequence of integers, got {lengths!r:.100}")
    found = found.astype(np.int64)
    if (found < 1).any():
        raise ValueError(
            f"packing: documents have 1 token or more, got lengths {found[found < 1][:5].tolist()}"
        )
    long = np.flatnonzero(found > capacity)
    if len(long):
        named = ", ".join(f"document {i} has {found[i]} tokens" for i in long[:5])
        more = f" and {len(long) - 5} more" if len(long) > 5 else ""
        raise ValueError(
            f"packing: {named}{more}, and a micro-batch {capacity} (--seq-length): cut longer "
            "documents, or raise it"
        )
    return found


class _Bins:
    """Micro-batches being filled, and what is in them."""

    def __init__(self, lengths: np.ndarray, attention: np.ndarray, count: int, capacity: int):
        self.lengths, self.attention = lengths, attention
        self.count, self.capacity = count, capacity
        self.of = np.zeros(len(lengths), np.int64)  # the bin of each document

    def fill(self, given: Sequence[Sequence[int]]) -> bool:
        """Put every document somewhere; False if no way is found.

        Each into the least busy one with room, longest processing time first; if that leaves one
        without room, into the fullest with room, longest first; and else as they came.
        """
        return self._place(fullest=False) or self._place(fullest=True) or self._take(given)

    def _place(self, fullest: bool) -> bool:
        self.busy = np.zeros(self.count, np.int64)
        self.room = np.full(self.count, self.capacity, np.int64)
        first = self.lengths if fullest else self.attention
        for index in np.lexsort((self.attention, self.lengths, first))[::-1]:
            length = self.lengths[index]
            with_room = self.room >= length
            where = int(np.where(with_room, self.room if fullest else self.busy, _MOST).argmin())
            if not with_room[where]:
                return False
            self.of[index] = where
            self.busy[where] += self.attention[index]
            self.room[where] -= length
        return True

    def _take(self, given: Sequence[Sequence[int]]) -> bool:
        if len(given) > self.count:
            return False
        self.of[:] = -1
        for index, documents in enumerate(given):
            self.of[list(documents)] = index
        if (self.of < 0).any():
            return False
        self.busy = np.zeros(self.count, np.int64)
        self.room = np.full(self.count, self.capacity, np.int64)
        np.add.at(self.busy, self.of, self.attention)
        np.subtract.at(self.room, self.of, self.lengths)
        return bool((self.room >= 0).all())

    def exchange(self) -> None:
        """Make the busiest bin less busy while one document moved, or exchanged, does.

        Each round takes what leaves the busier of both the least work: with one of the idlest
        bins, or with any where those do not help. The loads, sorted, decrease, so the rounds end;
        they also end where nobody is worth waiting for.
        """
        enough = int(self.busy.sum()) // self.count * 1001 // 1000
        for _ in range(_ROUNDS):
            order = np.argsort(self.busy, kind="stable")
            top = int(order[-1])
            if self.busy[top] <= enough:
                return
            if not (self._improve(top, order[:_IDLEST]) or self._improve(top, order[_IDLEST:-1])):
                return

    def _improve(self, top: int, others: np.ndarray) -> bool:
        mine = _some(np.flatnonzero(self.of == top), 64)
        theirs = _some(np.flatnonzero(np.isin(self.of, others[others != top])), 2048)
        # The last columns are exchanges for nothing: the document moves.
        where = np.concatenate([self.of[theirs], others])
        empty = np.zeros(len(others), np.int64)
        less, more = (
            values[mine][:, None] - np.concatenate([values[theirs], empty])
            for values in (self.attention, self.lengths)
        )
        after = np.maximum(self.busy[top] - less, self.busy[where] + less)
        fits = (more <= self.room[where]) & (-more <= self.room[top]) & (where != top)
        after[~fits] = _MOST
        if not after.size or after.min() >= self.busy[top]:
            return False
        row, column = divmod(int(after.argmin()), len(where))
        there = int(where[column])
        self.of[mine[row]] = there
        if column < len(theirs):
            self.of[theirs[column]] = top
        for place, sign in ((top, 1), (there, -1)):
            self.busy[place] -= sign * less[row, column]
            self.room[place] += sign * more[row, column]
        return True


def _some(documents: np.ndarray, most: int) -> np.ndarray:
    """At most so many of the documents, evenly out of all: a round looks at no more."""
    return documents[:: -(-len(documents) // most) or 1]


_MOST = np.iinfo(np.int64).max
_ROUNDS = 400  # of exchange, at most: a bound on time
_IDLEST = 8  # micro-batches that are asked first


def _dealt(bins: _Bins, ranks: int, linear: int) -> Packing:
    """Bins dealt to ranks, the busiest first, and back and forth: ranks get equal sums too."""
    documents: list[list[int]] = [[] for _ in range(bins.count)]
    for index, where in enumerate(bins.of.tolist()):
        documents[where].append(index)
    order = np.argsort(-bins.busy, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1].copy()
    places = tuple(tuple(tuple(documents[i]) for i in column) for column in order.T.tolist())
    return Packing(places, bins.busy[order.T] + linear)
