"""Problems of `--burst-pack`: what it needs, and what packs by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.config import OFF, BurstConfig
from megatron_burst.megatron.checks.problem import Problem

# What makes micro-batches of its own, by the attribute that asks for it.
_OTHERS = {
    "sequence_packing_scheduler": "--sequence-packing-scheduler",
    "dynamic_context_parallel": "--dynamic-context-parallel",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "rl_use_sequence_packing": "--rl-use-sequence-packing",
}


def packing_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless `--burst-pack` can do what it is asked.

    config: a ``TransformerConfig``, or parsed arguments under the same names.
    """
    if burst.algorithm != OFF and burst.pack != "off":
        yield from _pack_problems(config, f"--burst-pack {burst.pack}")


def _pack_problems(config: Any, flag: str) -> Iterator[Problem]:
    def get(name: str) -> Any:
        return getattr(config, name, None)

    if get("calculate_per_token_loss") is False:
        yield Problem(
            f"{flag} needs a loss per token: a mean over micro-batches would depend on which "
            "documents share one",
            add=("--calculate-per-token-loss",),
        )
    if (get("micro_batch_size") or 1) > 1:
        yield Problem(
            f"{flag} at --micro-batch-size {get('micro_batch_size')}: a pack is one row",
            add=("--micro-batch-size 1",),
        )
    for name, other in _OTHERS.items():
        if get(name):
            yield Problem(f"{flag} with {other}, which packs by itself", remove=("--burst-pack",))
    if (get("gtp_weight_remat_size") or 1) > 1:
        yield Problem(
            f"{flag} with weights sharded over tensor-parallel peers, which read batches of their "
            "own and need as many micro-batches as each other",
            remove=("--burst-pack",),
        )
    if get("cuda_graph_impl") == "full_iteration":
        yield Problem(
            f"{flag} with --cuda-graph-impl full_iteration: a graph has a fixed number of "
            "micro-batches",
            remove=("--cuda-graph-impl",),
        )
