"""Where a training step begins and ends: in Megatron's schedules, which all ranks enter.

The host's memory is shared out at the first step's begin and the fraction is settled at its end:
both are collective, and elsewhere ranks of one pipeline wait for each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_burst.megatron.offload.demand import passes_in_flight
from megatron_burst.megatron.offload.tier import tier_of
from megatron_burst.megatron.patching.compatibility import require_function
from megatron_burst.megatron.patching.registry import PatchSet

_COUNTS = ["num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"]


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what tells the tier of steps and of passes in them.

    Before that of packed batches, which changes the number of micro-batches: the last replacement
    runs first.
    """
    require_function(schedules, "get_pp_rank_microbatches", _COUNTS)
    for name, parameters, wrap in (
        ("get_forward_backward_func", [], _stepping),
        ("forward_step", ["input_tensor"], _passing),
    ):
        original = require_function(schedules, name, parameters)
        patches.replace_function(schedules, name, wrap(original, patches))


def _stepping(original: Callable, patches: PatchSet) -> Callable:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
        return _step(original(*args, **kwargs), patches)

    return get_forward_backward_func


def _step(run: Callable, patches: PatchSet) -> Callable:
    @functools.wraps(run)
    def forward_backward(**named: Any) -> Any:
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

    return forward_backward


def _passes(model: Any, micro_batches: int) -> int:
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    group = config.microbatch_group_size_per_vp_stage
    total, _, warmup, _ = schedules.get_pp_rank_microbatches(micro_batches, len(chunks), group)
    return passes_in_flight(warmup, total)


def _passing(original: Callable, patches: PatchSet) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        tier = tier_of(patches) if torch.is_grad_enabled() else None
        if tier is None:
            return original(*args, **kwargs)
        received = signature.bind(*args, **kwargs).arguments["input_tensor"]
        with tier.forward_pass(received):
            return original(*args, **kwargs)

    return forward_step
