"""How many tokens make a tile: as many as a budget for logits allows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..kernels.online_softmax import accumulation_dtype
from ..units import LOGITS_TILE, byte_size
from .products import logits_dtype
from .split import Split


class Tiling(NamedTuple):
    """rows: of this rank's slice in a tile; tiles; row_bytes: a tile's logits per such row."""

    rows: int
    tiles: int
    row_bytes: int


def tiling(hidden: torch.Tensor, weight: torch.Tensor, split: Split, tile: int | None) -> Tiling:
    """Tiles of hidden [..., d] that are as even as they get within `tile` bytes of logits."""
    count = hidden.shape[:-1].numel()
    budget = tile if tile is not None else LOGITS_TILE.get(hidden.device.type, LOGITS_TILE["cuda"])
    row_bytes = split.parts * len(weight) * logits_dtype(hidden).itemsize
    tiles = max(1, -(-count // max(1, budget // row_bytes)))
    return Tiling(max(1, -(-count // tiles)), tiles, row_bytes)


def describe(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    tile: int | None = None,
    mode: str = "single_pass",
) -> str:
    """What `linear_cross_entropy` will do with these arguments, on one line."""
    split = Split(tp_group, sequence_parallel and tp_group is not None)
    rows, tiles, row_bytes = tiling(hidden, weight, split, tile)
    count = hidden.shape[:-1].numel()
    gradients = hidden.nbytes + weight.numel() * accumulation_dtype(weight.dtype).itemsize
    kept = byte_size(gradients) if mode == "single_pass" else "a number per token"
    return " | ".join(
        [
            f"LM head loss: {mode}",
            f"{count * split.parts} tokens in {tiles} tiles of {rows * split.parts}",
            f"{byte_size(rows * row_bytes)} of logits at a time instead of "
            f"{byte_size(count * row_bytes)}",
            f"kept for backward {kept}",
        ]
    )
