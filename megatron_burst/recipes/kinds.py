# SPDX-License-Identifier: Apache-2.0
"""Kinds of recipe, and the recipe setting that corresponds to a flag of Megatron-LM.

The kinds are: Megatron-Bridge recipes, Megatron-Bridge recipes with a nested `model.transformer`,
and NeMo 2 recipes. Errors of this package name flags. A recipe has settings instead of flags, with
paths that depend on the kind of recipe. Therefore the path of the setting replaces each flag in an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..config import FIELDS

_FIELDS = {field.flag: name for name, field in FIELDS.items()} | {"--burst-intra-size": "intra"}
_ALIASES = {
    "--calculate-per-token-loss": "calculate_per_token_loss=True",
    "--no-rope-fusion": "apply_rope_fusion=False",
    "--fp8-format": "fp8",
    "--recompute-activations": "recompute_granularity=selective",
}
_STRATEGY = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "virtual_pipeline_model_parallel_size", "sequence_parallel",
)  # fmt: skip


@dataclass(frozen=True)
class RecipeKind:
    """A kind of recipe, and the paths under which its settings are overridden.

    Attributes:
        name: Name of the kind, for messages.
        transformer: Path that contains the fields of `TransformerConfig`.
        model: Path that contains the other fields of the model configuration.
        strategy: Path that contains the parallel sizes.
        batch: Path that contains the micro-batch size.
    """

    name: str
    transformer: str
    model: str
    strategy: str
    batch: str

    def path(self, flag: str, owner: Any) -> str:
        """Return the path of the setting that corresponds to a flag; the flag if it has no setting.

        Args:
            flag: a flag of Megatron-LM or of this package.
            owner: the model configuration of the recipe.
        """
        if flag in _FIELDS:
            return _FIELDS[flag]
        setting = _ALIASES.get(flag, flag.removeprefix("--").replace("-", "_"))
        name = setting.partition("=")[0]
        if name == "micro_batch_size":
            return f"{self.batch}.{setting}"
        if name in _STRATEGY:
            return f"{self.strategy}.{setting}"
        if hasattr(getattr(owner, "transformer", owner), name):
            return f"{self.transformer}.{setting}"
        return f"{self.model}.{setting}" if hasattr(owner, name) else flag


PROVIDER = RecipeKind("a Megatron-Bridge recipe", "model", "model", "model", "train")
NESTED = RecipeKind(
    "a Megatron-Bridge recipe", "model.transformer", "model", "model.transformer", "train"
)
NEMO = RecipeKind("a NeMo 2 recipe", "model.config", "model.config", "trainer.strategy", "data")


def kind_of(model: Any) -> RecipeKind:
    """Return the kind of recipe to which this model configuration belongs."""
    if getattr(model, "transformer", None) is not None:
        return NESTED
    return NEMO if type(model).__module__.startswith("nemo.") else PROVIDER


def translated(model: Any, text: str) -> str:
    """Return `text` with each flag replaced by the corresponding setting of the recipe."""
    form = kind_of(model)
    return re.sub(r"--[a-z][a-z0-9-]*", lambda m: form.path(m.group(), model), text)


@contextmanager
def translating(model: Any) -> Iterator[None]:
    """Return a context in which the message of a `ValueError` names recipe settings, not flags."""
    try:
        yield
    except ValueError as error:
        raise ValueError(translated(model, str(error))) from error
