"""Problems of what layers do beside attention over ranks: attention halves in chunks of rows, MLPs
in tiles, host memory, the fused LM head, packing.

A chunk or a tile runs Megatron's own code of a layer for some rows, twice or more, and the last
time in backward. Settings that let this code draw random numbers, keep something of a call, or
leave work for later would change results, and are refused; so is what else moves or frees
activations, and what was not tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import OFF, BurstConfig
from .cuda_graphs import graphs_asked
from .problem import Problem
from .splitting import needs_ranks, splits

# What selective recompute may not name: parts of the attention half.
_OVERLAPPING = ("core_attn", "layernorm", "mla_up_proj")
# Fields of a TransformerConfig, the reason, the flag to remove.
_NOT_IN_CHUNKS = (
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

    config: a `TransformerConfig`, or any object with attributes of the same names.
    """
    count = burst.sequence_chunks
    if count == 1:
        return
    flag, off = f"--burst-sequence-chunks {count}", ("--burst-sequence-chunks",)

    def get(name: str) -> Any:
        return getattr(config, name, None)

    if burst.algorithm == OFF or not splits(config):
        yield needs_ranks(flag, config, burst, off)
        return
    for name, reason, setting in _NOT_IN_CHUNKS:
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
    yield from _chunk_recompute_problems(config, flag)


def _chunk_recompute_problems(config: Any, flag: str) -> Iterator[Problem]:
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


MLP_TILES = "--burst-mlp-tiles"
# Fields of a TransformerConfig, or arguments, that a tile cannot honour, and why.
_NOT_IN_TILES = (
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
    """All settings of a `TransformerConfig`, or of arguments, that tiles cannot honour."""
    if burst.mlp_tiles == 1:
        return
    asked = f"{MLP_TILES} {burst.mlp_tiles}"

    def get(name: str) -> Any:
        return getattr(config, name, None)

    for name, why, flag in _NOT_IN_TILES:
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
        yield from _tile_recompute_problems(get("recompute_modules") or (), asked)
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


def _tile_recompute_problems(modules: Any, asked: str) -> Iterator[Problem]:
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
            add=(f"{MLP_TILES} 8",),
        )


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

    config: a `TransformerConfig`, or parsed arguments under the same names.
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


LM_HEAD = "--burst-lm-head-loss"


def lm_head_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """All settings of a `TransformerConfig` that the fused loss cannot honour."""
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
            yield Problem(f"{LM_HEAD} {burst.lm_head_loss} {what}", remove=(flag,))
    scope = str(get("cuda_graph_scope"))
    if get("cuda_graph_impl") == "full_iteration" or "full_iteration" in scope:
        yield Problem(
            f"{LM_HEAD} {burst.lm_head_loss} reads a flag of the device in backward: no CUDA graph "
            "of full iterations"
        )


# What makes micro-batches of its own, by the attribute that asks for it.
_OTHERS = {
    "sequence_packing_scheduler": "--sequence-packing-scheduler",
    "dynamic_context_parallel": "--dynamic-context-parallel",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "rl_use_sequence_packing": "--rl-use-sequence-packing",
}


def packing_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless `--burst-pack` can do what it is asked.

    config: a `TransformerConfig`, or parsed arguments under the same names.
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
