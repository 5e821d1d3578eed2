"""What this integration refuses, each with the flag to change.

Owns: the list of Megatron settings that BurstAttention does not honour, and the check that a
Megatron function still has the signature a patch was written for. Must not know: processes or
tensors; every rank reads the same configuration, so every rank raises the same error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.topology import Topology

OLDEST = (0, 16)  # of Megatron-Core; before, nothing of this was run
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def check_config(config: Any, burst: BurstConfig, seq_length: int | None = None) -> None:
    """Raise ``ValueError`` if a ``TransformerConfig`` asks for what BurstAttention cannot do."""
    cp = config.context_parallel_size
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if type(cp) is not int or cp < 1:
        raise ValueError(f"--context-parallel-size must be an integer from 1 on, got {cp!r}")
    if sizes is not None and (isinstance(sizes, str) or not isinstance(sizes, Sequence)):
        raise ValueError(
            f"--hierarchical-context-parallel-sizes must be two sizes, ranks per node and nodes, "
            f"got {sizes!r}"
        )
    if sizes and math.prod(sizes) != cp:
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {list(sizes)} multiply to {math.prod(sizes)}, "
            f"which is not --context-parallel-size {cp}"
        )
    if cp == 1:
        return
    if burst.algorithm == "megatron":
        if burst.layout != "zigzag":
            raise ValueError(
                f"--burst-layout {burst.layout} with --context-parallel-algo megatron: Megatron's "
                "own attention knows only zigzag; leave the layout out, or take "
                "--context-parallel-algo burst"
            )
        return
    check_topology(cp, sizes, burst.intra_size)
    if seq_length is not None:
        check_length(seq_length, cp)
    check_heads(config, head_size(burst, cp))
    _check_placement(cp, sizes[0] if sizes else burst.intra_size, burst)
    if burst.store:
        _check_store(config, burst.store)
    for problem in _refused(config, burst.layout):
        raise ValueError(f"{problem} (or --context-parallel-algo megatron)")


def check_length(seq_length: int, cp: int) -> None:
    """Raise ``ValueError`` unless ``cp`` ranks can hold two equal pieces of a sequence each."""
    if seq_length % (2 * cp):
        raise ValueError(
            f"--seq-length {seq_length} is not divisible by 2 x --context-parallel-size "
            f"({2 * cp}); pad the sequences or change one of the two"
        )


def _check_placement(cp: int, intra: int | None, burst: BurstConfig) -> None:
    """Raise ``ValueError`` unless ranks that share heads leave rings of equal nodes."""
    size = head_size(burst, cp)
    if size == 1 or intra is None:
        return
    try:
        Topology(cp, intra, size, burst.placement)
    except ValueError as error:
        raise ValueError(
            f"--burst-head-size {size} --burst-placement {burst.placement}: {error}"
        ) from error


def _check_store(config: Any, store: float) -> None:
    """Raise ``ValueError`` unless something recomputes attention, by calls that can be framed."""

    def get(name: str) -> Any:
        return getattr(config, name, None)

    flag = f"--burst-attention-store {store}"
    granularity, modules = get("recompute_granularity"), get("recompute_modules")
    modules = ["core_attn"] if modules is None else modules  # as Megatron fills it in
    if granularity == "selective" and "core_attn" not in modules:
        raise ValueError(
            f"{flag} keeps attention between forward and recompute, and --recompute-modules "
            f"{modules} does not recompute it: add core_attn, or leave {flag} out"
        )
    if granularity not in ("full", "selective"):
        raise ValueError(
            f"{flag} keeps attention between forward and recompute, and nothing recomputes it: "
            f"add --recompute-granularity full or --recompute-activations, or leave {flag} out"
        )
    if get("fp8") or get("fp4"):
        raise ValueError(f"{flag}: recompute in fp8 goes another way; remove --fp8-format")
    graphs = get("cuda_graph_impl")
    if get("enable_cuda_graph") or get("external_cuda_graph") or graphs not in (None, "none"):
        raise ValueError(f"{flag}: CUDA graphs replay without Python; turn them off")


def check_topology(cp: int, sizes: Sequence[int] | None, intra_size: int | None) -> None:
    """Raise ``ValueError`` unless the two ways to say ranks per node fit ``cp`` and each other."""
    if sizes and len(sizes) != 2:
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {list(sizes)} has {len(sizes)} levels; "
            "BurstAttention knows two: ranks per node, then nodes"
        )
    if intra_size is not None and cp % intra_size:
        raise ValueError(
            f"--burst-intra-size {intra_size} does not divide --context-parallel-size {cp}"
        )
    if sizes and intra_size not in (None, sizes[0]):
        raise ValueError(
            f"--burst-intra-size {intra_size} contradicts --hierarchical-context-parallel-sizes "
            f"{list(sizes)}; give one of them"
        )


def head_size(burst: BurstConfig, cp: int) -> int:
    """How many of ``cp`` ranks share the heads of the same rows; 1 for a plain ring."""
    if burst.algorithm == "ulysses":
        if burst.head_size not in (None, cp):
            raise ValueError(
                f"--burst-head-size {burst.head_size}: ulysses shares the heads over all "
                f"--context-parallel-size {cp} ranks; leave the flag out, or take "
                "--context-parallel-algo hybrid"
            )
        return cp
    if burst.algorithm == "hybrid" and burst.head_size is None:
        raise ValueError(
            "--context-parallel-algo hybrid needs --burst-head-size: how many ranks share heads"
        )
    return burst.head_size or 1


def check_heads(config: Any, size: int) -> None:
    """Raise ``ValueError`` unless ``size`` ranks can share the heads of a tensor-parallel rank."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    heads = config.num_attention_heads // tp
    kv_heads = max(1, (config.num_query_groups or config.num_attention_heads) // tp)
    if cp % size or heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"--burst-head-size {size} must divide --context-parallel-size {cp} and the {heads} "
            f"query heads of a tensor-parallel rank, and divide its {kv_heads} key/value heads or "
            "be a multiple of them; choose another size, or --context-parallel-algo burst"
        )


