"""Problems of a `TransformerConfig`: of the sizes of a run, of features of its layers, and of the
local attention that it names.

Each function yields the problems that it finds. Nothing here looks at processes or tensors: every
rank reads the same configuration, so every rank raises the same error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...autotune import cluster_file
from ...config import OFF, BurstConfig
from ...kernels import flash_packages
from ...schedule.topology import Topology
from ..users_mask import mask_function
from .cuda_graphs import graph_problems
from .problem import Problem, Refused, refuse
from .splitting import (
    DELTA_NETS,
    changing_groups,
    hybrid_problems,
    linear_layers,
    linear_problems,
    needs_ranks,
    splits,
    two_layout_problems,
)

SIZES = "--hierarchical-context-parallel-sizes"


def check_config(config: Any, burst: BurstConfig, seq_length: int | None = None) -> None:
    """Raise `ValueError` if BurstAttention cannot honour a `TransformerConfig`."""
    refuse(config_problems(config, burst, seq_length))


def config_problems(
    config: Any, burst: BurstConfig, seq_length: int | None = None
) -> Iterator[Problem]:
    """All settings of a `TransformerConfig` that BurstAttention cannot honour.

    config: a `TransformerConfig`, or any object with attributes of the same names;
    seq_length: global, in tokens.
    """
    cp = config.context_parallel_size
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if type(cp) is not int or cp < 1:
        yield Problem(f"--context-parallel-size must be an integer from 1 on, got {cp!r}")
        return
    if sizes is not None and (isinstance(sizes, str) or not isinstance(sizes, Sequence)):
        yield Problem(f"{SIZES} must be two sizes, ranks per node and nodes, got {sizes!r}")
        sizes = None
    if sizes and math.prod(sizes) != cp:
        yield Problem(
            f"{SIZES} {list(sizes)} multiply to {math.prod(sizes)}, which is not "
            f"--context-parallel-size {cp}"
        )
    yield from cluster_problems(burst, config)
    yield from mask_problems(config, burst)
    if not splits(config):
        yield from two_layout_problems(config, burst)
        return
    if burst.algorithm == "megatron":
        yield from two_layout_problems(config, burst)
        if burst.layout != "zigzag":
            yield Problem(
                f"--burst-layout {burst.layout} with --context-parallel-algo megatron: Megatron's "
                "own attention supports only zigzag; leave the layout out, or take "
                "--context-parallel-algo burst"
            )
        return
    of_groups = [*topology_problems(cp, sizes, burst.intra_size), *_head_problems(config, burst)]
    yield from of_groups
    if not of_groups:
        yield from _head_chunk_problems(config, burst)
        yield from _placement_problems(cp, sizes[0] if sizes else burst.intra_size, burst)
    if seq_length is not None:
        yield from length_problems(seq_length, cp)
        if burst.layout == "balanced":
            yield from _tensor_problems(config, seq_length)
    if burst.store:
        yield from _store_problems(config, burst.store)
    yield from hybrid_problems(config)
    yield from two_layout_problems(config, burst)
    yield from linear_problems(config, burst)
    states = burst.linear != OFF and linear_layers(config) is not None
    yield from graph_problems(config, burst.store, states)
    yield from model_problems(config)
    yield from max_logit_problems(config, burst.kernel)
    if burst.layout != "zigzag":
        yield from layout_problems(config, burst.layout)


def mask_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless the function of `--burst-mask` can be called for every layer and batch."""
    if burst.mask is None:
        return
    flag, off = f"--burst-mask {burst.mask}", ("--burst-mask",)
    if burst.algorithm == OFF or not splits(config):
        yield needs_ranks(flag, config, burst, off)
        return
    changing = changing_groups(config)
    for asked, other, why in (
        (burst.layout == "balanced", "--burst-layout balanced",
         "whose balance is that of causal documents"),
        (burst.pack != "off", f"--burst-pack {burst.pack}", "whose balance is that of causality"),
        (burst.sequence_chunks != 1, f"--burst-sequence-chunks {burst.sequence_chunks}",
         "which was not tested"),
        (burst.attention_layout not in (None, burst.layout),
         f"--burst-attention-layout {burst.attention_layout}", "which was not tested"),
        (getattr(config, "mtp_num_layers", None), "--mtp-num-layers",
         "whose layers count from 1 again, so that the function could not tell them apart"),
        (changing, changing, "whose groups change with the micro-batch: not tested"),
    ):  # fmt: skip
        if asked:
            yield Problem(f"{flag} with {other}, {why}", remove=off)
    try:
        mask_function(burst.mask)
    except ValueError as error:
        yield Problem(str(error))


