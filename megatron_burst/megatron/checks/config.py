# SPDX-License-Identifier: Apache-2.0
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
from ..model_shape import DELTA_NETS, DSA, ModelShape, provider_window
from ..users_mask import mask_function
from .cuda_graphs import graph_problems
from .features import option_problems, packing_problems
from .layer_lists import exchange_problems, frequency_problems
from .problem import (
    ConfigView,
    Problem,
    Refused,
    Rule,
    broken,
    excluded,
    excluded_options,
    refuse,
)
from .sparse import sparse_problems
from .splitting import (
    attends,
    changing_groups,
    hybrid_problems,
    linear_problems,
    needs_ranks,
    splits,
    two_layout_problems,
)

SIZES = "--hierarchical-context-parallel-sizes"


def check_config(config: Any, burst: BurstConfig, seq_length: int | None = None) -> None:
    """Raise `ValueError` if BurstAttention cannot honour a `TransformerConfig`.

    `configure` has checked it. Layers check it again when they are built, because Megatron and
    scripts copy and change configurations after that.
    """
    refuse(config_problems(config, burst, seq_length))


def configuration_problems(
    config: Any, burst: BurstConfig, seq_length: int | None, *, this_machine: bool = True
) -> Iterator[Problem]:
    """All problems that a `TransformerConfig`, or parsed arguments with the same names, can have.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.
        seq_length: global, in tokens; None if it is not known.
        this_machine: whether the run will use this machine, so that its kernels count.
    """
    yield from config_problems(config, burst, seq_length)
    yield from option_problems(config, burst, seq_length)
    yield from packing_problems(config, burst)
    if this_machine:
        yield from kernel_problems(config, burst)


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
    yield from sparse_problems(config, burst)
    if not attends(config, burst):
        yield from two_layout_problems(config, burst)
        if splits(config) and burst.layout != "zigzag":
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
    rule._replace(reason="{flag} with " + rule.reason, remove=("--burst-mask",))
    for rule in (
        Rule(lambda c, b: b.layout == "balanced",
             "--burst-layout balanced, whose balance is that of causal documents"),
        Rule(lambda c, b: b.pack != "off",
             "--burst-pack {b.pack}, whose balance is that of causality"),
        Rule(lambda c, b: b.attention_layout not in (None, b.layout),
             "--burst-attention-layout {b.attention_layout}, which was not tested"),
        Rule("mtp_num_layers", "--mtp-num-layers, whose layers count from 1 again, so that the "
             "function could not tell them apart"),
        Rule(lambda c, b: changing_groups(c),
             "{value}, whose groups change with the micro-batch: not tested"),
    )
)  # fmt: skip


