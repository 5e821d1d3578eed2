# SPDX-License-Identifier: Apache-2.0
"""Detection of recipes of diffusion models, and access to the plugin `diffusion`.

The providers of these models are in the package `megatron.bridge.diffusion` of Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from .. import registry
from ..config import BurstConfig
from ..megatron.checks.problem import Problem

_PACKAGE = "megatron.bridge.diffusion."


class DiffusionRecipes(Protocol):
    """Interface of the module `plugins.diffusion.recipes`, which supports diffusion models."""

    def prepare(self, model: Any, is_ours: Callable[[Any], bool]) -> None:
        """Patch a provider (Bridge's class of a model) to build its model from a layer spec.

        The layer spec is the attribute `transformer_layer_spec` of the provider.

        Args:
            model: The provider; changed.
            is_ours: Test for a layer spec of `apply_burst` (`layers.is_ours`).

        Raises:
            ValueError: The model is not supported.
        """
        ...

    def problems(self, model: Any, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
        """Yield a problem for each setting that is unsupported only in this diffusion model."""
        ...

    def with_attention(self, model: Any, layers: Any) -> Any:
        """Return a layer spec of Bridge, with core attention replaced by the plugin's.

        Args:
            model: The provider.
            layers: The layer spec.
        """
        ...

    def patch_bridge(self, model: Any) -> None:
        """Patch Bridge's training step to cut a model's sequences over ranks. Idempotent.

        Args:
            model: The provider.
        """
        ...

    def recipe(self, name: str) -> Callable[[], Any] | None:
        """Return Bridge's function that makes the recipe `name` of a diffusion model, or None."""
        ...

    def forward_step(self, recipe: Any) -> Any:
        """Return Bridge's forward step that trains the model of a recipe."""
        ...


def is_diffusion(model: Any) -> bool:
    """Return True if this provider of Bridge builds a diffusion model."""
    return any(cls.__module__.startswith(_PACKAGE) for cls in type(model).__mro__)


def diffusion_recipes(model: Any) -> DiffusionRecipes | None:
    """Return the functions of the plugin `diffusion` for a diffusion model, else None.

    Args:
        model: The model provider of Megatron Bridge.

    Raises:
        ValueError: The model is a diffusion model and the plugin is not installed.
    """
    if not is_diffusion(model):
        return None
    name = type(model).__name__
    return cast(
        "DiffusionRecipes",
        registry.required("diffusion_recipes", f"recipe: {name}, a diffusion model,"),
    )


def installed_recipes() -> DiffusionRecipes | None:
    """Return the functions of the plugin `diffusion`, or None if it is not installed."""
    return registry.optional("diffusion_recipes")
