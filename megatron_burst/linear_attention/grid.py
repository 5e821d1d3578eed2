"""Chunks of equal length that no piece shares: how rows of a rank are gathered into them.

A chunk that a piece does not fill ends in rows of zeros. Chunks are ordered by their number within
their piece, and pieces by their length, longest first: so that the pieces that have a chunk of
number c are the first of those that have one of number c - 1, and one loop over numbers takes all
pieces along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.autograd import first_order_only
from ..layout.sharding import to_device


class Grid:
    """spans: (first row, rows) of each piece; rows: of the rank; size: of a chunk.

    active: how many pieces have a chunk of each number. order: the pieces, longest first.
    """

    def __init__(
        self, spans: Sequence[tuple[int, int]], rows: int, size: int, device: torch.device
    ):
        self.rows, self.size, self.device = rows, size, device
        chunks = np.array([-(-length // size) for _, length in spans], dtype=np.int64)
        self.order = np.argsort(-chunks, kind="stable")
        self.pieces = len(spans)
        longest = int(chunks.max(initial=0))
        self.active = [int((chunks > number).sum()) for number in range(longest)]
        self.chunks = sum(self.active)
        shortest = min((length for _, length in spans), default=0)
        self._even = shortest > 0 and shortest % size == 0 and self.pieces * shortest == rows
        if not self._even:
            self._place(spans)

    def _place(self, spans: Sequence[tuple[int, int]]) -> None:
        """Which row stands where."""
        firsts = np.cumsum([0, *self.active])  # the first piece's chunk of each number
        rank_of = np.argsort(self.order)
        source, target = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for piece, (start, length) in enumerate(spans):
            at = np.arange(length)
            source.append(start + at)
            target.append((firsts[at // self.size] + rank_of[piece]) * self.size + at % self.size)
        self._source = to_device(np.concatenate(source), self.device)
        self._target = to_device(np.concatenate(target), self.device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [chunks, size, ...]."""
        if self._even:
            return x.unflatten(0, (self.pieces, -1, self.size)).transpose(0, 1).flatten(0, 1)
        moved = _Moved.apply(x, self._source, self._target, self.chunks * self.size)
        return moved.unflatten(0, (self.chunks, self.size))

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """[chunks, size, ...] -> [rows, ...]; rows of no piece are zero."""
        if self._even:
            return y.unflatten(0, (-1, self.pieces)).transpose(0, 1).flatten(0, 2)
        return _Moved.apply(y.flatten(0, 1), self._target, self._source, self.rows)

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        """[pieces, ...] in the order of the pieces -> longest first."""
        return self._picked(x, self.order)

    def unsorted(self, x: torch.Tensor) -> torch.Tensor:
        """[pieces, ...] longest first -> in the order of the pieces."""
        return self._picked(x, np.argsort(self.order))

    def _picked(self, x: torch.Tensor, order: np.ndarray) -> torch.Tensor:
        if np.array_equal(order, np.arange(self.pieces)):
            return x
        return x.index_select(0, to_device(order, self.device))


class _Moved(torch.autograd.Function):
    """Rows source of x at rows target of a tensor of `size` rows, zero elsewhere.

    No row comes twice, so that the gradient is moved back and nothing is added up.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int
    ) -> torch.Tensor:
        ctx.save_for_backward(source, target)
        ctx.size = x.shape[0]
        return _moved(x, source, target, size)

    @staticmethod
    @first_order_only("linear attention")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, target = ctx.saved_tensors
        return _moved(gradient, target, source, ctx.size), None, None, None


def _moved(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int) -> torch.Tensor:
    result = x.new_zeros((size, *x.shape[1:]))
    return result.index_copy_(0, target, x.index_select(0, source))
