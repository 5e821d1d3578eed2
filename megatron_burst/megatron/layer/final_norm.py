"""The norm behind the last layer in tiles of rows (`--burst-mlp-tiles`).

It belongs to no layer, so that neither the tiles of MLPs nor the chunks of attention reach it, and
torch's RMSNorm, where it is not fused, works through up to 15 tensors of the size of its input in
backward. In tiles it is its input, its output and one tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_burst.megatron.patching.compatibility import require_parameters
from megatron_burst.megatron.patching.registry import PatchSet
from megatron_burst.recompute import tile_counts
from megatron_burst.recompute.tiles import tiled

_WIDTH = 8  # numbers of a tile's backward for each of its input: fp32, where not fused


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what runs final norms in tiles, where a configuration asks for it."""
    original = TransformerBlock._build_layers
    require_parameters(original, ["self"], "TransformerBlock._build_layers")
    patches.replace(TransformerBlock, "_build_layers", _with_tiled_norm(original))


def _with_tiled_norm(original: Callable) -> Callable:
    @functools.wraps(original)
    def _build_layers(self: Any) -> None:
        original(self)
        norm = getattr(self, "final_layernorm", None)
        burst = getattr(self.config, "burst", None)
        # A norm without parameters is an identity in place of one.
        if burst is None or burst.mlp_tiles == 1 or norm is None or not [*norm.parameters()]:
            return
        norm.forward = TiledNorm(norm, burst.mlp_tiles)

    return _build_layers


class TiledNorm:
    """Replaces ``forward`` of one norm, whose type and hooks stay."""

    def __init__(self, norm: torch.nn.Module, tiles: Any) -> None:
        self.norm, self.tiles = norm, tiles

    def __call__(self, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        """What the norm makes of hidden states [rows, ..., hidden]."""
        whole = functools.partial(type(self.norm).forward, self.norm)
        count = self._count(hidden)
        if count == 1 or others or named:
            return whole(hidden, *others, **named)
        return tiled(whole, hidden, parameters=tuple(self.norm.parameters()), tiles=count)

    def _count(self, hidden: torch.Tensor) -> int:
        rows, width = hidden.shape[0], hidden.shape[-1]
        if self.tiles != "auto":
            return max(1, min(self.tiles, rows))
        return tile_counts.automatic(hidden.numel() // width, width, _WIDTH * width)
