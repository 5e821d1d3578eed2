"""Installing BurstAttention into Megatron-Core, and choosing it for a model.

Owns: which functions of Megatron are replaced, and the promise that a run has one layout.
Must not know: what an attention layer does with its core.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_burst.checkpoint import framed
from megatron_burst.config import BurstConfig
from megatron_burst.megatron import lm_head, patched, registry
from megatron_burst.megatron.checks import check_config, require_parameters
from megatron_burst.megatron.core_attention import BurstCoreAttention
from megatron_burst.megatron.data import batch_slicer, packed_batch_slicer, packed_rope, rope_slicer

_NAME = "burst"


def install(layout: str = "zigzag") -> None:
    """Teach Megatron-Core BurstAttention. Nothing changes until a configuration asks for it.

    Call before models are built and batches are cut. Idempotent; the layout of a run cannot be
    changed, so another layout is a ``ValueError`` until `uninstall`. Raises ``RuntimeError`` when
    this Megatron's functions are not those the patches were written for.
    """
    BurstConfig(layout=layout)
    present = registry.installed(_NAME)
    if present is not None:
        if present.notes["layout"] != layout:
            raise ValueError(
                f"layout {layout!r}: layout {present.notes['layout']!r} is installed, and a run "
                "has one; call uninstall() first, and build the model anew"
            )
        return
    with registry.patching(_NAME) as patches, patched.opened(patches):
        patches.notes["layout"] = layout
        _patch_attention(patches)
        _patch_slicing(patches, layout)
        _patch_recompute(patches)
        lm_head.patch(patches)


def uninstall() -> bool:
    """Put Megatron back as it was; False when nothing was installed.

    Models built meanwhile keep working; their process groups live as long as they do.
    """
    return registry.remove(_NAME)


def installed_layout() -> str | None:
    """The layout given to `install`, or None."""
    patches = registry.installed(_NAME)
    return patches.notes["layout"] if patches else None


def configure(config: Any, burst: BurstConfig, *, seq_length: int | None = None) -> Any:
    """Choose the attention of models built from a ``TransformerConfig``; returns the config.

    Sets ``config.burst``, which survives copies of the config. With algorithm "megatron", or one
    context-parallel rank, Megatron's own attention runs. Raises ``ValueError`` naming the flag
    for everything BurstAttention would not honour; ``seq_length`` (global, tokens) is checked if
    given.
    """
    layout = installed_layout()
    if layout is None:
        raise ValueError("megatron_burst is not installed: call install() before configure()")
    if burst.layout != layout:
        raise ValueError(
            f"--burst-layout {burst.layout}: install(layout={layout!r}) was called, and a run has "
            "one layout"
        )
    check_config(config, burst, seq_length)
    lm_head.check(config, burst)
    config.burst = burst
    return config


def _patch_attention(patches: registry.PatchSet) -> None:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    stock = _stock_core_attentions()
    for cls in (Attention, MultiLatentAttention):
        original = cls.__init__
        symbol = f"{cls.__name__}.__init__"
        require_parameters(original, ["config", "submodules", "pg_collection"], symbol)
        patches.replace(cls, "__init__", _with_burst(original, stock))
    for cls in stock:
        require_parameters(
            cls.__init__,
            ["config", "layer_number", "attn_mask_type", "attention_type", "softmax_scale",
             "cp_comm_type", "pg_collection"],
            f"{cls.__name__}.__init__",
        )  # fmt: skip
        require_parameters(
            cls.forward,
            ["query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias",
             "packed_seq_params"],
            f"{cls.__name__}.forward",
        )  # fmt: skip


def _stock_core_attentions() -> tuple[type, ...]:
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    found = (DotProductAttention, getattr(transformer_engine, "TEDotProductAttention", None))
    # Without Transformer Engine the second name is missing or a placeholder.
    return tuple(c for c in found if isinstance(c, type) and hasattr(c, "forward"))


def _with_burst(original: Callable, stock: tuple[type, ...]) -> Callable:
    """Wrap an attention constructor so that it gets our core attention where it should."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        config, submodules = bound.arguments["config"], bound.arguments["submodules"]
        burst = getattr(config, "burst", None)
        ours = burst is not None and burst.algorithm != "megatron"
        if ours and config.context_parallel_size > 1 and submodules.core_attention in stock:
            bound.arguments["submodules"] = dataclasses.replace(
                submodules, core_attention=BurstCoreAttention
            )
        original(*bound.args, **bound.kwargs)

    return __init__


def _patch_recompute(patches: registry.PatchSet) -> None:
    from megatron.core.tensor_parallel import random

    original = random.checkpoint
    names = ["function", "distribute_saved_activations"]
    require_parameters(original, names, "tensor_parallel.checkpoint")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["function"] = framed(bound.arguments["function"])
        return original(*bound.args, **bound.kwargs)

    patches.replace_function(random, "checkpoint", checkpoint)


def _patch_slicing(patches: registry.PatchSet, layout: str) -> None:
    from megatron.core import utils
    from megatron.core.models.common.embeddings import (  # noqa: F401  from-import what we replace
        rope_utils,
        rotary_pos_embedding,
        yarn_rotary_pos_embedding,
    )

    batch = batch_slicer(utils.get_batch_on_this_cp_rank, layout)
    patches.replace_function(utils, "get_batch_on_this_cp_rank", batch)
    of_packed = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    if of_packed is not None:  # until 0.17; later versions have one function for both
        packed_batch = packed_batch_slicer(of_packed, layout)
        patches.replace_function(utils, "get_thd_batch_on_this_cp_rank", packed_batch)
    packed = packed_rope(
        rope_utils._apply_rotary_pos_emb_thd, rope_utils._apply_rotary_pos_emb_bshd, layout
    )
    patches.replace_function(rope_utils, "_apply_rotary_pos_emb_thd", packed)
    if layout != "zigzag":  # Megatron's own
        rope = rope_slicer(rope_utils.get_pos_emb_on_this_cp_rank, layout)
        patches.replace_function(rope_utils, "get_pos_emb_on_this_cp_rank", rope)
