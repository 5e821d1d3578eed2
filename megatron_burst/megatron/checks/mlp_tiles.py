"""Problems of a model's settings with MLPs in tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.megatron.checks.problem import Problem

FLAG = "--burst-mlp-tiles"
# Fields of a TransformerConfig, or arguments, that a tile cannot honour, and why.
_UNSUPPORTED = (
    ("fp8", "scales of fp8 would be those of a tile", "--fp8-format"),
    ("fp4", "scales of fp4 would be those of a tile", "--fp4-format"),
    ("tp_comm_overlap", "its buffers are as long as the sequence", "--tp-comm-overlap"),
    ("delay_wgrad_compute", "a tile is differentiated at once", "--delay-wgrad-compute"),
    ("overlap_dispatch_backward_with_experts_wgrad", "a tile is differentiated at once",
     "--overlap-dispatch-backward-with-experts-wgrad"),
    ("overlap_moe_expert_parallel_comm", "it runs layers in pieces of its own",
     "--overlap-moe-expert-parallel-comm"),
    ("moe_shared_expert_overlap", "it spreads shared experts over the exchange of all tokens",
     "--moe-shared-expert-overlap"),
    ("fine_grained_activation_offloading", "it moves what a tile recomputes; --burst-offload moves "
     "tiles", "--fine-grained-activation-offloading"),
    ("cpu_offloading", "it moves what a tile recomputes; --burst-offload moves tiles",
     "--cpu-offloading-num-layers"),
    ("moe_pad_expert_input_to_capacity", "the capacity of a tile is not that of the batch, and "
     "other tokens would be dropped", "--moe-pad-expert-input-to-capacity"),
    ("moe_input_jitter_eps", "a tile would be computed again with other noise",
     "--moe-input-jitter-eps"),
    ("moe_router_force_load_balancing", "a tile would be computed again with other random logits",
     "--moe-router-force-load-balancing"),
    ("moe_router_force_biased", "its bias is drawn for all tokens together",
     "--moe-router-force-biased"),
    ("moe_paged_stash", "it keeps what a tile recomputes", "--moe-paged-stash"),
    ("use_megatron_fsdp", "it was never tested with parameters that are gathered by module",
     "--use-megatron-fsdp"),
    ("use_torch_fsdp2", "it was never tested with parameters that are gathered by module",
     "--use-torch-fsdp2"),
)  # fmt: skip
# With these, ranks may have unequally many tokens of a micro-batch.
_UNEVEN = ("variable_seq_lengths", "hybrid_context_parallel", "dynamic_context_parallel")
_RECOMPUTED = ("mlp", "moe", "layernorm", "moe_act", "shared_experts")


def tile_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """All settings of a ``TransformerConfig``, or of arguments, that tiles cannot honour."""
    if burst.mlp_tiles == 1:
        return
    asked = f"{FLAG} {burst.mlp_tiles}"

    def get(name: str) -> Any:
        return getattr(config, name, None)

    for name, why, flag in _UNSUPPORTED:
        if get(name):
            yield Problem(f"{asked} with {flag}: {why}", remove=(flag,))
    if get("hidden_dropout"):
        yield Problem(
            f"{asked}: hidden dropout is {get('hidden_dropout')}, and a tile would be computed "
            "again with other tokens dropped",
            add=("--hidden-dropout 0",),
        )
    if (get("mlp_chunks_for_training") or 1) > 1:
        flag = "--mlp-chunks-for-training"
        yield Problem(f"{asked} takes the place of {flag}", remove=(flag,))
    if get("recompute_granularity") == "selective":
        yield from _recompute_problems(get("recompute_modules") or (), asked)
    graphs = get("cuda_graph_impl") not in (None, "none")
    for flag, on in (
        ("--cuda-graph-impl", graphs),
        ("--enable-cuda-graph", get("enable_cuda_graph") and not graphs),
        ("--external-cuda-graph", get("external_cuda_graph") and not graphs),
    ):
        if on:
            yield Problem(f"{asked}: CUDA graphs replay without Python", remove=(flag,))
    if get("num_moe_experts"):
        yield from _expert_problems(get, burst, asked)


def _recompute_problems(modules: Any, asked: str) -> Iterator[Problem]:
    both = [name for name in _RECOMPUTED if name in modules]
    if both:
        yield Problem(
            f"{asked} computes again what --recompute-modules {' '.join(both)} would: leave "
            f"{'it' if len(both) == 1 else 'them'} out of --recompute-modules"
        )


def _expert_problems(get: Any, burst: BurstConfig, asked: str) -> Iterator[Problem]:
    if get("moe_token_dispatcher_type") == "flex":
        yield Problem(
            f"{asked}: the flex dispatcher (DeepEP, HybridEP) was never tested by tiles",
            add=("--moe-token-dispatcher-type alltoall",),
        )
    gathered = get("moe_token_dispatcher_type") == "allgather" and get("sequence_parallel")
    if gathered and get("moe_shared_expert_intermediate_size"):
        yield Problem(
            f"{asked} with shared experts: under --sequence-parallel the allgather dispatcher and "
            "they use one gather buffer, and gradients differed from those without tiles",
            add=("--moe-token-dispatcher-type alltoall",),
        )
    spread = (get("expert_model_parallel_size") or 1) > 1
    uneven = [name for name in _UNEVEN if get(name)]
    if burst.mlp_tiles == "auto" and spread and uneven:
        yield Problem(
            f"{asked}: expert-parallel ranks need equally many tiles, and with "
            f"--{uneven[0].replace('_', '-')} they may have unequally many tokens: give a number",
            add=(f"{FLAG} 8",),
        )
