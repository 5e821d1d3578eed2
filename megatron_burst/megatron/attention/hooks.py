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
from ..checks.splitting import OLDEST, attends
from ..data.cut import group_of
from ..patching import bound_to, core_version, given_to, require_function
from .core_attention import BurstCoreAttention
from .derived import stands_for

DSAttention: Any = homes.module("dsa").DSAttention


def patch_attention(patches: patching.PatchSet) -> None:
    """Add to a set of patches what puts our core attention into attention layers.

    Constructors are where every spec meets its configuration. Megatron's providers of modules
    (`core_attention()`) do not know it: specs of a GPT ask them by the name of a backend, those of
    hybrid models not at all.
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
    """Return Megatron's HybridModel if its forward can choose other attention: after 0.20."""
    if core_version() < OLDEST:
        return None
    home = homes.imported("megatron.core.models.hybrid.hybrid_model")
    model = getattr(home, "HybridModel", None)
    names = () if model is None else inspect.signature(model.forward).parameters
    return model if {"cp_batch", "shared_prefix_layout"} & set(names) else None


def refuse_other_attention(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call HybridModel.forward, unless its arguments change what attention computes.

    Megatron-LM after 0.20 (September 2026): with `shared_prefix_layout` the model runs its own
    attention over a tree, and `cp_batch` may have two layouts, between which it exchanges rows.
    Other arguments are passed through.
    """
    burst = getattr(self.config, "burst", None)
    if burst is None or not attends(self.config, burst):
        return original(self, *args, **kwargs)
    given = given_to(original, (self, *args), kwargs)
    if given.get("shared_prefix_layout") is not None:
        raise ValueError(
            "shared_prefix_layout: HybridModel then runs attention of its own over a prefix tree, "
            "and BurstAttention computes none of it: give trajectories to mb.rl.logprobs, or take "
            "--context-parallel-algo megatron"
        )
    batch = given.get("cp_batch")
    if batch is not None and len(batch.batches_by_layout) > 1:
        names = " and ".join(sorted(batch.batches_by_layout))
        raise ValueError(
            f"cp_batch has the layouts {names}, between which Megatron exchanges rows around "
            "attention; BurstAttention does so itself: leave --linear-cp-layout and "
            "--attention-cp-layout out, and take --burst-layout contiguous "
            "--burst-attention-layout zigzag"
        )
    return original(self, *args, **kwargs)


def _stock_core_attentions() -> tuple[type, ...]:
    classes = (DotProductAttention, getattr(transformer_engine, "TEDotProductAttention", None))
    # Without Transformer Engine the second name is missing or a placeholder.
    return tuple(c for c in classes if isinstance(c, type) and hasattr(c, "forward"))


def module_of(core: Any) -> Any:
    """What a core attention of a spec is built from: itself, or the module of its `ModuleSpec`."""
    return getattr(core, "module", core)


def is_sparse(core: Any) -> bool:
    """Is a core attention of a spec Megatron's sparse one, or derived from it?"""
    module = module_of(core)
    return isinstance(module, type) and issubclass(module, DSAttention)


def _with_burst(stock: tuple[type, ...], original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """An attention constructor, from which models with BurstAttention get our core attention. The
    plugin `sparse` replaces sparse attention. Without it there is a `ValueError`: Megatron's own
    would take our tokens for zigzag ones.
    """
    bound = bound_to(original, args, kwargs)
    config, submodules = bound.arguments["config"], bound.arguments["submodules"]
    burst, core = getattr(config, "burst", None), submodules.core_attention
    if burst is not None and attends(config, burst) and not is_sparse(core):
        core = _replaced(core, stock)
        bound.arguments["submodules"] = dataclasses.replace(submodules, core_attention=core)
    elif burst is not None and attends(config, burst):
        registry.require("sparse_problems", module_of(core).__name__)
    original(*bound.args, **bound.kwargs)


def _in_group_of_batch(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention layer, all of which uses the group that holds its micro-batch.

    Up to 0.20 its rotary embedding takes the group that the layer was built with.
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
    """Return our core attention in place of Megatron's, given as a class or as its `ModuleSpec`.

    Raises:
        ValueError: The core attention does not derive from Megatron's, or it overrides more than
            `__init__`. It would attend only to the tokens of its rank, or split them differently.
    """
    module = module_of(core)
    if isinstance(module, type) and issubclass(module, BurstCoreAttention):
        return core
    ours = BurstCoreAttention if module in stock else stands_for(module, stock)
    if ours is None and not isinstance(module, type):
        raise ValueError(
            f"the layer spec has no core attention to replace, but {module!r:.100}: layers of "
            "Transformer Engine, such as those of pretrain_hybrid.py, need it installed; or take "
            "--context-parallel-algo megatron"
        )
    if ours is None:
        names = " or ".join(one.__name__ for one in stock)
        raise ValueError(
            f"the layer spec has the core attention {patching.path_of(module)}, which does not "
            f"derive from {names}, so BurstAttention cannot replace it. Use one of these in the "
            "spec, or a class that overrides only __init__, or --context-parallel-algo megatron"
        )
    return ours if core is module else dataclasses.replace(core, module=ours)


def patch_recompute(patches: patching.PatchSet) -> None:
    """Add to a set of patches what lets recomputation use the attention store and host memory."""
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
