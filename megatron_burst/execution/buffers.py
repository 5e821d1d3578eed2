"""Buffers of one rank during a pass: what arrives, what leaves, partial results.

Every buffer of a kind has room for its longest message, and is used for shorter ones as well, so
that a pass holds few of them however messages shrink.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ..comm import packing
from ..comm.packing import Message
from ..comm.transport import Endpoint

RowShapes = Sequence[tuple[torch.Size, torch.dtype]]  # of each tensor: one row, dtype


class Buffers:
    """Messages by kind, reused once nothing holds them."""

    def __init__(self, device: torch.device, endpoint: Endpoint):
        self.device, self.endpoint = device, endpoint
        self._rows: dict[str, RowShapes] = {}
        self._longest: dict[str, int] = {}
        self._free: dict[str, list[torch.Tensor]] = defaultdict(list)

    def introduce(self, kind: str, rows: RowShapes, longest: int) -> None:
        """Messages of this kind have such rows, and at most `longest` of them."""
        self._rows[kind], self._longest[kind] = rows, longest

    def take(self, kind: str, rows: int) -> Message:
        """A message of so many rows; what is in it is undefined."""
        room = self._free[kind].pop() if self._free[kind] else self._new(kind)
        return packing.carve(room, self._shapes(kind, rows))

    def apart(self, kind: str, rows: int) -> Message:
        """Tensors of their own, which never travel, of as many rows."""
        shapes = self._shapes(kind, rows)
        tensors = (torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
        return Message(None, tuple(tensors))

    def give(self, kind: str, message: Message) -> None:
        """Nobody reads this message again."""
        self.endpoint.released(message.tensors)
        assert message.room is not None
        self._free[kind].append(message.room)

    def _new(self, kind: str) -> torch.Tensor:
        shapes = self._shapes(kind, self._longest[kind])
        return packing.room(shapes, self.device, self.endpoint.room)

    def _shapes(self, kind: str, rows: int) -> packing.Shapes:
        return [(torch.Size((rows, *shape)), dtype) for shape, dtype in self._rows[kind]]
