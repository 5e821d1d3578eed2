# SPDX-License-Identifier: Apache-2.0
"""The layer spec that `apply_burst` sets in a recipe.

`apply_burst` sets `transformer_layer_spec` to a `functools.partial` of `burst_layer_spec`. The
function is public and its arguments are plain values, so the partial can be written to a YAML file.
"""

from __future__ import annotations

import functools
from typing import Any

from ..megatron import patching, specs
from ..megatron.checks.problem import refuse
from ..megatron.data.cut import compare_clusters
from ..megatron.patching import show_log
from ..megatron.selection import uses_burst
from . import own_attention, packed
from .diffusion_models import diffusion_recipes
from .kinds import translated, translating
from .vision_models import patch_bridge as patch_vision_models
from .vision_models import vision_recipes


def burst_layer_spec(
    config: Any,
    vp_stage: int | None = None,
    *,
    base: Any = None,
    before: dict[str, Any] | None = None,
    **choices: Any,
) -> Any:
    """Return the layer spec of `megatron.specs.burst_layer_spec`, for a recipe.

    Errors name recipe settings instead of flags. The call also patches loaded modules of Bridge.

    Args:
        config: the model configuration of the recipe.
        vp_stage: the virtual pipeline stage, if the pipeline is interleaved.
        base: the recipe's layer spec without BurstAttention.
        before: the values of settings before `apply_burst` changed them. Only a later call of
            `apply_burst` reads them, to restore the settings.
        choices: fields of `BurstConfig`; they take precedence over flags.

    Returns:
        The layer spec.

    Raises:
        ValueError: Settings are not supported.
    """
    show_log()
    vision, diffusion = vision_recipes(config), diffusion_recipes(config)
    if vision is not None:
        choices = vision.with_mask(config, choices)
    with translating(config):
        layers = specs.burst_layer_spec(config, vp_stage, base=base, **choices)
        compare_clusters(patching.run_state(), choices.get("cluster"))
        transformer = specs.transformer_of(config)
        if diffusion is not None and uses_burst(transformer, transformer.burst):
            refuse(diffusion.problems(config, transformer, transformer.burst))
            layers = diffusion.with_attention(config, layers)
            diffusion.patch_bridge(config)
    patching.translate_with(functools.partial(translated, config))
    packed.patch_bridge()
    patch_vision_models()
    own_attention.patch_ropes()
    own_attention.name_to_bridge()
    return layers


def is_ours(spec: Any) -> bool:
    """Return whether `apply_burst` made this layer spec."""
    return isinstance(spec, functools.partial) and spec.func is burst_layer_spec


def fields_of(spec: functools.partial) -> dict[str, Any]:
    """Return the fields of `BurstConfig` that a layer spec made by `apply_burst` sets."""
    return {name: x for name, x in spec.keywords.items() if name not in ("base", "before")}


def choices_of(spec: functools.partial) -> dict[str, Any]:
    """Return the arguments of the `apply_burst` call that made a layer spec."""
    choices = fields_of(spec)
    intra = choices.pop("intra_size", None)
    return choices if intra is None else choices | {"intra": intra}
