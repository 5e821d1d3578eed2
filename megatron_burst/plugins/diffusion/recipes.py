# SPDX-License-Identifier: Apache-2.0
"""Recipes of Megatron-Bridge's diffusion models; implements `recipes.diffusion_models`.

Each supported model has a module with the functions of `DiffusionRecipes`, which are selected by
the class of the provider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...config import BurstConfig
from ...megatron import patching
from ...megatron.checks.problem import Problem
from . import bridge, flux, llada, nemotron, wan

_MODULES = {module.PROVIDER: module for module in (llada, nemotron, wan, flux)}


def _module(model: Any) -> Any:
    """Return the module of the model that a provider builds.

    Raises:
        ValueError: The model is not supported.
    """
    names = [cls.__name__ for cls in type(model).__mro__]
    module = next((_MODULES[name] for name in names if name in _MODULES), None)
    if module is None:
        raise ValueError(
            f"recipe: {names[0]} is a diffusion model that apply_burst does not support; it "
            f"supports {', '.join(_MODULES)}. For other models call mb.attention in your own script"
        )
    return module


def prepare(model: Any, is_ours: Callable[[Any], bool]) -> None:
    """Prepare a provider, and patch its model once; see `DiffusionRecipes.prepare`."""
    module = _module(model)
    bridge.check_version(module.PROVIDER, module.NEEDED)
    if not hasattr(model, "transformer_layer_spec"):
        model.transformer_layer_spec = module.layer_spec
    name = f"recipes, {module.PROVIDER}"
    if patching.installed(name) is None:
        with patching.patch_set(name) as patches:
            module.patch_model(patches, is_ours)


def problems(model: Any, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem for each unsupported setting; see `DiffusionRecipes.problems`."""
    yield from _module(model).problems(model, transformer, burst)


def with_attention(model: Any, layers: Any) -> Any:
    """Return the layer spec with the core attention of the plugin."""
    return _module(model).with_attention(model, layers)


def patch_bridge(model: Any) -> None:
    """Patch Bridge's training step of a model. Idempotent."""
    _module(model).patch_bridge()


def recipe(name: str) -> Callable[[], Any] | None:
    """Return Bridge's function that makes the recipe `name`, or None if there is none."""
    for home in ("wan.wan", "flux.flux", "nemotron_labs_diffusion.ar_to_dlm"):
        if name.startswith(home.partition(".")[0]):
            try:
                return getattr(bridge.module(f"recipes.{home}"), name, None)
            except ImportError:  # a Bridge without diffusion models
                return None
    return None


def forward_step(recipe: Any) -> Any:
    """Return Bridge's forward step of a recipe; see `DiffusionRecipes.forward_step`."""
    return _module(recipe.model).forward_step(recipe)
