"""What a recipe of Megatron-Bridge asks for, once all overrides are in.

Owns: the check that runs when Bridge validates a configuration, which is before it makes process
groups: sizes that do not fit would end there in an assertion that names nothing. All ranks read
the same configuration, so all raise the same ``ValueError``. Must not know: attention.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from megatron_burst.megatron import specs
from megatron_burst.megatron.checks.config import check_config
from megatron_burst.megatron.checks.lm_head import lm_head_problems
from megatron_burst.megatron.checks.problem import refuse
from megatron_burst.megatron.install import installed_layout
from megatron_burst.megatron.patching import registry
from megatron_burst.megatron.patching.compatibility import check_version, require_parameters
from megatron_burst.recipes.kinds import in_words_of
from megatron_burst.recipes.layers import fields_of, is_ours

_NAME = "recipes"


def watch() -> None:
    """Let Bridge's own validation check our recipes too. Idempotent."""
    if registry.installed(_NAME) is not None:
        return
    check_version()
    container = importlib.import_module("megatron.bridge.training.config").ConfigContainer
    original = container.validate
    require_parameters(original, ["self"], "ConfigContainer.validate")

    @functools.wraps(original)
    def validate(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return original(self, *args, **kwargs)

    with registry.patching(_NAME) as patches:
        patches.replace(container, "validate", validate)


def check(recipe: Any) -> None:
    """Raise ``ValueError`` naming the setting of a ``ConfigContainer`` that cannot be honoured."""
    model = recipe.model
    spec: Any = getattr(model, "transformer_layer_spec", None)
    transformer = specs.transformer_of(model)
    if not is_ours(spec):
        return _check_stranger(transformer)
    with in_words_of(model):
        burst = specs.settled(fields_of(spec), transformer)
        check_config(transformer, burst, getattr(model, "seq_length", None))
        specs.check_backend(transformer, burst)
        if burst.algorithm != "megatron" and transformer.context_parallel_size > 1:
            _check_groups(recipe)
        refuse(lm_head_problems(transformer, burst))


def _check_stranger(transformer: Any) -> None:
    """A recipe that did not ask for us must not find its batches cut our way."""
    layout = installed_layout()
    if layout not in (None, "zigzag") and getattr(transformer, "context_parallel_size", 1) != 1:
        raise ValueError(
            f"batches of this process are cut by layout {layout}, which an earlier recipe chose "
            "and the attention of this one does not know: call megatron_burst.megatron.uninstall() "
            "before, or apply_burst to this one too"
        )


def _check_groups(recipe: Any) -> None:
    if getattr(recipe.dist, "use_decentralized_pg", False):
        raise ValueError(
            "dist.use_decentralized_pg=True: those groups have no hierarchy of context-parallel "
            "ranks, and were never run with BurstAttention; set dist.use_decentralized_pg=False"
        )
