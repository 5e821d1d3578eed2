# SPDX-License-Identifier: Apache-2.0
"""`apply_burst`: one line that gives a recipe BurstAttention.

Only names and values of its arguments are checked here. Launchers override the sizes of a recipe
afterwards, so whatever depends on them is checked when the recipe is used (`recipes.validate`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from ..config import BurstConfig
from ..megatron.patching import log, show_log
from . import own_attention, validate
from .kinds import translating
from .layers import burst_layer_spec, is_ours
from .vision_models import vision_recipes

# Not `pack`: Bridge's loop and data sets were never run with it.
_NAMES = tuple(
    f.name for f in dataclasses.fields(BurstConfig) if f.name not in ("intra_size", "pack")
)

_STACKS = ("hybrid_stack_spec", "mamba_stack_spec")  # of hybrid models, the second until 0.17


def apply_burst(recipe: Any, *, intra: int | None = None, **choices: Any) -> Any:
    """Make a recipe train with BurstAttention. Changes the recipe and returns it.

    recipe: a `ConfigContainer` of Megatron-Bridge, or a `run.Partial` of NeMo 2.
    intra: context-parallel ranks per node, by default those on one host
    (`BurstConfig.intra_size`). choices: the other fields of `BurstConfig`, but for
    `pack`. A second call replaces the first.

    Two settings besides the layer spec change if a choice needs it, and the log names them:
    a fused `lm_head_loss` turns `cross_entropy_loss_fusion` off, and `store` turns full
    recompute on if the recipe recomputes nothing. Overrides may follow. The result is checked
    before the first process group is made (in NeMo 2: when the model is built).

    Raises `ValueError` for an unknown choice, a wrong value, or an object of another type.
    """
    unknown = sorted(set(choices) - set(_NAMES))
    if unknown:
        raise ValueError(f"{unknown[0]}: apply_burst takes intra, {', '.join(_NAMES)}")
    if intra is not None:
        choices["intra_size"] = intra
    with translating(None):
        BurstConfig(**choices)
    if _is_nemo(recipe):
        return _apply_nemo(recipe, choices)
    model: Any = getattr(recipe, "model", None)
    stack = next((name for name in _STACKS if hasattr(model, name)), None)
    if stack is not None and not hasattr(model, "transformer_layer_spec"):
        raise ValueError(
            f"recipe: {type(model).__name__} is a hybrid model, whose layers come from {stack}, "
            "and apply_burst changes transformer_layer_spec: call install() and configure() of "
            "megatron_burst.megatron before pretrain(), with Megatron-Core 0.19 or newer (never "
            "run with Bridge), or leave apply_burst out"
        )
    if not hasattr(model, "transformer_layer_spec"):
        what = type(recipe if model is None else model).__name__
        raise ValueError(
            "recipe must be a ConfigContainer of Megatron-Bridge with a GPT model, or a "
            f"run.Partial of NeMo 2; got {what}, which has no transformer_layer_spec"
        )
    vision = vision_recipes(model)
    if vision is not None:
        vision.check_provider(model, is_ours)
    own_attention.patch_provider(model, is_ours)
    base, before = model.transformer_layer_spec, {}
    if is_ours(base):
        base, before = base.keywords["base"], base.keywords.get("before", {})
    spec = functools.partial(burst_layer_spec, base=base, **choices)
    model.transformer_layer_spec = _adjusted(model, choices, before, spec)
    validate.hook_into_bridge()
    return recipe


_UNFUSED = {"cross_entropy_loss_fusion": False}
_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _adjusted(model: Any, choices: dict[str, Any], before: dict[str, Any], spec: Any) -> Any:
    """Change the settings that a choice needs changed; returns `spec` with their old values.

    before: old values that an earlier call recorded. They are put back first, except where the
    user has changed the setting since.
    """
    for name, value in before.items():
        if _get(model, name) == (_UNFUSED | _RECOMPUTE)[name]:
            setattr(model, name, value)
    wanted = {}
    ours = choices.get("algorithm") != "megatron"
    if choices.get("lm_head_loss", "off") != "off" and _get(model, "cross_entropy_loss_fusion"):
        wanted |= _UNFUSED
    if ours and choices.get("store") and not _get(model, "recompute_granularity"):
        wanted |= _RECOMPUTE
    if not wanted:
        return spec
    was = {name: _get(model, name) for name in wanted}
    for name, value in wanted.items():
        setattr(model, name, value)
    if was != before:  # an earlier call has logged the same change
        show_log()
        said = ", ".join(f"{name}={value}" for name, value in wanted.items())
        log(f"the recipe's model now has {said}")
    return functools.partial(spec, before=was)


def _get(model: Any, name: str) -> Any:
    return getattr(model, name, None)


def _is_nemo(recipe: Any) -> bool:
    """Whether it is a configuration of fiddle, as `run.Partial` and `run.Config` are."""
    return any(cls.__module__.startswith("fiddle.") for cls in type(recipe).__mro__)


def _apply_nemo(recipe: Any, choices: dict[str, Any]) -> Any:
    run = importlib.import_module("nemo_run")
    config = getattr(getattr(recipe, "model", None), "config", None)
    if config is None:
        raise ValueError("recipe: this run.Partial has no model.config, as NeMo's GPT recipes have")
    base, before = _get(config, "transformer_layer_spec"), {}
    if _is_nemo(base) and base.__fn_or_cls__ is burst_layer_spec:
        base, before = base.base, _get(base, "before") or {}
    spec = functools.partial(burst_layer_spec, base=base, **choices)
    spec = _adjusted(config, choices, before, spec)
    config.transformer_layer_spec = run.Partial(spec.func, **spec.keywords)
    return recipe
