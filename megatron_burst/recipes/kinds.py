"""The three kinds of recipe, and where each keeps what we read and write.

Owns: how a kind is recognised, and what its users call a setting: errors of this package name
flags, which no recipe has. Must not know: attention, or what a setting is good for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_burst import flags

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
class Form:
    """One kind of recipe: its name, and where overrides of its settings go."""

    name: str
    transformer: str
    model: str
    strategy: str
    batch: str

    def path(self, flag: str, owner: Any) -> str:
        """What users of this kind of recipe write for a flag; the flag if they cannot."""
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


PROVIDER = Form("a Megatron-Bridge recipe", "model", "model", "model", "train")
NESTED = Form(
    "a Megatron-Bridge recipe", "model.transformer", "model", "model.transformer", "train"
)
NEMO = Form("a NeMo 2 recipe", "model.config", "model.config", "trainer.strategy", "data")


def form_of(model: Any) -> Form:
    """The kind of recipe that a model configuration belongs to."""
    if getattr(model, "transformer", None) is not None:
        return NESTED
    return NEMO if type(model).__module__.startswith("nemo.") else PROVIDER


def words_of(model: Any, text: str) -> str:
    """A text about flags as one about the settings of a recipe."""
    form = form_of(model)
    return re.sub(r"--[a-z][a-z0-9-]*", lambda m: form.path(m.group(), model), text)


@contextmanager
def in_words_of(model: Any) -> Iterator[None]:
    """Inside, a ``ValueError`` about flags becomes one about the settings of a recipe."""
    try:
        yield
    except ValueError as error:
        raise ValueError(words_of(model, str(error))) from error
