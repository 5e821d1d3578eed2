# SPDX-License-Identifier: Apache-2.0
"""Where the tier meets Megatron: layers, training steps, and weights that have to stay one object.

Steps begin and end in Megatron's schedules, which all ranks enter: the host's memory is shared out
at the first step's begin and the fraction is settled at its end. Both are collective, and elsewhere
ranks of one pipeline wait for each other.

torch rebuilds every tensor that was saved under saved-tensor hooks: the same memory, but another
object, without the attributes of Megatron's parameters. With gradient accumulation fusion the
backward of a linear layer reads and sets such attributes (`grad_added_to_main_grad`); on the
rebuilt object they would be lost, and data parallelism would not see a gradient. So linear layers
get their own weight back. Transformer Engine (2.9 and later) keeps a reference of its own.
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
from .tier import ASKED, tier_of

MambaLayer: Any = homes.module("mamba_layer").MambaLayer


def patch_layers(patches: PatchSet) -> None:
    """Add to a set of patches what moves the saved tensors of layers.

    A layer that a checkpoint runs is left alone: the first time it saves nothing, and what it saves
    when it is run again is used at once.
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
    """Add to a set of patches what tells the tier of steps and of passes in them.

    Before that of packed batches, which changes the number of micro-batches.
    """
    require_function(schedules, "get_pp_rank_microbatches", _COUNTS)
    wrap_steps(patches, partial(_step, patches))
    patches.wrap(schedules, "forward_step", ["input_tensor"], partial(_passing, patches))


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


def _passing(patches: PatchSet, original: Callable, *args: Any, **kwargs: Any) -> Any:
    tier = tier_of(patches) if torch.is_grad_enabled() else None
    if tier is None:
        return original(*args, **kwargs)
    received = given_to(original, args, kwargs)["input_tensor"]
    with tier.forward_pass(received):
        return original(*args, **kwargs)


_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
_WEIGHT = "_burst_weight"


def patch_weights(patches: PatchSet) -> None:
    """Add to a set of patches what hands linear layers their own weight in backward."""
    linear = getattr(layers, _LINEAR)
    require_parameters(linear.forward, ["ctx", "input", "weight"], f"{_LINEAR}.forward")
    require_parameters(linear.backward, ["ctx", "grad_output"], f"{_LINEAR}.backward")
    patches.replace(linear, "forward", staticmethod(_noting(linear.forward, patches)))
    patches.replace(linear, "backward", staticmethod(_restoring(linear.backward)))


def _noting(original: Callable, patches: PatchSet) -> Callable:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any) -> Any:
        if ASKED in patches.notes:
            setattr(ctx, _WEIGHT, given_to(original, (ctx, *args), {})["weight"])
        return original(ctx, *args)

    return forward


def _restoring(original: Callable) -> Callable:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Any) -> Any:
        return original(_Restored(ctx) if hasattr(ctx, _WEIGHT) else ctx, grad_output)

    return backward


class _Restored:
    """A context whose second saved tensor is the weight itself; all else is the context's own."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__["_ctx"] = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        first, _, *others = self._ctx.saved_tensors
        return (first, getattr(self._ctx, _WEIGHT), *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_ctx"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_ctx"], name, value)
