# SPDX-License-Identifier: Apache-2.0
"""Checks of a `TransformerConfig`: sizes of the run, features of the layers, and the kernel.

Each function yields the problems that it finds. No function communicates or reads tensors. Every
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
from ..model_shape import DELTA_NETS, DSA, ModelShape, provider_window
from ..selection import changing_groups, splits, splits_with_burst, uses_burst
from ..users_mask import mask_function
from .cuda_graphs import graph_problems
from .features import option_problems, packing_problems
from .layer_lists import exchange_problems, frequency_problems
from .problem import (
    ConfigView,
    Problem,
    Rule,
    SettingsError,
    broken,
    excluded,
    excluded_options,
    refuse,
)
from .sparse import sparse_problems
from .splitting import hybrid_problems, linear_problems, needs_ranks, two_layout_problems

SIZES = "--hierarchical-context-parallel-sizes"


def check_layer(config: Any, burst: BurstConfig) -> None:
    """Raise an error if BurstAttention does not support a `TransformerConfig`.

    Layers call this function when they are built, because Megatron and scripts copy and change
    configurations after `configure_model`. It repeats the checks of `configuration_problems`
    without those of the sequence length, the LM head, plugins' options, packing, and of whether
    this machine has the kernel.

    Args:
        config: a `TransformerConfig`.
        burst: the options of the run.

    Raises:
        SettingsError: The configuration has unsupported settings; the message names all of them.
    """
    refuse(layer_problems(config, burst))


def configuration_problems(
    config: Any, burst: BurstConfig, seq_length: int | None, *, this_machine: bool = True
) -> Iterator[Problem]:
    """Yield all problems of a `TransformerConfig`, or of parsed arguments with the same names.

    Only `backend_problems`, which depend on how the layer spec was made, are left to callers.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.
        seq_length: global sequence length in tokens; None if unknown.
        this_machine: whether to check that the kernel is available on this machine.

    Yields:
        The problems.
    """
    yield from layer_problems(config, burst, seq_length)
    yield from option_problems(config, burst, seq_length)
    yield from packing_problems(config, burst)
    if this_machine:
        yield from kernel_problems(config, burst)


def layer_problems(
    config: Any, burst: BurstConfig, seq_length: int | None = None
) -> Iterator[Problem]:
    """Yield the settings of a `TransformerConfig` that BurstAttention does not support.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.
        seq_length: global sequence length in tokens; None if unknown.

    Yields:
        The problems.
    """
    cp = config.context_parallel_size
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if type(cp) is not int or cp < 1:
        yield Problem(f"--context-parallel-size is {cp!r}; it must be an integer >= 1")
        return
    if sizes is not None and (isinstance(sizes, str) or not isinstance(sizes, Sequence)):
        yield Problem(f"{SIZES} is {sizes!r}; it must be two sizes: ranks per node, then nodes")
        sizes = None
    if sizes and math.prod(sizes) != cp:
        yield Problem(
            f"{SIZES} {list(sizes)} has the product {math.prod(sizes)}, but "
            f"--context-parallel-size is {cp}: the two must be equal"
        )
    yield from cluster_problems(burst, config)
    yield from mask_problems(config, burst)
    yield from sparse_problems(config, burst)
    if not uses_burst(config, burst):
        yield from two_layout_problems(config, burst)
        if splits(config) and burst.layout != "zigzag":
            yield Problem(
                f"--burst-layout {burst.layout} with --context-parallel-algo megatron: Megatron's "
                "own attention supports only zigzag; remove --burst-layout, or use "
                "--context-parallel-algo burst"
            )
        return
    group_problems = [
        *topology_problems(cp, sizes, burst.intra_size),
        *_head_problems(config, burst),
    ]
    yield from group_problems
    if not group_problems:
        yield from _head_chunk_problems(config, burst)
        yield from _placement_problems(cp, sizes[0] if sizes else burst.intra_size, burst)
    if seq_length is not None:
        yield from length_problems(seq_length, cp)
        if burst.layout == "balanced":
            yield from _tensor_problems(config, seq_length)
    if burst.store:
        yield from broken(_STORE, config, burst, f"--burst-attention-store {burst.store}")
    yield from exchange_problems(config)
    yield from frequency_problems(config)
    yield from hybrid_problems(config)
    yield from two_layout_problems(config, burst)
    yield from linear_problems(config, burst)
    states = burst.linear != OFF and ModelShape.of(config).linear_setting is not None
    yield from graph_problems(config, burst, states)
    yield from model_problems(config)
    yield from max_logit_problems(config, burst.kernel)
    if burst.layout != "zigzag":
        yield from layout_problems(config, burst.layout)


_MASK = tuple(
    rule._replace(reason="{flag} does not work with " + rule.reason, remove=("--burst-mask",))
    for rule in (
        Rule(lambda c, b: b.layout == "balanced",
             "--burst-layout balanced, which balances work for causal documents only"),
        Rule(lambda c, b: b.pack != "off",
             "--burst-pack {b.pack}, which balances work for causal attention only"),
        Rule(lambda c, b: b.attention_layout not in (None, b.layout),
             "--burst-attention-layout {b.attention_layout}: the two were not tested together"),
        Rule("mtp_num_layers", "--mtp-num-layers: layers of MTP heads are also numbered from 1, so "
             "the function cannot distinguish them from the model's layers"),
        Rule(lambda c, b: changing_groups(c),
             "{value}, which changes groups between micro-batches: this was not tested"),
    )
)  # fmt: skip


def mask_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the settings that do not work with a mask function (`--burst-mask`).

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.

    Yields:
        The problems.
    """
    if burst.mask is None:
        return
    flag = f"--burst-mask {burst.mask}"
    if not splits_with_burst(config, burst):
        yield needs_ranks(flag, config, burst, ("--burst-mask",))
        return
    yield from broken(_MASK, config, burst, flag)
    yield from excluded_options("mask", flag, burst, remove=("--burst-mask",))
    try:
        mask_function(burst.mask)
    except ValueError as error:
        yield Problem(str(error))


