# SPDX-License-Identifier: Apache-2.0
"""What one rank holds during a pass: buffers of messages, and partial results.

A buffer of a kind has room for its longest message, or for a fourth, a sixteenth, ... of it, and is
used for shorter ones as well, so that a pass holds few of them however messages shrink, and many
short ones take little. Partial results are gradients, which add up, and outputs, which merge by
online softmax: a rank's results for its own rows stay on it, those for rows of others are sent
away, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..comm import packing
from ..comm.packing import Message
from ..comm.transport import Endpoint
from ..kernels.online_softmax import merge_
from ..schedule.tables import ALL, Chunk
from .job import RowPlace, Target, Tensors


class MessageKind:
    """What the messages of a kind look like, found out once for each number of rows.

    rows: of each tensor, the shape of one row and the dtype. longest: rows of the longest message.
    """

    def __init__(self, rows: Sequence[tuple[torch.Size, torch.dtype]], longest: int):
        self.rows, self.longest = rows, longest
        self._cuts: dict[int, packing.Cut] = {}

    def cut(self, rows: int) -> packing.Cut:
        if rows not in self._cuts:
            shapes = [(torch.Size((rows, *shape)), dtype) for shape, dtype in self.rows]
            self._cuts[rows] = packing.cut(shapes)
        return self._cuts[rows]


class Buffers:
    """Messages by kind, reused once nothing holds them."""

    def __init__(self, device: torch.device, endpoint: Endpoint, kinds: Mapping[str, MessageKind]):
        self.device, self.endpoint, self.kinds = device, endpoint, kinds
        # By kind, bytes of the buffer, and rows of the message.
        self._free: dict[str, dict[int, dict[int, list[Message]]]] = {kind: {} for kind in kinds}

    def take(self, kind: str, rows: int) -> Message:
        """A message of so many rows; what is in it is undefined."""
        of, free = self.kinds[kind], self._free[kind]
        room = of.longest  # no half of it: a zigzag layout sends halves as often as whole chunks
        while 1 < rows <= room // 4:
            room //= 4
        least = packing.room_size(of.cut(max(room, rows)), self.device, self.endpoint.room)
        for size in sorted(size for size in free if size >= least):
            fitting = free[size]
            if fitting.get(rows):  # most: as it was cut before
                return fitting[rows].pop()
            other = next((messages for messages in fitting.values() if messages), None)
            if other is not None:
                buffer = other.pop().room
                assert buffer is not None
                return packing.carve(buffer, of.cut(rows))
        buffer = torch.empty(least, dtype=torch.uint8, device=self.device)
        return packing.carve(buffer, of.cut(rows))

    def apart(self, kind: str, rows: int) -> Message:
        """Tensors of their own, which never travel, of as many rows."""
        parts, device = self.kinds[kind].cut(rows).parts, self.device
        tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape, *_ in parts]
        return Message(None, tuple(tensors))

    def give(self, kind: str, message: Message) -> None:
        """Nobody reads this message again."""
        self.endpoint.released(message.tensors)
        if message.room is not None:  # else it is no buffer of these
            rows = message.tensors[0].size(0) if message.tensors else 0
            free = self._free[kind].setdefault(message.room.numel(), {})
            free.setdefault(rows, []).append(message)


@dataclass
class _Total:
    """All rows of a partial result that this rank has; filled: those to which something was
    contributed. write: writes sums that are not in the message yet.
    """

    message: Message
    filled: int = 0
    write: Callable[[Message], None] | None = None


class PartialResults:
    """The partial results of a pass, made when first asked for.

    wire: of each family, the kind of buffer in which it travels.
    """

    def __init__(self, buffers: Buffers, wire: Mapping[str, str]):
        self._buffers, self._wire = buffers, wire
        self._totals: dict[Chunk, _Total] = {}

    def begin(
        self, target: Target, sums: Tensors, write: Callable[..., None] | None = None
    ) -> bool:
        """All sums of a chunk go on from these, or what is written later; False: it has some."""
        if first := target.total not in self._totals:
            self._totals[target.total] = _Total(Message(None, sums), target.total.rows, write)
        return first

    def open(self, target: Target) -> Message:
        """Where to contribute to the rows of a target; `merge` it where these lie apart."""
        total, place = self._total(target), target.place
        total.filled |= target.rows
        if place.whole:
            return total.message
        if isinstance(place.at, slice):
            return Message(None, taken(total.message.tensors, place))
        message = self._buffers.take(target.total.family, place.count)
        _clear(target.total.family, message)
        return message

    def merge(self, target: Target, part: Message) -> None:
        """What was contributed to rows that lie apart goes to their places."""
        _contribute(self._total(target).message, target, part)
        self._buffers.give(target.total.family, part)

    def whole(self, target: Target) -> Tensors:
        """All rows that this rank has of a chunk; nothing contributed yet: zeros."""
        return self._total(target).message.tensors

    def receive(self, target: Target, message: Message) -> None:
        """What arrived becomes the sum if there is none and it has all rows; else it is added."""
        family = target.total.family
        kind = self._wire[family]
        if target.place.whole and target.total not in self._totals and kind == family:
            self._totals[target.total] = _Total(message, target.rows)
            return
        total = self._total(target)
        total.filled |= target.rows
        _contribute(total.message, target, message)
        self._buffers.give(kind, message)

    def send(self, target: Target) -> Message:
        """The rows of a target, which are cleared here: a message of the kind that travels."""
        total, family = self._total(target), target.total.family
        kind = self._wire[family]
        total.filled &= ~target.rows
        if target.place.whole and kind == family:
            return self._totals.pop(target.total).message
        message = self._buffers.take(kind, target.place.count)
        rows = taken(total.message.tensors, target.place)
        for tensor, source in zip(message.tensors, rows, strict=True):
            tensor.copy_(source)
        if total.filled:
            _clear(family, total.message, target.place.at)
        else:
            self._buffers.give(family, self._totals.pop(target.total).message)
        return message

    def _total(self, target: Target) -> _Total:
        total = self._totals.get(target.total)
        if total is None or total.write:
            # The output is no view: autograd refuses to let such a one be changed in place.
            output = target.total[::2] == ("out", ALL)
            make = self._buffers.apart if output else self._buffers.take
            message = make(target.total.family, target.size)
            ((total and total.write) or partial(_clear, target.total.family))(message)
            total = self._totals[target.total] = _Total(message, total.filled if total else 0)
        return total


def _contribute(total: Message, target: Target, part: Message) -> None:
    """Add `part` to the rows of the target, or merge it into them."""
    place = target.place
    rows = taken(total.tensors, place)
    if target.total.family == "out":
        merge_(*rows, *part.tensors)
    else:
        for sums, new in zip(rows, part.tensors, strict=True):
            sums += new
    if not isinstance(place.at, slice):
        for tensor, row in zip(total.tensors, rows, strict=True):
            tensor.index_copy_(0, place.at, row)


def taken(tensors: Tensors, place: RowPlace) -> Tensors:
    """The rows at a place of each tensor: views where they are a slice, else copies."""
    if place.whole:
        return tensors
    if isinstance(place.at, slice):
        return tuple(t[place.at] for t in tensors)
    return tuple(t.index_select(0, place.at) for t in tensors)


def _clear(family: str, message: Message, at: slice | torch.Tensor | None = None) -> None:
    """Rows (None: all) to which nothing was contributed: 0, and an lse of -inf."""
    if at is None and family != "out" and message.flat is not None:
        message.flat.zero_()  # all of its tensors at once
        return
    for index, tensor in enumerate(message.tensors):
        empty = float("-inf") if family == "out" and index == 1 else 0.0
        if at is None:
            tensor.fill_(empty)
        else:
            tensor[at] = empty
