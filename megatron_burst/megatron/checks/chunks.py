"""Problems of the attention half of layers in chunks of rows (``--burst-sequence-chunks``).

Each chunk runs Megatron's own code of a layer twice or more, for some rows, and the last time in
backward. Settings that let this code draw random numbers, keep something of a call, or leave work
for later would change results, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.config import OFF, BurstConfig
from megatron_burst.megatron.checks.hybrid import splits
from megatron_burst.megatron.checks.problem import Problem

# What selective recompute may not name: parts of the attention half.
_OVERLAPPING = ("core_attn", "layernorm", "mla_up_proj")
# Fields of a TransformerConfig, the reason, the flag to remove.
_UNSUPPORTED = (
    ("fp8", "its scales depend on whole tensors", "--fp8-format"),
    ("fp4", "its scales depend on whole tensors", "--fp4-format"),
    ("tp_comm_overlap", "its buffers are made for all rows of a layer", "--tp-comm-overlap"),
    ("fine_grained_activation_offloading", "it empties tensors that chunks share",
     "--fine-grained-activation-offloading"),
    ("cpu_offloading", "it moves what chunks keep, untested", "--cpu-offloading-num-layers"),
    ("delay_wgrad_compute", "weight gradients are summed over chunks when backward ends",
     "--delay-wgrad-compute"),
    ("overlap_moe_expert_parallel_comm", "it runs layers in pieces of its own",
     "--overlap-moe-expert-parallel-comm"),
    ("enable_autocast", "chunks run again in backward, outside torch.autocast", ""),
    ("fused_single_qkv_rope", "untested", "--fused-single-qkv-rope"),
)  # fmt: skip


def chunk_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless the attention half of a model's layers can be cut into chunks, if that is asked for.

    config: a ``TransformerConfig``, or any object with attributes of the same names.
    """
    count = burst.sequence_chunks
    if count == 1:
        return
    flag, off = f"--burst-sequence-chunks {count}", ("--burst-sequence-chunks",)

    def get(name: str) -> Any:
        return getattr(config, name, None)

    if burst.algorithm == OFF or not splits(config):
        yield Problem(
            f"{flag} is for BurstAttention over context-parallel ranks: it needs "
            f"--context-parallel-algo burst and --context-parallel-size above 1, got "
            f"{burst.algorithm} and {config.context_parallel_size}",
            remove=off,
        )
        return
    for name, reason, setting in _UNSUPPORTED:
        if get(name):
            yield Problem(
                f"{flag} with {setting or name}: {reason}", remove=(setting,) if setting else off
            )
    if get("hidden_dropout"):
        yield Problem(
            f"{flag}: hidden dropout is {config.hidden_dropout}, and rows that run again would "
            "draw other numbers",
            add=("--hidden-dropout 0",),
        )
    if get("cuda_graph_impl") not in (None, "none") or get("enable_cuda_graph"):
        yield Problem(f"{flag}: CUDA graphs replay without Python", remove=("--cuda-graph-impl",))
    if burst.kv_cache:
        yield Problem(
            f"{flag}: --burst-kv-cache {burst.kv_cache} keeps keys of one forward, and chunks send "
            "them round several times",
            remove=("--burst-kv-cache",),
        )
    if get("multi_latent_attention") and get("apply_rope_fusion"):
        yield Problem(
            f"{flag}: the fused rope of latent attention chooses rows itself",
            add=("--no-rope-fusion",),
        )
    yield from _recompute_problems(config, flag)


def _recompute_problems(config: Any, flag: str) -> Iterator[Problem]:
    if getattr(config, "recompute_granularity", None) != "selective":
        return
    modules = getattr(config, "recompute_modules", None)
    modules = ["core_attn"] if modules is None else modules  # as Megatron fills it in
    found = [name for name in modules if name in _OVERLAPPING]
    if found:
        rest = [name for name in modules if name not in found]
        yield Problem(
            f"{flag} recomputes the attention half but for attention, and so does "
            f"--recompute-modules {' '.join(found)}",
            add=(f"--recompute-modules {' '.join(rest)}",) if rest else (),
            remove=() if rest else ("--recompute-granularity", "--recompute-modules"),
        )
