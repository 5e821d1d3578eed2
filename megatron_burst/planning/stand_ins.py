# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for tensors, for plans that are made before tensors exist.

A stand-in has the shape, dtype and device of a tensor, but only one element of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorShapes:
    """Shapes of q, k and v on one rank: arguments of `mb.prepare` that replace tensors.

    Attributes:
        shape: Shape of q, (s, b, h, d).
        kv_heads: Number of key/value heads; None for h.
        value_width: Width of v; None for d.
        key_rows: Number of rows of k and v; None for s.
        dtype: Data type; None for torch's default.
        device: Device; None for torch's default.
    """

    shape: Sequence[int] | None
    kv_heads: int | None
    value_width: int | None
    key_rows: int | None
    dtype: torch.dtype | None
    device: torch.device | str | None


def of_shape(
    tensors: Sequence[Any], shapes: TensorShapes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return stand-ins for q, k and v with these shapes, each a view of one element.

    Args:
        tensors: q, k and v of the caller; all must be None.
        shapes: The shapes.

    Raises:
        ValueError: A tensor is not None, or a shape is missing or invalid.
    """
    shape, kv_heads, value_width = shapes.shape, shapes.kv_heads, shapes.value_width
    if any(tensor is not None for tensor in tensors):
        raise ValueError(
            "pass either q, k, v, or shape with kv_heads, value_width, key_rows, dtype, device"
        )
    if shape is None:
        raise ValueError("pass q, k and v, or shape=(rows, batch, heads, width)")
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else ()
    if len(sizes) != 4 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"shape of q on this rank must be (rows, batch, heads, width), got {shape!r}"
        )
    for name, value in (("kv_heads", kv_heads), ("value_width", value_width)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    key_rows = sizes[0] if shapes.key_rows is None else shapes.key_rows
    if type(key_rows) is not int or key_rows < 0:
        raise ValueError(f"key_rows must be an integer of at least 0, got {key_rows!r}")
    rows, batch, heads, width = sizes
    keys = heads if kv_heads is None else kv_heads
    values = width if value_width is None else value_width
    element = torch.empty(1, dtype=shapes.dtype, device=shapes.device)
    q, k, v = (
        element.expand(length, batch, *sizes_of)
        for length, *sizes_of in (
            (rows, heads, width), (key_rows, keys, width), (key_rows, keys, values)
        )
    )  # fmt: skip
    return q, k, v


def rows_like(x: torch.Tensor, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a stand-in [s, b, *sizes] on the device of x, a view of one element.

    Args:
        x: Tensor [s, b, ...], from which s and b are taken.
        *sizes: Sizes of the other dimensions.
        dtype: Data type. Default: the dtype of x.
    """
    return x.new_empty((), dtype=dtype).expand(*x.shape[:2], *sizes)
