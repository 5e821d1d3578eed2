# SPDX-License-Identifier: Apache-2.0
"""Checks of the settings of runs with sparse attention, and the choice of its algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....megatron.checks.config import model_problems, records_max_logits, ulysses_size
from ....megatron.checks.problem import ConfigView, Problem, Rule, broken, excluded
from ....megatron.checks.sparse import gathers
from ....megatron.model_shape import ModelShape
from ....megatron.patching import HYBRID_SINCE, PatchSet, core_version, log
from ....megatron.selection import splits_with_burst
from ....schedule.algorithms import ALGORITHMS
from ....spine_options import OFF
from ..options import SPARSE, SparseOptions

FLAG = "--burst-sparse"
COEFFICIENT = "--dsa-indexer-loss-coeff"
_GATHER = "--cp-comm-type allgather"
KEEP = (f"{FLAG} {OFF}",)


def selects(config: Any, burst: SparseOptions | None) -> bool:
    """Return whether models of this run use the sparse attention of this plugin.

    Args:
        config: `TransformerConfig` of the model.
        burst: Options of the run, or None.
    """
    if burst is None or burst.sparse == OFF or not splits_with_burst(config, burst):
        return False
    return ModelShape.of(config).sparse_setting is not None


def sparse_algorithm(burst: SparseOptions) -> str:
    """Return the algorithm with which `mb.select` and `mb.sparse_attention` run for these options.

    If the result is "auto", each of the two operations selects its own algorithm.

    Args:
        burst: Options of the run.
    """
    if burst.sparse != "auto":
        return SPARSE[burst.sparse]
    if burst.algorithm == "auto":
        return burst.algorithm
    entry = ALGORITHMS.get(burst.algorithm)
    # Each kernel call reads all queries. Multicast needs one call per node, burst one per chunk.
    if burst.algorithm == SPARSE["ring"] or entry is None or not entry.keeps:
        return SPARSE["multicast"]
    return burst.algorithm


# Settings that do not work, or were not tested, with DSA and layers that have a selection rule.
SELECTING = (
    Rule(lambda c, b: b.side == "query",
         "{flag} with --burst-side query: queries and their selection must stay on their rank",
         remove=("--burst-side",)),
    Rule(lambda c, b: b.wire_dtype, "{flag} with --burst-wire-dtype {b.wire_dtype}: gradients "
         "are sent in the dtype of their sums", remove=("--burst-wire-dtype",)),
    Rule(lambda c, b: b.head_chunks not in (None, 1),
         "{flag} with --burst-head-chunks {b.head_chunks}: the combination was not "
         "tested",
         remove=("--burst-head-chunks",)),
    Rule(lambda c, b: b.pack == "trees", "{flag} with --burst-pack trees: the combination was "
         "not tested",
         remove=("--burst-pack",)),
    Rule(lambda c, b: b.offload, "{flag} with --burst-offload {b.offload}: the combination was "
         "not tested",
         remove=("--burst-offload",)),
    Rule("mtp_num_layers", "{flag} with --mtp-num-layers: the combination was not tested",
         remove=("--mtp-num-layers",)),
)  # fmt: skip

# Settings that do not work with layers of `mb.sparse_layer_spec`.
OF_SPECS = (
    *SELECTING,
    Rule(lambda c, b: b.algorithm == OFF,
         "{flag} need BurstAttention at any --context-parallel-size, got --context-parallel-algo "
         f"{OFF}", add=("--context-parallel-algo burst",)),
    Rule(lambda c, b: b.sparse == OFF, f"{{flag}} with {FLAG} {OFF}: Megatron has no such layers",
         remove=(FLAG,)),
    Rule(lambda c, b: b.sequence_chunks not in (None, 1, "auto"),
         "{flag} do not support row chunks", remove=("--burst-sequence-chunks",)),
    Rule(lambda c, b: records_max_logits(c), "{flag} do not record the largest attention logits",
         remove=("--log-max-attention-logit", "--qk-clip")),
)  # fmt: skip

# Settings that do not work with DSA.
_RULES = (
    *SELECTING,
    Rule(lambda c, b: c.dsa_kernel_backend not in (None, "none"),
         "{flag}: --dsa-kernel-backend {c.dsa_kernel_backend} computes over keys of the whole "
         "sequence; add --dsa-kernel-backend none, or keep Megatron's all-gather", add=KEEP),
    Rule(lambda c, b: b.algorithm in ("ulysses", "hybrid") or (b.ulysses_size or 1) > 1,
         "{flag}: ranks cannot share heads of sparse attention, as --context-parallel-algo "
         "{b.algorithm} or --burst-ulysses-size requires",
         add=("--context-parallel-algo auto",), remove=("--burst-ulysses-size",)),
    Rule(lambda c, b: b.sequence_chunks not in (None, 1),
         "{flag} with --burst-sequence-chunks {b.sequence_chunks}: the combination was not "
         "tested",
         remove=("--burst-sequence-chunks",)),
    Rule(lambda c, b: b.attention_layout not in (None, b.layout),
         "{flag} with --burst-attention-layout {b.attention_layout}: the combination was not "
         "tested",
         remove=("--burst-attention-layout",)),
    Rule(lambda c, b: b.mask,
         "{flag} with --burst-mask {b.mask}: the combination was not tested",
         remove=("--burst-mask",)),
    Rule(lambda c, b: (c.dsa_indexer_topk_freq or 1) > 1 and (c.fp8 or c.fp4)
         and c.recompute_granularity == "full",
         "{flag} with --dsa-indexer-topk-freq {c.dsa_indexer_topk_freq}: in fp8 and fp4, "
         "Transformer Engine recomputes a layer without the selection that it shares with an "
         "earlier layer",
         remove=("--recompute-granularity",)),
    Rule("window_size", "{flag} with --window-size: DSA selects from all keys before a query",
         remove=("--window-size",)),
    Rule(lambda c, b: c.softmax_type not in (None, "vanilla"),
         "{flag} with --softmax-type {c.softmax_type}: DSA does not support sinks",
         remove=("--softmax-type",)),
    *excluded(
        "{flag} with {other}: {why}",
        log_max_attention_logit="DSA does not record the largest attention logits",
        qk_clip="DSA does not record the largest attention logits, which the clip needs",
    ),
)  # fmt: skip


def spec_problems(
    rules: Sequence[Rule], config: Any, burst: SparseOptions, layers: str
) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that does not work with layers of `mb.sparse_layer_spec`.

    Args:
        rules: Rules for settings that do not work with these layers, including `OF_SPECS`.
        config: `TransformerConfig` of the model, after `configure`.
        burst: Options of the run.
        layers: Name of the layers in messages.
    """
    yield from broken(rules, config, burst, layers)
    yield from model_problems(config)
    runs = OFF not in (burst.algorithm, burst.sparse)
    if runs and ulysses_size(burst, config.context_parallel_size) > 1:
        yield Problem(
            f"{layers} do not support ulysses: ranks cannot share their heads",
            add=("--context-parallel-algo auto",),
            remove=("--burst-ulysses-size",),
        )


