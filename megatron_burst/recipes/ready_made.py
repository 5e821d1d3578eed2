# SPDX-License-Identifier: Apache-2.0
"""Ready-made recipes: recipes of Megatron-Bridge, changed for long sequences and BurstAttention.

A recipe's name contains the model, the task, number and type of GPUs, and the sequence length.
Comments give the reason for each setting. Model, optimizer, data (random tokens until
`dataset.blend` is set) and learning-rate schedule are the same as in Bridge's recipe. No recipe has
been run on the GPUs in its name; `docs/nemo.md` estimates the memory. `megatron-burst recipe
--list` prints the first line of each recipe's docstring.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .apply import apply_burst
from .diffusion_models import installed_recipes

K, M = 2**10, 2**20


def llama3_8b_pretrain_8gpu_h100_256k() -> Any:
    """Llama 3 8B at 256K tokens on one node of 8 H100."""
    recipe = _bridge(
        "llama", "llama3_8b_128k_pretrain_config", "llama3_8b_pretrain_64gpu_h100_bf16_128k_config"
    )
    # With TP 4 a GPU has 4 GB of weights and 8 GB of gradients. TP 4 x CP 2 uses all 8 GPUs.
    _sizes(recipe, tokens=256 * K, tensor=4, context=2)
    # 128K tokens x a quarter of the vocabulary would be 16 GiB of float32 logits; the fused loss
    # never materializes them. store=0.5 keeps half of the attention outputs, which saves 3/4 of
    # their recomputation.
    return apply_burst(recipe, lm_head_loss="single_pass", store=0.5)


def llama3_8b_pretrain_32gpu_h100_1m() -> Any:
    """Llama 3 8B at 1M tokens on 4 nodes of 8 H100."""
    recipe = _bridge(
        "llama", "llama3_8b_128k_pretrain_config", "llama3_8b_pretrain_64gpu_h100_bf16_128k_config"
    )
    # TP 4, not 8, gives two context-parallel ranks per node, whose ring uses the fast links within
    # the node. With CP 8 and sequence parallelism a GPU stores 32K tokens per layer, 256 MiB.
    _sizes(recipe, tokens=M, tensor=4, context=8)
    # `side` keeps its default auto: with 8 key/value heads for 32 query heads, keys and values have
    # fewer bytes in backward. store=0.5 (striped, so that all ranks keep the same number of rows)
    # saves 3/4 of the recomputation of attention for 4 GiB. Without lm_head_loss, logits would take
    # 16 GiB.
    return apply_burst(recipe, lm_head_loss="single_pass", store=0.5)


def qwen3_14b_pretrain_64gpu_h100_2m() -> Any:
    """Qwen3 14B at 2M tokens on 8 nodes of 8 H100."""
    recipe = _bridge(
        "qwen", "qwen3_14b_pretrain_config", "qwen3_14b_pretrain_8gpu_h100_bf16_config"
    )
    # The recipe's TP 8 would give one rank per node, and every hop would use the slow links.
    _sizes(recipe, tokens=2 * M, tensor=4, context=16)
    # With a vocabulary of 152K, logits would take 18 GiB per GPU, and backward several times that.
    return apply_burst(recipe, lm_head_loss="single_pass", store=0.5)


def llama2_7b_pretrain_32gpu_a800_2m() -> Any:
    """Llama 2 7B at 2M tokens on 4 nodes of 8 A800, the setting of the BurstEngine paper."""
    recipe = _bridge(
        "llama", "llama2_7b_pretrain_config", "llama2_7b_pretrain_2gpu_h100_bf16_config"
    )
    # The paper shards weights with FSDP. Here TP 2 halves the weights per GPU, and CP 16 gives a
    # ring of 4 ranks within each node.
    _sizes(recipe, tokens=2 * M, tensor=2, context=16)
    # Key/value heads equal query heads in number, so queries are sent in backward, as in the paper.
    return apply_burst(recipe, side="query", lm_head_loss="single_pass", store=0.5)


RECIPES: dict[str, Callable[[], Any]] = {
    recipe.__name__: recipe
    for recipe in (
        llama3_8b_pretrain_8gpu_h100_256k,
        llama3_8b_pretrain_32gpu_h100_1m,
        qwen3_14b_pretrain_64gpu_h100_2m,
        llama2_7b_pretrain_32gpu_a800_2m,
    )
}


def find(name: str) -> Callable[[], Any]:
    """Return a function that makes the named recipe; recipes of Bridge are passed to `apply_burst`.

    Args:
        name: name of a recipe in `RECIPES` or in `megatron.bridge.recipes`.

    Raises:
        ValueError: There is no recipe with that name.
    """
    if name in RECIPES:
        return RECIPES[name]
    bridge_recipe = getattr(importlib.import_module("megatron.bridge.recipes"), name, None)
    diffusion = installed_recipes()
    if bridge_recipe is None and diffusion is not None:
        bridge_recipe = diffusion.recipe(name)
    if not callable(bridge_recipe) or not name.endswith("_config"):
        raise ValueError(
            f"NAME {name} is unknown: use a ready-made recipe ({', '.join(RECIPES)}) or a recipe "
            "of Megatron-Bridge (such as llama3_8b_128k_pretrain_config)"
        )
    return lambda: apply_burst(bridge_recipe())


def _bridge(family: str, *names: str) -> Any:
    """Make the recipe of the first of `names` that exists in the installed version of Bridge.

    Args:
        family: module of `megatron.bridge.recipes`.
        names: names of one recipe in different versions of Bridge.
    """
    module = importlib.import_module(f"megatron.bridge.recipes.{family}")
    recipe = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if recipe is None:
        raise ValueError(
            f"this Megatron-Bridge has no recipe named {' or '.join(names)}; use another version"
        )
    return recipe()


def _sizes(recipe: Any, *, tokens: int, tensor: int, context: int) -> None:
    """Set the sizes of a recipe; a micro-batch is one sequence.

    Args:
        recipe: the recipe; changed.
        tokens: length of the sequence.
        tensor: tensor-parallel size.
        context: context-parallel size.
    """
    model = recipe.model
    model.seq_length = tokens
    recipe.dataset.seq_length = tokens
    model.tensor_model_parallel_size = tensor
    model.sequence_parallel = tensor > 1
    model.context_parallel_size = context
    # At these lengths attention dominates the time, and a pipeline would only add a bubble.
    model.pipeline_model_parallel_size = 1
    model.pipeline_dtype = None
    recipe.train.micro_batch_size = 1
    recipe.train.global_batch_size = max(1, 4 * M // tokens)  # 4M tokens a step
