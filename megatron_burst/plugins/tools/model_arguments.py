# SPDX-License-Identifier: Apache-2.0
"""Model and settings that a command line describes: `--model`, or a Megatron command after `--`.

`--model` accepts the name of a model, a Hugging Face `config.json`, or the name of a
Megatron-Bridge recipe, as `megatron-burst recipe` does. Megatron-Bridge is imported only for a
recipe.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...cli.megatron_arguments import MegatronCommand, parse
from ...config import BurstConfig
from .advise.shapes import models
from .advise.shapes.megatron_model import model_from
from .advise.shapes.models import Model, padded

# Option -> value that predictions assume for "auto".
AUTO = {"offload": 1.0, "sequence_chunks": 32, "mlp_tiles": 64}
HELP = "name of a model, config.json of Hugging Face, or name of a Megatron-Bridge recipe"


def find(text: str | None, words: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """Return the model, and the fields of `Settings` that a recipe or a Megatron command sets.

    Args:
        text: Value of `--model`; None if it is not set.
        words: Words of a Megatron command; empty if there is none.

    Returns:
        The model, and a dict of fields. The dict also has the key "global_batch", the number of
            sequences of a step.

    Raises:
        ValueError: Neither `text` nor `words` describes a model, or both do.
    """
    words = [word for word in words if word != "--"]
    if text is not None and any(word.split("=")[0] == "--num-layers" for word in words):
        raise ValueError(
            f"--model {text} and the Megatron command after -- (--num-layers ...) both describe "
            "the model; use only one of them"
        )
    if text is None and words and words[0] in models.NAMED:
        raise ValueError(f"{words[0]} is a model, not a Megatron command; use --model {words[0]}")
    model, described = read_command(words) if words else (None, {})
    if text is None:
        if model is None:
            raise ValueError(
                f"--model is required: one of {', '.join(models.NAMED)}, a config.json, or a "
                "recipe of Megatron-Bridge; or a Megatron command after --"
            )
        return model, described
    if _is_recipe(text):
        model, own = read_recipe(recipe(text), text)
        return model, own | described
    return models.named(text), described


def read_command(words: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """Return the model and the fields of `Settings` that a Megatron command describes.

    Args:
        words: Words of the command.

    Raises:
        ValueError: A flag is missing or invalid; the message names the flag.
    """
    command = parse(words)
    burst_flags, wrong = command.burst_arguments()
    if wrong:
        raise ValueError(wrong[0])
    if not command.group_query_attention:
        command.num_query_groups = None
    model = model_from(
        lambda name: getattr(command, name, None),
        "the Megatron command",
        gated=command.swiglu or command.quick_geglu,
        tied=not command.untie_embeddings_and_output_weights,
        flag=lambda name: f"--{name.replace('_', '-')}",
    )
    if command.seq_length is None:
        raise ValueError("--seq-length is missing in the Megatron command; add it")
    if command.context_parallel_algo is None:
        burst_flags.context_parallel_algo = "burst"
    choices = _settled(command, burst_flags)
    run = _command_run(command)
    run |= choices_of(choices, command.seq_length, command.cp, lambda name: f"--burst-{name}")
    return padded(model, command.make_vocab_size_divisible_by * command.tp), run


def _settled(command: MegatronCommand, burst_flags: Any) -> BurstConfig:
    """Return this package's options in a command, with the layout that training would use."""
    # Imported late, because they import torch, which takes seconds.
    from ...megatron.run_options import complete_flags, settings_of

    config = settings_of(command)
    config.context_parallel_size = command.cp
    burst, errors, _ = complete_flags(burst_flags, config)
    if errors:
        raise ValueError("; ".join(errors))
    return burst


