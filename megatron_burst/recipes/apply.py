# SPDX-License-Identifier: Apache-2.0
"""`apply_burst`: one call that adds BurstAttention to a recipe.

This module checks only names and values of the arguments. A launcher may override the sizes of a
recipe later, so `recipes.validate` makes the checks that depend on sizes when the recipe is used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from ..config import BurstConfig
from ..megatron.patching import log, show_log
from . import own_attention, validate
from .diffusion_models import diffusion_recipes
from .kinds import translating
from .layers import burst_layer_spec, is_ours
from .vision_models import vision_recipes

# Without `pack`, which was not tested with Bridge's loop and data sets.
_NAMES = tuple(
    f.name for f in dataclasses.fields(BurstConfig) if f.name not in ("intra_size", "pack")
)

# Names of one setting of hybrid models; the second name until Megatron-Core 0.17.
_STACKS = ("hybrid_stack_spec", "mamba_stack_spec")


def apply_burst(recipe: Any, *, intra: int | None = None, **choices: Any) -> Any:
    """Change a recipe so that it trains with BurstAttention.

    The call sets the layer spec. Two options change other settings too, and the change is logged. A
    fused `lm_head_loss` turns `cross_entropy_loss_fusion` off. `store` turns full recomputation on
    if the recipe recomputes nothing. A second call on a recipe replaces all options of the first.

    Settings may be overridden after the call. They are checked before the first process group is
    made (in NeMo 2: when the model is built).

    Args:
        recipe: a `ConfigContainer` of Megatron-Bridge, or a `run.Partial` of NeMo 2; changed.
        intra: context-parallel ranks per node (`BurstConfig.intra_size`); default: the ranks on one
            host.
        choices: the other fields of `BurstConfig`, except `pack`.

    Returns:
        `recipe`.

    Raises:
        ValueError: An option or its value is unknown, or the type of `recipe` is not supported.

    Example:
        >>> from megatron.bridge.recipes.llama import llama3_8b_128k_pretrain_config
        >>> from megatron_burst.recipes import apply_burst
        >>> recipe = apply_burst(llama3_8b_128k_pretrain_config(), algorithm="auto")
        >>> recipe.model.context_parallel_size = 16
    """
    unknown = sorted(set(choices) - set(_NAMES))
    if unknown:
        raise ValueError(
            f"{unknown[0]} is not an argument of apply_burst; use intra, {', '.join(_NAMES)}"
        )
    if intra is not None:
        choices["intra_size"] = intra
    with translating(None):
        BurstConfig(**choices)
    if _is_nemo(recipe):
        return _apply_nemo(recipe, choices)
    model: Any = getattr(recipe, "model", None)
    diffusion = diffusion_recipes(model)
    if diffusion is not None:
        diffusion.prepare(model, is_ours)
    stack = next((name for name in _STACKS if hasattr(model, name)), None)
    if stack is not None and not hasattr(model, "transformer_layer_spec"):
        raise ValueError(
            f"recipe: {type(model).__name__} is a hybrid model with the setting {stack}, and "
            "apply_burst supports only transformer_layer_spec: call install() and configure() of "
            "megatron_burst.megatron before pretrain(), with Megatron-Core 0.19 or newer (not "
            "tested with Bridge), or do not use apply_burst"
        )
    if not hasattr(model, "transformer_layer_spec"):
        class_name = type(recipe if model is None else model).__name__
        raise ValueError(
            "recipe must be a ConfigContainer of Megatron-Bridge with a GPT model, or a "
            f"run.Partial of NeMo 2; got {class_name}, which has no transformer_layer_spec"
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
    """Change settings of the model as the options require; return `spec` with the old values.

    Args:
        model: the model configuration; changed.
        choices: the options of `apply_burst`.
        before: old values that an earlier call of `apply_burst` recorded. They are restored first,
            except for settings that the user changed after that call.
        spec: the layer spec.
    """
    for name, value in before.items():
        if _get(model, name) == (_UNFUSED | _RECOMPUTE)[name]:
            setattr(model, name, value)
    required = {}
    uses_burst = choices.get("algorithm") != "megatron"
    if choices.get("lm_head_loss", "off") != "off" and _get(model, "cross_entropy_loss_fusion"):
        required |= _UNFUSED
    if uses_burst and choices.get("store") and not _get(model, "recompute_granularity"):
        required |= _RECOMPUTE
    if not required:
        return spec
    previous = {name: _get(model, name) for name in required}
    for name, value in required.items():
        setattr(model, name, value)
    if previous != before:  # an earlier call has logged the same change
        show_log()
        changes = ", ".join(f"{name}={value}" for name, value in required.items())
        log(f"the recipe's model now has {changes}")
    return functools.partial(spec, before=previous)


def _get(model: Any, name: str) -> Any:
    return getattr(model, name, None)


def _is_nemo(recipe: Any) -> bool:
    """Return whether a recipe is a fiddle configuration, such as `run.Partial` or `run.Config`."""
    return any(cls.__module__.startswith("fiddle.") for cls in type(recipe).__mro__)


def _apply_nemo(recipe: Any, choices: dict[str, Any]) -> Any:
    run = importlib.import_module("nemo_run")
    config = getattr(getattr(recipe, "model", None), "config", None)
    if config is None:
        raise ValueError(
            "recipe: this run.Partial has no model.config; use one of NeMo's GPT recipes"
        )
    base, before = _get(config, "transformer_layer_spec"), {}
    if _is_nemo(base) and base.__fn_or_cls__ is burst_layer_spec:
        base, before = base.base, _get(base, "before") or {}
    spec = functools.partial(burst_layer_spec, base=base, **choices)
    spec = _adjusted(config, choices, before, spec)
    config.transformer_layer_spec = run.Partial(spec.func, **spec.keywords)
    return recipe
