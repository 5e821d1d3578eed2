# SPDX-License-Identifier: Apache-2.0
"""Replacements of the functions with which Megatron configures and builds sparse attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_config import TransformerConfig

from ....config import OFF
from ....megatron import homes
from ....megatron.attention.hooks import DSAttention, is_sparse, module_of
from ....megatron.checks.splitting import splits
from ....megatron.model_shape import DSA, ModelShape
from ....megatron.patching import PatchSet, bound_to, burst_chosen, require_function
from .checks import FLAG, selects
from .dsa import BurstDSAttention

_DEFAULTS = (None, "p2p")  # what Megatron-Core and Megatron-LM take where nobody says


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what puts our sparse attention into layers; for 0.19 and newer."""
    require_function(DSAttention, "forward", [
        "query", "key", "value", "attention_mask", "x", "qr", "position_ids", "attn_mask_type",
        "attention_bias", "packed_seq_params", "up_v_weight",
    ])  # fmt: skip
    patches.wrap(TransformerConfig, "__post_init__", ["self"], _with_any_exchange)
    patches.wrap(Attention, "__init__", ["config", "submodules"], _refusing_others)
    home = homes.module("absorbed_mla")
    patches.wrap(home.AbsorbedMLASelfAttention, "__init__", ["config", "submodules"], _with_ours)


def _with_any_exchange(original: Callable, self: Any) -> None:
    """Check a configuration without Megatron's assertion that DSA exchanges by all-gather, if
    BurstAttention is chosen. `configure` checks the exchange if Megatron's own DSA runs.
    """
    given = getattr(self, "cp_comm_type", None)
    variant = getattr(self, "experimental_attention_variant", None)
    split = variant == DSA and self.context_parallel_size > 1
    if not split or given not in _DEFAULTS or not burst_chosen():
        return original(self)
    self.cp_comm_type = "allgather"
    try:
        original(self)
    finally:
        self.cp_comm_type = given


def _with_ours(original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """The constructor of attention over absorbed latents."""
    bound = bound_to(original, args, kwargs)
    config, submodules = bound.arguments["config"], bound.arguments["submodules"]
    core = submodules.core_attention
    if selects(config, getattr(config, "burst", None)) and module_of(core) is DSAttention:
        core = dataclasses.replace(core, module=BurstDSAttention)
        bound.arguments["submodules"] = dataclasses.replace(submodules, core_attention=core)
    original(*bound.args, **bound.kwargs)


def _refusing_others(original: Callable, /, *args: Any, **kwargs: Any) -> None:
    """The constructor of any attention; ours has taken the place of DSA behind absorbed latents."""
    given = bound_to(original, args, kwargs).arguments
    config, kind = given["config"], module_of(given["submodules"].core_attention)
    burst = getattr(config, "burst", None)
    other = is_sparse(given["submodules"].core_attention) and kind != BurstDSAttention
    ours = burst is not None and burst.algorithm != OFF and splits(config)
    # Such layers were not checked.
    if other and ours and ModelShape.of(config).sparse_setting is None:
        raise ValueError(
            f"{type(given['self']).__name__} with {kind.__name__}, of which the configuration "
            f'says nothing: set experimental_attention_variant="{DSA}" before `configure`'
        )
    if other and selects(config, burst):
        raise ValueError(
            f"{type(given['self']).__name__} with {kind.__name__}: only Megatron's DSAttention "
            f"over absorbed latents (AbsorbedMLASelfAttention) runs on a ring; take {FLAG} megatron"
        )
    original(*args, **kwargs)
