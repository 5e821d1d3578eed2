# SPDX-License-Identifier: Apache-2.0
"""Patches of verl's Megatron engine that configure BurstAttention.

One method of the engine builds the configuration of a model. The patch of this method removes the
entry `burst` from `override_transformer_config`, because Megatron does not accept it. It then
passes the entry to `configure`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from .... import flags
from ....config import FIELDS, BurstConfig
from ....megatron import patching
from ....megatron.checks.problem import Problem, refuse
from ....megatron.configuration import configure
from ....megatron.install import install as install_burst
from ....megatron.install import uninstall as uninstall_burst

VERSIONS = ("0.9.1",)  # tested versions of verl
_NAME = "verl"
_ENTRY = "burst"
_ENGINE = "verl.workers.engine.megatron.transformer_impl"


def install() -> None:
    """Patch Megatron engines of verl to use BurstAttention. Calls after the first have no effect.

    Raises:
        ValueError: The installed version of verl was not tested.
        RuntimeError: A patched function of verl lacks a parameter that the patch needs.
    """
    if patching.installed(_NAME) is not None:
        return
    version = importlib.import_module("verl").__version__
    if version not in VERSIONS:
        raise ValueError(
            f"megatron_burst.plugins.rl.verl was tested with verl {', '.join(VERSIONS)}, but verl "
            f"{version} is installed; install a tested version, or remove "
            "megatron_burst.plugins.rl.verl from external_lib"
        )
    engine = importlib.import_module(_ENGINE)
    util, forward, fused = (
        importlib.import_module(f"verl.models.mcore.{name}")
        for name in ("util", "model_forward", "model_forward_fused")
    )
    from . import merged_rows  # these import Megatron-Core
    from .head import processed

    with patching.patch_set(_NAME) as patches:
        patches.wrap(engine.MegatronEngine, "_build_tf_config", ["self"], _configured)
        names = ["hidden_states", "output_layer", "output_weight", "labels", "context", "config"]
        patches.wrap(fused, "fused_output_processor", names, processed)
        merged_rows.patch(patches, util, forward, fused)


def uninstall() -> bool:
    """Remove the patches of verl and Megatron. Return False if verl was not patched."""
    uninstall_burst()
    return patching.remove(_NAME)


def _configured(original: Callable[[Any], None], engine: Any) -> None:
    """Run `MegatronEngine._build_tf_config`, then configure attention with the `burst` entry."""
    settings = engine.engine_config
    overrides = settings.override_transformer_config
    entry = overrides.get(_ENTRY)
    remaining = {name: value for name, value in overrides.items() if name != _ENTRY}
    object.__setattr__(settings, "override_transformer_config", remaining)  # the class is frozen
    try:
        original(engine)
    finally:
        object.__setattr__(settings, "override_transformer_config", overrides)
    model = engine.tf_config or engine.provider
    try:
        burst = choices(entry)
        layout: Any = burst.layout
        refuse(engine_problems(settings, engine.model_config, burst))
        install_burst(layout)
        patching.show_log(patching.installed("burst"))
        patching.translate_with(translated)
        configure(model, burst)
        refuse(map(Problem, _tree_reasons(model, burst)))
    except ValueError as error:
        raise ValueError(translated(str(error))) from error


def choices(entry: Any) -> BurstConfig:
    """Return the `BurstConfig` with the fields of a `burst` entry, which is a dict or None."""
    fields = dict(entry or {})
    unknown = sorted(set(fields) - FIELDS.keys())
    if unknown:
        valid = ", ".join(FIELDS)
        raise ValueError(
            f"override_transformer_config.{_ENTRY}.{unknown[0]}: unknown field; use one of {valid}"
        )
    return BurstConfig(**fields)  # zigzag by default, as verl cuts sequences


def engine_problems(settings: Any, model: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a `Problem` for each setting of an engine that cannot be combined with `burst`.

    Args:
        settings: `McoreEngineConfig` of the engine.
        model: `HFModelConfig` of the engine.
        burst: Configuration of the `burst` entry.
    """
    trees = burst.pack == "trees"
    if burst.algorithm == flags.OFF or not (trees or settings.context_parallel_size > 1):
        return
    if not settings.use_remove_padding:
        yield Problem(
            "use_remove_padding False requires a padding mask, which BurstAttention does not "
            f"support; set it to True, or use --context-parallel-algo {flags.OFF}"
        )
    if burst.layout != "zigzag":
        yield Problem(
            f"--burst-layout {burst.layout}: verl cuts batches in zigzag order; remove "
            "--burst-layout"
        )
    if burst.pack == "documents":
        yield Problem("--burst-pack documents: verl makes micro-batches itself; use trees or off")
    if settings.dynamic_context_parallel:
        yield Problem(
            "dynamic_context_parallel was not tested with BurstAttention in verl; set it to False"
        )
    unfit = {
        "router_replay.mode": settings.router_replay.mode != "disabled",
        "mtp.enable": model.mtp.enable,
        "a model with vision": hasattr(model.hf_config, "vision_config"),
    }
    for name in (name for name, present in unfit.items() if trees and present):
        yield Problem(f"--burst-pack trees is not supported with {name}; remove one of them")


def _tree_reasons(model: Any, burst: BurstConfig) -> Iterator[str]:
    """Yield an error message for each property of a model that does not support prefix trees."""
    from ..step import tree_reasons  # imports Megatron-Core

    if burst.pack == "trees" and burst.algorithm != flags.OFF:
        for name in ("fp8", "hidden_dropout", "attention_dropout"):
            if value := getattr(model, name, None):
                yield (
                    f"--burst-pack trees is not supported with {name} {value}; use --burst-pack off"
                )
        for reason in tree_reasons(model):
            yield reason.replace("tree=False", "--burst-pack off")


_FIELDS = {
    field.flag: f"override_transformer_config.{_ENTRY}.{name}" for name, field in FIELDS.items()
}


def translated(text: str) -> str:
    """Return `text` with each flag of the command line replaced by verl's name of the setting."""

    def setting(match: re.Match) -> str:
        flag = match.group()
        return _FIELDS.get(flag) or flag.removeprefix("--").replace("-", "_")

    return re.sub(r"--[a-z][a-z0-9-]*", setting, text)
