# SPDX-License-Identifier: Apache-2.0
"""Checks of options other than attention: the fused LM head, packing, and options of plugins.

The argument `config` of each function is a `TransformerConfig`, or parsed arguments with the same
names.
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
    """Yield the settings that do not work with the fused LM head or options of plugins.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        burst: the options of the run.
        seq_length: global sequence length in tokens; None if unknown.

    Yields:
        The problems.
    """
    yield from lm_head_problems(config, burst)
    for _, problems in registry.hooked("option_problems"):
        yield from problems(config, burst, seq_length)


UNTESTED_FSDP = (
    "shards parameters and was not tested with attention over context-parallel ranks; torch's "
    "FSDP2 was tested"
)
LM_HEAD = "--burst-lm-head-loss"
_LM_HEAD = (
    *excluded(
        "{flag} {why}",
        cross_entropy_loss_fusion="replaces {other}",
        defer_embedding_wgrad_compute="computes the gradient that {other} defers",
        fp16="supports bf16 and fp32, not {other}",
        fp8_output_proj="supports bf16 and fp32, not {other}",
        overlap_moe_expert_parallel_comm="requires GPTModel.forward, which {other} does not call",
        use_torch_fsdp2="needs whole weights, which {other} frees after the output layer",
    ),
    Rule(lambda c, b: c.cuda_graph_impl == "full_iteration"
         or "full_iteration" in str(c.cuda_graph_scope),
         "{flag} reads a value from the device in backward, which a CUDA graph of full iterations "
         "cannot do"),
)  # fmt: skip


def lm_head_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the settings that do not work with the fused LM head and loss."""
    if burst.lm_head_loss != "off":
        yield from broken(_LM_HEAD, config, burst, f"{LM_HEAD} {burst.lm_head_loss}")


_PACKING = (
    Rule(lambda c, b: c.calculate_per_token_loss is False,
         "{flag} requires a loss per token, because a mean over micro-batches depends on the "
         "documents in each micro-batch", add=("--calculate-per-token-loss",)),
    Rule(lambda c, b: (c.micro_batch_size or 1) > 1,
         "{flag} requires one pack per micro-batch, got --micro-batch-size {c.micro_batch_size}",
         add=("--micro-batch-size 1",)),
    *excluded(
        "{flag} does not work with {other}, which {why}",
        ("--burst-pack",),
        sequence_packing_scheduler="packs documents itself",
        dynamic_context_parallel="packs documents itself",
        hybrid_context_parallel="packs documents itself",
        rl_use_sequence_packing="packs documents itself",
    ),
    Rule(lambda c, b: (c.gtp_weight_remat_size or 1) > 1,
         "{flag} does not work with --tensor-parallel-num-weight-shards "
         "{c.gtp_weight_remat_size}: ranks that share weights read different batches and need "
         "equal numbers of micro-batches",
         remove=("--burst-pack",)),
    Rule(lambda c, b: c.cuda_graph_impl == "full_iteration",
         "{flag} does not work with --cuda-graph-impl full_iteration: a graph has a fixed number "
         "of micro-batches", remove=("--cuda-graph-impl",)),
)  # fmt: skip


def packing_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the settings that do not work with `--burst-pack`, and a missing plugin for trees."""
    if burst.pack == "trees":
        yield from plugin_problems("trees", "--burst-pack trees", remove=("--burst-pack",))
    if burst.algorithm != OFF and burst.pack == "documents":
        yield from broken(_PACKING, config, burst, f"--burst-pack {burst.pack}")
