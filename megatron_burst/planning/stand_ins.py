# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for tensors of which only the shape is known yet; they take no memory."""

from __future__ import annotations

from typing import Any

import torch


def of_shape(
    given: tuple[Any, Any, Any],
    shape: Any,
    *,
    kv_heads: int | None,
    value_width: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Any, Any, Any]:
    """q, k, v of one rank; shape: of q on it. given: q, k, v of the caller.

    Raises ValueError unless the caller gave a shape, and no tensors.
    """
    if any(each is not None for each in given):
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
    one = torch.empty(1, dtype=dtype, device=device)
    q, k, v = (one.expand(*rows, *e) for e in ((heads, width), (keys, width), (keys, values)))
    return q, k, v


def rows_like(x: torch.Tensor, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[s, b, *sizes] for the rows of x [s, b, ...]; dtype: that of x, unless another is given."""
    return x.new_empty((), dtype=dtype).expand(*x.shape[:2], *sizes)
