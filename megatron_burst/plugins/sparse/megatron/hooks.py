# SPDX-License-Identifier: Apache-2.0
"""Patches of the Megatron functions that check the configuration of DSA and build its layers."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from ....megatron import homes
from ....megatron.attention.hooks import DSAttention, is_sparse, module_of
from ....megatron.model_shape import DSA, ModelShape
from ....megatron.patching import PatchSet, bound_to, require_function, skips_megatrons_checks
from ....megatron.selection import burst_of, splits_with_burst
from ....spine_options import OFF
from .checks import FLAG, selects
from .dsa import BurstDSAttention
from .hybrid_layers import HybridSelfAttention, hybrid_submodules
from .hybrid_settings import VARIANT, hybrid_rule

_SPECS = "megatron.core.models.gpt"
_DEFAULTS = (None, "p2p")  # defaults of Megatron-Core and Megatron-LM


def patch(patches: PatchSet) -> None:
    """Wrap Megatron's constructors, so that layers use the sparse attention of this plugin.

    Requires Megatron-Core 0.19 or newer.

    Args:
        patches: Set of patches.
    """
    require_function(DSAttention, "forward", [
        "query", "key", "value", "attention_mask", "x", "qr", "position_ids", "attn_mask_type",
        "attention_bias", "packed_seq_params", "up_v_weight",
    ])  # fmt: skip
    patches.wrap(TransformerConfig, "__post_init__", ["self"], _allow_any_exchange)
    patches.wrap(Attention, "__init__", ["config", "submodules"], _refuse_unsupported)
    home = homes.module("absorbed_mla")
    patches.wrap(home.AbsorbedMLASelfAttention, "__init__", ["config", "submodules"], _replace_core)
    layers = homes.find("deepseek_v4_hybrid_attention")
    if layers is not None:  # Megatron's branch for DeepSeek-V4
        specs = importlib.import_module(f"{_SPECS}.experimental_attention_variant_module_specs")
        patches.wrap(
            specs, "get_dsv4_hybrid_module_spec_for_backend", ["config", "backend"], _hybrid_spec
        )
        patches.wrap(layers.DSv4HybridAttention, "__init__", ["config"], _refuse_megatrons_hybrid)


def _hybrid_spec(original: Callable, config: Any, backend: Any) -> Any:
    """Return the spec of DeepSeek-V4's attention: `HybridSelfAttention` if the run selects it.

    Parameters and their names in checkpoints are the same as in Megatron's layers.
    """
    spec, burst = original(config, backend), burst_of(config)
    if burst is None or burst.sparse == OFF or not splits_with_burst(config, burst):
        return spec
    return ModuleSpec(
        module=HybridSelfAttention,
        params={"rule": hybrid_rule("csa", {})},
        submodules=hybrid_submodules(spec.submodules.linear_proj),
        metainfo=spec.metainfo,
    )


def _refuse_megatrons_hybrid(original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Raise `ValueError` before Megatron's own hybrid attention is built for a BurstAttention run.

    Megatron's layers require packed sequences that are split into contiguous parts. BurstAttention
    splits them according to its layout.
    """
    config = bound_to(original, args, kwargs).arguments["config"]
    if splits_with_burst(config, burst_of(config)):
        raise ValueError(
            "Megatron's DSv4HybridAttention does not run with BurstAttention at "
            f"--context-parallel-size {config.context_parallel_size}: call `configure` before the "
            f"layer spec is made and omit {FLAG} {OFF}, or use --context-parallel-algo {OFF}"
        )
    original(*args, **kwargs)


def _allow_any_exchange(original: Callable, self: Any) -> None:
    """Run Megatron's check of a configuration (`self`), except its rules for the exchange of keys.

    Megatron asserts that `cp_comm_type` is all-gather for DSA. The assertion is skipped if the run
    uses BurstAttention. If Megatron's own DSA runs, `configure` checks `cp_comm_type`. For
    DeepSeek-V4 see `_check_as_one_rank`.
    """
    comm_type = getattr(self, "cp_comm_type", None)
    variant = getattr(self, "experimental_attention_variant", None)
    split = self.context_parallel_size > 1 and skips_megatrons_checks()
    if split and variant == VARIANT:
        return _check_as_one_rank(original, self)
    if not split or variant != DSA or comm_type not in _DEFAULTS:
        return original(self)
    self.cp_comm_type = "allgather"
    try:
        original(self)
    finally:
        self.cp_comm_type = comm_type


def _check_as_one_rank(original: Callable, config: Any) -> None:
    """Run Megatron's check of a configuration as if it had one context-parallel rank.

    With more ranks, Megatron requires packed sequences that are split into contiguous parts.
    """
    ranks = config.context_parallel_size
    config.context_parallel_size = 1
    try:
        original(config)
    finally:
        config.context_parallel_size = ranks


def _replace_core(original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Construct an `AbsorbedMLASelfAttention`, with `BurstDSAttention` if the run selects it."""
    bound = bound_to(original, args, kwargs)
    config, submodules = bound.arguments["config"], bound.arguments["submodules"]
    core = submodules.core_attention
    if selects(config, burst_of(config)) and module_of(core) is DSAttention:
        core = dataclasses.replace(core, module=BurstDSAttention)
        bound.arguments["submodules"] = dataclasses.replace(submodules, core_attention=core)
    original(*bound.args, **bound.kwargs)


def _refuse_unsupported(original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Raise `ValueError` before an attention module with unsupported sparse attention is built.

    For absorbed latents, `_replace_core` has already replaced the core attention.
    """
    arguments = bound_to(original, args, kwargs).arguments
    config, kind = arguments["config"], module_of(arguments["submodules"].core_attention)
    burst = burst_of(config)
    unsupported = is_sparse(arguments["submodules"].core_attention) and kind != BurstDSAttention
    enabled = splits_with_burst(config, burst)
    # The check of `configure` does not include these layers.
    if unsupported and enabled and ModelShape.of(config).sparse_setting is None:
        raise ValueError(
            f"{type(arguments['self']).__name__} with {kind.__name__}: the configuration does "
            "not select sparse attention; set "
            f'experimental_attention_variant="{DSA}" before `configure`'
        )
    if unsupported and selects(config, burst):
        raise ValueError(
            f"{type(arguments['self']).__name__} with {kind.__name__}: only Megatron's DSAttention "
            f"over absorbed latents (AbsorbedMLASelfAttention) is supported; use {FLAG} megatron"
        )
    original(*args, **kwargs)
