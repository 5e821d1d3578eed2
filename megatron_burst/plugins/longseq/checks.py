# SPDX-License-Identifier: Apache-2.0
"""Checks for settings that are incompatible with row chunks, MLP tiles or host memory.

Megatron's layer code runs at least twice for each row chunk or tile: in forward, and in backward
for the recomputation. Settings with which recomputed results would differ are refused: random
numbers, state kept between calls, deferred work. Other features that move or free activations and
untested combinations are refused too.

The argument `config` of each function is a `TransformerConfig`, or parsed arguments with the same
names.
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
from ...megatron.checks.splitting import needs_ranks
from ...megatron.selection import splits_with_burst
from .options import LongSequenceOptions


def option_problems(
    config: Any, burst: LongSequenceOptions, seq_length: int | None
) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that is incompatible with an option of this plugin."""
    yield from chunk_problems(config, burst)
    yield from tile_problems(config, burst)
    yield from offload_problems(config, burst)


def _uses_cuda_graphs(c: ConfigView, _: LongSequenceOptions) -> bool:
    return c.cuda_graph_impl not in (None, "none") or bool(c.enable_cuda_graph)


_CHUNKS = (
    *excluded(
        "{flag} with {other}: {why}",
        fp8="its scales depend on whole tensors",
        fp4="its scales depend on whole tensors",
        tp_comm_overlap="its buffers are allocated for all rows of a layer",
        fine_grained_activation_offloading="it frees tensors that row chunks share",
        cpu_offloading="it moves tensors that row chunks keep, which is not tested",
        delay_wgrad_compute="weight gradients are summed over row chunks when backward ends",
        overlap_moe_expert_parallel_comm="it splits layers into its own parts",
    ),
    Rule("enable_autocast",
         "{flag} with enable_autocast: backward recomputes row chunks outside torch.autocast",
         remove=("--burst-sequence-chunks",)),
    *excluded("{flag} was not tested with {other}", fused_single_qkv_rope=""),
    Rule("hidden_dropout",
         "{flag}: hidden dropout is {c.hidden_dropout}, and recomputed rows would draw "
         "different random numbers", add=("--hidden-dropout 0",)),
    Rule(_uses_cuda_graphs,
         "{flag}: CUDA graphs replay without Python code, which runs the row chunks",
         remove=("--cuda-graph-impl",)),
    Rule(lambda c, b: c.multi_latent_attention and c.apply_rope_fusion,
         "{flag}: the fused rope of latent attention selects the angles of rows itself",
         add=("--no-rope-fusion",)),
)  # fmt: skip
# Modules of the attention half that --recompute-modules must not contain.
_OVERLAPPING = ("core_attn", "layernorm", "mla_up_proj")