def _command_run(command: MegatronCommand) -> dict[str, Any]:
    """Return the fields of `Settings` that Megatron's own flags set: name -> value.

    The result also has the key "global_batch".
    """
    pp, vpp = command.pipeline_model_parallel_size, command.num_virtual_stages_per_pipeline_rank
    if command.num_layers_per_virtual_pipeline_stage:
        vpp = command.num_layers // pp // command.num_layers_per_virtual_pipeline_stage
    if (segments := (command.hybrid_layer_pattern or "").split("/")[0].count("|") + 1) > pp:
        vpp = segments // pp  # as Megatron derives it
    # `Settings` split experts over expert- and tensor-parallel ranks; only the product matters.
    split = command.expert_tensor_parallel_size or command.tp
    run: dict[str, Any] = {
        "seq": command.seq_length,
        "tp": command.tp,
        "cp": command.cp,
        "pp": pp,
        "first_layers": command.decoder_first_pipeline_num_layers,
        "last_layers": command.decoder_last_pipeline_num_layers,
        "vpp": vpp or 1,
        "ep": max(1, command.expert_model_parallel_size * split // command.tp),
        "micro_batch": command.micro_batch_size or 1,
        "global_batch": command.global_batch_size,
        "recompute": "full" if command.recompute_granularity == "full" else "none",
        "gradients": "bf16" if command.grad_reduce_in_bf16 else "fp32",
        "distributed_optimizer": command.use_distributed_optimizer,
        "optimizer_offload": command.optimizer_offload_fraction * command.optimizer_cpu_offload,
        "fsdp": command.use_megatron_fsdp or command.use_torch_fsdp2,
        "path": "cpu" if command.transformer_impl == "local" else "gpu",
    }
    if command.sizes:
        run["intra"] = command.sizes[0]
    return run


def choices_of(
    choices: BurstConfig, seq: int, cp: int, name_of: Callable[[str], str]
) -> dict[str, Any]:
    """Convert options of this package (`BurstConfig`) to fields of `Settings`: name -> value.

    Args:
        choices: Options of this package.
        seq: Tokens of a sequence.
        cp: Number of context-parallel ranks.
        name_of: Function that returns the flag or the setting of an option, for messages.

    Raises:
        ValueError: An option requires BurstAttention, but Megatron's attention is selected.
    """
    # Imported late, because they import torch, which takes seconds.
    from ...megatron.checks.config import ulysses_size
    from ...recompute import tile_counts

    # Minimum numbers of rows of a row chunk and of a tile, as in training.
    fewest = {
        "sequence_chunks": tile_counts.MIN_CHUNK_ROWS,
        "mlp_tiles": tile_counts.MIN_TILE_TOKENS,
    }
    rows = seq // max(1, cp)
    own_attention = choices.algorithm != "megatron"
    fields: dict[str, Any] = {
        "store": choices.store or 0.0,
        "lm_head_loss": choices.lm_head_loss,
        "algorithm": choices.algorithm if own_attention else "burst",
        "kernel": None if choices.kernel == "auto" else choices.kernel,
        "layout": choices.layout if choices.layout != "auto" else "zigzag",
        "side": choices.side,
        "linear": choices.linear if own_attention or cp == 1 else "megatron",
        "wire": "bf16" if choices.wire_dtype == "bf16" else "fp32",
        "placement": choices.placement,
        "head_chunks": choices.head_chunks or 1,
        "ulysses": ulysses_size(choices, cp) if own_attention else 1,
    }
    if choices.intra_size:
        fields["intra"] = choices.intra_size
    for name, counted in AUTO.items():
        value = getattr(choices, name, None)
        if value is None:  # the plugin with this option is not installed
            continue
        if value == "auto" and name in fewest:
            counted = min(counted, max(1, rows // fewest[name]))
        fields[name] = counted if value == "auto" else value
        if name == "sequence_chunks" and fields[name] > 1 and not own_attention:
            raise ValueError(
                f"{name_of('sequence-chunks')} {value} requires BurstAttention; use "
                "--context-parallel-algo burst, or remove the flag"
            )
    return fields


def _is_recipe(text: str) -> bool:
    """Return True if a text may be the name of a recipe and is neither a model nor a file."""
    exists = text.lower() in models.NAMED or text.endswith(".json") or Path(text).exists()
    return not exists and text.isidentifier() and ("_pretrain" in text or text.endswith("_config"))


def recipe(name: str) -> Any:
    """Return a recipe by name: a ready-made recipe of this package, or one of Megatron-Bridge.

    Args:
        name: Name of the recipe.

    Raises:
        ValueError: Megatron-Bridge is not installed, or there is no such recipe.
    """
    try:
        ready = importlib.import_module("megatron_burst.recipes.ready_made")
        return ready.find(name)()
    except ImportError as error:
        raise ValueError(
            f"--model {name}: recipes require Megatron-Bridge, which cannot be imported ({error}); "
            "install it, or use a config.json"
        ) from error


def read_recipe(config: Any, name: str = "the recipe") -> tuple[Model, dict[str, Any]]:
    """Return the model of a recipe, and the fields of `Settings` that the recipe sets.

    The fields include the options that `apply_burst` has stored in the recipe.

    Args:
        config: `ConfigContainer` of Megatron-Bridge.
        name: Name of the recipe, for messages.
    """
    provider = getattr(config.model, "transformer", None) or config.model

    def get(field: str) -> Any:
        value = getattr(provider, field, None)
        return getattr(config.model, field, None) if value is None else value

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
        "first_layers": get("num_layers_in_first_pipeline_stage"),
        "last_layers": get("num_layers_in_last_pipeline_stage"),
        "vpp": get("virtual_pipeline_model_parallel_size") or 1,
        "ep": get("expert_model_parallel_size") or 1,
        "micro_batch": _of(config, "train", "micro_batch_size") or 1,
        "global_batch": _of(config, "train", "global_batch_size"),
        "recompute": "full" if get("recompute_granularity") == "full" else "none",
        "gradients": "bf16" if _of(config, "ddp", "grad_reduce_in_fp32") is False else "fp32",
        "distributed_optimizer": bool(_of(config, "ddp", "use_distributed_optimizer")),
        "fsdp": bool(_of(config, "ddp", "use_megatron_fsdp")),
        "optimizer_offload": float(bool(_of(config, "optimizer", "optimizer_cpu_offload"))),
    }
    seq = get("seq_length") or _of(config, "dataset", "seq_length")
    if seq:
        run["seq"] = seq
    # Options of `apply_burst`, or defaults if the layer spec is not from this package.
    chosen = getattr(get("transformer_layer_spec"), "keywords", {})
    choices = BurstConfig(**{n: x for n, x in chosen.items() if n not in ("base", "before")})
    run |= choices_of(choices, seq or 1, cp, lambda name: name.replace("-", "_"))
    return padded(model, (get("make_vocab_size_divisible_by") or 128) * tp), run


def _of(config: Any, part: str, name: str) -> Any:
    return getattr(getattr(config, part, None), name, None)
