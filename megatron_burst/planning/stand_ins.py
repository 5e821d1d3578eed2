# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for tensors of which only the shape is known yet; they take no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorShapes:
    """Shapes of q, k and v on one rank: arguments of `mb.prepare`, in place of tensors."""

    shape: Sequence[int] | None
    kv_heads: int | None
    value_width: int | None
    dtype: torch.dtype | None
    device: torch.device | str | None


def of_shape(
    tensors: Sequence[Any], shapes: TensorShapes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v of one rank, of these shapes.

    Raises:
        ValueError: There are also `tensors`, or no shape.
    """
    shape, kv_heads, value_width = shapes.shape, shapes.kv_heads, shapes.value_width
    if any(each is not None for each in tensors):
        raise ValueError("give either q, k, v or shape with kv_heads, value_width, dtype, device")
    if shape is None:
        raise ValueError("give q, k and v, or shape=(rows, batch, heads, width)")
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else ()
    if len(sizes) != 4 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"shape must be that of q on this rank, (rows, batch, heads, width), got {shape!r}"
        )
    for name, value in (("kv_heads", kv_heads), ("value_width", value_width)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    rows, heads, width = sizes[:2], sizes[2], sizes[3]
    keys = heads if kv_heads is None else kv_heads
    values = width if value_width is None else value_width
    one = torch.empty(1, dtype=shapes.dtype, device=shapes.device)
    q, k, v = (one.expand(*rows, *e) for e in ((heads, width), (keys, width), (keys, values)))
    return q, k, v


def rows_like(x: torch.Tensor, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[s, b, *sizes] for the rows of x [s, b, ...]; dtype: that of x, unless another is given."""
    return x.new_empty((), dtype=dtype).expand(*x.shape[:2], *sizes)
