# SPDX-License-Identifier: Apache-2.0
"""Settings that exclude chunks of rows, tiles of MLPs, or host memory.

A chunk or a tile runs Megatron's own code of a layer for some rows, twice or more, and the last
time in backward. Settings that let this code draw random numbers, keep something of a call, or
leave work for later would change results, and are refused; so is what else moves or frees
activations, and what was not tested.

Each function takes a `TransformerConfig`, or parsed arguments under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...megatron.checks.cuda_graphs import graphs_asked
from ...megatron.checks.problem import (
    ConfigView,
    Problem,
    Rule,
    broken,
    excluded,
    flag_of_setting,
)
from ...megatron.checks.splitting import needs_ranks, splits
from ...spine_options import OFF
from .options import LongSequenceOptions


def option_problems(
    config: Any, burst: LongSequenceOptions, seq_length: int | None
) -> Iterator[Problem]:
    """All settings that exclude an option of this plugin, at any sequence length."""
    yield from chunk_problems(config, burst)
    yield from tile_problems(config, burst)
    yield from offload_problems(config, burst)


def _graphs_of_any_name(c: ConfigView, _: LongSequenceOptions) -> bool:
    return c.cuda_graph_impl not in (None, "none") or bool(c.enable_cuda_graph)


_CHUNKS = (
    *excluded(
        "{flag} with {other}: {why}",
        fp8="its scales depend on whole tensors",
        fp4="its scales depend on whole tensors",
        tp_comm_overlap="its buffers are made for all rows of a layer",
        fine_grained_activation_offloading="it empties tensors that chunks share",
        cpu_offloading="it moves what chunks keep, untested",
        delay_wgrad_compute="weight gradients are summed over chunks when backward ends",
        overlap_moe_expert_parallel_comm="it runs layers in pieces of its own",
    ),
    Rule("enable_autocast",
         "{flag} with enable_autocast: chunks run again in backward, outside torch.autocast",
         remove=("--burst-sequence-chunks",)),
    *excluded("{flag} with {other}: {why}", fused_single_qkv_rope="untested"),
    Rule("hidden_dropout",
         "{flag}: hidden dropout is {c.hidden_dropout}, and rows that run again would draw other "
         "numbers", add=("--hidden-dropout 0",)),
    Rule(_graphs_of_any_name, "{flag}: CUDA graphs replay without Python",
         remove=("--cuda-graph-impl",)),
    Rule(lambda c, b: c.multi_latent_attention and c.apply_rope_fusion,
         "{flag}: the fused rope of latent attention chooses rows itself",
         add=("--no-rope-fusion",)),
)  # fmt: skip
# What selective recompute may not name: parts of the attention half.
_OVERLAPPING = ("core_attn", "layernorm", "mla_up_proj")


def chunk_problems(config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """Unless the attention half of a model's layers can be cut into chunks, if that is asked."""
    count = burst.sequence_chunks
    if count == 1:
        return
    flag = f"--burst-sequence-chunks {count}"
    if burst.algorithm == OFF or not splits(config):
        yield needs_ranks(flag, config, burst, ("--burst-sequence-chunks",))
        return
    yield from broken(_CHUNKS, config, burst, flag)
    if getattr(config, "recompute_granularity", None) != "selective":
        return
    modules = getattr(config, "recompute_modules", None)
    modules = ["core_attn"] if modules is None else modules  # as Megatron fills it in
    twice = [name for name in modules if name in _OVERLAPPING]
    if twice:
        rest = [name for name in modules if name not in twice]
        yield Problem(
            f"{flag} recomputes the attention half but for attention, and so does "
            f"--recompute-modules {' '.join(twice)}",
            add=(f"--recompute-modules {' '.join(rest)}",) if rest else (),
            remove=() if rest else ("--recompute-granularity", "--recompute-modules"),
        )


MLP_TILES = "--burst-mlp-tiles"
_ALLTOALL = ("--moe-token-dispatcher-type alltoall",)
_TILES = (
    *excluded(
        "{flag} with {other}: {why}",
        fp8="scales of fp8 would be those of a tile",
        fp4="scales of fp4 would be those of a tile",
        tp_comm_overlap="its buffers are as long as the sequence",
        delay_wgrad_compute="a tile is differentiated at once",
        overlap_dispatch_backward_with_experts_wgrad="a tile is differentiated at once",
        overlap_moe_expert_parallel_comm="it runs layers in pieces of its own",
        moe_shared_expert_overlap="it spreads shared experts over the exchange of all tokens",
        fine_grained_activation_offloading=(
            "it moves what a tile recomputes; --burst-offload moves tiles"
        ),
        cpu_offloading="it moves what a tile recomputes; --burst-offload moves tiles",
        moe_pad_expert_input_to_capacity=(
            "the capacity of a tile is not that of the batch, and other tokens would be dropped"
        ),
        moe_input_jitter_eps="a tile would be computed again with other noise",
        moe_router_force_load_balancing=(
            "a tile would be computed again with other random logits"
        ),
        moe_router_force_biased="its bias is drawn for all tokens together",
        moe_paged_stash="it keeps what a tile recomputes",
        use_megatron_fsdp="it was never tested with parameters that are gathered by module",
        use_torch_fsdp2="it was never tested with parameters that are gathered by module",
    ),
    Rule("hidden_dropout",
         "{flag}: hidden dropout is {c.hidden_dropout}, and a tile would be computed again with "
         "other tokens dropped", add=("--hidden-dropout 0",)),
    Rule(lambda c, b: (c.mlp_chunks_for_training or 1) > 1,
         "{flag} takes the place of --mlp-chunks-for-training",
         remove=("--mlp-chunks-for-training",)),
)  # fmt: skip
_GRAPHS = "{flag}: CUDA graphs replay without Python"
_TILES_AND_GRAPHS = (
    Rule(lambda c, b: c.cuda_graph_impl not in (None, "none"), _GRAPHS,
         remove=("--cuda-graph-impl",)),
    *(
        Rule(lambda c, b, name=name: c.cuda_graph_impl in (None, "none") and getattr(c, name),
             _GRAPHS, remove=(flag_of_setting(name),))
        for name in ("enable_cuda_graph", "external_cuda_graph")
    ),
)  # fmt: skip
_RECOMPUTED = ("mlp", "moe", "layernorm", "moe_act", "shared_experts")
# With these, ranks may have unequally many tokens of a micro-batch.
_UNEVEN = ("variable_seq_lengths", "hybrid_context_parallel", "dynamic_context_parallel")