def length_problems(seq_length: int, cp: int) -> Iterator[Problem]:
    """Unless `cp` ranks can each hold two equal pieces of a sequence."""
    if seq_length % (2 * cp):
        yield Problem(
            f"--seq-length {seq_length} is not divisible by 2 x --context-parallel-size "
            f"({2 * cp}); pad the sequences or change one of the two"
        )


def _tensor_problems(config: Any, seq_length: int) -> Iterator[Problem]:
    """Unless tensor-parallel ranks can share the tokens of a context-parallel one."""
    cp, tp = config.context_parallel_size, getattr(config, "tensor_model_parallel_size", 1)
    if getattr(config, "sequence_parallel", False) and seq_length % (cp * tp):
        yield Problem(
            f"--seq-length {seq_length} is not divisible by --context-parallel-size ({cp}) x "
            f"--tensor-model-parallel-size ({tp}), which --sequence-parallel needs"
        )


def _placement_problems(cp: int, intra: int | None, burst: BurstConfig) -> Iterator[Problem]:
    """Unless the ranks that share heads leave rings with equally many ranks per node."""
    size = ulysses_size(burst, cp)
    if size == 1 or intra is None:
        return
    try:
        Topology(cp, intra, size, burst.placement)
    except ValueError as error:
        yield Problem(f"--burst-ulysses-size {size} --burst-placement {burst.placement}: {error}")


