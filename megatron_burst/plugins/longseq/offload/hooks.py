# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron for offloading: layers, training steps, and weights of linear layers.

Steps begin and end in Megatron's schedules, which all ranks enter. Host memory is divided among
ranks at the beginning of the first step. The fraction of saved tensors that is offloaded is set at
the end of this step. Both operations are collective. Inside a step they would deadlock, because
pipeline ranks wait for each other.

Under saved-tensor hooks, torch unpacks each saved tensor as a new object. This object shares the
memory of the tensor, but lacks the attributes of Megatron's parameters. With gradient accumulation
fusion, the backward of a linear layer reads and sets such attributes (`grad_added_to_main_grad`).
On the new object these attributes would be lost, and data parallelism would miss a gradient. So the
backward of a linear layer gets the original weight. Transformer Engine (2.9 and later) does not
need this patch, because it keeps its own reference to the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from ....megatron import homes
from ....megatron.patching import (
    PatchSet,
    given_to,
    require_function,
    require_parameters,
    wrap_steps,
)
from ....recompute.checkpoint import current_store
from .demand import passes_in_flight
from .tier import OPTIONS, tier_of

MambaLayer: Any = homes.module("mamba_layer").MambaLayer


def patch_layers(patches: PatchSet) -> None:
    """Patch layers to move the tensors that they save for backward to the host.

    Calls of a layer inside a checkpoint do not move tensors. The first call saves none, and
    backward uses the saved tensors of the recomputation immediately.
    """
    for layer in (TransformerLayer, MambaLayer):
        patches.wrap(layer, "forward", [], partial(_moving, patches))


def _moving(patches: PatchSet, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    tier = tier_of(patches) if torch.is_grad_enabled() and current_store() is None else None
    if tier is None:
        return original(self, *args, **kwargs)
    with tier.call((*args, *kwargs.values())):
        return original(self, *args, **kwargs)


_COUNTS = ["num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"]


def patch_steps(patches: PatchSet) -> None:
    """Patch Megatron's schedules to call the `Tier` of the run in each step and each forward pass.

    Call this before the patch of packed batches, which changes the number of micro-batches.
    """
    require_function(schedules, "get_pp_rank_microbatches", _COUNTS)
    wrap_steps(patches, partial(_step, patches))
    patches.wrap(schedules, "forward_step", ["input_tensor"], partial(_forward_pass, patches))


def _step(patches: PatchSet, run: Callable, named: dict[str, Any]) -> Any:
    tier = tier_of(patches)
    if tier is None:
        return run(**named)
    if named.get("forward_only"):
        with tier.evaluation():
            return run(**named)
    tier.begin(_passes(named["model"], named["num_microbatches"]))
    try:
        result = run(**named)
    except BaseException:
        tier.abandon()
        raise
    tier.end()
    return result


def _passes(model: Any, micro_batches: int) -> int:
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    group = config.microbatch_group_size_per_vp_stage
    total, _, warmup, _ = schedules.get_pp_rank_microbatches(micro_batches, len(chunks), group)
    return passes_in_flight(warmup, total)


def _forward_pass(patches: PatchSet, original: Callable, *args: Any, **kwargs: Any) -> Any:
    tier = tier_of(patches) if torch.is_grad_enabled() else None
    if tier is None:
        return original(*args, **kwargs)
    received = given_to(original, args, kwargs)["input_tensor"]
    with tier.forward_pass(received):
        return original(*args, **kwargs)


_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_WEIGHT = "_burst_weight"


def patch_weights(patches: PatchSet) -> None:
    """Patch linear layers so that their backward gets the weight with Megatron's attributes.

    The module's docstring has the reason.
    """
    linear = getattr(layers, _LINEAR)
    require_parameters(linear.forward, ["ctx", "input", "weight"], f"{_LINEAR}.forward")
    require_parameters(linear.backward, ["ctx", "grad_output"], f"{_LINEAR}.backward")
    patches.replace(linear, "forward", staticmethod(_keeping_weight(linear.forward, patches)))
    patches.replace(linear, "backward", staticmethod(_with_original_weight(linear.backward)))


def _keeping_weight(original: Callable, patches: PatchSet) -> Callable:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any) -> Any:
        if OPTIONS in patches.run.plugins:
            setattr(ctx, _WEIGHT, given_to(original, (ctx, *args), {})["weight"])
        return original(ctx, *args)

    return forward


def _with_original_weight(original: Callable) -> Callable:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Any) -> Any:
        return original(_ContextWithWeight(ctx) if hasattr(ctx, _WEIGHT) else ctx, grad_output)

    return backward


class _ContextWithWeight:
    """Autograd context in which the original weight replaces the second saved tensor."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__["_ctx"] = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        first, _, *following = self._ctx.saved_tensors
        return (first, getattr(self._ctx, _WEIGHT), *following)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_ctx"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_ctx"], name, value)