def _uneven_experts(c: ConfigView, burst: LongSequenceOptions) -> str | None:
    """The flag with which expert-parallel ranks may have unequally many tokens, if that matters."""
    if burst.mlp_tiles != "auto" or (c.expert_model_parallel_size or 1) == 1:
        return None
    return next((flag_of_setting(name) for name in _UNEVEN if getattr(c, name)), None)


_TILES_OF_EXPERTS = (
    Rule(lambda c, b: c.moe_token_dispatcher_type == "flex",
         "{flag}: the flex dispatcher (DeepEP, HybridEP) was never tested by tiles",
         add=_ALLTOALL),
    Rule(lambda c, b: c.moe_token_dispatcher_type == "allgather" and c.sequence_parallel
         and c.moe_shared_expert_intermediate_size,
         "{flag} with shared experts: under --sequence-parallel the allgather dispatcher and they "
         "use one gather buffer, and gradients differed from those without tiles", add=_ALLTOALL),
    Rule(_uneven_experts,
         "{flag}: expert-parallel ranks need equally many tiles, and with {value} they may have "
         "unequally many tokens: give a number", add=(f"{MLP_TILES} 8",)),
)  # fmt: skip


def tile_problems(config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """All settings that tiles cannot honour."""
    if burst.mlp_tiles == 1:
        return
    flag = f"{MLP_TILES} {burst.mlp_tiles}"
    yield from broken(_TILES, config, burst, flag)
    modules = getattr(config, "recompute_modules", None) or ()
    twice = [name for name in _RECOMPUTED if name in modules]
    if twice and getattr(config, "recompute_granularity", None) == "selective":
        yield Problem(
            f"{flag} computes again what --recompute-modules {' '.join(twice)} would: leave "
            f"{'it' if len(twice) == 1 else 'them'} out of --recompute-modules"
        )
    yield from broken(_TILES_AND_GRAPHS, config, burst, flag)
    if getattr(config, "num_moe_experts", None):
        yield from broken(_TILES_OF_EXPERTS, config, burst, flag)


OFFLOAD = (
    *excluded(
        "{flag} with {other}, which {why}",
        cpu_offloading="moves the same tensors",
        cpu_offloading_num_layers="moves the same tensors",
        fine_grained_activation_offloading="moves the same tensors",
        moe_paged_stash="moves the same tensors",
        distribute_saved_activations="replaces what a checkpoint has saved by a part of it",
        overlap_moe_expert_parallel_comm="runs the parts of a layer without calling the layer",
        delay_wgrad_compute="reads what layers saved after their backward has freed it",
        num_microbatches_with_partial_activation_checkpoints=(
            "recomputes some micro-batches only, which was not tested with it"
        ),
        fp8="recomputes through Transformer Engine, past ours",
        fp4="recomputes through Transformer Engine, past ours",
        tp_comm_overlap="saves buffers of its own; not tested with it",
        use_megatron_fsdp="frees gathered weights; not tested with it",
        use_torch_fsdp2="frees gathered weights; not tested with it",
    ),
    Rule(
        lambda c, b: (c.gtp_weight_remat_size or 1) > 1,
        "{flag} with --tensor-parallel-num-weight-shards, which frees gathered weights",
        remove=("--tensor-parallel-num-weight-shards",),
    ),
)
# Modules whose output Megatron frees after use and computes again, in place, before backward.
_FREED = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")


def offload_problems(config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """Unless what layers leave for backward can wait in host memory."""
    if not burst.offload:
        if burst.host_memory is not None:
            yield Problem(
                f"--burst-host-memory {burst.host_memory} limits what --burst-offload moves, and "
                "nothing moves: leave it out, or ask for that",
                add=("--burst-offload auto",),
            )
        return
    flag = f"--burst-offload {burst.offload}"
    yield from broken(OFFLOAD, config, burst, flag)
    graphs, kind = graphs_asked(config)
    if kind != "none":
        yield Problem(
            f"{flag} with {graphs} {kind}: a graph replays without Python, which moves tensors",
            remove=(graphs,),
        )
    modules = getattr(config, "recompute_modules", None) or ()
    freed = [name for name in modules if name in _FREED]
    if freed and getattr(config, "recompute_granularity", None) == "selective":
        yield Problem(
            f"{flag} with --recompute-modules {' '.join(freed)}, whose outputs Megatron frees "
            "while they may still be on their way to the host; name others, such as core_attn mlp"
        )