def sparse_problems(config: Any, burst: SparseOptions, setting: str) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that does not work with Megatron's DSA layers.

    The sequences of the model must be split over context-parallel ranks.

    Args:
        config: `TransformerConfig`, or any object with attributes of the same names.
        burst: Options of the run.
        setting: The flag that selects sparse attention, with its value.
    """
    if OFF in (burst.algorithm, burst.sparse):
        yield from _megatron_problems(config, burst, setting)
        return
    if core_version() < HYBRID_SINCE:
        version, oldest = (".".join(map(str, parts)) for parts in (core_version(), HYBRID_SINCE))
        yield Problem(
            f"{setting} at --context-parallel-size {config.context_parallel_size} needs "
            f"Megatron-Core {oldest} or newer, which has absorbed latents, but this is {version}; "
            "upgrade megatron-core"
        )
        return
    yield from broken(_RULES, config, burst, setting)


def _megatron_problems(config: Any, burst: SparseOptions, setting: str) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that does not work with Megatron's own DSA."""
    view: Any = ConfigView(config)
    if burst.layout != "zigzag" and burst.algorithm != OFF:
        yield Problem(
            f"{setting} with {FLAG} {OFF} and --burst-layout {burst.layout}: Megatron's "
            "all-gather assumes zigzag order",
            add=("--burst-layout zigzag",),
        )
    overlaps, trains = view.overlap_grad_reduce, view.dsa_indexer_loss_coeff
    if burst.algorithm != OFF and overlaps and not trains:
        yield Problem(
            f"{setting} with {FLAG} {OFF}, --overlap-grad-reduce and {COEFFICIENT} {trains}: "
            "Megatron's data parallelism would wait for gradients that the indexers do not have",
            add=(f"{COEFFICIENT} 0.001",),
            remove=("--overlap-grad-reduce",),
        )
    # Our patches skip Megatron's assertion of all-gather when the configuration is built.
    if burst.algorithm == OFF and view.has("cp_comm_type") and not gathers(config):
        yield Problem(
            f"{setting} with --context-parallel-algo {OFF}: Megatron must exchange keys by "
            f"all-gather, got cp_comm_type {config.cp_comm_type}",
            add=(_GATHER,),
        )


def configured(patches: PatchSet, config: Any, burst: SparseOptions) -> None:
    """Set `cp_comm_type` to all-gather if the run uses Megatron's own sparse attention.

    Args:
        patches: Set of patches.
        config: `TransformerConfig` of the model, which is changed.
        burst: Options of the run.
    """
    megatron_runs = burst.sparse == OFF and splits_with_burst(config, burst)
    if not megatron_runs or ModelShape.of(config).sparse_setting is None or gathers(config):
        return
    log(f"cp_comm_type changed from {config.cp_comm_type} to allgather, for {FLAG} {OFF}")
    config.cp_comm_type = "allgather"
