# SPDX-License-Identifier: Apache-2.0
"""Problems of options beside attention over ranks: the fused LM head, packing, and the options of
plugins.

Each function takes a `TransformerConfig`, or parsed arguments under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import registry
from ...config import OFF, BurstConfig
from .problem import Problem, Rule, broken, excluded, plugin_problems


def option_problems(
    config: Any, burst: BurstConfig, seq_length: int | None = None
) -> Iterator[Problem]:
    """Settings that exclude the fused LM head or an option of a plugin.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        burst: the options of the run.
        seq_length: global, in tokens; None if it is not known.
    """
    yield from lm_head_problems(config, burst)
    for _, problems in registry.hooked("option_problems"):
        yield from problems(config, burst, seq_length)


UNTESTED_FSDP = (
    "shards parameters on CUDA devices alone, and was never run with attention over "
    "context-parallel ranks; torch's FSDP2 was, on a CPU"
)
LM_HEAD = "--burst-lm-head-loss"
_LM_HEAD = (
    *excluded(
        "{flag} {why}",
        cross_entropy_loss_fusion="replaces it",
        defer_embedding_wgrad_compute="makes that gradient at once",
        fp16="takes bf16 or fp32",
        fp8_output_proj="takes bf16 or fp32",
        overlap_moe_expert_parallel_comm="needs GPTModel.forward",
        use_torch_fsdp2="needs whole weights after the output layer has freed them",
    ),
    Rule(lambda c, b: c.cuda_graph_impl == "full_iteration"
         or "full_iteration" in str(c.cuda_graph_scope),
         "{flag} reads a flag of the device in backward: no CUDA graph of full iterations"),
)  # fmt: skip


def lm_head_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """All settings that the fused loss cannot honour."""
    if burst.lm_head_loss != "off":
        yield from broken(_LM_HEAD, config, burst, f"{LM_HEAD} {burst.lm_head_loss}")


_PACKING = (
    Rule(lambda c, b: c.calculate_per_token_loss is False,
         "{flag} needs a loss per token: a mean over micro-batches would depend on which documents "
         "share one", add=("--calculate-per-token-loss",)),
    Rule(lambda c, b: (c.micro_batch_size or 1) > 1,
         "{flag} at --micro-batch-size {c.micro_batch_size}: a pack is one row",
         add=("--micro-batch-size 1",)),
    *excluded(
        "{flag} with {other}, which {why}",
        ("--burst-pack",),
        sequence_packing_scheduler="packs by itself",
        dynamic_context_parallel="packs by itself",
        hybrid_context_parallel="packs by itself",
        rl_use_sequence_packing="packs by itself",
    ),
    Rule(lambda c, b: (c.gtp_weight_remat_size or 1) > 1,
         "{flag} with weights sharded over tensor-parallel peers, which read batches of their own "
         "and need as many micro-batches as each other", remove=("--burst-pack",)),
    Rule(lambda c, b: c.cuda_graph_impl == "full_iteration",
         "{flag} with --cuda-graph-impl full_iteration: a graph has a fixed number of "
         "micro-batches", remove=("--cuda-graph-impl",)),
)  # fmt: skip


def packing_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """What `--burst-pack` excludes, and the plugin that trees need."""
    if burst.pack == "trees":
        yield from plugin_problems("trees", "--burst-pack trees", remove=("--burst-pack",))
    if burst.algorithm != OFF and burst.pack == "documents":
        yield from broken(_PACKING, config, burst, f"--burst-pack {burst.pack}")
