"""Problems of `--burst-offload`: what else moves or frees activations, and what was not tested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.megatron.checks.cuda_graphs import graphs_asked
from megatron_burst.megatron.checks.problem import Problem

# Attribute of a configuration (or of parsed arguments) -> its flag, and why it excludes ours.
_EXCLUDED = {
    "cpu_offloading": ("--cpu-offloading-num-layers", "moves the same tensors"),
    "cpu_offloading_num_layers": ("--cpu-offloading-num-layers", "moves the same tensors"),
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "moves the same tensors",
    ),
    "moe_paged_stash": ("--moe-paged-stash", "moves the same tensors"),
    "distribute_saved_activations": (
        "--distribute-saved-activations",
        "replaces what a checkpoint has saved by a part of it",
    ),
    "overlap_moe_expert_parallel_comm": (
        "--overlap-moe-expert-parallel-comm",
        "runs the parts of a layer without calling the layer",
    ),
    "delay_wgrad_compute": (
        "--delay-wgrad-compute",
        "reads what layers saved after their backward has freed it",
    ),
    "num_microbatches_with_partial_activation_checkpoints": (
        "num_microbatches_with_partial_activation_checkpoints",
        "recomputes some micro-batches only, which was not tested with it",
    ),
    "fp8": ("--fp8-format", "recomputes through Transformer Engine, past ours"),
    "fp4": ("--fp4-format", "recomputes through Transformer Engine, past ours"),
    "tp_comm_overlap": ("--tp-comm-overlap", "saves buffers of its own; not tested with it"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "frees gathered weights; not tested with it"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "frees gathered weights; not tested with it"),
    "is_hybrid_model": ("--hybrid-layer-pattern", "has layers of other kinds; not tested with it"),
}
# Modules whose output Megatron frees after use and computes again, in place, before backward.
_FREED = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")


def offload_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless what layers leave for backward can wait in host memory.

    config: a ``TransformerConfig``, or parsed arguments under the same names.
    """
    if not burst.offload:
        if burst.host_memory is not None:
            yield Problem(
                f"--burst-host-memory {burst.host_memory} limits what --burst-offload moves, and "
                "nothing moves: leave it out, or ask for that",
                add=("--burst-offload auto",),
            )
        return
    flag = f"--burst-offload {burst.offload}"

    def get(name: str) -> Any:
        return getattr(config, name, None)

    for name, (other, why) in _EXCLUDED.items():
        if get(name):
            yield Problem(f"{flag} with {other}, which {why}", remove=(other,))
    if (get("gtp_weight_remat_size") or 1) > 1:
        other = "--tensor-parallel-num-weight-shards"
        yield Problem(f"{flag} with {other}, which frees gathered weights", remove=(other,))
    graphs, made = graphs_asked(config)
    if made != "none":
        yield Problem(
            f"{flag} with {graphs} {made}: a graph replays without Python, which moves tensors",
            remove=(graphs,),
        )
    freed = [name for name in get("recompute_modules") or () if name in _FREED]
    if get("recompute_granularity") == "selective" and freed:
        yield Problem(
            f"{flag} with --recompute-modules {' '.join(freed)}, whose outputs Megatron frees "
            "while they may still be on their way to the host; name others, such as core_attn mlp"
        )
