# SPDX-License-Identifier: Apache-2.0
"""The three kinds of recipe, and the recipe setting that corresponds to each flag.

Errors of this package name flags of Megatron-LM. A recipe has settings instead of flags, with paths
that depend on the kind of recipe. Therefore flags in errors are replaced by the paths of settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import flags

_FIELDS = {flag.name: flag.field for flag in flags.FLAGS} | {"--burst-intra-size": "intra"}
_ALIASES = {
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
    """A kind of recipe, and the paths of its settings in overrides.

    Attributes:
        name: Name of the kind, for messages.
        transformer: Path of the fields of a `TransformerConfig`.
        model: Path of further fields of the model configuration.
        strategy: Path of the parallel sizes.
        batch: Path of the micro-batch size.
    """

    name: str
    transformer: str
    model: str
    strategy: str
    batch: str

    def path(self, flag: str, owner: Any) -> str:
        """Return the path of the setting for a flag, or the flag if there is no such setting.

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
    """Return the kind of the recipe that has this model configuration."""
    if getattr(model, "transformer", None) is not None:
        return NESTED
    return NEMO if type(model).__module__.startswith("nemo.") else PROVIDER


def translated(model: Any, text: str) -> str:
    """Return `text` with each flag replaced by the corresponding setting of the recipe."""
    form = kind_of(model)
    return re.sub(r"--[a-z][a-z0-9-]*", lambda m: form.path(m.group(), model), text)


@contextmanager
def translating(model: Any) -> Iterator[None]:
    """Replace flags by recipe settings in a `ValueError` that is raised inside the context."""
    try:
        yield
    except ValueError as error:
        raise ValueError(translated(model, str(error))) from error
