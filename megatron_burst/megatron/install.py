# SPDX-License-Identifier: Apache-2.0
"""Installation of BurstAttention into Megatron: which functions of Megatron are replaced."""

from __future__ import annotations

from typing import Any

from .. import registry
from ..config import BurstConfig
from ..layout import LayoutName
from . import patching
from .configuration import install_layout
from .patching import HYBRID_SINCE, check_version, core_version

_NAME = "burst"


def install(layout: LayoutName | None = None) -> None:
    """Patch Megatron, so that configurations of models can select BurstAttention.

    Call this before arguments are parsed, models are built and batches are cut. A second call with
    the same layout changes nothing.

    Without `layout` (Megatron-LM scripts), the flags of this package are added to the command line
    if `megatron.training` can be imported. The flags configure every model, and the first
    configuration decides the layout. With `layout`, only Megatron-Core is patched, and the script
    calls `configure` itself.

    Two checks of `TransformerConfig` apply only to Megatron's own context parallelism: the
    all-gather of DSA, and the number of heads of gated delta nets. Both checks are skipped
    if `layout` is set, after a first `configure`, or if `--context-parallel-algo` is not megatron.

    Args:
        layout: the layout of the run, for scripts that call `configure`; None for Megatron-LM.

    Raises:
        ValueError: Another layout is installed: a run has one layout until `uninstall`.
        RuntimeError: A function of this Megatron is missing, or lacks a parameter.
    """
    if layout is not None:
        BurstConfig(layout=layout)
        if layout == "auto":
            raise ValueError(
                "install(layout='auto') is not supported: a script that calls configure() names "
                "the layout in which it cuts batches, such as zigzag or contiguous"
            )
    check_version()
    present = patching.installed(_NAME)
    if present is None:
        _patch(layout, layout is None and patching.training_available())
    elif layout is not None:
        install_layout(present, layout)
    elif patching.training_available() and not present.run.for_scripts:
        raise ValueError(
            "install(layout=...) was called before, without flags for Megatron-LM's command line; "
            "call uninstall() before install()"
        )


def _patch(layout: LayoutName | None, for_scripts: bool) -> None:
    """Replace functions of Megatron; replace none if one of them is missing or differs."""
    # These modules import Megatron before any function is replaced: a module that imported a
    # replacement by name would keep it after `uninstall`.
    from .attention import hooks as attention_hooks
    from .data import loader, next_pack
    from .data.rope import rope_patches
    from .data.slicing import slicing_patches
    from .lm_head import fused_loss, mtp
    from .packing import step as packing_step
    from .training import TrainingHooks, load_training_modules

    linear_patches: list[Any] = []
    if core_version() >= HYBRID_SINCE:
        from .linear import delta_net, mamba

        linear_patches = [delta_net.patch_heads, delta_net.patch, mamba.patch]
    plugin_patches = [patch for _, patch in registry.hooked("patch_megatron")]
    if for_scripts:
        load_training_modules()  # before `opened` looks for seams
    with patching.patch_set(_NAME) as patches, patching.opened(patches):
        attention_hooks.patch_attention(patches)
        # Check the functions that a layout replaces while all replacements can still be undone.
        for owner, name, parameters, _ in (*slicing_patches(""), *rope_patches("")):
            patching.require_function(owner, name, parameters)
        attention_hooks.patch_recompute(patches)
        fused_loss.patch(patches)
        mtp.patch(patches)
        # These precede `packing_step.patch`, which changes the number of micro-batches of a step:
        # the wrapper of a step that was added last is called first.
        for patch in (*linear_patches, *plugin_patches):
            patch(patches)
        loader.patch(patches)
        next_pack.patch(patches)
        packing_step.patch(patches)
        patches.run.for_scripts = for_scripts
        if for_scripts:
            TrainingHooks(patches).patch()
        if layout is not None:
            install_layout(patches, layout)


def uninstall() -> bool:
    """Restore Megatron's own functions; return False if nothing was installed.

    Models that were built before this call still work and keep their process groups.
    """
    return patching.remove(_NAME)
