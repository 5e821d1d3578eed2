# SPDX-License-Identifier: Apache-2.0
"""Assignment of documents to micro-batches.

All micro-batches have the same number of tokens, the capacity; padding fills unused tokens. The
work of linear layers is therefore equal, and only the work of attention has to be balanced.

First each document goes to the micro-batch with the least work, in the order of decreasing work
(the LPT rule: longest processing time first). Then documents of the busiest micro-batch are moved
to other micro-batches or exchanged with their documents, until that no longer reduces the largest
work. All values are integers, so that ranks that pack the same documents compute the same packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .work import Work


@dataclass(frozen=True)
class Packing:
    """Assignment of the documents of a training step to micro-batches.

    Attributes:
        places: Document indices of each micro-batch, `places[rank][micro_batch]`.
        loads: Work of each micro-batch in pairs (see `Work`), int64 [ranks, micro-batches]. It
            includes the linear work of padding.
    """

    places: tuple[tuple[tuple[int, ...], ...], ...]
    loads: np.ndarray

    @property
    def count(self) -> int:
        """Number of micro-batches of each rank."""
        return len(self.places[0])

    @property
    def imbalance(self) -> float:
        """Work of the busiest micro-batch, divided by the mean work of a micro-batch."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def slowest(self) -> int:
        """Number of micro-batches per rank times the work of the busiest micro-batch.

        This is the work of a step in a pipeline, in which every micro-batch delays the next stage
        as long as the busiest micro-batch does.
        """
        return self.count * int(self.loads.max())