def _store_problems(config: Any, store: float) -> Iterator[Problem]:
    """Unless Megatron recomputes attention, in a way that the store can intercept."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    flag = f"--burst-attention-store {store}"
    granularity, modules = get("recompute_granularity"), get("recompute_modules")
    modules = ["core_attn"] if modules is None else modules  # as Megatron fills it in
    if granularity == "selective" and "core_attn" not in modules:
        yield Problem(
            f"{flag} keeps attention between forward and recompute, and --recompute-modules "
            f"{modules} does not recompute it: add core_attn, or leave {flag} out"
        )
    if granularity not in ("full", "selective"):
        yield Problem(
            f"{flag} keeps attention between forward and recompute, and nothing recomputes it: "
            f"add --recompute-granularity full or --recompute-activations, or leave {flag} out"
        )
    for name in ("fp8", "fp4"):
        if get(name):
            yield Problem(
                f"{flag}: {name} layers are recomputed by Transformer Engine, past the store",
                remove=(f"--{name}-format",),
            )
    if get("fine_grained_activation_offloading"):
        yield Problem(
            f"{flag} keeps results whose memory --fine-grained-activation-offloading frees",
            remove=("--fine-grained-activation-offloading",),
        )


def check_topology(cp: int, sizes: Sequence[int] | None, intra_size: int | None) -> None:
    """Raise `ValueError` unless `sizes` and `intra_size` fit `cp` and each other."""
    refuse(topology_problems(cp, sizes, intra_size))


def topology_problems(
    cp: int, sizes: Sequence[int] | None, intra_size: int | None
) -> Iterator[Problem]:
    """What does not fit of the two ways to state ranks per node: to `cp`, or to each other."""
    if sizes and len(sizes) != 2:
        yield Problem(
            f"{SIZES} {list(sizes)} has {len(sizes)} levels; BurstAttention takes two: ranks per "
            "node, then nodes"
        )
    if intra_size is not None and cp % intra_size:
        yield Problem(
            f"--burst-intra-size {intra_size} does not divide --context-parallel-size {cp}"
        )
    if sizes and intra_size not in (None, sizes[0]):
        yield Problem(
            f"--burst-intra-size {intra_size} contradicts --hierarchical-context-parallel-sizes "
            f"{list(sizes)}",
            remove=("--burst-intra-size",),
        )


def ulysses_size(burst: BurstConfig, cp: int) -> int:
    """How many of `cp` ranks share the heads of the same rows; 1 for a ring of all ranks."""
    if burst.algorithm == "ulysses":
        if burst.ulysses_size not in (None, cp):
            refuse([Problem(
                f"--burst-ulysses-size {burst.ulysses_size}: ulysses shares the heads over all "
                f"--context-parallel-size {cp} ranks; leave the flag out, or take "
                "--context-parallel-algo hybrid"
            )])  # fmt: skip
        return cp
    if burst.algorithm == "hybrid" and burst.ulysses_size is None:
        refuse([Problem(
            "--context-parallel-algo hybrid needs --burst-ulysses-size: how many ranks share heads"
        )])  # fmt: skip
    return burst.ulysses_size or 1


def _head_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless the heads of a tensor-parallel rank can be shared by that many ranks."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads, config.num_query_groups
    try:
        size = ulysses_size(burst, cp)
    except Refused as error:
        yield from error.problems
        return
    if size == 1 or heads is None:  # a yaml file or a layer spec gives the heads later
        return
    heads, kv_heads = heads // tp, max(1, (groups or heads) // tp)
    if _shared(size, cp, heads, kv_heads):
        return
    fitting = [n for n in range(2, cp + 1) if _shared(n, cp, heads, kv_heads)]
    has = f"a tensor-parallel rank has {heads} query heads and {kv_heads} key/value heads"
    if burst.algorithm == "ulysses":
        reason = f"--context-parallel-algo ulysses at --context-parallel-size {cp}: {has}, too few "
        reason += f"or not divisible for {cp} ranks"
    else:
        reason = (
            f"--burst-ulysses-size {size} must divide --context-parallel-size {cp} and the heads "
        )
        reason += f"of a rank; {has}"
    if fitting:
        size = max([n for n in fitting if n <= size], default=fitting[0])
        algorithm = {"ulysses": "hybrid"}.get(burst.algorithm, burst.algorithm)
        size = f"--burst-ulysses-size {size}"
        yield Problem(reason, add=(f"--context-parallel-algo {algorithm}", size))
    else:
        left = ("--burst-ulysses-size",) if burst.ulysses_size else ()
        yield Problem(reason, add=("--context-parallel-algo burst",), remove=left)


def _head_chunk_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless chunks of heads can be cut of those that a rank computes."""
    count, heads = burst.head_chunks, config.num_attention_heads
    if count is None or heads is None:
        return
    each = max(1, (config.num_query_groups or heads) // config.tensor_model_parallel_size)
    each = max(1, each // ulysses_size(burst, config.context_parallel_size))
    if each % count:
        yield Problem(
            f"--burst-head-chunks {count} does not divide the {each} key/value heads that a rank "
            "computes",
            remove=("--burst-head-chunks",),
        )


def _shared(size: int, cp: int, heads: int, kv_heads: int) -> bool:
    """Whether `size` ranks can share these heads without splitting one.

    Key/value heads may be repeated.
    """
    return not (cp % size or heads % size or (kv_heads % size and size % kv_heads))


HIDDEN_STATES = "Megatron shifts hidden states too, and only zigzag shards of unpacked sequences"
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def _window_problems(size: Any) -> Iterator[Problem]:
    if size is None:
        return
    flag = "--window-size"
    if isinstance(size, int):
        yield Problem(
            f"{flag} {size} must be two sizes: tokens back, tokens ahead", (f"{flag} {size},0",)
        )
    elif len(size) != 2 or any(limit < -1 for limit in size):
        yield Problem(f"{flag} {size} must be two sizes, each at least 0, or -1 for no limit")
    elif size[1] > 0:
        yield Problem(
            f"{flag} {size} looks {size[1]} tokens ahead, and the model is causal",
            (f"{flag} {size[0]},0",),
        )


# Fields of a TransformerConfig for features that do not exist here, the reason, the flag to remove.
_UNSUPPORTED = (
    ("apply_query_key_layer_scaling", "query-key layer scaling is not supported",
     "--apply-query-key-layer-scaling"),
    ("fp8_dot_product_attention", "attention in fp8 is not supported",
     "--fp8-dot-product-attention"),
    ("fp8_multi_head_attention", "attention in fp8 is not supported",
     "--fp8-multi-head-attention"),
    ("sequence_packing_scheduler", "it cuts packed batches by itself, for Megatron's own "
     "attention; --burst-pack documents packs them over the data-parallel ranks",
     "--sequence-packing-scheduler"),
    ("use_kitchen_attention", "BurstAttention takes the place of the attention it asks for",
     "--use-kitchen-attention"),
    ("batch_invariant_mode", "partial results of ranks are merged, and their bits depend on how "
     "many there are; Megatron's own attention has no such mode over ranks either",
     "--batch-invariant-mode"),
    ("overlap_moe_expert_parallel_comm", "it runs layers in pieces on CUDA streams, those of one "
     "micro-batch between those of another; with BurstAttention this was never tested",
     "--overlap-moe-expert-parallel-comm"),
)  # fmt: skip


def model_problems(config: Any) -> Iterator[Problem]:
    """Features of the layers of a `TransformerConfig` that BurstAttention lacks."""

    def get(name: str, default: Any = None) -> Any:
        return getattr(config, name, default)

    if get("attention_dropout", 0):
        yield dropout_problem(config.attention_dropout)
    yield from _window_problems(get("window_size"))
    if get("softmax_type", "vanilla") not in SOFTMAX_TYPES:
        yield Problem(
            f"--softmax-type {config.softmax_type}: only {', '.join(SOFTMAX_TYPES)} are supported"
        )
    if get("attn_logit_softcapping"):
        yield Problem(
            "attention logit softcapping is not supported; leave attn_logit_softcapping unset"
        )
    for name, reason, flag in _UNSUPPORTED:
        if get(name):
            yield Problem(f"{flag}: {reason}", remove=(flag,))
    heads, groups = get("num_attention_heads"), get("num_query_groups")
    if groups and heads and heads % groups:
        yield Problem(f"--num-query-groups {groups} does not divide --num-attention-heads {heads}")


def records_max_logits(config: Any) -> bool:
    """Whether Megatron's optimizer step reads the largest attention logits."""
    return bool(getattr(config, "log_max_attention_logit", 0) or getattr(config, "qk_clip", 0))


def max_logit_problems(config: Any, kernel: str) -> Iterator[Problem]:
    """Unless the local attention `kernel` can tell the largest logits, if they are asked for."""
    if records_max_logits(config) and kernel not in ("auto", "triton", "reference"):
        yield Problem(
            f"{_max_logit_flag(config)} needs the largest attention logits, which --burst-kernel "
            f"{kernel} does not tell; triton and reference do",
            add=("--burst-kernel auto",),
        )


def _max_logit_flag(config: Any) -> str:
    return "--qk-clip" if getattr(config, "qk_clip", False) else "--log-max-attention-logit"


def dropout_problem(share: float) -> Problem:
    """Attention dropout with probability `share`."""
    return Problem(
        f"attention dropout is {share}, and BurstAttention has none", add=("--attention-dropout 0",)
    )


def layout_problems(config: Any, layout: str) -> Iterator[Problem]:
    """Features for which Megatron slices or shifts the sequence itself, assuming zigzag."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    zigzag = ("--burst-layout zigzag",)
    if get("mtp_hsm"):
        yield Problem(f"--mtp-hsm with --burst-layout {layout}: {HIDDEN_STATES}", add=zigzag)
    variant = get("experimental_attention_variant")
    if variant and variant not in DELTA_NETS:
        yield Problem(
            f"--experimental-attention-variant {variant} needs --burst-layout zigzag, not {layout}",
            add=zigzag,
        )
    if get("multi_latent_attention") and get("apply_rope_fusion"):
        yield Problem("fused MLA rope works only with --burst-layout zigzag",
                      add=("--no-rope-fusion",))  # fmt: skip
    if layout == "balanced":
        yield from _balanced_problems(config)


def _balanced_problems(config: Any) -> Iterator[Problem]:
    """What packs of mixed documents, and ranks that hold unequally many counted tokens, exclude."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    if not get("calculate_per_token_loss"):
        yield Problem(
            "--burst-layout balanced gives ranks unequally many tokens that count, and Megatron "
            "divides the loss of each rank by the rank's own count, so that gradients depend on "
            "the layout",
            add=("--calculate-per-token-loss",),
        )
    rotary = get("position_embedding_type") in ("rope", "yarn", "mrope")
    if rotary and get("apply_rope_fusion") and not get("multi_latent_attention"):
        yield Problem(
            "fused rope lays every document out by itself, and --burst-layout balanced does not",
            add=("--no-rope-fusion",),
        )
    if get("linear_attention_freq") and not get("experimental_attention_variant"):
        yield Problem(
            "--linear-attention-freq: layers of linear attention assume an order of tokens, and "
            "work only with --burst-layout zigzag, not balanced",
            add=("--burst-layout zigzag",),
        )


def backend_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless the attention backend leaves the core attention of a layer spec in place.

    With `local`, builders put Megatron's unfused attention over the one that a spec names.
    """
    backend = getattr(config, "attention_backend", None)
    split = config.context_parallel_size != 1 and burst.algorithm != OFF
    if split and getattr(backend, "name", backend) == "local":
        yield Problem(
            "--attention-backend local asks for Megatron's own unfused attention, which "
            "BurstAttention replaces: leave it unset, or take --context-parallel-algo megatron"
        )


def kernel_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless this machine can run the local attention that `burst` names for this model."""
    name = burst.kernel
    split = config.context_parallel_size != 1 and burst.algorithm != OFF
    if split and name == "auto" and records_max_logits(config) and not torch.cuda.is_available():
        yield Problem(
            f"{_max_logit_flag(config)} needs the largest attention logits, which --burst-kernel "
            "auto does not tell without CUDA; and pretrain_gpt.py takes the flag only with "
            "Transformer Engine 2.9.0 or later",
            add=("--burst-kernel reference",),
        )
    if name in flash_packages.PACKAGES:
        try:
            flash_packages.load(name)
        except ValueError as error:
            yield Problem(str(error))
            return
    if name in ("aten_cudnn", "triton", *flash_packages.PACKAGES) and not torch.cuda.is_available():
        yield Problem(
            f"--burst-kernel {name} needs CUDA, which this machine does not have",
            add=("--burst-kernel auto",),
        )


def cluster_problems(burst: BurstConfig, config: Any = None) -> Iterator[Problem]:
    """Unless the file is one of `megatron-burst calibrate` and "auto" will read it: that of
    attention or, in a model of this `config`, that of layers that carry a state."""
    if burst.cluster is None:
        return
    flag = f"--burst-cluster {burst.cluster}"
    states = burst.linear == "auto" and burst.algorithm != OFF and linear_layers(config)
    if burst.algorithm != "auto" and not states:
        yield Problem(
            f"{flag} is for --context-parallel-algo auto, and {burst.algorithm} needs no rates",
            remove=("--burst-cluster",),
        )
    try:
        cluster_file.read(burst.cluster)
    except ValueError as error:
        missing = not Path(burst.cluster).is_file()
        hint = "; every node needs the file" if missing else ""
        yield Problem(f"--burst-cluster {error}{hint}")
