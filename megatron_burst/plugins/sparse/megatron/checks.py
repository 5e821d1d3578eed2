# SPDX-License-Identifier: Apache-2.0
"""What settings exclude where sparse attention is ours, and the algorithm that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....megatron.checks.problem import ConfigView, Problem, Rule, broken, excluded
from ....megatron.checks.sparse import gathers
from ....megatron.checks.splitting import OLDEST, splits
from ....megatron.model_shape import ModelShape
from ....megatron.patching import PatchSet, core_version, log
from ....schedule.algorithms import ALGORITHMS
from ....spine_options import OFF
from ..options import SPARSE, SparseOptions

FLAG = "--burst-sparse"
COEFFICIENT = "--dsa-indexer-loss-coeff"
_GATHER = "--cp-comm-type allgather"
KEEP = (f"{FLAG} {OFF}",)


def selects(config: Any, burst: SparseOptions | None) -> bool:
    """Whether layers of sparse attention in models of such a run are ours."""
    if burst is None or OFF in (burst.algorithm, burst.sparse) or not splits(config):
        return False
    return ModelShape.of(config).sparse_setting is not None


def sparse_algorithm(burst: SparseOptions) -> str:
    """The algorithm of `mb.select` and `mb.sparse_attention` that these choices stand for; "auto"
    where the fastest is to be found, for each of the two.
    """
    if burst.sparse != "auto":
        return SPARSE[burst.sparse]
    if burst.algorithm == "auto":
        return burst.algorithm
    known = ALGORITHMS.get(burst.algorithm)
    # A call reads all queries, so the default has one for each node and not for each chunk.
    if burst.algorithm == SPARSE["ring"] or known is None or not known.keeps:
        return SPARSE["multicast"]
    return burst.algorithm


# What was not tested, or cannot be, where queries stay and a selection with them: of DSA and of
# layers with a rule.
SELECTING = (
    Rule(lambda c, b: b.side == "query",
         "{flag} with --burst-side query: queries stay where their selection is",
         remove=("--burst-side",)),
    Rule(lambda c, b: b.wire_dtype, "{flag} with --burst-wire-dtype {b.wire_dtype}: gradients "
         "travel as they are summed", remove=("--burst-wire-dtype",)),
    Rule(lambda c, b: b.head_chunks not in (None, 1),
         "{flag} with --burst-head-chunks {b.head_chunks}, which was not tested",
         remove=("--burst-head-chunks",)),
    Rule(lambda c, b: b.pack == "trees", "{flag} with --burst-pack trees, which was not tested",
         remove=("--burst-pack",)),
    Rule(lambda c, b: b.offload, "{flag} with --burst-offload {b.offload}, which was not tested",
         remove=("--burst-offload",)),
    Rule("mtp_num_layers", "{flag} with --mtp-num-layers, which was not tested",
         remove=("--mtp-num-layers",)),
)  # fmt: skip

# Of DSA besides.
_RULES = (
    *SELECTING,
    Rule(lambda c, b: c.dsa_kernel_backend not in (None, "none"),
         "{flag}: --dsa-kernel-backend {c.dsa_kernel_backend} computes over keys of the whole "
         "sequence; add --dsa-kernel-backend none, or keep Megatron's all-gather", add=KEEP),
    Rule(lambda c, b: b.algorithm in ("ulysses", "hybrid") or (b.ulysses_size or 1) > 1,
         "{flag}: ranks do not share heads of sparse attention, as --context-parallel-algo "
         "{b.algorithm} or --burst-ulysses-size asks",
         add=("--context-parallel-algo burst",), remove=("--burst-ulysses-size",)),
    Rule(lambda c, b: b.sequence_chunks not in (None, 1),
         "{flag} with --burst-sequence-chunks {b.sequence_chunks}, which was not tested",
         remove=("--burst-sequence-chunks",)),
    Rule(lambda c, b: b.attention_layout not in (None, b.layout),
         "{flag} with --burst-attention-layout {b.attention_layout}, which was not tested",
         remove=("--burst-attention-layout",)),
    Rule(lambda c, b: b.mask, "{flag} with --burst-mask {b.mask}, which was not tested",
         remove=("--burst-mask",)),
    Rule(lambda c, b: (c.dsa_indexer_topk_freq or 1) > 1 and (c.fp8 or c.fp4)
         and c.recompute_granularity == "full",
         "{flag} with --dsa-indexer-topk-freq {c.dsa_indexer_topk_freq}: Transformer Engine "
         "recomputes layers in fp8 and fp4 where the selection that they share is not kept",
         remove=("--recompute-granularity",)),
    Rule("window_size", "{flag} with --window-size: DSA selects from all keys before a query",
         remove=("--window-size",)),
    Rule(lambda c, b: c.softmax_type not in (None, "vanilla"),
         "{flag} with --softmax-type {c.softmax_type}: DSA has no sink",
         remove=("--softmax-type",)),
    *excluded(
        "{flag} with {other}, which {why}",
        log_max_attention_logit="DSA does not tell",
        qk_clip="DSA does not tell",
    ),
)  # fmt: skip


def sparse_problems(config: Any, burst: SparseOptions, what: str) -> Iterator[Problem]:
    """Problems of sparse attention in a model that is split over ranks.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.
        what: the setting that asks for such layers.
    """
    if OFF in (burst.algorithm, burst.sparse):
        yield from _megatrons_problems(config, burst, what)
        return
    if core_version() < OLDEST:
        version, oldest = (".".join(map(str, one)) for one in (core_version(), OLDEST))
        yield Problem(
            f"{what} at --context-parallel-size {config.context_parallel_size} needs Megatron-Core "
            f"{oldest} or newer, whose latents are absorbed, and this is {version}; upgrade "
            "megatron-core"
        )
        return
    yield from broken(_RULES, config, burst, what)


def _megatrons_problems(config: Any, burst: SparseOptions, what: str) -> Iterator[Problem]:
    """Problems where Megatron's own sparse attention runs."""
    given: Any = ConfigView(config)
    if burst.layout != "zigzag" and burst.algorithm != OFF:
        yield Problem(
            f"{what} with {FLAG} {OFF} and --burst-layout {burst.layout}: Megatron's "
            "all-gather takes the tokens for zigzag ones",
            add=("--burst-layout zigzag",),
        )
    overlaps, trains = given.overlap_grad_reduce, given.dsa_indexer_loss_coeff
    if burst.algorithm != OFF and overlaps and not trains:
        yield Problem(
            f"{what} with {FLAG} {OFF}, --overlap-grad-reduce and {COEFFICIENT} {trains}: "
            "Megatron's data parallelism waits for gradients of the indexers, which have none",
            add=(f"{COEFFICIENT} 0.001",),
            remove=("--overlap-grad-reduce",),
        )
    # With ours installed the configuration was made without Megatron's assertion.
    if burst.algorithm == OFF and given.has("cp_comm_type") and not gathers(config):
        yield Problem(
            f"{what} with --context-parallel-algo {OFF}: Megatron's own exchange must be an "
            f"all-gather, not {config.cp_comm_type}",
            add=(_GATHER,),
        )


def configured(patches: PatchSet, config: Any, burst: SparseOptions) -> None:
    """Set the exchange of a configuration whose sparse attention stays Megatron's to all-gather."""
    theirs = burst.sparse == OFF and burst.algorithm != OFF and splits(config)
    if not theirs or ModelShape.of(config).sparse_setting is None or gathers(config):
        return
    log(f"cp_comm_type {config.cp_comm_type} is now allgather, for {FLAG} {OFF}")
    config.cp_comm_type = "allgather"
