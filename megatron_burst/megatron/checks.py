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


def check_config(config: Any, burst: BurstConfig, seq_length: int | None = None) -> None:
    """Raise ``ValueError`` if a ``TransformerConfig`` asks for what BurstAttention cannot do."""
    cp = config.context_parallel_size
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if sizes and math.prod(sizes) != cp:
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {list(sizes)} multiply to {math.prod(sizes)}, "
            f"which is not --context-parallel-size {cp}"
        )
    if burst.algorithm == "megatron" or cp == 1:
        return
    check_topology(cp, sizes, burst.intra_size)
    if seq_length is not None and seq_length % (2 * cp):
        raise ValueError(
            f"--seq-length {seq_length} is not divisible by 2 x --context-parallel-size "
            f"({2 * cp}); pad the sequences or change one of the two"
        )
    for problem in _refused(config, burst.layout):
        raise ValueError(f"{problem} (or --context-parallel-algo megatron)")


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


def _refused(config: Any, layout: str) -> Iterator[str]:
    def get(name: str, default: Any = None) -> Any:
        return getattr(config, name, default)

    if get("attention_dropout", 0):
        yield f"attention dropout is {config.attention_dropout}; set --attention-dropout 0"
    if get("window_size") is not None:
        yield "sliding window attention is not supported; remove --window-size"
    if get("softmax_type", "vanilla") != "vanilla":
        yield "attention sinks are not supported; remove --softmax-type"
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