def length_problems(seq_length: int, cp: int) -> Iterator[Problem]:
    """Yield a problem if `seq_length` tokens cannot be cut into 2 x `cp` equal parts."""
    if seq_length % (2 * cp):
        yield Problem(
            f"--seq-length {seq_length} is not divisible by 2 x --context-parallel-size "
            f"({2 * cp}); pad the sequences to a multiple, or change one of the two flags"
        )


def _tensor_problems(config: Any, seq_length: int) -> Iterator[Problem]:
    """Yield a problem if sequence parallelism cannot divide a context-parallel rank's tokens."""
    cp, tp = config.context_parallel_size, getattr(config, "tensor_model_parallel_size", 1)
    if getattr(config, "sequence_parallel", False) and seq_length % (cp * tp):
        yield Problem(
            f"--seq-length {seq_length} is not divisible by --context-parallel-size ({cp}) x "
            f"--tensor-model-parallel-size ({tp}), which --sequence-parallel requires"
        )


def _placement_problems(cp: int, intra: int | None, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem if Ulysses groups do not fit the nodes with the selected placement."""
    size = ulysses_size(burst, cp)
    if size == 1 or intra is None:
        return
    try:
        Topology(cp, intra, size, burst.placement)
    except ValueError as error:
        yield Problem(f"--burst-ulysses-size {size} --burst-placement {burst.placement}: {error}")


def _recomputes(c: ConfigView) -> list[str]:
    """Return the modules that selective recomputation recomputes; by default core_attn."""
    return ["core_attn"] if c.recompute_modules is None else c.recompute_modules


_STORE = (
    Rule(lambda c, b: c.recompute_granularity == "selective"
         and "core_attn" not in (modules := _recomputes(c)) and f"{modules}",
         "{flag} keeps attention outputs for the recomputation, and --recompute-modules {value} "
         "does not recompute attention: add core_attn, or remove {flag}"),
    Rule(lambda c, b: c.recompute_granularity not in ("full", "selective"),
         "{flag} keeps attention outputs for the recomputation, and nothing is recomputed: add "
         "--recompute-granularity full or --recompute-activations, or remove {flag}"),
    *excluded(
        "{flag}: Transformer Engine recomputes {why} layers itself and does not use the store",
        fp8="fp8",
        fp4="fp4",
    ),
    *excluded(
        "{flag} keeps outputs whose memory {other} frees", fine_grained_activation_offloading=""
    ),
)  # fmt: skip


def check_topology(cp: int, sizes: Sequence[int] | None, intra_size: int | None) -> None:
    """Raise an error unless `sizes` and `intra_size` fit `cp` and each other.

    Args:
        cp: number of context-parallel ranks.
        sizes: [ranks per node, number of nodes]; None if not set.
        intra_size: ranks per node; None if not set.

    Raises:
        SettingsError: The sizes contradict each other or do not divide `cp`.
    """
    refuse(topology_problems(cp, sizes, intra_size))


def topology_problems(
    cp: int, sizes: Sequence[int] | None, intra_size: int | None
) -> Iterator[Problem]:
    """Yield the problems that `check_topology` reports; same arguments."""
    if sizes and len(sizes) != 2:
        yield Problem(
            f"{SIZES} {list(sizes)} has {len(sizes)} levels; BurstAttention supports two: ranks "
            "per node, then nodes"
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
    """Return the number of ranks that share the heads of the same rows; 1 for a ring of all ranks.

    Args:
        burst: the options of the run.
        cp: number of context-parallel ranks.

    Raises:
        SettingsError: `--burst-ulysses-size` is missing, or contradicts the algorithm.
    """
    if burst.algorithm == "ulysses":
        if burst.ulysses_size not in (None, cp):
            refuse([Problem(
                f"--burst-ulysses-size {burst.ulysses_size}: --context-parallel-algo ulysses "
                f"splits heads across all {cp} ranks of --context-parallel-size; remove "
                "--burst-ulysses-size, or use --context-parallel-algo hybrid"
            )])  # fmt: skip
        return cp
    if burst.algorithm == "hybrid" and burst.ulysses_size is None:
        refuse([Problem(
            "--context-parallel-algo hybrid requires --burst-ulysses-size, the number of ranks "
            "that share heads"
        )])  # fmt: skip
    return burst.ulysses_size or 1


def _head_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem if a Ulysses group cannot divide the heads of a tensor-parallel rank."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads, config.num_query_groups
    try:
        size = ulysses_size(burst, cp)
    except SettingsError as error:
        yield from error.problems
        return
    if size == 1 or heads is None:  # a yaml file or a layer spec states the heads later
        return
    heads, kv_heads = heads // tp, max(1, (groups or heads) // tp)
    if _shared(size, cp, heads, kv_heads):
        return
    fitting = [n for n in range(2, cp + 1) if _shared(n, cp, heads, kv_heads)]
    has = f"a tensor-parallel rank has {heads} query heads and {kv_heads} key/value heads"
    if burst.algorithm == "ulysses":
        reason = f"--context-parallel-algo ulysses at --context-parallel-size {cp}: {has}, which "
        reason += f"{cp} ranks cannot share equally"
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
        yield Problem(reason, add=("--context-parallel-algo auto",), remove=left)


def _head_chunk_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem if the number of head chunks does not divide a rank's key/value heads."""
    count, heads = burst.head_chunks, config.num_attention_heads
    if count is None or heads is None:
        return
    rank_heads = max(1, (config.num_query_groups or heads) // config.tensor_model_parallel_size)
    rank_heads = max(1, rank_heads // ulysses_size(burst, config.context_parallel_size))
    if rank_heads % count:
        yield Problem(
            f"--burst-head-chunks {count} does not divide the {rank_heads} key/value heads of a "
            "rank",
            remove=("--burst-head-chunks",),
        )


def _shared(size: int, cp: int, heads: int, kv_heads: int) -> bool:
    """Return whether `size` ranks can share these heads by all-to-all (Ulysses).

    Key/value heads may be replicated.
    """
    return not (cp % size or heads % size or (kv_heads % size and size % kv_heads))


HIDDEN_STATES = (
    "Megatron's shift of hidden states is correct only for zigzag shards of unpacked sequences"
)
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def _window_problems(size: Any) -> Iterator[Problem]:
    if size is None:
        return
    flag = "--window-size"
    if isinstance(size, int):
        yield Problem(
            f"{flag} {size} is one number; it must be two numbers, the tokens before and after "
            "the query",
            (f"{flag} {size},0",),
        )
    elif len(size) != 2 or any(type(limit) is not int or limit < -1 for limit in size):
        yield Problem(
            f"{flag} {size} must be two numbers, the tokens before and after the query, each >= 0 "
            "or -1 for no limit"
        )
    elif size[1] > 0:
        yield Problem(
            f"{flag} {size} includes {size[1]} tokens after the query, but the model is causal",
            (f"{flag} {size[0]},0",),
        )


# Features of layers that BurstAttention does not support.
_MODEL = (
    Rule(lambda c, b: c.has("softmax_type") and c.softmax_type not in SOFTMAX_TYPES,
         f"--softmax-type {{c.softmax_type}}: only {', '.join(SOFTMAX_TYPES)} are supported"),
    Rule("attn_logit_softcapping",
         "attention logit softcapping is not supported; set attn_logit_softcapping to None"),
    *excluded(
        "{other}: {why}",
        apply_query_key_layer_scaling="query-key layer scaling is not supported",
        fp8_dot_product_attention="attention in fp8 is not supported",
        fp8_multi_head_attention="attention in fp8 is not supported",
        sequence_packing_scheduler=(
            "Megatron's scheduler cuts packed batches for its own attention; use --burst-pack "
            "documents, which packs documents over the data-parallel ranks"
        ),
        use_kitchen_attention="BurstAttention replaces the attention that this flag selects",
        batch_invariant_mode=(
            "attention merges partial results of ranks, so its rounding depends on the number of "
            "ranks, as with Megatron's own --cp-comm-type p2p"
        ),
        overlap_moe_expert_parallel_comm=(
            "interleaving the layers of two micro-batches on CUDA streams was not tested with "
            "BurstAttention"
        ),
    ),
    Rule(lambda c, b: c.num_query_groups and (c.num_attention_heads or 0) % c.num_query_groups,
         "--num-query-groups {c.num_query_groups} does not divide --num-attention-heads "
         "{c.num_attention_heads}"),
)  # fmt: skip


def model_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem for each feature of the layers that BurstAttention does not support."""
    if getattr(config, "attention_dropout", 0):
        yield dropout_problem(config.attention_dropout)
    if provider_window(config) is None:
        yield from _window_problems(getattr(config, "window_size", None))
    yield from broken(_MODEL, config)


def records_max_logits(config: Any) -> bool:
    """Return whether attention must record its largest logits for Megatron's optimizer step."""
    return bool(getattr(config, "log_max_attention_logit", 0) or getattr(config, "qk_clip", 0))


def max_logit_problems(config: Any, kernel: str) -> Iterator[Problem]:
    """Yield a problem if the largest logits are needed and `kernel` does not return them."""
    if records_max_logits(config) and kernel not in ("auto", "flex", "triton", "reference"):
        yield Problem(
            f"{_max_logit_flag(config)} needs the largest attention logits, which --burst-kernel "
            f"{kernel} does not return; use triton, flex or reference",
            add=("--burst-kernel auto",),
        )


def _max_logit_flag(config: Any) -> str:
    return "--qk-clip" if getattr(config, "qk_clip", False) else "--log-max-attention-logit"


def dropout_problem(share: float) -> Problem:
    """Return the problem of attention dropout with probability `share`."""
    return Problem(
        f"attention dropout is {share}, and BurstAttention supports no dropout",
        add=("--attention-dropout 0",),
    )


_ZIGZAG = ("--burst-layout zigzag",)
# Features in which Megatron's own code slices or shifts the sequence and assumes zigzag.
_LAYOUT = (
    Rule("mtp_hsm", f"--mtp-hsm does not work with --burst-layout {{flag}}: {HIDDEN_STATES}",
         add=_ZIGZAG),
    Rule(lambda c, b: (variant := c.experimental_attention_variant) not in (*DELTA_NETS, DSA)
         and variant,
         "--experimental-attention-variant {value} requires --burst-layout zigzag, and the layout "
         "is {flag}", add=_ZIGZAG),
    Rule(lambda c, b: c.multi_latent_attention and c.apply_rope_fusion,
         "fused rope of latent attention requires --burst-layout zigzag, and the layout is {flag}",
         add=("--no-rope-fusion",)),
)  # fmt: skip
# Settings that forbid cutting a document across ranks, or unequal numbers of loss tokens.
_BALANCED = (
    Rule(lambda c, b: not c.calculate_per_token_loss,
         "--burst-layout balanced gives ranks unequal numbers of loss tokens, and Megatron divides "
         "each rank's loss by this number, so gradients depend on the layout",
         add=("--calculate-per-token-loss",)),
    Rule(lambda c, b: c.position_embedding_type in ("rope", "yarn", "mrope")
         and c.apply_rope_fusion and not c.multi_latent_attention,
         "fused rope requires zigzag within each document, and --burst-layout balanced cuts the "
         "pack as a whole", add=("--no-rope-fusion",)),
    Rule(lambda c, b: c.linear_attention_freq and not c.experimental_attention_variant,
         "--linear-attention-freq: --burst-layout balanced does not support layers of linear "
         "attention", add=_ZIGZAG),
)  # fmt: skip


def layout_problems(config: Any, layout: str) -> Iterator[Problem]:
    """Yield the settings that do not work with `layout`, which is not zigzag.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        layout: the layout of the run.

    Yields:
        The problems.
    """
    yield from broken(_LAYOUT, config, flag=layout)
    if layout == "balanced":
        yield from broken(_BALANCED, config)


def backend_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem if `attention_backend` is `local`.

    Megatron then builds its unfused attention in place of the core attention in a layer spec.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.

    Yields:
        The problem.
    """
    backend = getattr(config, "attention_backend", None)
    if uses_burst(config, burst) and getattr(backend, "name", backend) == "local":
        yield Problem(
            "--attention-backend local selects Megatron's own unfused attention, which "
            "BurstAttention replaces: remove it, or use --context-parallel-algo megatron"
        )


def kernel_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem if this machine cannot run `burst.kernel` for this model.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.

    Yields:
        The problems.
    """
    name = burst.kernel
    if burst.algorithm == OFF:
        return
    records = uses_burst(config, burst) and records_max_logits(config)
    if records and name == "auto" and not torch.cuda.is_available():
        yield Problem(
            f"{_max_logit_flag(config)} needs the largest attention logits, which --burst-kernel "
            "auto does not return without CUDA; pretrain_gpt.py also requires Transformer Engine "
            "2.9.0 or later for this flag",
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
    """Yield the problems of `--burst-cluster`.

    The file must be an output of `megatron-burst calibrate`. The flag requires that "auto" selects
    an algorithm, for attention or for layers that carry a state.

    Args:
        burst: the options of the run.
        config: a `TransformerConfig`, or any object with attributes of the same names.

    Yields:
        The problems.
    """
    if burst.cluster is None:
        return
    flag = f"--burst-cluster {burst.cluster}"
    states = (
        burst.linear == "auto"
        and burst.algorithm != OFF
        and ModelShape.of(config).linear_setting is not None
    )
    if burst.algorithm != "auto" and not states:
        yield Problem(
            f"{flag} has an effect only with --context-parallel-algo auto, not with "
            f"{burst.algorithm}, or with --burst-linear auto in models with linear attention",
            remove=("--burst-cluster",),
        )
    try:
        cluster_file.read(burst.cluster)
    except ValueError as error:
        missing = not Path(burst.cluster).is_file()
        hint = "; copy the file to every node" if missing else ""
        yield Problem(f"--burst-cluster {error}{hint}")
