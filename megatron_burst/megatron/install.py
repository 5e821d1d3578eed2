# SPDX-License-Identifier: Apache-2.0
"""Installing BurstAttention into Megatron, and choosing it for a model.

This module decides which parts of Megatron are replaced, and ensures that a run has one layout:
Megatron slices batches and caches rotary embeddings before it knows which model will see them.
"""

from __future__ import annotations

from typing import Any

from .. import registry
from ..config import BurstConfig
from ..layout import LayoutName
from . import patching
from .checks.config import configuration_problems
from .checks.problem import refuse
from .checks.splitting import OLDEST
from .data.cut import cut_for, settle_cut
from .layout_choice import log_choice, one_layout, settled
from .patching import check_version, core_version

_NAME = "burst"


def install(layout: LayoutName | None = None) -> None:
    """Make BurstAttention available in Megatron. Nothing changes until a configuration chooses it.

    Checks of `TransformerConfig` that apply only to Megatron's own context parallelism (the
    all-gather of DSA, the number of heads of gated delta nets) are dropped with `layout`, after a
    first `configure`, and for `--context-parallel-algo` other than megatron; not before.

    Without `layout`, for scripts of Megatron-LM: if `megatron.training` can be imported, its
    command line gets our flags and its configurations follow them. The first configuration
    decides the layout. With `layout`, only Megatron-Core is changed, and the script calls
    `configure` itself.

    Call it before arguments are parsed, models are built and batches are cut. Idempotent. Raises
    `ValueError` for a second layout, since a run has one until `uninstall`, and
    `RuntimeError` if a function of this Megatron lacks a parameter that its patch needs.
    """
    if layout is not None:
        BurstConfig(layout=layout)
        if layout == "auto":
            raise ValueError(
                "install(layout='auto'): a script that calls configure() itself names "
                "the layout by which it cuts batches: zigzag, contiguous, ..."
            )
    check_version()
    present = patching.installed(_NAME)
    if present is None:
        _patch(layout, layout is None and patching.training_available())
    elif layout is not None:
        _fix_layout(present, layout)
    elif patching.training_available() and not present.notes["scripts"]:
        raise ValueError(
            "install(layout=...) was called, and added no flags to Megatron-LM's command line; "
            "call uninstall() before install()"
        )


def _patch(layout: LayoutName | None, for_scripts: bool) -> None:
    """Replace the functions of Megatron; all of them or, if one of them is not as needed, none."""
    # These import Megatron, before any of it is replaced: a module that imported a replacement
    # by name would keep it after `uninstall`.
    from . import training as training_hooks
    from .attention import hooks as attention_hooks
    from .data import loader
    from .data.rope import rope_patches
    from .data.slicing import slicing_patches
    from .lm_head import fused_loss, mtp
    from .packing import step as packing_step

    states: list[Any] = []  # of layers of linear attention
    if core_version() >= OLDEST:
        from .linear import delta_net, mamba

        states = [delta_net.patch_heads, delta_net.patch, mamba.patch]
    of_plugins = [patch for _, patch in registry.hooked("patch_megatron")]
    if for_scripts:
        training_hooks.load()  # before `opened` looks for seams
    with patching.patch_set(_NAME) as patches, patching.opened(patches):
        attention_hooks.patch_attention(patches)
        # Signatures of what a layout replaces, while all can be undone.
        for owner, name, parameters, _ in (*slicing_patches(""), *rope_patches("")):
            patching.require_function(owner, name, parameters)
        attention_hooks.patch_recompute(patches)
        fused_loss.patch(patches)
        mtp.patch(patches)
        # Before packed batches, which change the number of micro-batches of a step: of the
        # functions around a step the last one that was added runs first.
        for patch in (*states, *of_plugins):
            patch(patches)
        loader.patch(patches)
        packing_step.patch(patches)
        patches.notes["scripts"] = for_scripts
        if for_scripts:
            training_hooks.patch(patches, configure)
        if layout is not None:
            _fix_layout(patches, layout)


def _fix_layout(patches: patching.PatchSet, layout: str) -> None:
    """Fix the layout of the run, and slice batches and rotary embeddings by it from now on."""
    settled = patches.notes.setdefault("layout", layout)
    if settled != layout:
        raise ValueError(
            f"--burst-layout {layout}: layout {settled!r} is installed, and a run has one "
            "layout; call uninstall() first, and build the model again"
        )
    if "sliced" not in patches.notes:
        from .data.other_cuts import guard_other_cuts
        from .data.rope import rope_patches
        from .data.slicing import slicing_patches

        with patching.opened(patches, "slicing"):
            for each in slicing_patches(layout):
                patches.wrap(*each)
        guard_other_cuts(patches, layout)
        for each in rope_patches(layout):
            patches.wrap(*each)
        patches.notes["sliced"] = True


def uninstall() -> bool:
    """Restore Megatron's own functions; False if nothing was installed.

    Models that were built in between keep working, with their process groups.
    """
    return patching.remove(_NAME)


def configure(config: Any, burst: BurstConfig, *, seq_length: int | None = None) -> Any:
    """Choose the attention of models built from a `TransformerConfig`; returns the config.

    Sets `config.burst`, which copies of the config keep. With algorithm "megatron", or on one
    context-parallel rank, Megatron's own attention runs. `seq_length` (global, tokens) is
    checked if given. Raises `ValueError` naming the flag of every setting that cannot be
    honoured.
    """
    patches = patching.installed(_NAME)
    if patches is None:
        raise ValueError("megatron_burst is not installed: call install() before configure()")
    burst, why = settled(config, burst, seq_length)
    log_choice(burst, why)
    refuse(configuration_problems(config, burst, seq_length))
    if burst.algorithm != "megatron" or "layout" in patches.notes:
        _fix_layout(patches, burst.layout)
    if burst.algorithm != "megatron":
        settle_cut(patches, cut_for(config, burst))
    if burst.pack == "documents":
        patches.notes["packing"] = True
    config.burst = burst
    one_layout(config, burst)
    for _, configured in registry.hooked("configured"):
        configured(patches, config, burst)
    return config
