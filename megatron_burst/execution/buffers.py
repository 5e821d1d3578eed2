# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank during a pass: message buffers and partial results.

The buffers of one kind of message (such as "kv") have few sizes: the largest number of rows, and
1/4, 1/16, ... of it. So messages of similar length share buffers, and short messages use little
memory. Partial results are gradients, which are added, and outputs, which are merged by online
softmax. Results for a rank's own rows stay on the rank. Results for rows of other ranks are sent,
in messages that may contain only some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..comm import packing
from ..comm.packing import Message
from ..comm.transport import Endpoint
from ..kernels.online_softmax import merge_
from ..schedule.dry_run import buffer_rows
from ..schedule.tables import ALL, Chunk
from .rank_plan import RowPlace, Target, Tensors


class MessageKind:
    """Shapes and dtypes of the tensors in one kind of message.

    Message layouts and sizes of buffers are cached by number of rows.

    Args:
        rows: (shape of one row, dtype) of each tensor.
        longest: Number of rows of the longest message, or of the longest sum for rows of another
            rank.
    """

    def __init__(self, rows: Sequence[tuple[torch.Size, torch.dtype]], longest: int):
        self.rows, self.longest = rows, longest
        self._layouts: dict[int, packing.MessageLayout] = {}
        self._room_sizes: dict[tuple[int, torch.device, int], int] = {}

    def layout(self, rows: int) -> packing.MessageLayout:
        if rows not in self._layouts:
            shapes = [(torch.Size((rows, *shape)), dtype) for shape, dtype in self.rows]
            self._layouts[rows] = packing.layout_of(shapes)
        return self._layouts[rows]

    def room_size(self, rows: int, device: torch.device, least: int) -> int:
        """Return the size in bytes of a new buffer for a message of `rows` rows.

        Args:
            rows: Number of rows of the message.
            device: Device of the buffer.
            least: Minimum size in bytes on the CPU.
        """
        key = rows, device, least
        if key not in self._room_sizes:
            layout = self.layout(buffer_rows(rows, self.longest))
            self._room_sizes[key] = packing.room_size(layout, device, least)
        return self._room_sizes[key]


