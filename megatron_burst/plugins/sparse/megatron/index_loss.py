# SPDX-License-Identifier: Apache-2.0
"""Loss of an indexer, whose gradient is computed in the backward of attention.

The gradient is scaled in the same way as Megatron scales the loss of the model. The value of the
loss is stored in Megatron's tracker of indexer losses. Every row of a micro-batch has the same
weight, so the loss does not depend on the number of context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import get_model_config

from ....megatron import homes, patching

_MICRO_BATCHES = "sparse: micro-batches of a step"


def patch(patches: patching.PatchSet) -> None:
    """Wrap Megatron's schedules, to record the number of micro-batches of each step.

    Args:
        patches: Set of patches that records what it replaces.
    """

    def record(run: Callable[..., Any], named: dict[str, Any]) -> Any:
        patches.run.plugins[_MICRO_BATCHES] = named["num_microbatches"]
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
    """Attach the indexer's losses of a micro-batch to the output of attention.

    The result equals `out`. The backward of the result also starts the backward of the losses.

    Args:
        out: Output of attention.
        losses: Losses [s, b, H] of this rank's rows and selections.
        weight: Factor of the losses.
        config: `TransformerConfig` that Megatron's schedules read.
        layer: Layer number, from 1.
        cp_group: Context-parallel group.
        sum_over: Tensor-parallel group if its ranks have different selections, otherwise None.
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
    if layer <= len(tracker["values"]):  # layers of MTP heads have higher numbers
        tracker["values"][layer - 1] += mean
    tracker["reduce_group"], tracker["avg_group"] = None, cp_group


def _values(config: Any, device: torch.device) -> dict[str, Any]:
    """Return Megatron's tracker of indexer losses, whose "values" have one entry per layer."""
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
            scale = scale / patching.run_state().plugins.get(_MICRO_BATCHES, 1)
        return grads[0], scale.to(ctx.unit.dtype), None
