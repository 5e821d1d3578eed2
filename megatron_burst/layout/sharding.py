# SPDX-License-Identifier: Apache-2.0
"""Cuts a tensor into the shards of a layout, and joins shards again.

For inputs and results: attention works on shards and never calls this. Decides how numbers of rows
reach a device: not at all where a few slices say the same, else without the host waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .layouts import Layout

SLICES = 8  # of so many spans at most, slices are joined: no numbers of rows are made and sent


def shard(x: torch.Tensor, layout: Layout, rank: int, *, dim: int = 0) -> torch.Tensor:
    """The rows of `x` that `rank` holds, in shard order.

    x: the whole sequence, S rows along `dim`; any dtype and device. Returns a copy with S / cp_size
    rows along `dim`. Raises ValueError where S does not fit the layout.
    """
    _check(layout)
    _check_tensor("x", x, dim)
    spans = layout.spans(rank, x.shape[dim])
    if len(spans) > SLICES:
        return x.index_select(dim, to_device(layout.positions(rank, x.shape[dim]), x.device))
    before = (slice(None),) * (dim % x.dim())
    parts = [x[(*before, slice(start, start + stride * n, stride))] for start, stride, n in spans]
    return torch.cat(parts, dim).contiguous()  # cat may keep an order of strides of its inputs


def unshard(parts: Sequence[torch.Tensor], layout: Layout, *, dim: int = 0) -> torch.Tensor:
    """The whole sequence from the shards of ranks 0, 1, ..., joined along `dim`: undoes `shard`.

    Raises ValueError where there are not as many parts, or rows in them, as the layout says.
    """
    _check(layout)
    if len(parts) != layout.cp_size:
        raise ValueError(f"parts: the layout has {layout.cp_size} ranks, got {len(parts)} parts")
    for part in parts:
        _check_tensor("parts", part, dim)
    seq_len = sum(part.shape[dim] for part in parts)
    order: list[np.ndarray] = [layout.positions(rank, seq_len) for rank in range(layout.cp_size)]
    wanted, rows = [len(p) for p in order], [part.shape[dim] for part in parts]
    if rows != wanted:
        raise ValueError(f"parts: layout {layout.name} gives the ranks rows {wanted}, got {rows}")
    index = to_device(np.argsort(np.concatenate(order)), parts[0].device)
    return torch.cat(list(parts), dim=dim).index_select(dim, index)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`; on the CPU the two share memory.

    The host waits for no GPU: it copies into pinned memory, which the GPU reads in its own time.
    """
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _check(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: give one that mb.layout.make made, got {layout!r}")


def _check_tensor(name: str, x: object, dim: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, or tensors, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: {name} has {x.dim()} dimensions, got dim={dim}")
