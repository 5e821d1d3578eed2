# SPDX-License-Identifier: Apache-2.0
"""The loss of an indexer beside the loss of the model: its gradient is added in backward, scaled as
Megatron scales the loss of the model, and its value is in Megatron's tracker of indexer losses.

Its weight does not depend on how many context-parallel ranks there are: every row of a micro-batch
counts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import get_model_config

from ....megatron import homes, patching

_NOTE = "micro-batches of a step"


def patch(patches: patching.PatchSet) -> None:
    """Add to a set of patches what notes how many micro-batches a step has."""

    def noting(run: Callable[..., Any], named: dict[str, Any]) -> Any:
        patches.notes[_NOTE] = named["num_microbatches"]
        models = named["model"]
        first = models[0] if isinstance(models, list) else models
        config: Any = get_model_config(first)
        if getattr(config, "dsa_indexer_loss_coeff", None):
            # Megatron sums its tracker over all pipeline stages, also those without an indexer.
            _values(config, next(first.parameters()).device)
        return run(**named)

    patching.wrap_steps(patches, noting)


def attached(
    out: torch.Tensor,
    losses: torch.Tensor,
    weight: float,
    config: Any,
    layer: int,
    cp_group: Any,
    sum_over: Any,
) -> torch.Tensor:
    """`out`, in whose backward the losses of the rows of a micro-batch get their gradient.

    losses [s, b, H]: of this rank's rows, its selections. weight: what the sum over the selections
    of a row counts. config: the `TransformerConfig` that Megatron's schedules read. sum_over: the
    tensor-parallel ranks, where they have other selections; None where all have the same.
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
    if layer <= len(tracker["values"]):  # layers of further heads count on
        tracker["values"][layer - 1] += mean
    tracker["reduce_group"], tracker["avg_group"] = None, cp_group


def _values(config: Any, device: torch.device) -> dict[str, Any]:
    """Megatron's tracker, with room for the loss of each layer."""
    home: Any = homes.find("dsa_loss") or homes.module("dsa")
    tracker: dict[str, Any] = home.DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        tracker["values"] = torch.zeros(config.num_layers, device=device)
    return tracker


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, config: Any) -> torch.Tensor:
        ctx.config, ctx.one = config, torch.ones_like(loss)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        scale, config = ctx.one, ctx.config
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not config.calculate_per_token_loss:
            scale = scale / patching.notes().get(_NOTE, 1)
        return grads[0], scale.to(ctx.one.dtype), None
