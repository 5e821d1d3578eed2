"""Installing BurstAttention into Megatron-Core, and choosing it for a model.

Owns: which functions of Megatron are replaced, and the promise that a run has one layout.
Must not know: what an attention layer does with its core.
"""

from __future__ import annotations

from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.layout import LayoutName
from megatron_burst.megatron import training
from megatron_burst.megatron.checks.config import config_problems
from megatron_burst.megatron.checks.lm_head import lm_head_problems
from megatron_burst.megatron.checks.model import kernel_problems
from megatron_burst.megatron.checks.problem import refuse
from megatron_burst.megatron.patching import patched, registry
from megatron_burst.megatron.patching.compatibility import check_version

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
        for_scripts = layout is None and training.available()
        # These import Megatron, before any of it is replaced: a module that imported a replacement
        # by name would keep it after `uninstall`.
        from megatron_burst.megatron.attention import hooks as attention_hooks
        from megatron_burst.megatron.data.slicing import slicing_patches
        from megatron_burst.megatron.lm_head import fused_loss, mtp
        from megatron_burst.megatron.training import hooks as training_hooks

        if for_scripts:
            training_hooks.load()  # before `opened` looks for seams
        with registry.patching(_NAME) as patches, patched.opened(patches):
            attention_hooks.patch_attention(patches)
            slicing_patches(layout or "striped")  # checks signatures while all can be undone
            attention_hooks.patch_recompute(patches)
            fused_loss.patch(patches)
            mtp.patch(patches)
            patches.notes["scripts"] = for_scripts
            if for_scripts:
                training_hooks.patch(patches, configure)
            if layout is not None:
                _settle(patches, layout)
    elif layout is not None:
        _settle(present, layout)
    elif training.available() and not present.notes["scripts"]:
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
        from megatron_burst.megatron.data.slicing import slicing_patches

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
        *lm_head_problems(config, burst),
        *kernel_problems(burst.kernel),
    ])  # fmt: skip
    if burst.algorithm != "megatron" or "layout" in patches.notes:
        _settle(patches, burst.layout)
    config.burst = burst
    return config
