"""Problems of a model's settings that do not depend on the sizes of a run, and of local attention.

Each function yields the problems that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_burst.config import OFF, BurstConfig
from megatron_burst.kernels import flash_packages
from megatron_burst.megatron.checks.linear import DELTA_NETS
from megatron_burst.megatron.checks.problem import Problem

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
    """Features of the layers of a ``TransformerConfig`` that BurstAttention lacks."""

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
    """Unless the local attention ``kernel`` can tell the largest logits, if they are asked for."""
    if records_max_logits(config) and kernel not in ("auto", "triton", "reference"):
        yield Problem(
            f"{_max_logit_flag(config)} needs the largest attention logits, which --burst-kernel "
            f"{kernel} does not tell; triton and reference do",
            add=("--burst-kernel auto",),
        )


def _max_logit_flag(config: Any) -> str:
    return "--qk-clip" if getattr(config, "qk_clip", False) else "--log-max-attention-logit"


def dropout_problem(share: float) -> Problem:
    """Attention dropout with probability ``share``."""
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

    With ``local``, builders put Megatron's unfused attention over the one that a spec names.
    """
    backend = getattr(config, "attention_backend", None)
    split = config.context_parallel_size != 1 and burst.algorithm != OFF
    if split and getattr(backend, "name", backend) == "local":
        yield Problem(
            "--attention-backend local asks for Megatron's own unfused attention, which "
            "BurstAttention replaces: leave it unset, or take --context-parallel-algo megatron"
        )


def kernel_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless this machine can run the local attention that ``burst`` names for this model."""
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
