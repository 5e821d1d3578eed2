"""The MLP half of a transformer layer in tiles of rows (`--burst-mlp-tiles`).

Norm, MLP, bias-dropout-add and residual of a dense layer depend on one row each, so that all of
`TransformerLayer._forward_mlp` is what a tile runs, whatever modules the layer spec put there. The
gather of sequence parallelism is part of it, and is one tile long. Layers with experts are
`moe_tiles`'s. Decides how many tiles, and which of them wait in host memory.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_burst.megatron.layer.moe_tiles import forward_moe
from megatron_burst.megatron.log import log
from megatron_burst.megatron.offload.tier import tier_of
from megatron_burst.megatron.patching.compatibility import require_parameters
from megatron_burst.megatron.patching.registry import PatchSet
from megatron_burst.recompute import tile_counts
from megatron_burst.recompute.tiles import Fate, tiled

_TOLD = "MLP tiles"  # note: lines that were logged


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what runs MLPs in tiles, where a configuration asks for them."""
    original = TransformerLayer._forward_mlp
    names = ["hidden_states", "inference_context", "padding_mask"]
    require_parameters(original, names, "TransformerLayer._forward_mlp")
    patches.replace(TransformerLayer, "_forward_mlp", _in_tiles(original, patches))


def _in_tiles(original: Callable, patches: PatchSet) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _forward_mlp(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        hidden = given.pop("hidden_states")
        inference = given.get("inference_context") is not None
        count = 1 if inference else tiles_of(self, hidden)
        if count == 1:
            return original(self, *args, **kwargs)
        _tell(patches, self.config.burst, count, hidden)
        tier = tier_of(patches)
        share = tier.going.fraction if tier is not None and tier.going is not None else 0.0
        cut = functools.partial(tiled, tiles=count, fates=fates_of(count, share), host=tier)
        del given["self"]
        if self.is_moe_layer:
            return forward_moe(self, original, hidden, given, cut)
        return cut(
            lambda tile: original(self, tile, **given),
            hidden,
            parameters=[*self.pre_mlp_layernorm.parameters(), *self.mlp.parameters()],
        )

    return _forward_mlp


def _tell(patches: PatchSet, burst: Any, count: int, hidden: torch.Tensor) -> None:
    """Log each number of tiles once."""
    line = (
        f"MLP tiles: {count} of {math.ceil(len(hidden) / count):,} rows (--burst-mlp-tiles "
        f"{burst.mlp_tiles}), computed again in backward or moved to the host"
    )
    told = patches.notes.setdefault(_TOLD, set())
    if line not in told:
        told.add(line)
        log(line)


def tiles_of(layer: Any, hidden: torch.Tensor) -> int:
    """Into how many tiles a layer cuts hidden states [rows, batch, hidden].

    The same on all ranks that exchange tokens or partial results, as they run tile by tile
    together. Raises ValueError for a number above the rows of a layer whose experts are on several
    ranks: these need not have equally many rows, and Megatron's router takes no empty tile.
    """
    burst, config = getattr(layer.config, "burst", None), layer.config
    if burst is None or burst.mlp_tiles == 1 or isinstance(layer.mlp, IdentityOp):
        return 1
    rows, batch = hidden.shape[:2]
    if burst.mlp_tiles == "auto":
        width = _width(config, layer.is_moe_layer)
        return tile_counts.automatic(rows * batch, config.hidden_size, width)
    spread = layer.is_moe_layer and config.expert_model_parallel_size > 1
    if spread and rows < burst.mlp_tiles:
        raise ValueError(
            f"--burst-mlp-tiles {burst.mlp_tiles} is more than the {rows} rows that this rank has "
            "of a micro-batch, and expert-parallel ranks need equally many tiles: take fewer"
        )
    return min(burst.mlp_tiles, max(rows, 1))


def _width(config: Any, moe: bool) -> int:
    """Elements that a tile's backward holds per token of this rank."""
    gated, hidden = bool(config.gated_linear_unit), config.hidden_size
    tp = config.tensor_model_parallel_size
    if not moe:
        return tile_counts.dense_width(
            hidden, config.ffn_hidden_size, gated=gated, tp=tp, gathered=config.sequence_parallel
        )
    gathers = config.moe_token_dispatcher_type == "allgather"
    return tile_counts.moe_width(
        hidden,
        config.moe_ffn_hidden_size or config.ffn_hidden_size,
        topk=config.moe_router_topk,
        shared=config.moe_shared_expert_intermediate_size or 0,
        gated=gated,
        gathered=tp * config.expert_model_parallel_size if gathers else 1,
    )


def fates_of(count: int, share: float) -> tuple[Fate, ...]:
    """What becomes of each of `count` tiles, of which `share` (0 to 1) is moved to the host.

    The first ones are moved: their transfer overlaps with the others, which are computed again.
    """
    moved = math.ceil(share * count)
    return ("move",) * moved + ("recompute",) * (count - moved)
