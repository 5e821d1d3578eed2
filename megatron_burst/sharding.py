"""Cutting a tensor into the shards of a layout, and putting shards together again.

For data on the way in and results on the way out; attention itself never calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Layout


def shard(x: torch.Tensor, layout: Layout, rank: int, *, dim: int = 0) -> torch.Tensor:
    """The rows of `x` along `dim` (the whole sequence) that `rank` holds, in shard order."""
    index = torch.from_numpy(layout.positions(rank, x.shape[dim])).to(x.device)
    return x.index_select(dim, index)


def unshard(parts: Sequence[torch.Tensor], layout: Layout, *, dim: int = 0) -> torch.Tensor:
    """The whole sequence again, from the shards of ranks 0, 1, ... along `dim`."""
    if len(parts) != layout.cp_size:
        raise ValueError(f"parts: the layout has {layout.cp_size} ranks, got {len(parts)} parts")
    seq_len = sum(part.shape[dim] for part in parts)
    order = [layout.positions(rank, seq_len) for rank in range(layout.cp_size)]
    index = torch.cat([torch.from_numpy(p) for p in order]).argsort().to(parts[0].device)
    return torch.cat(list(parts), dim=dim).index_select(dim, index)
