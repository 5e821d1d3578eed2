"""A layer with experts in tiles of rows: routed once for all rows, the rest tile by tile.

The router's decisions are about all tokens of a micro-batch: auxiliary losses, z-loss, capacity,
expert bias. Only its matrix product is rowwise. So it takes three steps: norm and the router's
logits by tiles; routing of all logits, which are small; then norm, dispatch, experts, combine and
residual by tiles, each tile with its rows of what was routed. Both norms are recomputed, and no
tensor of the width of the hidden states is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def forward_moe(
    layer: Any,
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    given: dict[str, Any],
    cut: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """What `forward(layer, hidden, **given)` returns, by tiles.

    layer: a ``TransformerLayer`` whose `mlp` is a ``MoELayer``; forward: its own `_forward_mlp`;
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
        with _instead(moe, "route", lambda *_, **__: routed):
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
    with _instead(router, "routing", lambda logits, **_: (logits, None)):
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


@contextmanager
def _instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, this instance's method `name` is `function`."""
    before = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)
