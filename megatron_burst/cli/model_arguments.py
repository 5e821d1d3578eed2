"""The model of a command line, wherever it is described, and the run where that says one.

`--model` takes a name, a Hugging Face `config.json`, or the name of a Megatron-Bridge recipe as
`megatron-burst recipe` takes it; a Megatron command follows `--`. Megatron-Bridge is imported only
for a recipe.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..advisor.shapes import models
from ..advisor.shapes.megatron_model import model_from
from ..advisor.shapes.models import Model, padded
from ..config import BurstConfig
from . import megatron_arguments as megatron

HELP = "a model's name, a config.json of Hugging Face, or a recipe of Megatron-Bridge"


def find(text: str | None, words: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """The model, and the fields of `Settings` that its description gives.

    text: of `--model`; words: of a Megatron command, empty without one. ValueError, with
    what would do, where neither is given, or both describe a model.
    """
    words = [word for word in words if word != "--"]
    if text is not None and any(word.split("=")[0] == "--num-layers" for word in words):
        raise ValueError(
            f"--model {text} and the Megatron command after -- (--num-layers ...) both describe "
            "the model: give one of them"
        )
    model, given = megatron.read(words) if words else (None, {})
    if text is None:
        if model is None:
            raise ValueError(
                f"--model is needed: one of {', '.join(models.NAMED)}, a config.json, or a recipe "
                "of Megatron-Bridge; or a Megatron command after --"
            )
        return model, given
    if _is_recipe(text):
        model, own = read_recipe(recipe(text), text)
        return model, own | given
    return models.named(text), given


def _is_recipe(text: str) -> bool:
    """Recipes have names of functions, and no model that is known has one."""
    known = text.lower() in models.NAMED or text.endswith(".json") or Path(text).exists()
    return not known and text.isidentifier() and ("_pretrain" in text or text.endswith("_config"))


def recipe(name: str) -> Any:
    """A recipe by its name. ValueError where Megatron-Bridge is not installed or has none."""
    try:
        ready = importlib.import_module("megatron_burst.recipes.ready_made")
        return ready.find(name)()
    except ImportError as error:
        raise ValueError(
            f"--model {name}: recipes need Megatron-Bridge: {error}; a config.json would do"
        ) from error


def read_recipe(found: Any, name: str = "the recipe") -> tuple[Model, dict[str, Any]]:
    """The model and the fields of `Settings` of a ``ConfigContainer``, with what `apply_burst` has
    put into it."""
    provider = getattr(found.model, "transformer", None) or found.model

    def get(field: str) -> Any:
        value = getattr(provider, field, None)
        return getattr(found.model, field, None) if value is None else value

    tied = get("share_embeddings_and_output_weights")
    model = model_from(
        get, name, gated=bool(get("gated_linear_unit")), tied=tied is not False,
        flag=lambda field: f"model.{field}",
    )  # fmt: skip
    tp, cp = get("tensor_model_parallel_size") or 1, get("context_parallel_size") or 1
    run: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "pp": get("pipeline_model_parallel_size") or 1,
        "vpp": get("virtual_pipeline_model_parallel_size") or 1,
        "ep": get("expert_model_parallel_size") or 1,
        "micro_batch": _of(found, "train", "micro_batch_size") or 1,
        "recompute": "full" if get("recompute_granularity") == "full" else "none",
        "gradients": "bf16" if _of(found, "ddp", "grad_reduce_in_fp32") is False else "fp32",
        "distributed_optimizer": bool(_of(found, "ddp", "use_distributed_optimizer")),
        "fsdp": bool(_of(found, "ddp", "use_megatron_fsdp")),
        "optimizer_offload": float(bool(_of(found, "optimizer", "optimizer_cpu_offload"))),
    }
    seq = get("seq_length") or _of(found, "dataset", "seq_length")
    if seq:
        run["seq"] = seq
    run |= _choices(get("transformer_layer_spec"), seq or 1, cp)
    return padded(model, (get("make_vocab_size_divisible_by") or 128) * tp), run


def _choices(spec: Any, seq: int, cp: int) -> dict[str, Any]:
    """What `apply_burst` chose; its defaults where the layer spec is not ours."""
    keywords = getattr(spec, "keywords", {})
    ours = {name: x for name, x in keywords.items() if name not in ("base", "before")}
    return megatron.choices_of(BurstConfig(**ours), seq, cp, lambda name: name.replace("-", "_"))


def _of(found: Any, part: str, name: str) -> Any:
    return getattr(getattr(found, part, None), name, None)
