# SPDX-License-Identifier: Apache-2.0
"""The MLP half of transformer layers, and the norm behind the last, in tiles of rows.

Norm, MLP, bias-dropout-add and residual of a dense layer depend on one row each, so that all of
`TransformerLayer._forward_mlp` is what a tile runs, whatever modules the layer spec put there. The
gather of sequence parallelism is part of it, and is one tile long.

Of a layer with experts only the router's matrix product is rowwise; its decisions are about all
tokens of a micro-batch (auxiliary losses, z-loss, capacity, expert bias). So it takes three steps:
norm and the router's logits by tiles; routing of all logits, which are small; then norm, dispatch,
experts, combine and residual by tiles, each tile with its rows of what was routed. Both norms are
recomputed, and no tensor of the width of the hidden states is kept.

The final norm belongs to no layer, and torch's RMSNorm, where it is not fused, works through up to
15 tensors of the size of its input in backward. In tiles it is its input, its output and one tile.

Decides how many tiles, and which of them wait in host memory (`--burst-mlp-tiles`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from ....megatron.patching import PatchSet, given_to, instead, log
from ....recompute import tile_counts
from ..offload.tier import tier_of
from ..tiles import Fate, tiled

_TOLD = "MLP tiles"  # note: lines that were logged


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what runs MLPs in tiles, where a configuration asks for them."""
    names = ["hidden_states", "inference_context", "padding_mask"]
    around = functools.partial(_in_tiles, patches)
    patches.wrap(TransformerLayer, "_forward_mlp", names, around)


def _in_tiles(patches: PatchSet, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    given = given_to(original, (self, *args), kwargs)
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


def _tell(patches: PatchSet, burst: Any, count: int, hidden: torch.Tensor) -> None:
    """Log each number of tiles once."""
    line = (
        f"MLP tiles: {count} of {math.ceil(len(hidden) / count):,} rows (--burst-mlp-tiles "
        f"{burst.mlp_tiles}), computed again in backward or moved to the host"
    )
    logged = patches.notes.setdefault(_TOLD, set())
    if line not in logged:
        logged.add(line)
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


def forward_moe(
    layer: Any,
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    given: dict[str, Any],
    cut: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """What `forward(layer, hidden, **given)` returns, by tiles.

    layer: a `TransformerLayer` whose `mlp` is a `MoELayer`; forward: its own `_forward_mlp`;
    hidden [rows, batch, hidden]; given: its other arguments; cut: `tiled` with the tiles chosen.
    """
    moe, norm = layer.mlp, layer.pre_mlp_layernorm
    logits = cut(
        lambda tile: _logits(layer, tile),
        hidden,
        parameters=[*norm.parameters(), *moe.router.parameters()],
        fates=None,  # all computed again: little work, and wide tensors
    )
    probs, chosen = _route(layer, logits, given)

    def experts(tile: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        routed = probs.flatten(0, 1), chosen.flatten(0, 1)
        with instead(moe, "route", lambda *_, **__: routed):
            return forward(layer, tile)

    router = {id(p) for p in moe.router.parameters()}
    others = [p for p in moe.parameters() if id(p) not in router]
    return cut(experts, hidden, probs, chosen, parameters=[*norm.parameters(), *others])


def _logits(layer: Any, tile: torch.Tensor) -> torch.Tensor:
    """The router's logits [rows, batch, experts] of a tile of hidden states.

    The router is called as a module, whose hooks wait for its parameters (overlap-param-gather).
    """
    normed = layer._forward_pre_mlp_layernorm(tile)
    normed = normed[0] if isinstance(normed, tuple) else normed  # with the residual, where fused
    router = layer.mlp.router
    with instead(router, "routing", lambda logits, **_: (logits, None)):
        return router(normed)[0]


def _route(
    layer: Any, logits: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and chosen experts, each [rows, batch, experts], of all tokens together."""
    mask, samples, params = given.get("padding_mask"), None, given.get("packed_seq_params")
    rows, batch, experts = logits.shape
    if params is not None and hasattr(layer, "_maybe_unflatten_for_moe"):
        logits, mask, samples = layer._maybe_unflatten_for_moe(logits, mask, params)
    mask = None if mask is None else mask.transpose(0, 1).bool()
    routed = layer.mlp.router.routing(logits, padding_mask=mask)
    if samples is not None:  # [tokens of a sample, samples], and rows are sample by sample
        routed = (each.view(-1, samples, experts).transpose(0, 1) for each in routed)
    probs, chosen = (each.reshape(rows, batch, experts) for each in routed)
    return probs, chosen


_WIDTH = 8  # numbers of a tile's backward for each of its input: fp32, where not fused


def patch_final_norm(patches: PatchSet) -> None:
    """Add to a set of patches what runs final norms in tiles, where a configuration asks for it."""
    patches.wrap(TransformerBlock, "_build_layers", ["self"], _with_tiled_norm)


def _with_tiled_norm(original: Callable, self: Any) -> None:
    original(self)
    norm = getattr(self, "final_layernorm", None)
    burst = getattr(self.config, "burst", None)
    # A norm without parameters is an identity in place of one.
    if burst is None or burst.mlp_tiles == 1 or norm is None or not [*norm.parameters()]:
        return
    norm.forward = TiledNorm(norm, burst.mlp_tiles)


class TiledNorm:
    """Replaces `forward` of one norm, whose type and hooks stay."""

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
