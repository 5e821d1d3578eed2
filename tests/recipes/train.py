"""Recipes of Megatron-Bridge as a user trains them, on forked ranks.

It imports Bridge once, which takes longer than three steps, and forks the ranks of each job. Rank 0
writes loss and gradient norm of every step, unrounded, to the file of the job. A job with `words`
is a call of the launcher; one with `models` runs those of `models`, one with `code` runs it with
the variables `names`.
"""

import copy
import importlib
import json
import os
import sys
from pathlib import Path

import torch
from jobs import serve_jobs
from loaded import BRIDGE, load


def job(work):
    """Run one rank of a job, in its process."""
    if "words" in work:
        from megatron_burst.cli.main import main

        sys.exit(main(["recipe", "--cpu", *work["words"]]))
    if "code" in work:
        return exec(work["code"], work["names"])
    if "vision" in work:
        family = importlib.import_module("gemma" if "gemma" in work["model"] else "qwen")
        return family.run(work)
    if "models" in work:
        import models

        return models.run(work)
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from megatron_burst.recipes import apply_burst

    recipe = built(work)
    if work.get("attention"):
        recipe.model.transformer_layer_spec = {"blind": blind, "dense": dense}[work["attention"]]
    elif work.get("choices") is not None:
        recipe = apply_burst(recipe, **work["choices"])
    recipe = process_config_with_overrides(recipe, cli_overrides=work["overrides"])
    if work.get("reload"):
        file = f"{work['output']}.{os.environ['RANK']}.yaml"
        recipe.to_yaml(file)
        recipe = ConfigContainer.from_yaml(file)
    steps = []

    def remember(context):
        total, tokens = as_pair(context.loss_dict["lm loss"])
        steps.append((total / tokens, float(context.grad_norm)))

    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", remember)
    pretrain(recipe, forward_step, callbacks=callbacks)
    if os.environ["RANK"] == "0":
        Path(work["output"]).write_text(json.dumps(steps))


def as_pair(loss):
    """Return (sum, count) of a loss of Bridge, which is a mean or such a pair."""
    return (float(loss[0]), float(loss[1])) if loss.numel() == 2 else (float(loss), 1.0)


def built(work):
    """Return the real recipe, with the changes that a CPU needs."""
    from megatron.bridge.recipes.llama import llama3

    from megatron_burst.plugins.testing import recipes as cpu

    recipe = getattr(llama3, work["recipe"])()
    cpu.adapt(recipe)
    if work.get("packed"):
        from megatron.bridge.data.datasets.packed_sequence import PackedSequenceSpecs
        from megatron.bridge.training.config import FinetuningDatasetConfig

        size = work["packed_size"]
        recipe.dataset = FinetuningDatasetConfig(
            dataset_root=Path(work["packed"]).parent, seq_length=size, num_workers=0,
            dataloader_type="batch", do_validation=False, do_test=False,
            dataset_kwargs={"pad_to_max_length": True},
            packed_sequence_specs=PackedSequenceSpecs(
                packed_sequence_size=size, packed_train_data_path=work["packed"],
                packed_metadata_path=work["packed_metadata"], pad_seq_to_mult=work["pad"],
            ),
        )  # fmt: skip
    return recipe


def blind(config):
    """Return Megatron's local layers whose attention ignores other ranks."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Blind(DotProductAttention):
        def __init__(self, config, *args, **kwargs):
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)

    return local_layers(config, Blind)


def dense(config):
    """Return Megatron's local layers for one rank, with the whole mask of a packed batch."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Dense(DotProductAttention):
        def forward(self, query, key, value, *args, packed_seq_params, **kwargs):
            padded = packed_seq_params.cu_seqlens_q_padded
            ends = packed_seq_params.cu_seqlens_q if padded is None else padded
            places = torch.arange(len(query))
            document = torch.bucketize(places, ends, right=True)
            hidden = (document[:, None] != document) | (places[:, None] < places)
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            return super().forward(query, key, value, hidden[None, None]).squeeze(1)

    return local_layers(config, Dense)


def local_layers(config, attention):
    from megatron.bridge.models.gpt_provider import local_layer_spec

    layers = copy.deepcopy(local_layer_spec(config))
    layers.submodules.self_attention.submodules.core_attention = attention
    return layers


if __name__ == "__main__":
    from megatron_burst.plugins.testing import recipes as cpu

    cpu.enable()
    load([*BRIDGE, "megatron.bridge.training.pretrain", "megatron.bridge.training.gpt_step",
        "megatron.bridge.recipes.llama.llama3", "megatron.bridge.training.callbacks",
        "megatron.bridge.training.utils.omegaconf_utils",
        "megatron.bridge.data.datasets.packed_sequence"])  # fmt: skip
    serve_jobs(job)
