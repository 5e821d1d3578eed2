# SPDX-License-Identifier: Apache-2.0
"""Vision-language models in recipes: recognized here, run by the plugin `vision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from .. import registry
from ..megatron.checks.problem import Problem


class VisionRecipes(Protocol):
    """What the plugin does for a provider of Megatron-Bridge that makes a vision-language model."""

    def check_provider(self, model: Any, is_ours: Callable[[Any], bool]) -> None:
        """Raise `ValueError` for a model that is not supported; is_ours: `layers.is_ours`."""
        ...

    def with_mask(self, model: Any, choices: dict[str, Any]) -> dict[str, Any]:
        """The choices of `apply_burst`, with the mask that the model needs over ranks."""
        ...

    def problems(self, model: Any, transformer: Any) -> Iterator[Problem]:
        """What a supported model excludes besides what every model does."""
        ...

    def patch_bridge(self) -> None:
        """Patch those of Bridge's vision-language models that are imported. Idempotent."""
        ...


def is_vision(model: Any) -> bool:
    """Whether this provider of Bridge makes a vision-language model."""
    # is_vision_language: language models alone have it too.
    names = vars(model).keys() - {"is_vision_language"}
    return any("vision" in name.split("_") for name in names)  # not of a revision


def vision_recipes(model: Any) -> VisionRecipes | None:
    """The plugin's part in recipes, for a vision-language model; None for other models.

    Raises:
        ValueError: if the model is a vision-language model and the plugin is not installed.
    """
    if not is_vision(model):
        return None
    name = type(model).__name__
    return cast(
        "VisionRecipes",
        registry.required("vision_recipes", f"recipe: {name}, a vision-language model,"),
    )


def patch_bridge() -> None:
    """Patch the vision-language models of Bridge that are imported, if the plugin is there."""
    recipes = registry.optional("vision_recipes")
    if recipes is not None:
        recipes.patch_bridge()
