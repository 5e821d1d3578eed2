"""Partial results of one rank during a pass: gradients, which add up, and outputs, which merge.

Decides what happens when one arrives, and what is left when one leaves. A rank's results for its
own rows stay on it; those for rows of others are sent away, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..comm.packing import Message
from ..kernels.online_softmax import merge_
from ..schedule.tables import ALL, Chunk
from .buffers import Buffers, RowShapes
from .row_maps import RowMaps, taken

Tensors = tuple[torch.Tensor, ...]


@dataclass
class _Partial:
    """What this rank has of a chunk's rows; filled: those to which something was contributed."""

    message: Message
    filled: int = 0


class Partials:
    """The partial results of every chunk, made when first asked for.

    chunks: (family, owner) -> the chunk with all rows that this rank ever holds of it.
    """

    def __init__(self, maps: RowMaps, chunks: dict[tuple[str, int], Chunk], buffers: Buffers):
        self.maps, self.chunks, self.buffers = maps, chunks, buffers
        self._held: dict[Chunk, _Partial] = {}
        self._same: dict[str, bool] = {}  # does a family travel in the dtype of its sums?

    def introduce(self, family: str, rows: RowShapes, wire: RowShapes, longest: int) -> None:
        """Sums of `family` have such rows here and, where they travel, rows like `wire`."""
        self._same[family] = list(rows) == list(wire)
        self.buffers.introduce(family, rows, longest)
        self.buffers.introduce(self.wire(family), wire, longest)

    def wire(self, family: str) -> str:
        """The kind of buffer in which chunks of a family travel."""
        return family if self._same[family] else family + " wire"

    def whole(self, family: str, owner: int) -> Tensors:
        """All rows that this rank has of a chunk; nothing contributed yet: zeros."""
        chunk = self.chunks[family, owner]
        if chunk not in self._held:
            self._held[chunk] = _Partial(self._blank(chunk))
        return self._held[chunk].message.tensors

    def begin(self, own: Chunk, tensors: Tensors) -> None:
        """The sums of all rows of an own chunk go on from what earlier passes added up."""
        self._held[own] = _Partial(Message(None, tensors), own.rows)

    @contextmanager
    def adding(self, part: Chunk, rows: int) -> Iterator[Tensors]:
        """To contribute to the rows of `part`; rows: those to which something is contributed."""
        tensors, chunk = self.whole(part.family, part.owner), self.chunks[part[:2]]
        self._held[chunk].filled |= rows
        where = self.maps.where(chunk, part.rows)
        if isinstance(where, slice):
            yield tuple(t[where] for t in tensors)
            return
        apart = self._blank(part)
        yield apart.tensors
        _contribute(part.family, tensors, where, apart.tensors)
        self.buffers.give(part.family, apart)

    def receive(self, chunk: Chunk, message: Message) -> None:
        """What arrived becomes the sum if there is none and it has all rows; else it is added."""
        whole, kind = self.chunks[chunk[:2]], self.wire(chunk.family)
        if whole == chunk and whole not in self._held and kind == chunk.family:
            self._held[whole] = _Partial(message, chunk.rows)
            return
        target = self.whole(chunk.family, chunk.owner)
        self._held[whole].filled |= chunk.rows
        _contribute(chunk.family, target, self.maps.where(whole, chunk.rows), message.tensors)
        self.buffers.give(kind, message)

    def send(self, chunk: Chunk) -> Message:
        """The rows of `chunk`, which are cleared here: a message of the kind `wire`."""
        whole, kind = self.chunks[chunk[:2]], self.wire(chunk.family)
        tensors, partial = self.whole(chunk.family, chunk.owner), self._held[whole]
        partial.filled &= ~chunk.rows
        if whole == chunk and kind == chunk.family:
            return self._held.pop(whole).message
        message = self.buffers.take(kind, self.maps.count(chunk))
        where = self.maps.where(whole, chunk.rows)
        for target, source in zip(message.tensors, taken(tensors, where), strict=True):
            target.copy_(source)
        if partial.filled:
            _clear(chunk.family, tensors, where)
        else:
            self.buffers.give(chunk.family, self._held.pop(whole).message)
        return message

    def _blank(self, chunk: Chunk) -> Message:
        rows = self.maps.count(chunk)
        # The output is no view: autograd refuses to let such a one be changed in place.
        make = self.buffers.apart if chunk[::2] == ("out", ALL) else self.buffers.take
        message = make(chunk.family, rows)
        if chunk.family != "out" and message.flat is not None:
            message.flat.zero_()  # all of its tensors at once
        else:
            _clear(chunk.family, message.tensors, slice(None))
        return message


def _contribute(family: str, whole: Tensors, where: slice | torch.Tensor, part: Tensors) -> None:
    """Add `part` to these rows of `whole`, or merge it into them."""
    rows = taken(whole, where)
    if family == "out":
        merge_(*rows, *part)
    else:
        for total, new in zip(rows, part, strict=True):
            total += new
    if not isinstance(where, slice):
        for target, total in zip(whole, rows, strict=True):
            target.index_copy_(0, where, total)


def _clear(family: str, tensors: Sequence[torch.Tensor], where: slice | torch.Tensor) -> None:
    """Rows to which nothing was contributed: 0, and an lse of -inf."""
    for index, tensor in enumerate(tensors):
        tensor[where] = float("-inf") if family == "out" and index == 1 else 0.0