class Buffers:
    """Pool of message buffers, by kind of message (such as "kv").

    A message is the tensors of some rows that are sent together. `take` reuses buffers that were
    returned by `give`.
    """

    def __init__(self, device: torch.device, endpoint: Endpoint, kinds: Mapping[str, MessageKind]):
        self.device, self.endpoint, self.kinds = device, endpoint, kinds
        # kind -> bytes of the buffer -> rows of the message -> free messages
        self._free: dict[str, dict[int, dict[int, list[Message]]]] = {kind: {} for kind in kinds}
        self._free_beside: dict[str, dict[int, dict[int, list[Message]]]] = {k: {} for k in kinds}
        self._memory: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def beside(self, memory: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Return a context for work on another stream, in which a separate pool is used.

        Args:
            memory: Returns the context in which memory for buffers is allocated.
        """
        before, self._memory = self._memory, memory
        self._free, self._free_beside = self._free_beside, self._free
        try:
            yield
        finally:
            self._memory = before
            self._free, self._free_beside = self._free_beside, self._free

    def take(self, kind: str, rows: int) -> Message:
        """Return a message with this number of rows and undefined content."""
        kind_of_message, free = self.kinds[kind], self._free[kind]
        least = kind_of_message.room_size(rows, self.device, self.endpoint.room)
        same_size = free.get(least)
        if same_size and same_size.get(rows):  # the usual case: same layout as before
            return same_size[rows].pop()
        for size in sorted(size for size in free if size >= least):
            fitting = free[size]
            if fitting.get(rows):
                return fitting[rows].pop()
            reusable = next((messages for messages in fitting.values() if messages), None)
            if reusable is not None:
                buffer = reusable.pop().room
                assert buffer is not None
                return packing.carve(buffer, kind_of_message.layout(rows))
        with self._memory():
            buffer = torch.empty(least, dtype=torch.uint8, device=self.device)
        return packing.carve(buffer, kind_of_message.layout(rows))

    def separate(self, kind: str, rows: int) -> Message:
        """Allocate a message whose tensors are separate, for results that are never sent."""
        parts, device = self.kinds[kind].layout(rows).parts, self.device
        tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape, *_ in parts]
        return Message(None, tuple(tensors))

    def give(self, kind: str, message: Message) -> None:
        """Return the buffer of a message to the pool."""
        self.endpoint.released(message.tensors)
        if message.room is not None:  # without room, the message is not from `take`
            rows = message.tensors[0].size(0) if message.tensors else 0
            free = self._free[kind].setdefault(message.room.numel(), {})
            free.setdefault(rows, []).append(message)


class OpenSum(NamedTuple):
    """Tensors to which a kernel call adds results.

    Attributes:
        message: The message of the tensors.
        new: True if the content of the tensors is undefined. The call then writes all rows, which
            needs less memory traffic than clearing them and adding to them.
    """

    message: Message
    new: bool = False

    @property
    def tensors(self) -> Tensors:
        """The tensors of the message."""
        return self.message.tensors


@dataclass
class _RowTotals:
    """Sums of partial results (gradients or outputs) for rows of one rank.

    Attributes:
        message: The sums. It has no tensors as long as `write` is set.
        filled: Bit set of the rows that have a result (one bit per bundle: rows that the same ranks
            use).
        write: Function that writes the initial sums into a message on first use, or None.
    """

    message: Message
    filled: int = 0
    write: Callable[[Message], None] | None = None


class ResultAccumulator:
    """Sums of the partial results (gradients, outputs) of a pass on one rank.

    Args:
        buffers: Message buffers of the pass.
        wire: Family of partial results ("out", "dquery", "dkv") -> kind of message in which these
            results are sent.
    """

    def __init__(self, buffers: Buffers, wire: Mapping[str, str]):
        self._buffers, self._wire = buffers, wire
        self._totals: dict[Chunk, _RowTotals] = {}

    def begin(
        self, target: Target, sums: Tensors, write: Callable[..., None] | None = None
    ) -> bool:
        """Set the initial sums of a chunk, unless the chunk already has sums.

        Args:
            target: The chunk, as `target.total`.
            sums: Initial sums of all rows; empty with `write`.
            write: Function that writes the initial sums into a message on first use, or None.

        Returns:
            True if the initial sums were set. False if the chunk already has sums; they are kept.
        """
        if first := target.total not in self._totals:
            self._totals[target.total] = _RowTotals(Message(None, sums), target.total.rows, write)
        return first

    def open(self, target: Target, *, clear: bool = True) -> OpenSum:
        """Return tensors to which the caller adds results for the rows of `target`.

        If the rows are not consecutive, the tensors are a temporary buffer, which the caller must
        pass to `merge`.

        Args:
            target: The rows.
            clear: True if new tensors must contain the empty result. False if the caller writes all
                rows of new tensors (`OpenSum.new`).
        """
        place = target.place
        new = not clear and place.whole and target.total not in self._totals
        total = self._total(target, clear=not new)
        total.filled |= target.rows
        if place.whole:
            return OpenSum(total.message, new)
        if isinstance(place.at, slice):
            return OpenSum(Message(None, rows_at(total.message.tensors, place)))
        message = self._buffers.take(target.total.family, place.count)
        if clear:
            _clear(target.total.family, message)
        return OpenSum(message, not clear)

    def merge(self, target: Target, part: OpenSum) -> None:
        """Add the temporary buffer from `open` to the sums of `target`, and free the buffer."""
        _add_or_merge(self._total(target).message, target, part.message)
        self._buffers.give(target.total.family, part.message)

    def total_rows(self, target: Target) -> Tensors:
        """Return the sums of all rows of a chunk. Rows without a result are 0 (lse: -inf)."""
        return self._total(target).message.tensors

    def held(self) -> list[object]:
        """Return an object per sum; the memory of the sum is not freed while the object exists."""
        return list(self._totals.values())

    def receive(self, target: Target, message: Message) -> None:
        """Add a received message to the sums of `target`.

        If the message has all rows and no sum exists yet, the message becomes the sum.
        """
        family = target.total.family
        kind = self._wire[family]
        if target.place.whole and target.total not in self._totals and kind == family:
            self._totals[target.total] = _RowTotals(message, target.rows)
            return
        total = self._total(target)
        total.filled |= target.rows
        _add_or_merge(total.message, target, message)
        self._buffers.give(kind, message)

    def send(self, target: Target) -> Message:
        """Return a message with the sums of the rows of `target`, and reset or free these sums."""
        total, family = self._total(target), target.total.family
        kind = self._wire[family]
        total.filled &= ~target.rows
        if target.place.whole and kind == family:
            return self._totals.pop(target.total).message
        message = self._buffers.take(kind, target.place.count)
        rows = rows_at(total.message.tensors, target.place)
        for tensor, source in zip(message.tensors, rows, strict=True):
            tensor.copy_(source)
        if total.filled:
            _clear(family, total.message, target.place.at)
        else:
            self._buffers.give(family, self._totals.pop(target.total).message)
        return message

    def _total(self, target: Target, *, clear: bool = True) -> _RowTotals:
        """Return the sums of a chunk; make them if there are none.

        Args:
            target: The chunk, as `target.total`.
            clear: True to set new sums to the empty result; False to leave their content undefined.
        """
        total = self._totals.get(target.total)
        if total is None or total.write:
            # The output must not be a view: autograd forbids in-place changes of returned views.
            output = target.total[::2] == ("out", ALL)
            make = self._buffers.separate if output else self._buffers.take
            message = make(target.total.family, target.size)
            if total is not None and total.write:
                total.write(message)
            elif clear:
                _clear(target.total.family, message)
            total = self._totals[target.total] = _RowTotals(message, total.filled if total else 0)
        return total


def _add_or_merge(total: Message, target: Target, part: Message) -> None:
    """Add gradients to the rows of the target, or merge outputs into them by online softmax."""
    place = target.place
    rows = rows_at(total.tensors, place)
    if target.total.family == "out":
        merge_(*rows, *part.tensors)
    else:
        for sums, new in zip(rows, part.tensors, strict=True):
            sums += new
    if not isinstance(place.at, slice):
        for tensor, row in zip(total.tensors, rows, strict=True):
            tensor.index_copy_(0, place.at, row)


def rows_at(tensors: Tensors, place: RowPlace) -> Tensors:
    """Return the rows of `place` of each tensor: views for a slice, otherwise copies."""
    if place.whole:
        return tensors
    if isinstance(place.at, slice):
        return tuple(t[place.at] for t in tensors)
    return tuple(t.index_select(0, place.at) for t in tensors)


def _clear(family: str, message: Message, at: slice | torch.Tensor | None = None) -> None:
    """Set results to the empty result: 0, and -inf in lse.

    Args:
        family: "out" for outputs with lse, otherwise gradients.
        message: The results.
        at: Rows to set; None for all rows.
    """
    if at is None and family != "out" and message.flat is not None:
        message.flat.zero_()  # all tensors at once
        return
    for index, tensor in enumerate(message.tensors):
        empty = float("-inf") if family == "out" and index == 1 else 0.0
        if at is None:
            tensor.fill_(empty)
        else:
            tensor[at] = empty
