# SPDX-License-Identifier: Apache-2.0
"""Functions that cut a tensor into the shards of a layout, and join shards.

Callers use these functions for inputs and results; attention itself works on shards and does not
call them. A shard with few spans is cut by slicing. For a shard with more than `SLICES` spans, row
numbers are copied to the device without blocking the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .layouts import Layout

SLICES = 8  # largest number of spans of a shard that is cut by slicing


def shard(x: torch.Tensor, layout: Layout, rank: int, *, dim: int = 0) -> torch.Tensor:
    """Return the rows of a tensor that a rank holds under a layout, in shard order.

    Args:
        x: The whole sequence, S rows along `dim`; any dtype and device.
        layout: The layout.
        rank: The rank.
        dim: Dimension of the sequence.

    Returns:
        A copy with S / cp_size rows along `dim`.

    Raises:
        ValueError: An argument is invalid, or the layout cannot split S rows.

    Example:
        >>> layout = mb.layout.make("zigzag", cp_size=2)
        >>> mb.shard(torch.arange(8), layout, rank=0)
        tensor([0, 1, 6, 7])
    """
    _check(layout)
    _check_tensor("x", x, dim)
    spans = layout.spans(rank, x.shape[dim])
    if len(spans) > SLICES:
        return x.index_select(dim, to_device(layout.positions(rank, x.shape[dim]), x.device))
    before = (slice(None),) * (dim % x.dim())
    parts = [
        x[(*before, slice(start, start + stride * length, stride))]
        for start, stride, length in spans
    ]
    return torch.cat(parts, dim).contiguous()  # cat may keep the stride order of its inputs


def unshard(parts: Sequence[torch.Tensor], layout: Layout, *, dim: int = 0) -> torch.Tensor:
    """Return the whole sequence from the shards of all ranks: the inverse of `shard`.

    Args:
        parts: Shards of ranks 0, 1, ...
        layout: The layout.
        dim: Dimension of the sequence.

    Raises:
        ValueError: An argument is invalid. Or the number of parts, or the number of rows of a part,
            does not match the layout.

    Example:
        >>> layout = mb.layout.make("zigzag", cp_size=2)
        >>> x = torch.arange(8)
        >>> mb.unshard([mb.shard(x, layout, rank) for rank in range(2)], layout)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    _check(layout)
    if len(parts) != layout.cp_size:
        raise ValueError(
            f"parts must have one part for each of the {layout.cp_size} ranks of the layout, got "
            f"{len(parts)} parts"
        )
    for i, part in enumerate(parts):
        _check_tensor(f"parts[{i}]", part, dim)
    seq_len = sum(part.shape[dim] for part in parts)
    order: list[np.ndarray] = [layout.positions(rank, seq_len) for rank in range(layout.cp_size)]
    expected, rows = [len(positions) for positions in order], [part.shape[dim] for part in parts]
    if rows != expected:
        raise ValueError(f"parts: layout {layout.name} needs {expected} rows, got {rows}")
    index = to_device(np.argsort(np.concatenate(order)), parts[0].device)
    return torch.cat(list(parts), dim=dim).index_select(dim, index)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` as a tensor on `device`; on the CPU, the tensor shares the array's memory.

    For a GPU, the array is copied into pinned memory, and the host does not wait for the transfer.
    """
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _check(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be made by mb.layout.make, got {layout!r}")


def _check_tensor(name: str, x: object, dim: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: {name} has {x.dim()} dimensions, got dim={dim}")
