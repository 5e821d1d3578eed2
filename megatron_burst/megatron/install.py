"""Installing BurstAttention into Megatron-Core, and choosing it for a model.

Owns: which functions of Megatron are replaced, and the promise that a run has one layout.
Must not know: what an attention layer does with its core.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.layout import LayoutName
from megatron_burst.megatron.checks.config import check_version, config_problems, require_parameters
from megatron_burst.megatron.checks.model import kernel_problems
from megatron_burst.megatron.checks.problem import refuse
from megatron_burst.megatron.data.slicing import slicing_patches
from megatron_burst.megatron.lm_head import fused_loss, mtp
from megatron_burst.megatron.patching import patched, registry
from megatron_burst.megatron.training import hooks
from megatron_burst.recompute.checkpoint import framed

_NAME = "burst"


def install(layout: LayoutName | None = None) -> None:
    """Teach Megatron BurstAttention. Nothing changes until a configuration asks for it.

    Without ``layout``, which is what a script of Megatron-LM wants: where `megatron.training` can
    be imported, its command line gets our flags, and its configurations follow them; the layout is
    that of the first configuration. With ``layout`` the script calls `configure` by itself, and
    only Megatron-Core is touched.

    Call before arguments are parsed, models are built and batches are cut. Idempotent; the layout
    of a run cannot be changed, so another layout is a ``ValueError`` until `uninstall`. Raises
    ``RuntimeError`` when this Megatron's functions are not those the patches were written for.
    """
    if layout is not None:
        BurstConfig(layout=layout)
    check_version()
    present = registry.installed(_NAME)
    if present is None:
        # Before anything is replaced, so that no module keeps a replacement after `uninstall`.
        importlib.import_module("megatron_burst.megatron.attention.core_attention")
        for_scripts = layout is None and hooks.available()
        if for_scripts:
            hooks.load()  # before seams are looked for
        with registry.patching(_NAME) as patches, patched.opened(patches):
            _patch_attention(patches)
            slicing_patches(layout or "striped")  # checks signatures while all can be undone
            _patch_recompute(patches)
            fused_loss.patch(patches)
            mtp.patch(patches)
            patches.notes["scripts"] = for_scripts
            if for_scripts:
                hooks.patch(patches, configure)
            if layout is not None:
                _settle(patches, layout)
    elif layout is not None:
        _settle(present, layout)
    elif hooks.available() and not present.notes["scripts"]:
        raise ValueError(
            "install(layout=...) was called, and added no flags to Megatron-LM's command line; "
            "call uninstall() before install()"
        )


def _settle(patches: registry.PatchSet, layout: str) -> None:
    """Make ``layout`` that of the run, whose batches and rotary embeddings are cut by it."""
    settled = patches.notes.setdefault("layout", layout)
    if settled != layout:
        raise ValueError(
            f"--burst-layout {layout}: layout {settled!r} is installed, and a run has one "
            "layout; call uninstall() first, and build the model anew"
        )
    if "sliced" not in patches.notes:
        with patched.opened(patches, "slicing"):
            for home, name, replacement in slicing_patches(layout):
                patches.replace_function(home, name, replacement)
        patches.notes["sliced"] = True


def uninstall() -> bool:
    """Put Megatron back as it was; False when nothing was installed.

    Models built meanwhile keep working; their process groups live as long as they do.
    """
    return registry.remove(_NAME)


def installed_layout() -> str | None:
    """The layout of this run: that given to `install`, or of the first `configure`; or None."""
    patches = registry.installed(_NAME)
    return patches.notes.get("layout") if patches else None


def configure(config: Any, burst: BurstConfig, *, seq_length: int | None = None) -> Any:
    """Choose the attention of models built from a ``TransformerConfig``; returns the config.

    Sets ``config.burst``, which survives copies of the config. With algorithm "megatron", or one
    context-parallel rank, Megatron's own attention runs. Raises ``ValueError`` naming the flag
    for everything BurstAttention would not honour; ``seq_length`` (global, tokens) is checked if
    given.
    """
    patches = registry.installed(_NAME)
    if patches is None:
        raise ValueError("megatron_burst is not installed: call install() before configure()")
    refuse([
        *config_problems(config, burst, seq_length),
        *fused_loss.problems(config, burst),
        *kernel_problems(burst.kernel),
    ])  # fmt: skip
    if burst.algorithm != "megatron" or "layout" in patches.notes:
        _settle(patches, burst.layout)
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
        if ours and config.context_parallel_size > 1:
            core = _replaced(submodules.core_attention, stock)
            bound.arguments["submodules"] = dataclasses.replace(submodules, core_attention=core)
        original(*bound.args, **bound.kwargs)

    return __init__


def _replaced(core: Any, stock: tuple[type, ...]) -> Any:
    """Ours for a core attention of Megatron's own, be it a class or a ``ModuleSpec`` of one.

    Raises ``ValueError`` for any other: it would see its own rank's tokens, or split them its way.
    """
    from megatron_burst.megatron.attention.core_attention import BurstCoreAttention

    module = getattr(core, "module", core)
    if isinstance(module, type) and issubclass(module, BurstCoreAttention):
        return core
    if module not in stock and not isinstance(module, type):
        raise ValueError(
            f"the layer spec has no core attention to replace, but {module!r:.100}: layers of "
            "Transformer Engine, such as those of pretrain_hybrid.py, need it installed; or take "
            "--context-parallel-algo megatron"
        )
    if module not in stock:
        names = " and ".join(one.__name__ for one in stock)
        raise ValueError(
            f"the layer spec has the core attention {getattr(module, '__name__', module)}, and "
            f"BurstAttention can take the place of {names} only: change the spec, or take "
            "--context-parallel-algo megatron"
        )
    return (
        BurstCoreAttention
        if core is module
        else dataclasses.replace(core, module=BurstCoreAttention)
    )


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
