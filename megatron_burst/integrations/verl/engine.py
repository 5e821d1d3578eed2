# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine with BurstAttention: what is replaced in it, and what it is asked for.

The engine builds the configuration of a model in one method. Here its entry `burst` is taken out
of `override_transformer_config`, which Megatron does not know, and given to `configure`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from ... import flags
from ...config import BurstConfig
from ...megatron import patching
from ...megatron.install import configure
from ...megatron.install import install as install_burst
from ...megatron.install import uninstall as uninstall_burst

VERSIONS = ("0.9.1",)  # of verl, that the tests run with
_NAME = "verl"
_ENTRY = "burst"
_ENGINE = "verl.workers.engine.megatron.transformer_impl"


def install() -> None:
    """Let verl's Megatron engines use BurstAttention. Idempotent.

    Raises `ValueError` for a version of verl that was not tested, and `RuntimeError` if a function
    of it lacks a parameter that its patch needs.
    """
    if patching.installed(_NAME) is not None:
        return
    found = importlib.import_module("verl").__version__
    if found not in VERSIONS:
        raise ValueError(
            f"megatron_burst.integrations.verl was tested with verl {', '.join(VERSIONS)}, and this "
            f"is verl {found}: install one of those, or leave it out of external_lib"
        )
    engine = importlib.import_module(_ENGINE)
    fused = importlib.import_module("verl.models.mcore.model_forward_fused")
    from .head import processed  # imports Megatron-Core

    with patching.patch_set(_NAME) as patches:
        patches.wrap(engine.MegatronEngine, "_build_tf_config", ["self"], _configured)
        names = ["hidden_states", "output_layer", "output_weight", "labels", "context", "config"]
        patches.wrap(fused, "fused_output_processor", names, processed)


def uninstall() -> bool:
    """Restore verl and Megatron; False if nothing was installed."""
    uninstall_burst()
    return patching.remove(_NAME)


def _configured(original: Callable[[Any], None], engine: Any) -> None:
    """`MegatronEngine._build_tf_config`, whose model gets the attention that its entry asks for."""
    overrides = engine.engine_config.override_transformer_config
    entry = overrides.pop(_ENTRY, None)
    try:
        original(engine)
    finally:
        if entry is not None:
            overrides[_ENTRY] = entry
    burst = choices(entry)
    refuse_engine(engine.engine_config, burst)
    layout: Any = burst.layout
    install_burst(layout)
    patching.show_log(patching.installed("burst"))
    patching.translate_with(translated)
    try:
        configure(engine.tf_config or engine.provider, burst)
    except ValueError as error:
        raise ValueError(translated(str(error))) from error


def choices(entry: Any) -> BurstConfig:
    """The choices of an entry `burst`, a dict of fields of `BurstConfig` or None."""
    given = dict(entry or {})
    unknown = sorted(set(given) - {flag.field for flag in flags.FLAGS})
    if unknown:
        known = ", ".join(flag.field for flag in flags.FLAGS)
        raise ValueError(
            f"override_transformer_config.{_ENTRY}.{unknown[0]}: there are the fields {known}"
        )
    chosen = BurstConfig(**given)
    given.setdefault("layout", flags.layout_for(chosen.algorithm, chosen.store))
    return BurstConfig(**given)


def refuse_engine(config: Any, burst: BurstConfig) -> None:
    """Raise `ValueError` for settings of an engine, a `McoreEngineConfig`, that were never run with
    these choices."""
    if burst.algorithm == flags.OFF or config.context_parallel_size == 1:
        return
    if not config.use_remove_padding:
        raise ValueError(
            "use_remove_padding=False gives attention a mask per batch: set it to True, or "
            f"override_transformer_config.{_ENTRY}.algorithm to {flags.OFF}"
        )
    if burst.layout != "zigzag":
        raise ValueError(
            f"override_transformer_config.{_ENTRY}.layout {burst.layout}: verl cuts its packs in "
            "zigzag order; leave it out"
        )


_FIELDS = {flag.name: f"override_transformer_config.{_ENTRY}.{flag.field}" for flag in flags.FLAGS}


def translated(text: str) -> str:
    """A message that names flags, with the settings of verl that stand for them."""

    def setting(match: re.Match) -> str:
        flag = match.group()
        return _FIELDS.get(flag, flag.removeprefix("--").replace("-", "_"))

    return re.sub(r"--[a-z][a-z0-9-]*", setting, text)
