"""Validation of supervised fine-tuning: means over whole sequences, not over each rank's part.

With `--sft` Megatron-LM averages each rank's mean loss per micro-batch over all ranks, so the
weight of a token depends on how its sequence is split: uneven masks change the loss by up to 1e-3.
Here each rank of a context-parallel group reports the sums of the group, whose mean is that of one
rank with whole sequences. Training sums before it divides, so it needs no change.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_burst.megatron.attention.plan_book import splits_attention
from megatron_burst.megatron.data.slicing import context_group
from megatron_burst.megatron.patching import registry
from megatron_burst.megatron.patching.compatibility import require_function


def patch(patches: registry.PatchSet) -> None:
    """Add to a set of patches what `--sft` needs of `megatron.training`."""
    home = importlib.import_module("megatron.training.training")
    original = require_function(home, "evaluate", ["forward_step_func"])
    patches.replace_function(home, "evaluate", _evaluating(original))


def _evaluating(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate(*args: Any, **named: Any) -> Any:
        group = context_group()
        sft = getattr(importlib.import_module("megatron.training").get_args(), "sft", False)
        if not sft or group.size() == 1 or not splits_attention(group):
            return original(*args, **named)
        bound = signature.bind(*args, **named)
        bound.arguments["forward_step_func"] = _summing(bound.arguments["forward_step_func"], group)
        return original(*bound.args, **bound.kwargs)

    return evaluate


def _summing(forward_step: Callable, group: Any) -> Callable:
    """A forward step whose loss function reports [sum, count] of the whole group."""

    @functools.wraps(forward_step)
    def step(*args: Any, **named: Any) -> Any:
        output, loss_function = forward_step(*args, **named)

        def loss(*outputs: Any, **options: Any) -> Any:
            found = loss_function(*outputs, **options)
            if options or not isinstance(found, tuple):  # a call that is not for losses
                return found
            *first, reported = found
            return *first, {name: _summed(value, group) for name, value in reported.items()}

        return output, loss

    return step


def _summed(value: Any, group: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() != 2:
        return value  # already a mean, which Megatron does not weigh
    value = value.detach().clone()
    torch.distributed.all_reduce(value, group=group)
    return value