def pack(
    lengths: Sequence[int] | np.ndarray,
    work: Work,
    *,
    ranks: int,
    capacity: int,
    multiple: int = 1,
    original: Sequence[Sequence[int]] = (),
) -> Packing:
    """Pack documents into micro-batches of `capacity` tokens.

    The number of micro-batches per rank is the smallest multiple of `multiple` for which an
    assignment is found, or the next multiple if that makes the step faster (`Packing.slowest`).

    Args:
        lengths: Tokens of each document, at least 1.
        work: Work per token and per visible pair.
        ranks: Number of ranks; all get the same number of micro-batches.
        capacity: Tokens of a micro-batch.
        multiple: Number that must divide the number of micro-batches per rank.
        original: Documents of each micro-batch before packing. This assignment is used if the
            solver finds no other assignment with that number of micro-batches.

    Raises:
        ValueError: A document is longer than the capacity, or an argument is invalid.
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
        if bins.fill(original):
            bins.exchange()
            packing = _dealt(bins, ranks, linear)
            if best is not None:
                return min(best, packing, key=lambda candidate: candidate.slowest)
            best = packing
        count += multiple


def _checked(lengths: object, ranks: int, capacity: int, multiple: int) -> np.ndarray:
    for name, value in (("ranks", ranks), ("capacity", capacity), ("multiple", multiple)):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_integer or value < 1:
            raise ValueError(f"packing: {name} must be an integer >= 1, got {value!r}")
    checked = np.asarray(lengths)
    if checked.ndim != 1 or (checked.size and checked.dtype.kind not in "iu"):
        raise ValueError(f"packing: lengths must be a sequence of integers, got {lengths!r:.100}")
    checked = checked.astype(np.int64)
    if (checked < 1).any():
        raise ValueError(
            "packing: every document must have at least 1 token, got lengths "
            f"{checked[checked < 1][:5].tolist()}"
        )
    long = np.flatnonzero(checked > capacity)
    if len(long):
        listed = ", ".join(f"document {i} has {checked[i]} tokens" for i in long[:5])
        suffix = f" and {len(long) - 5} more" if len(long) > 5 else ""
        raise ValueError(
            f"packing: {listed}{suffix}, but a micro-batch has {capacity} "
            "(--seq-length): cut longer documents, or raise --seq-length"
        )
    return checked


class _Bins:
    """Micro-batches during packing, called bins.

    `busy` has the attention work of each bin, `room` the tokens that still fit into it.
    """

    def __init__(self, lengths: np.ndarray, attention: np.ndarray, count: int, capacity: int):
        self.lengths, self.attention = lengths, attention
        self.count, self.capacity = count, capacity
        self.of = np.zeros(len(lengths), np.int64)  # the bin of each document

    def fill(self, original: Sequence[Sequence[int]]) -> bool:
        """Assign every document to a bin. Return False if no assignment fits.

        The first attempt puts each document into the least busy bin with room, in the order of
        decreasing work. If a document fits in no bin, the second attempt puts each document into
        the fullest bin with room, longest first. The last attempt is the original assignment.
        """
        return (
            self._place(fullest=False)
            or self._place(fullest=True)
            or self._place_original(original)
        )

    def _place(self, fullest: bool) -> bool:
        self.busy = np.zeros(self.count, np.int64)
        self.room = np.full(self.count, self.capacity, np.int64)
        first = self.lengths if fullest else self.attention
        for index in np.lexsort((self.attention, self.lengths, first))[::-1]:
            length = self.lengths[index]
            with_room = self.room >= length
            target = int(np.where(with_room, self.room if fullest else self.busy, _MOST).argmin())
            if not with_room[target]:
                return False
            self.of[index] = target
            self.busy[target] += self.attention[index]
            self.room[target] -= length
        return True

    def _place_original(self, original: Sequence[Sequence[int]]) -> bool:
        if len(original) > self.count:
            return False
        self.of[:] = -1
        for index, documents in enumerate(original):
            self.of[list(documents)] = index
        if (self.of < 0).any():
            return False
        self.busy = np.zeros(self.count, np.int64)
        self.room = np.full(self.count, self.capacity, np.int64)
        np.add.at(self.busy, self.of, self.attention)
        np.subtract.at(self.room, self.of, self.lengths)
        return bool((self.room >= 0).all())

    def exchange(self) -> None:
        """Move or exchange documents of the busiest bin, until that no longer reduces its work.

        Each round chooses the change after which the busier of the two bins has the least work. It
        tries the least busy bins as partners first, then all bins. The search ends if no change
        helps, after `_ROUNDS` rounds, or if the busiest bin is within 0.1 % of the mean.
        """
        enough = int(self.busy.sum()) // self.count * 1001 // 1000
        for _ in range(_ROUNDS):
            order = np.argsort(self.busy, kind="stable")
            top = int(order[-1])
            if self.busy[top] <= enough:
                return
            if not (self._improve(top, order[:_IDLEST]) or self._improve(top, order[_IDLEST:-1])):
                return

    def _improve(self, top: int, candidates: np.ndarray) -> bool:
        own = _sample(np.flatnonzero(self.of == top), 64)
        foreign = _sample(np.flatnonzero(np.isin(self.of, candidates[candidates != top])), 2048)
        # In the last columns a document moves and no document is returned.
        target = np.concatenate([self.of[foreign], candidates])
        empty = np.zeros(len(candidates), np.int64)
        attention, tokens = (
            values[own][:, None] - np.concatenate([values[foreign], empty])
            for values in (self.attention, self.lengths)
        )
        after = np.maximum(self.busy[top] - attention, self.busy[target] + attention)
        fits = (tokens <= self.room[target]) & (-tokens <= self.room[top]) & (target != top)
        after[~fits] = _MOST
        if not after.size or after.min() >= self.busy[top]:
            return False
        row, column = divmod(int(after.argmin()), len(target))
        chosen = int(target[column])
        self.of[own[row]] = chosen
        if column < len(foreign):
            self.of[foreign[column]] = top
        for place, sign in ((top, 1), (chosen, -1)):
            self.busy[place] -= sign * attention[row, column]
            self.room[place] += sign * tokens[row, column]
        return True


def _sample(documents: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` documents, evenly spaced, to bound the time of a round."""
    return documents[:: -(-len(documents) // limit) or 1]


_MOST = np.iinfo(np.int64).max
_ROUNDS = 400  # limit of exchange rounds, which bounds the time
_IDLEST = 8  # micro-batches that a round tries first


def _dealt(bins: _Bins, ranks: int, linear: int) -> Packing:
    """Return the packing that distributes the bins over ranks.

    Bins are dealt in the order of decreasing work, alternately from the first to the last rank and
    back, so that the total work of each rank is nearly equal too.

    Args:
        bins: The bins, filled.
        ranks: Number of ranks; divides the number of bins.
        linear: Linear work of each bin, in pairs.
    """
    documents: list[list[int]] = [[] for _ in range(bins.count)]
    for index, target in enumerate(bins.of.tolist()):
        documents[target].append(index)
    order = np.argsort(-bins.busy, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1].copy()
    places = tuple(tuple(tuple(documents[i]) for i in column) for column in order.T.tolist())
    return Packing(places, bins.busy[order.T] + linear)
