# SPDX-License-Identifier: Apache-2.0
"""Vision-language models in recipes: detected here, run by the plugin `vision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from .. import registry
from ..megatron.checks.problem import Problem


class VisionRecipes(Protocol):
    """The functions of the plugin for providers of vision-language models of Megatron-Bridge."""

    def check_provider(self, model: Any, is_ours: Callable[[Any], bool]) -> None:
        """Raise `ValueError` for a model that is not supported.

        Args:
            model: the provider.
            is_ours: `layers.is_ours`.
        """
        ...

    def with_mask(self, model: Any, choices: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `apply_burst`, with the mask that the model needs over ranks."""
        ...

    def problems(self, model: Any, transformer: Any) -> Iterator[Problem]:
        """Yield the settings that a supported model excludes in addition to other models."""
        ...

    def patch_bridge(self) -> None:
        """Patch Bridge's vision-language models that are imported. Idempotent."""
        ...


def is_vision(model: Any) -> bool:
    """Return whether this provider of Bridge makes a vision-language model."""
    # Providers of pure language models have is_vision_language too.
    names = vars(model).keys() - {"is_vision_language"}
    return any("vision" in name.split("_") for name in names)  # split: "revision" does not count


def vision_recipes(model: Any) -> VisionRecipes | None:
    """Return the plugin's functions for a vision-language model; None for other models.

    Args:
        model: the provider.

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
    """Patch the vision-language models of Bridge that are imported, if the plugin is installed."""
    recipes = registry.optional("vision_recipes")
    if recipes is not None:
        recipes.patch_bridge()
