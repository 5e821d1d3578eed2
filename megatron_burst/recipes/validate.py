# SPDX-License-Identifier: Apache-2.0
"""Check of a Megatron-Bridge recipe after all overrides.

The check runs when Bridge validates a configuration, before Bridge makes process groups. Without
the check, wrong sizes would fail in an assertion of Bridge that names no setting. One error reports
all problems. All ranks read the same configuration, so all ranks raise the same error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from ..megatron import patching, specs
from ..megatron.checks.config import backend_problems, configuration_problems
from ..megatron.checks.features import UNTESTED_FSDP
from ..megatron.checks.problem import Problem, refuse
from ..megatron.data.cut import installed_layout
from ..megatron.patching import check_version
from ..megatron.selection import uses_burst
from .diffusion_models import diffusion_recipes
from .kinds import translating
from .layers import fields_of, is_ours
from .own_attention import gemma4_problems
from .vision_models import vision_recipes

_NAME = "recipes"


def hook_into_bridge() -> None:
    """Wrap Bridge's `ConfigContainer.validate`, so that it first calls `check`. Idempotent."""
    if patching.installed(_NAME) is not None:
        return
    check_version()
    container = importlib.import_module("megatron.bridge.training.config").ConfigContainer

    def validate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return original(self, *args, **kwargs)

    with patching.patch_set(_NAME) as patches:
        patches.wrap(container, "validate", ["self"], validate)


def check(recipe: Any) -> None:
    """Raise an error for settings of a `ConfigContainer` that are not supported.

    Args:
        recipe: the `ConfigContainer`.

    Raises:
        ValueError: Settings are not supported; the message names each setting.
    """
    model = recipe.model
    spec: Any = getattr(model, "transformer_layer_spec", None)
    transformer = specs.transformer_of(model)
    if not is_ours(spec):
        return _check_layout_of_others(transformer)
    vision, diffusion, fields = vision_recipes(model), diffusion_recipes(model), fields_of(spec)
    with translating(model):
        if vision is not None:
            fields = vision.with_mask(model, fields)
        burst = specs.choices_with_layout(fields, model)
        split = uses_burst(transformer, burst)
        refuse(
            [
                # This machine may have no GPU; `configure` checks the kernel.
                *configuration_problems(
                    transformer, burst, getattr(model, "seq_length", None), this_machine=False
                ),
                *backend_problems(transformer, burst),
                *_group_problems(recipe, transformer, burst.algorithm),
                *(vision.problems(model, transformer) if vision is not None else ()),
                *gemma4_problems(model, transformer),
                *(diffusion.problems(model, transformer, burst) if diffusion and split else ()),
            ]
        )


def _check_layout_of_others(transformer: Any) -> None:
    """Raise an error if a recipe without BurstAttention would use an earlier recipe's layout."""
    layout = installed_layout()
    if layout not in (None, "zigzag") and getattr(transformer, "context_parallel_size", 1) != 1:
        raise ValueError(
            f"an earlier recipe of this process installed layout {layout}, and the attention of "
            "this recipe supports only zigzag: call megatron_burst.megatron.uninstall() first, or "
            "use apply_burst on this recipe too"
        )


def _group_problems(recipe: Any, transformer: Any, algorithm: str) -> Iterator[Problem]:
    split = algorithm != "megatron" and transformer.context_parallel_size != 1
    if split and getattr(recipe.dist, "use_decentralized_pg", False):
        yield Problem(
            "dist.use_decentralized_pg=True: its groups have no hierarchy of context-parallel "
            "ranks, and were not tested with BurstAttention; set dist.use_decentralized_pg=False"
        )
    sharded = (getattr(recipe, name, None) for name in ("ddp", "dist"))
    if split and any(getattr(section, "use_megatron_fsdp", False) for section in sharded):
        yield Problem(f"ddp.use_megatron_fsdp=True {UNTESTED_FSDP}; set use_megatron_fsdp=False")