def mask_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless the function of `--burst-mask` can be called for every layer and batch."""
    if burst.mask is None:
        return
    flag = f"--burst-mask {burst.mask}"
    if burst.algorithm == OFF or not splits(config):
        yield needs_ranks(flag, config, burst, ("--burst-mask",))
        return
    yield from broken(_MASK, config, burst, flag)
    yield from excluded_options("mask", flag, burst, remove=("--burst-mask",))
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


def _recomputes(c: ConfigView) -> list[str]:
    """The modules that Megatron recomputes selectively: core_attn where none are named."""
    return ["core_attn"] if c.recompute_modules is None else c.recompute_modules


_STORE = (
    Rule(lambda c, b: c.recompute_granularity == "selective"
         and "core_attn" not in (modules := _recomputes(c)) and f"{modules}",
         "{flag} keeps attention between forward and recompute, and --recompute-modules {value} "
         "does not recompute it: add core_attn, or leave {flag} out"),
    Rule(lambda c, b: c.recompute_granularity not in ("full", "selective"),
         "{flag} keeps attention between forward and recompute, and nothing recomputes it: add "
         "--recompute-granularity full or --recompute-activations, or leave {flag} out"),
    *excluded(
        "{flag}: {why} layers are recomputed by Transformer Engine, past the store",
        fp8="fp8",
        fp4="fp4",
    ),
    *excluded(
        "{flag} keeps results whose memory {other} frees", fine_grained_activation_offloading=""
    ),
)  # fmt: skip


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


# Features of layers that do not exist here.
_MODEL = (
    Rule(lambda c, b: c.has("softmax_type") and c.softmax_type not in SOFTMAX_TYPES,
         f"--softmax-type {{c.softmax_type}}: only {', '.join(SOFTMAX_TYPES)} are supported"),
    Rule("attn_logit_softcapping",
         "attention logit softcapping is not supported; leave attn_logit_softcapping unset"),
    *excluded(
        "{other}: {why}",
        apply_query_key_layer_scaling="query-key layer scaling is not supported",
        fp8_dot_product_attention="attention in fp8 is not supported",
        fp8_multi_head_attention="attention in fp8 is not supported",
        sequence_packing_scheduler=(
            "it cuts packed batches by itself, for Megatron's own attention; --burst-pack "
            "documents packs them over the data-parallel ranks"
        ),
        use_kitchen_attention="BurstAttention takes the place of the attention it asks for",
        batch_invariant_mode=(
            "partial results of ranks are merged, and their bits depend on how many there are; "
            "Megatron's own attention has no such mode over ranks either"
        ),
        overlap_moe_expert_parallel_comm=(
            "it runs layers in pieces on CUDA streams, those of one micro-batch between those of "
            "another; with BurstAttention this was never tested"
        ),
    ),
    Rule(lambda c, b: c.num_query_groups and (c.num_attention_heads or 0) % c.num_query_groups,
         "--num-query-groups {c.num_query_groups} does not divide --num-attention-heads "
         "{c.num_attention_heads}"),
)  # fmt: skip


def model_problems(config: Any) -> Iterator[Problem]:
    """Features of the layers of a `TransformerConfig` that BurstAttention lacks."""
    if getattr(config, "attention_dropout", 0):
        yield dropout_problem(config.attention_dropout)
    if provider_window(config) is None:
        yield from _window_problems(getattr(config, "window_size", None))
    yield from broken(_MODEL, config)


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


_ZIGZAG = ("--burst-layout zigzag",)
# Features for which Megatron slices or shifts the sequence itself, assuming zigzag, with a layout.
_LAYOUT = (
    Rule("mtp_hsm", f"--mtp-hsm with --burst-layout {{flag}}: {HIDDEN_STATES}", add=_ZIGZAG),
    Rule(lambda c, b: (variant := c.experimental_attention_variant) not in (*DELTA_NETS, DSA)
         and variant,
         "--experimental-attention-variant {value} needs --burst-layout zigzag, not {flag}",
         add=_ZIGZAG),
    Rule(lambda c, b: c.multi_latent_attention and c.apply_rope_fusion,
         "fused MLA rope works only with --burst-layout zigzag", add=("--no-rope-fusion",)),
)  # fmt: skip
# What packs of mixed documents, and ranks that hold unequally many counted tokens, exclude.
_BALANCED = (
    Rule(lambda c, b: not c.calculate_per_token_loss,
         "--burst-layout balanced gives ranks unequally many tokens that count, and Megatron "
         "divides the loss of each rank by the rank's own count, so that gradients depend on the "
         "layout", add=("--calculate-per-token-loss",)),
    Rule(lambda c, b: c.position_embedding_type in ("rope", "yarn", "mrope")
         and c.apply_rope_fusion and not c.multi_latent_attention,
         "fused rope lays every document out by itself, and --burst-layout balanced does not",
         add=("--no-rope-fusion",)),
    Rule(lambda c, b: c.linear_attention_freq and not c.experimental_attention_variant,
         "--linear-attention-freq: layers of linear attention assume an order of tokens, and work "
         "only with --burst-layout zigzag, not balanced", add=_ZIGZAG),
)  # fmt: skip


def layout_problems(config: Any, layout: str) -> Iterator[Problem]:
    """What a layout other than zigzag excludes."""
    yield from broken(_LAYOUT, config, flag=layout)
    if layout == "balanced":
        yield from broken(_BALANCED, config)


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
    """Yield the problems of a kernel that this machine cannot run for this model."""
    name = burst.kernel
    if burst.algorithm == OFF:
        return
    split = config.context_parallel_size != 1
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
    attention or, in a model of this `config`, that of layers that carry a state.
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
            f"{flag} is for --context-parallel-algo auto, and {burst.algorithm} needs no rates",
            remove=("--burst-cluster",),
        )
    try:
        cluster_file.read(burst.cluster)
    except ValueError as error:
        missing = not Path(burst.cluster).is_file()
        hint = "; every node needs the file" if missing else ""
        yield Problem(f"--burst-cluster {error}{hint}")
