"""Problems of a model's settings with the fused LM head and loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.megatron.checks.problem import Problem

FLAG = "--burst-lm-head-loss"


def lm_head_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """All settings of a ``TransformerConfig`` that the fused loss cannot honour."""
    if burst.lm_head_loss == "off":
        return

    def get(name: str) -> Any:
        return getattr(config, name, None)

    for asked, what, flag in (
        (get("cross_entropy_loss_fusion"), "replaces it", "--cross-entropy-loss-fusion"),
        (get("defer_embedding_wgrad_compute"),
         "makes that gradient at once", "--defer-embedding-wgrad-compute"),
        (get("fp16"), "takes bf16 or fp32", "--fp16"),
        (get("fp8_output_proj"), "takes bf16 or fp32", "--fp8-output-proj"),
        (get("overlap_moe_expert_parallel_comm"),
         "needs GPTModel.forward", "--overlap-moe-expert-parallel-comm"),
    ):  # fmt: skip
        if asked:
            yield Problem(f"{FLAG} {burst.lm_head_loss} {what}", remove=(flag,))
    scope = str(get("cuda_graph_scope"))
    if get("cuda_graph_impl") == "full_iteration" or "full_iteration" in scope:
        yield Problem(
            f"{FLAG} {burst.lm_head_loss} reads a flag of the device in backward: no CUDA graph "
            "of full iterations"
        )
