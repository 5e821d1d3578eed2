# SPDX-License-Identifier: Apache-2.0
"""Loss of an indexer, which is added to the loss of the model in backward.

Its gradient is scaled like the loss of the model in Megatron, and its value is stored in Megatron's
tracker of indexer losses. The weight does not depend on the number of context-parallel ranks: every
row of a micro-batch has the same weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import get_model_config

from ....megatron import homes, patching

_NOTE = "micro-batches of a step"


def patch(patches: patching.PatchSet) -> None:
    """Add a patch that records the number of micro-batches of a step.

    Args:
        patches: Set of patches.
    """

    def record(run: Callable[..., Any], named: dict[str, Any]) -> Any:
        patches.notes[_NOTE] = named["num_microbatches"]
        models = named["model"]
        first = models[0] if isinstance(models, list) else models
        config: Any = get_model_config(first)
        if getattr(config, "dsa_indexer_loss_coeff", None):
            # Megatron sums its tracker over all pipeline stages, even those without an indexer.
            _values(config, next(first.parameters()).device)
        return run(**named)

    patching.wrap_steps(patches, record)


def attached(
    out: torch.Tensor,
    losses: torch.Tensor,
    weight: float,
    config: Any,
    layer: int,
    cp_group: Any,
    sum_over: Any,
) -> torch.Tensor:
    """Return `out` with the losses of a micro-batch's rows attached.

    The backward of the result adds the gradient of the losses.

    Args:
        out: Output of attention.
        losses: Losses [s, b, H] of this rank's rows and selections.
        weight: Weight of the sum over the selections of a row.
        config: `TransformerConfig` that Megatron's schedules read.
        layer: Number of the layer.
        cp_group: Context-parallel group.
        sum_over: Tensor-parallel group if its ranks have other selections, otherwise None.
    """
    rows = losses.shape[0] * losses.shape[1]
    total = losses.sum() * weight
    mean = total / rows
    _log(mean.detach().clone(), config, layer, cp_group, sum_over)
    out = _Attached.apply(out, total if config.calculate_per_token_loss else mean, config)
    assert out is not None
    return out


def _log(mean: torch.Tensor, config: Any, layer: int, cp_group: Any, sum_over: Any) -> None:
    if sum_over is not None:
        torch.distributed.all_reduce(mean, group=sum_over)
    tracker = _values(config, mean.device)
    if layer <= len(tracker["values"]):  # layers of additional heads have higher numbers
        tracker["values"][layer - 1] += mean
    tracker["reduce_group"], tracker["avg_group"] = None, cp_group


def _values(config: Any, device: torch.device) -> dict[str, Any]:
    """Return Megatron's tracker, with an entry for the loss of each layer."""
    home: Any = homes.find("dsa_loss") or homes.module("dsa")
    tracker: dict[str, Any] = home.DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        tracker["values"] = torch.zeros(config.num_layers, device=device)
    return tracker


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, config: Any) -> torch.Tensor:
        ctx.config, ctx.unit = config, torch.ones_like(loss)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        scale, config = ctx.unit, ctx.config
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not config.calculate_per_token_loss:
            scale = scale / patching.notes().get(_NOTE, 1)
        return grads[0], scale.to(ctx.unit.dtype), None
