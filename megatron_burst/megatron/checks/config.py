"""Problems of a ``TransformerConfig`` that depend on the sizes of a run.

Nothing here looks at processes or tensors: every rank reads the same configuration, so every rank
raises the same error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_burst.config import OFF, BurstConfig
from megatron_burst.megatron.checks.cluster import cluster_problems
from megatron_burst.megatron.checks.cuda_graphs import graph_problems
from megatron_burst.megatron.checks.hybrid import hybrid_problems, splits
from megatron_burst.megatron.checks.layouts import two_layout_problems
from megatron_burst.megatron.checks.linear import linear_layers, linear_problems
from megatron_burst.megatron.checks.model import (
    layout_problems,
    max_logit_problems,
    model_problems,
)
from megatron_burst.megatron.checks.problem import Problem, Refused, refuse
from megatron_burst.schedule.topology import Topology

SIZES = "--hierarchical-context-parallel-sizes"


def check_config(config: Any, burst: BurstConfig, seq_length: int | None = None) -> None:
    """Raise ``ValueError`` if BurstAttention cannot honour a ``TransformerConfig``."""
    refuse(config_problems(config, burst, seq_length))


def config_problems(
    config: Any, burst: BurstConfig, seq_length: int | None = None
) -> Iterator[Problem]:
    """All settings of a ``TransformerConfig`` that BurstAttention cannot honour.

    config: a ``TransformerConfig``, or any object with attributes of the same names;
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


def length_problems(seq_length: int, cp: int) -> Iterator[Problem]:
    """Unless ``cp`` ranks can each hold two equal pieces of a sequence."""
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
    """Raise ``ValueError`` unless ``sizes`` and ``intra_size`` fit ``cp`` and each other."""
    refuse(topology_problems(cp, sizes, intra_size))


def topology_problems(
    cp: int, sizes: Sequence[int] | None, intra_size: int | None
) -> Iterator[Problem]:
    """What does not fit of the two ways to state ranks per node: to ``cp``, or to each other."""
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
    """How many of ``cp`` ranks share the heads of the same rows; 1 for a ring of all ranks."""
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
    """Whether ``size`` ranks can share these heads without splitting one.

    Key/value heads may be repeated.
    """
    return not (cp % size or heads % size or (kv_heads % size and size % kv_heads))
