# SPDX-License-Identifier: Apache-2.0
"""Selection of BurstAttention for a model.

`configure_model` checks a `TransformerConfig` and stores the options in its attribute `burst`
(`selection.burst_of`). The flags, layer specs and the public function `configure` call it.

The first configuration decides the layout of the run: Megatron slices batches and caches rotary
embeddings independently of the model that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import registry
from ..config import OFF, BurstConfig
from . import patching
from .checks.config import configuration_problems
from .checks.problem import Problem, refuse
from .data.cut import cut_for, set_cut
from .run_options import log_choice, one_layout, resolve_auto_layout


def configure(config: Any, burst: BurstConfig, *, seq_length: int | None = None) -> Any:
    """Select the attention of models that are built from a `TransformerConfig`.

    Sets `config.burst`; copies of the configuration keep this attribute. Megatron's own attention
    runs with algorithm "megatron". It also runs on one context-parallel rank, except with
    `pack="trees"` or groups per micro-batch (`selection.uses_burst`).

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
    _installed_patches()
    burst, why = resolve_auto_layout(config, burst, seq_length)
    log_choice(burst, why)
    return configure_model(config, burst, seq_length)


def configure_model(
    config: Any, burst: BurstConfig, seq_length: int | None, problems: Iterable[Problem] = ()
) -> Any:
    """Configure a model as in `configure`, from options with concrete layouts.

    Args:
        config: a `TransformerConfig`; changed.
        burst: the options of the run; no layout is "auto".
        seq_length: global sequence length in tokens; checked if given.
        problems: problems that the caller has found; the error lists them too.

    Returns:
        `config`.

    Raises:
        ValueError: See `configure`.
    """
    patches = _installed_patches()
    refuse([*problems, *configuration_problems(config, burst, seq_length)])
    assert burst.layout != "auto", "callers resolve the layout"
    with _restored_on_error(patches, config):
        if burst.algorithm != OFF or patches.run.layout is not None:
            install_layout(patches, burst.layout)
        if burst.algorithm != OFF:
            set_cut(patches, cut_for(config, burst))
        if burst.pack == "documents":
            patches.run.packs_documents = True
        config.burst = burst
        one_layout(config, burst)
        for _, configured in registry.hooked("configured"):
            configured(patches, config, burst)
    return config


def _installed_patches() -> patching.PatchSet:
    """Return the set of patches that `install` made; raise `ValueError` without `install`."""
    patches = patching.installed("burst")
    if patches is None:
        raise ValueError("megatron_burst is not installed: call install() before configure()")
    return patches


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


def install_layout(patches: patching.PatchSet, layout: str) -> None:
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
