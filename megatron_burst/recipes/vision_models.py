# SPDX-License-Identifier: Apache-2.0
"""Detection of recipes of vision-language models, and access to the plugin `vision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from .. import registry
from ..megatron.checks.problem import Problem
from .diffusion_models import is_diffusion


class VisionRecipes(Protocol):
    """Interface of the module `plugins.vision.recipes`, which supports vision-language models."""

    def check_provider(self, model: Any, is_ours: Callable[[Any], bool]) -> None:
        """Raise `ValueError` for a model that is not supported.

        Args:
            model: the provider.
            is_ours: test for a layer spec of `apply_burst` (`layers.is_ours`).
        """
        ...

    def with_mask(self, model: Any, choices: dict[str, Any]) -> dict[str, Any]:
        """Return `choices` (fields of `BurstConfig`), for Gemma 3 VL with its attention mask."""
        ...

    def problems(self, model: Any, transformer: Any) -> Iterator[Problem]:
        """Yield a problem for each setting that is unsupported only in vision-language models."""
        ...

    def patch_bridge(self) -> None:
        """Patch loaded vision-language models of Bridge to cut sequences over ranks. Idempotent."""
        ...


def is_vision(model: Any) -> bool:
    """Return True if this provider of Bridge builds a vision-language model."""
    if is_diffusion(model):  # some derive from a provider of vision-language models
        return False
    # Providers of pure language models also have is_vision_language.
    names = vars(model).keys() - {"is_vision_language"}
    return any("vision" in name.split("_") for name in names)  # not a substring: "revision"


def vision_recipes(model: Any) -> VisionRecipes | None:
    """Return the functions of the plugin `vision` for a vision-language model, else None.

    Args:
        model: the model provider of Megatron Bridge.

    Raises:
        ValueError: The model is a vision-language model and the plugin is not installed.
    """
    if not is_vision(model):
        return None
    name = type(model).__name__
    return cast(
        "VisionRecipes",
        registry.required("vision_recipes", f"recipe: {name}, a vision-language model,"),
    )


def patch_bridge() -> None:
    """Call `patch_bridge` of the plugin `vision`, if the plugin is installed."""
    recipes = registry.optional("vision_recipes")
    if recipes is not None:
        recipes.patch_bridge()
