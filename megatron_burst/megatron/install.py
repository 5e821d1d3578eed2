# SPDX-License-Identifier: Apache-2.0
"""Installation of BurstAttention into Megatron, and selection of BurstAttention for a model.

This module decides which functions of Megatron are replaced, and ensures that a run has one layout:
Megatron slices batches and caches rotary embeddings independently of the model that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import registry
from ..config import BurstConfig
from ..layout import LayoutName
from . import patching
from .checks.config import configuration_problems
from .checks.problem import Problem, refuse
from .checks.splitting import OLDEST
from .data.cut import cut_for, set_cut
from .layout_choice import log_choice, one_layout, resolve_auto_layout
from .patching import check_version, core_version

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
        _fix_layout(present, layout)
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
    from .data import loader
    from .data.rope import rope_patches
    from .data.slicing import slicing_patches
    from .lm_head import fused_loss, mtp
    from .packing import step as packing_step
    from .training import TrainingHooks, load_training_modules

    linear_patches: list[Any] = []
    if core_version() >= OLDEST:
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
        packing_step.patch(patches)
        patches.run.for_scripts = for_scripts
        if for_scripts:
            TrainingHooks(patches, configure).patch()
        if layout is not None:
            _fix_layout(patches, layout)


def _fix_layout(patches: patching.PatchSet, layout: str) -> None:
    """Patch the functions that cut batches and rotary tables, and set the layout of the run."""
    state = patches.run
    if state.layout not in (None, layout):
        raise ValueError(
            f"--burst-layout {layout}: layout {state.layout!r} is installed, and a run has one "
            "layout; call uninstall() first, and build the model again"
        )
    if not state.slicing_patched:
        from .data.other_cuts import guard_other_cuts
        from .data.rope import rope_patches
        from .data.slicing import slicing_patches

        with patches.undone_on_error():
            with patching.opened(patches, "slicing"):
                for wrap in slicing_patches(layout):
                    patches.wrap(*wrap)
            guard_other_cuts(patches, layout)
            for wrap in rope_patches(layout):
                patches.wrap(*wrap)
        state.slicing_patched = True
    state.layout = layout


def uninstall() -> bool:
    """Restore Megatron's own functions; return False if nothing was installed.

    Models that were built before this call still work and keep their process groups.
    """
    return patching.remove(_NAME)


def configure(config: Any, burst: BurstConfig, *, seq_length: int | None = None) -> Any:
    """Select the attention of models that are built from a `TransformerConfig`.

    Sets `config.burst`; copies of the configuration keep this attribute. Megatron's own attention
    runs with algorithm "megatron". It also runs on one context-parallel rank, except with
    `pack="trees"` or groups per micro-batch (`checks.splitting.uses_burst`).

    An error changes nothing.

    Args:
        config: a `TransformerConfig`; changed.
        burst: the options of the run.
        seq_length: global sequence length in tokens; checked if given.

    Returns:
        `config`.

    Raises:
        ValueError: `install` was not called, or settings are not supported; the message lists all
            unsupported settings.
    """
    return select_attention(config, burst, seq_length)


def select_attention(
    config: Any, burst: BurstConfig, seq_length: int | None, problems: Iterable[Problem] = ()
) -> Any:
    """Configure a model as in `configure`; the error also lists problems of the caller.

    Args:
        config: a `TransformerConfig`; changed.
        burst: the options of the run.
        seq_length: global sequence length in tokens; checked if given.
        problems: problems that the caller has found.

    Returns:
        `config`.

    Raises:
        ValueError: See `configure`.
    """
    patches = patching.installed(_NAME)
    if patches is None:
        raise ValueError("megatron_burst is not installed: call install() before configure()")
    burst, why = resolve_auto_layout(config, burst, seq_length)
    log_choice(burst, why)
    refuse([*problems, *configuration_problems(config, burst, seq_length)])
    with _restored_on_error(patches, config):
        if burst.algorithm != "megatron" or patches.run.layout is not None:
            _fix_layout(patches, burst.layout)
        if burst.algorithm != "megatron":
            set_cut(patches, cut_for(config, burst))
        if burst.pack == "documents":
            patches.run.packs_documents = True
        config.burst = burst
        one_layout(config, burst)
        for _, configured in registry.hooked("configured"):
            configured(patches, config, burst)
    return config


@contextmanager
def _restored_on_error(patches: patching.PatchSet, config: Any) -> Iterator[None]:
    """Restore patches, the state of the run and `config` if the context raises an exception."""
    run = patches.run
    before = [(values, dict(values)) for values in (run.plugins, vars(run), vars(config))]
    try:
        with patches.undone_on_error():
            yield
    except BaseException:
        for values, previous in before:
            values.clear()
            values.update(previous)
        raise
