"""Layers and checkpoints whose saved tensors go through the tier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_burst.megatron.offload.tier import tier_of
from megatron_burst.megatron.patching.registry import PatchSet
from megatron_burst.recompute.checkpoint import current


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what moves the saved tensors of layers.

    A layer that a checkpoint runs is left alone: the first time it saves nothing, and what it saves
    when it is run again is used at once.
    """
    original = TransformerLayer.forward
    patches.replace(TransformerLayer, "forward", _moving(original, patches))


def _moving(original: Callable, patches: PatchSet) -> Callable:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tier = tier_of(patches) if torch.is_grad_enabled() and current() is None else None
        if tier is None:
            return original(self, *args, **kwargs)
        with tier.call((*args, *kwargs.values())):
            return original(self, *args, **kwargs)

    return forward
