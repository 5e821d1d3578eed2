# SPDX-License-Identifier: Apache-2.0
"""Replacements of the functions with which Megatron builds and recomputes attention."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import random
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from ... import registry
from ...recompute.checkpoint import StoreOffload, StoringCall, current_store, storing
from .. import homes, patching
from ..data.cut import group_of
from ..patching import HYBRID_SINCE, bound_to, core_version, given_to, require_function
from ..selection import burst_of, uses_burst
from .core_attention import BurstCoreAttention
from .derived import replacement_class

DSAttention: Any = homes.module("dsa").DSAttention


def patch_attention(patches: patching.PatchSet) -> None:
    """Wrap the constructors of Megatron's attention layers, so that they build our core attention.

    Only a constructor has both the spec and the configuration. Megatron's module providers
    (`core_attention()`) do not have the configuration, and specs of hybrid models do not call them.
    """
    stock = _stock_core_attentions()
    for cls in (Attention, MultiLatentAttention):
        named = ["config", "submodules", "pg_collection"]
        patches.wrap(cls, "__init__", named, partial(_with_burst, stock))
        patches.wrap(cls, "forward", ["packed_seq_params"], _in_group_of_batch)
    for cls in stock:
        require_function(cls, "__init__", [
            "config", "layer_number", "attn_mask_type", "attention_type", "softmax_scale",
            "cp_comm_type", "pg_collection",
        ])  # fmt: skip
        require_function(cls, "forward", [
            "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias",
            "packed_seq_params",
        ])  # fmt: skip
    hybrid = _hybrid_model()
    if hybrid is not None:
        patches.wrap(hybrid, "forward", ["packed_seq_params"], refuse_other_attention)


def _hybrid_model() -> Any:
    """Return Megatron's HybridModel if its forward can bypass core attention, otherwise None.

    Megatron-Core after 0.20 has such a HybridModel.
    """
    if core_version() < HYBRID_SINCE:
        return None
    home = homes.imported("megatron.core.models.hybrid.hybrid_model")
    model = getattr(home, "HybridModel", None)
    names = () if model is None else inspect.signature(model.forward).parameters
    return model if {"cp_batch", "shared_prefix_layout"} & set(names) else None


def refuse_other_attention(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run HybridModel.forward, unless its arguments change what attention computes.

    In Megatron-LM after 0.20 (September 2026), `shared_prefix_layout` selects the model's own
    attention over a tree. `cp_batch` may have two layouts, and the model then exchanges rows
    between them. Other arguments are passed on.

    Args:
        original: HybridModel.forward.
        self: the model.
        args: positional arguments of `original`.
        kwargs: keyword arguments of `original`.

    Raises:
        ValueError: The arguments select other attention or two layouts.
    """
    burst = burst_of(self.config)
    if not uses_burst(self.config, burst):
        return original(self, *args, **kwargs)
    arguments = given_to(original, (self, *args), kwargs)
    if arguments.get("shared_prefix_layout") is not None:
        raise ValueError(
            "shared_prefix_layout is set: HybridModel would run its own attention over a prefix "
            "tree in place of BurstAttention. Pass trajectories to mb.rl.logprobs, or use "
            "--context-parallel-algo megatron"
        )
    batch = arguments.get("cp_batch")
    if batch is not None and len(batch.batches_by_layout) > 1:
        names = " and ".join(sorted(batch.batches_by_layout))
        raise ValueError(
            f"cp_batch has the layouts {names}, so both Megatron and BurstAttention would exchange "
            "rows around attention: remove --linear-cp-layout and --attention-cp-layout, and use "
            "--burst-layout contiguous --burst-attention-layout zigzag"
        )
    return original(self, *args, **kwargs)


def _stock_core_attentions() -> tuple[type, ...]:
    classes = (DotProductAttention, getattr(transformer_engine, "TEDotProductAttention", None))
    # Without Transformer Engine the second name is missing or a placeholder.
    return tuple(c for c in classes if isinstance(c, type) and hasattr(c, "forward"))