def chunk_problems(config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that is incompatible with `--burst-sequence-chunks`."""
    count = burst.sequence_chunks
    if count == 1:
        return
    flag = f"--burst-sequence-chunks {count}"
    if not splits_with_burst(config, burst):
        yield needs_ranks(flag, config, burst, ("--burst-sequence-chunks",))
        return
    yield from broken(_CHUNKS, config, burst, flag)
    if getattr(config, "recompute_granularity", None) != "selective":
        return
    modules = getattr(config, "recompute_modules", None)
    modules = ["core_attn"] if modules is None else modules  # Megatron's default
    twice = [name for name in modules if name in _OVERLAPPING]
    if twice:
        remaining = [name for name in modules if name not in twice]
        yield Problem(
            f"{flag} already recomputes the attention half of a layer (input norm to residual, "
            f"without core attention), so --recompute-modules {' '.join(twice)} would recompute "
            "parts of it twice",
            add=(f"--recompute-modules {' '.join(remaining)}",) if remaining else (),
            remove=() if remaining else ("--recompute-granularity", "--recompute-modules"),
        )


MLP_TILES = "--burst-mlp-tiles"
_ALLTOALL = ("--moe-token-dispatcher-type alltoall",)
_TILES = (
    *excluded(
        "{flag} with {other}: {why}",
        fp8="its scales would be computed per tile",
        fp4="its scales would be computed per tile",
        tp_comm_overlap="its buffers are as long as the sequence",
        delay_wgrad_compute="backward of a tile computes all gradients of the tile at once",
        overlap_dispatch_backward_with_experts_wgrad=(
            "backward of a tile computes all gradients of the tile at once"
        ),
        overlap_moe_expert_parallel_comm="it splits layers into its own parts",
        moe_shared_expert_overlap="it overlaps shared experts with the exchange of all tokens",
        fine_grained_activation_offloading=(
            "it moves tensors that a tile recomputes; --burst-offload moves tiles"
        ),
        cpu_offloading="it moves tensors that a tile recomputes; --burst-offload moves tiles",
        moe_pad_expert_input_to_capacity=(
            "the expert capacity would be computed per tile, so different tokens would be dropped "
            "than without tiles"
        ),
        moe_input_jitter_eps="a tile would be recomputed with different noise",
        moe_router_force_load_balancing="a tile would be recomputed with different random logits",
        moe_router_force_biased="its bias is drawn for all tokens together",
        moe_paged_stash="it keeps tensors that a tile recomputes",
        use_megatron_fsdp="tiles were not tested with parameters that are gathered per module",
        use_torch_fsdp2="tiles were not tested with parameters that are gathered per module",
    ),
    Rule("hidden_dropout",
         "{flag}: hidden dropout is {c.hidden_dropout}, and a recomputed tile would draw "
         "different random numbers", add=("--hidden-dropout 0",)),
    Rule(lambda c, b: (c.mlp_chunks_for_training or 1) > 1,
         "{flag} replaces --mlp-chunks-for-training",
         remove=("--mlp-chunks-for-training",)),
)  # fmt: skip
_GRAPHS = "{flag}: CUDA graphs replay without Python code, which runs the tiles"
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
# Settings that may give ranks different numbers of tokens in a micro-batch.
_UNEVEN = ("variable_seq_lengths", "hybrid_context_parallel", "dynamic_context_parallel")


def _uneven_experts(c: ConfigView, burst: LongSequenceOptions) -> str | None:
    """Return the flag that may give expert-parallel ranks different numbers of tokens.

    Return None if no such flag is set, if experts are not split over ranks, or if the number of
    tiles does not depend on the number of tokens.
    """
    if burst.mlp_tiles != "auto" or (c.expert_model_parallel_size or 1) == 1:
        return None
    return next((flag_of_setting(name) for name in _UNEVEN if getattr(c, name)), None)


_TILES_OF_EXPERTS = (
    Rule(lambda c, b: c.moe_token_dispatcher_type == "flex",
         "{flag}: the flex dispatcher (DeepEP, HybridEP) is not tested with tiles",
         add=_ALLTOALL),
    Rule(lambda c, b: c.moe_token_dispatcher_type == "allgather" and c.sequence_parallel
         and c.moe_shared_expert_intermediate_size,
         "{flag} with shared experts: under --sequence-parallel the allgather dispatcher and "
         "shared experts use the same gather buffer, and gradients would be wrong", add=_ALLTOALL),
    Rule(_uneven_experts,
         "{flag}: expert-parallel ranks need the same number of tiles, and with {value} they may "
         "have different numbers of tokens; set a number", add=(f"{MLP_TILES} 8",)),
)  # fmt: skip


def tile_problems(config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that is incompatible with `--burst-mlp-tiles`."""
    if burst.mlp_tiles == 1:
        return
    flag = f"{MLP_TILES} {burst.mlp_tiles}"
    yield from broken(_TILES, config, burst, flag)
    modules = getattr(config, "recompute_modules", None) or ()
    twice = [name for name in _RECOMPUTED if name in modules]
    if twice and getattr(config, "recompute_granularity", None) == "selective":
        yield Problem(
            f"{flag} already recomputes the modules of --recompute-modules {' '.join(twice)}; "
            f"remove {' '.join(twice)} from --recompute-modules"
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
        distribute_saved_activations="replaces saved tensors of a checkpoint by a part of them",
        overlap_moe_expert_parallel_comm="runs the parts of a layer without calling the layer",
        delay_wgrad_compute="reads saved tensors of a layer after its backward has freed them",
        num_microbatches_with_partial_activation_checkpoints=(
            "recomputes only some micro-batches; this is not tested"
        ),
        fp8="recomputes with the checkpoint of Transformer Engine, which cannot offload",
        fp4="recomputes with the checkpoint of Transformer Engine, which cannot offload",
        tp_comm_overlap="saves its own buffers; this is not tested",
        use_megatron_fsdp="frees gathered weights; this is not tested",
        use_torch_fsdp2="frees gathered weights; this is not tested",
    ),
    Rule(
        lambda c, b: (c.gtp_weight_remat_size or 1) > 1,
        "{flag} with --tensor-parallel-num-weight-shards, which frees gathered weights",
        remove=("--tensor-parallel-num-weight-shards",),
    ),
)
# Modules whose output Megatron frees after use and recomputes in place before backward.
_FREED = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")


def offload_problems(config: Any, burst: LongSequenceOptions) -> Iterator[Problem]:
    """Yield a `Problem` for each setting that is incompatible with `--burst-offload`.

    `--burst-host-memory` without `--burst-offload` is a problem too.
    """
    if not burst.offload:
        if burst.host_memory is not None:
            yield Problem(
                f"--burst-host-memory {burst.host_memory} limits --burst-offload, which is not "
                "set; remove --burst-host-memory or set --burst-offload",
                add=("--burst-offload auto",),
            )
        return
    flag = f"--burst-offload {burst.offload}"
    yield from broken(OFFLOAD, config, burst, flag)
    graphs, kind = graphs_asked(config)
    if kind != "none":
        yield Problem(
            f"{flag} with {graphs} {kind}: offloading moves tensors in Python code, which does not "
            "run when a CUDA graph is replayed",
            remove=(graphs,),
        )
    modules = getattr(config, "recompute_modules", None) or ()
    freed = [name for name in modules if name in _FREED]
    if freed and getattr(config, "recompute_granularity", None) == "selective":
        yield Problem(
            f"{flag} with --recompute-modules {' '.join(freed)}: Megatron frees outputs of these "
            "modules while copies to the host may still read them; name other modules, such as "
            "core_attn mlp"
        )
