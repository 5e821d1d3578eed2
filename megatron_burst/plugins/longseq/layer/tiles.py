# SPDX-License-Identifier: Apache-2.0
"""MLP half of transformer layers (norm to residual), and the final norm, in tiles of rows.

Norm, MLP, bias-dropout-add and residual of a dense layer treat rows independently. So a tile runs
all of `TransformerLayer._forward_mlp`, with any modules of the layer spec. `_forward_mlp` includes
the all-gather of sequence parallelism, which then gathers one tile.

In a layer with experts, only the matrix product of the router is row-wise. The router's decisions
depend on all tokens of a micro-batch (auxiliary losses, z-loss, capacity, expert bias). So the
layer runs in three steps. In the first step, norm and router logits are computed in tiles. In the
second, all logits, which are small, are routed together. In the third, norm, dispatch, experts,
combine and residual run in tiles, each with its rows of the routing result. The norm runs in the
first and in the third step, so that no tensor of the width of the hidden states is kept between
steps.

The final norm belongs to no layer. The backward of torch's RMSNorm, if it is not fused, allocates
up to 15 tensors of the size of its input. If the norm runs in tiles, only its input, its output and
the tensors of one tile exist.

This module decides the number of tiles and which tiles are moved to host memory
(`--burst-mlp-tiles`).
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

from ....megatron.patching import PatchSet, given_to, instead, log_once
from ....megatron.selection import burst_of
from ....recompute import tile_counts
from ..offload.tier import tier_of
from ..tiles import Fate, tiled


def patch(patches: PatchSet) -> None:
    """Add the patch that runs MLPs in tiles if a configuration requires it."""
    names = ["hidden_states", "inference_context", "padding_mask"]
    wrapper = functools.partial(_in_tiles, patches)
    patches.wrap(TransformerLayer, "_forward_mlp", names, wrapper)


def _in_tiles(patches: PatchSet, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = given_to(original, (self, *args), kwargs)
    hidden = arguments.pop("hidden_states")
    inference = arguments.get("inference_context") is not None
    count = 1 if inference else tiles_of(self, hidden)
    if count == 1:
        return original(self, *args, **kwargs)
    _log_count(patches, self.config.burst, count, hidden)
    tier = tier_of(patches)
    running = tier.running if tier is not None else None
    share = running.fraction if running is not None else 0.0
    run_tiled = functools.partial(tiled, tiles=count, fates=fates_of(count, share), host=tier)
    del arguments["self"]
    if self.is_moe_layer:
        return forward_moe(self, original, hidden, arguments, run_tiled)
    return run_tiled(
        lambda tile: original(self, tile, **arguments),
        hidden,
        parameters=[*self.pre_mlp_layernorm.parameters(), *self.mlp.parameters()],
    )


def _log_count(patches: PatchSet, burst: Any, count: int, hidden: torch.Tensor) -> None:
    line = (
        f"MLP tiles: {count} tiles of {math.ceil(len(hidden) / count):,} rows (--burst-mlp-tiles "
        f"{burst.mlp_tiles}), recomputed in backward or moved to the host"
    )
    log_once(patches.run, line)


def tiles_of(layer: Any, hidden: torch.Tensor) -> int:
    """Return the number of tiles into which a layer cuts hidden states [rows, batch, hidden].

    The number is the same on all ranks that exchange tokens or partial results, because these
    ranks run the tiles together.

    Raises:
        ValueError: The experts are on several ranks and this rank has fewer rows than tiles. Ranks
            may have different numbers of rows, and Megatron's router does not accept empty tiles.
    """
    burst, config = burst_of(layer.config), layer.config
    if burst is None or burst.mlp_tiles == 1 or isinstance(layer.mlp, IdentityOp):
        return 1
    rows, batch = hidden.shape[:2]
    if burst.mlp_tiles == "auto":
        width = _width(config, layer.is_moe_layer)
        return tile_counts.automatic(rows * batch, config.hidden_size, width)
    spread = layer.is_moe_layer and config.expert_model_parallel_size > 1
    if spread and rows < burst.mlp_tiles:
        raise ValueError(
            f"--burst-mlp-tiles {burst.mlp_tiles} is more than this rank's {rows} rows of the "
            "micro-batch, and expert-parallel ranks need the same number of tiles; use a smaller "
            "number"
        )
    return min(burst.mlp_tiles, max(rows, 1))


def _width(config: Any, moe: bool) -> int:
    """Return the number of elements per token that backward of an MLP allocates on this rank.

    Args:
        config: Megatron's configuration.
        moe: Whether the MLP has experts.
    """
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
    """Return the fate of each tile: "move" (saved tensors are moved to the host) or "recompute".

    A `share` (0 to 1) of the tiles is moved. These are the first tiles, so that their copies
    overlap with the other tiles.
    """
    moved = math.ceil(share * count)
    return ("move",) * moved + ("recompute",) * (count - moved)


def forward_moe(
    layer: Any,
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    arguments: dict[str, Any],
    run_tiled: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Run `forward(layer, hidden, **arguments)` in tiles, for a layer with experts.

    Args:
        layer: A `TransformerLayer` whose `mlp` is a `MoELayer`.
        forward: The layer's own `_forward_mlp`.
        hidden: Hidden states [rows, batch, hidden].
        arguments: The other arguments of `forward`.
        run_tiled: The function `tiled`, with the number of tiles and their fates already set.
    """
    moe, norm = layer.mlp, layer.pre_mlp_layernorm
    logits = run_tiled(
        lambda tile: _logits(layer, tile),
        hidden,
        parameters=[*norm.parameters(), *moe.router.parameters()],
        fates=None,  # recompute all tiles: little work, and wide tensors
    )
    probs, chosen = _route(layer, logits, arguments)

    def experts(tile: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        routed = probs.flatten(0, 1), chosen.flatten(0, 1)
        with instead(moe, "route", lambda *_, **__: routed):
            return forward(layer, tile)

    router = {id(p) for p in moe.router.parameters()}
    expert_parameters = [p for p in moe.parameters() if id(p) not in router]
    parameters = [*norm.parameters(), *expert_parameters]
    return run_tiled(experts, hidden, probs, chosen, parameters=parameters)


def _logits(layer: Any, tile: torch.Tensor) -> torch.Tensor:
    """Return the router's logits [rows, batch, experts] for a tile of hidden states.

    The router is called as a module, because its hooks wait for parameters that are still being
    gathered (overlap-param-gather).
    """
    normed = layer._forward_pre_mlp_layernorm(tile)
    normed = normed[0] if isinstance(normed, tuple) else normed  # a fused norm adds the residual
    router = layer.mlp.router
    with instead(router, "routing", lambda logits, **_: (logits, None)):
        return router(normed)[0]


def _route(
    layer: Any, logits: torch.Tensor, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route all tokens together: return their probabilities and their chosen experts.

    Args:
        layer: A `TransformerLayer` whose `mlp` is a `MoELayer`.
        logits: Logits of the router [rows, batch, experts].
        arguments: Arguments of the layer's `_forward_mlp` by name.

    Returns:
        Probabilities and a mask of chosen experts, [rows, batch, experts] each.
    """
    mask, samples = arguments.get("padding_mask"), None
    params = arguments.get("packed_seq_params")
    rows, batch, experts = logits.shape
    if params is not None and hasattr(layer, "_maybe_unflatten_for_moe"):
        logits, mask, samples = layer._maybe_unflatten_for_moe(logits, mask, params)
    mask = None if mask is None else mask.transpose(0, 1).bool()
    routed = layer.mlp.router.routing(logits, padding_mask=mask)
    if samples is not None:  # from [tokens of a sample, samples] to rows sample by sample
        routed = (x.view(-1, samples, experts).transpose(0, 1) for x in routed)
    probs, chosen = (x.reshape(rows, batch, experts) for x in routed)
    return probs, chosen


# Elements that a tile's backward allocates per input element; an unfused norm computes in fp32.
_WIDTH = 8


def patch_final_norm(patches: PatchSet) -> None:
    """Add the patch that runs final norms in tiles if a configuration requires it."""
    patches.wrap(TransformerBlock, "_build_layers", ["self"], _with_tiled_norm)


def _with_tiled_norm(original: Callable, self: Any) -> None:
    original(self)
    norm = getattr(self, "final_layernorm", None)
    burst = burst_of(self.config)
    # Megatron replaces an absent norm by an identity, which has no parameters.
    if burst is None or burst.mlp_tiles == 1 or norm is None or not [*norm.parameters()]:
        return
    norm.forward = TiledNorm(norm, burst.mlp_tiles)


class TiledNorm:
    """Replacement for the `forward` of a norm module, which runs the module in tiles of rows.

    The type and the hooks of the module do not change.
    """

    def __init__(self, norm: torch.nn.Module, tiles: Any) -> None:
        self.norm, self.tiles = norm, tiles

    def __call__(self, hidden: torch.Tensor, *args: Any, **named: Any) -> Any:
        """Apply the norm to hidden states [rows, ..., hidden]."""
        forward = functools.partial(type(self.norm).forward, self.norm)
        count = self._count(hidden)
        if count == 1 or args or named:
            return forward(hidden, *args, **named)
        return tiled(forward, hidden, parameters=tuple(self.norm.parameters()), tiles=count)

    def _count(self, hidden: torch.Tensor) -> int:
        rows, width = hidden.shape[0], hidden.shape[-1]
        if self.tiles != "auto":
            return max(1, min(self.tiles, rows))
        return tile_counts.automatic(hidden.numel() // width, width, _WIDTH * width)