def module_of(core: Any) -> Any:
    """Return the class of a spec's core attention, which may be a `ModuleSpec`."""
    return getattr(core, "module", core)


def is_sparse(core: Any) -> bool:
    """Return whether a spec's core attention is Megatron's sparse attention or derives from it."""
    module = module_of(core)
    return isinstance(module, type) and issubclass(module, DSAttention)


def _with_burst(stock: tuple[type, ...], original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Run an attention constructor with our core attention, if the model uses BurstAttention.

    The plugin `sparse` replaces sparse attention. Without the plugin, raise a `ValueError`:
    Megatron's own sparse attention assumes zigzag tokens.
    """
    bound = bound_to(original, args, kwargs)
    config, submodules = bound.arguments["config"], bound.arguments["submodules"]
    burst, core = burst_of(config), submodules.core_attention
    if uses_burst(config, burst) and not is_sparse(core):
        core = _replaced(core, stock)
        bound.arguments["submodules"] = dataclasses.replace(submodules, core_attention=core)
    elif uses_burst(config, burst):
        registry.require("sparse_problems", module_of(core).__name__)
    original(*bound.args, **bound.kwargs)


def _in_group_of_batch(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of an attention layer with the group that holds the micro-batch.

    Up to Megatron-Core 0.20 the rotary embedding uses the group in the layer's `pg_collection`, so
    that group is replaced during the call.
    """
    if not isinstance(getattr(self, "core_attention", None), BurstCoreAttention):
        return original(self, *args, **kwargs)
    params = given_to(original, (self, *args), kwargs).get("packed_seq_params")
    static = self.pg_collection.cp
    group = group_of(params, static)
    if group is static:
        return original(self, *args, **kwargs)
    self.pg_collection.cp = group
    try:
        return original(self, *args, **kwargs)
    finally:
        self.pg_collection.cp = static


def _replaced(core: Any, stock: tuple[type, ...]) -> Any:
    """Return the BurstAttention replacement of `core`, a class or a `ModuleSpec`.

    Raises:
        ValueError: `core` does not derive from Megatron's classes, or overrides more than
            `__init__`. Without a replacement, a rank would attend only to its own tokens.
    """
    module = module_of(core)
    if isinstance(module, type) and issubclass(module, BurstCoreAttention):
        return core
    replacement = BurstCoreAttention if module in stock else replacement_class(module, stock)
    if replacement is None and not isinstance(module, type):
        raise ValueError(
            f"the layer spec has {module!r:.100} in place of a core attention: install Transformer "
            "Engine, which layers of pretrain_hybrid.py require, or use "
            "--context-parallel-algo megatron"
        )
    if replacement is None:
        names = " or ".join(cls.__name__ for cls in stock)
        raise ValueError(
            f"the layer spec has the core attention {patching.path_of(module)}, which does not "
            f"derive from {names}, so BurstAttention cannot replace it. Use one of these in the "
            "spec, or a class that overrides only __init__, or --context-parallel-algo megatron"
        )
    return replacement if core is module else dataclasses.replace(core, module=replacement)


def patch_recompute(patches: patching.PatchSet) -> None:
    """Wrap Megatron's `checkpoint` to use the attention store and offload to host memory."""
    tier_of = registry.optional("offload_tier")

    def checkpoint(original: Callable, *args: Any, **kwargs: Any) -> Any:
        bound = bound_to(original, args, kwargs)
        function = bound.arguments["function"]
        tier = None
        if tier_of is not None and torch.is_grad_enabled() and current_store() is None:
            tier = tier_of(patches)
        if tier is None:
            bound.arguments["function"] = storing(function)
            return original(*bound.args, **bound.kwargs)
        with tier.call(bound.arguments["args"]) as going:
            away = None if going is None else StoreOffload(tier.host, going.fraction, going.frame)
            bound.arguments["function"] = StoringCall(function, None, away)
            return original(*bound.args, **bound.kwargs)

    names = ["function", "distribute_saved_activations", "args"]
    patches.wrap(random, "checkpoint", names, checkpoint)