def layer_window(config: Any, layer_number: int) -> tuple[int | None, int | None] | None:
    """(left, right) of a sliding-window layer, None standing for no limit; None for a full one.

    A query at p sees the keys from p - left to p + right; ``layer_number`` counts from 1.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    size = getattr(config, "window_size", None)
    skip: Any = getattr(config, "window_attn_skip_freq", None)
    if not size or not is_layer_window_attention(size, skip, layer_number):
        return None
    left, right = (None if limit == -1 else limit for limit in size)
    return left, right


def _check_window(size: Any) -> str | None:
    if size is None:
        return None
    if isinstance(size, int):
        return f"--window-size {size} must be two sizes, such as {size},0 for {size} tokens back"
    if len(size) != 2 or any(limit < -1 for limit in size):
        return f"--window-size {size} must be two sizes, each at least 0, or -1 for no limit"
    if size[1] > 0:
        return (
            f"--window-size {size} looks {size[1]} tokens ahead, and the model is causal; make "
            f"the second size 0: {size[0]},0"
        )
    return None


def _refused(config: Any, layout: str) -> Iterator[str]:
    def get(name: str, default: Any = None) -> Any:
        return getattr(config, name, default)

    if get("attention_dropout", 0):
        yield f"attention dropout is {config.attention_dropout}; set --attention-dropout 0"
    window = _check_window(get("window_size"))
    if window:
        yield window
    if get("softmax_type", "vanilla") not in SOFTMAX_TYPES:
        yield f"--softmax-type {config.softmax_type}: only {', '.join(SOFTMAX_TYPES)} are known"
    if get("attn_logit_softcapping"):
        yield "attention logit softcapping is not supported; leave attn_logit_softcapping unset"
    if get("qk_clip"):
        yield "maximum attention logits are not recorded; remove --qk-clip"
    if get("apply_query_key_layer_scaling"):
        yield "query-key layer scaling is not supported; remove --apply-query-key-layer-scaling"
    if get("fp8_dot_product_attention") or get("fp8_multi_head_attention"):
        yield "attention in fp8 is not supported; remove --fp8-dot-product-attention"
    if get("hybrid_context_parallel"):
        yield "one context-parallel size per run; remove --hybrid-context-parallel"
    heads, groups = get("num_attention_heads"), get("num_query_groups")
    if groups and heads % groups:
        yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}"
    if layout == "zigzag":
        return
    # Code of Megatron that slices or shifts the sequence for itself, assuming its own layout.
    if get("mtp_num_layers"):
        yield f"--mtp-num-layers works only with --burst-layout zigzag, not {layout}"
    if get("is_hybrid_model"):
        yield f"Mamba layers work only with --burst-layout zigzag, not {layout}"
    if get("experimental_attention_variant"):
        yield f"--experimental-attention-variant needs --burst-layout zigzag, not {layout}"
    if get("multi_latent_attention") and get("apply_rope_fusion"):
        yield "fused MLA rope works only with --burst-layout zigzag: add --no-rope-fusion"


def check_version() -> None:
    """Raise ``RuntimeError`` for a Megatron-Core that lacks what every patch stands on.

    There is no newest version: what a patch needs of a function is checked by its signature.
    """
    import megatron.core

    version = megatron.core.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise RuntimeError(
            f"Megatron-Core {version} is older than {'.'.join(map(str, OLDEST))}, the oldest that "
            "megatron_burst works with; upgrade megatron-core"
        )


def require_parameters(function: Callable, names: Sequence[str], symbol: str) -> None:
    """Raise ``RuntimeError`` unless ``function`` takes (at least) the parameters ``names``."""
    import megatron.core

    found = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in found]
    if missing:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__}: {symbol} takes {found}, without "
            f"{missing}; this version of megatron_burst does not know it"
        )


def require_function(home: Any, name: str, parameters: Sequence[str]) -> Callable:
    """The function ``name`` of a module of Megatron, if it takes ``parameters``.

    Raises ``RuntimeError`` naming Megatron's version and the symbol otherwise.
    """
    import megatron.core

    symbol = f"{home.__name__.removeprefix('megatron.')}.{name}"
    found = getattr(home, name, None)
    if found is None:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} has no {symbol}; this version of "
            "megatron_burst does not know it"
        )
    require_parameters(found, parameters, symbol)
    return found
