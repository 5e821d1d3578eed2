# SPDX-License-Identifier: Apache-2.0
"""The choices of an attention call: one typed object, from the keywords of a call to its plan.

Owns what may be chosen, what each choice means, and the names of kernels; layouts, algorithms and
sides are named by their rooms. Values are checked by `planning.validate`, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from .layout import Layout, LayoutName
from .masks import Mask
from .schedule.algorithms import ALGORITHMS as RING_ALGORITHMS
from .schedule.tables import Side

if TYPE_CHECKING:
    import torch

KernelName = Literal["auto", "aten", "aten_cudnn", "flash3", "flash4", "triton", "reference"]
SideName = Literal["auto", Side]
WireDtype = Literal["fp32", "bf16", "auto"]
# All-to-alls of heads around a ring of this algorithm.
WITH_SHARED_HEADS = {"ulysses": "ring", "hybrid": "burst"}


def algorithms() -> tuple[str, ...]:
    """The names that `algorithm` may have: those of the registry of schedules, and others."""
    return (*RING_ALGORITHMS, *WITH_SHARED_HEADS, "auto")


def ring_algorithm(algorithm: str) -> str:
    """The algorithm of the ring that this one runs."""
    return WITH_SHARED_HEADS.get(algorithm, algorithm)


KERNELS: tuple[str, ...] = get_args(KernelName)
SIDES: tuple[str, ...] = get_args(SideName)
WIRE_DTYPES: tuple[str, ...] = get_args(WireDtype)


# What each option means, told once: the documentation of calls, of flags and of recipes takes it.
MEANING: Mapping[str, str] = {
    "layout": "which positions each rank holds: a name (see `mb.layout`) or a `Layout`",
    "mask": "from `mb.masks`; None: `Causal()`",
    "algorithm": (
        'one of `options.algorithms()`; "hybrid" and "ulysses" need groups that share heads; '
        '"auto" takes the one that is predicted to be fastest, with its side and head chunks'
    ),
    "side": "which tensors travel in backward; auto takes the side with fewer bytes",
    "kernel": (
        "the attention of one device; auto takes the first that supports the call, flash3 and "
        "flash4 are the installed FlashAttention packages"
    ),
    "softmax_scale": "factor of the scores; None: d ** -0.5",
    "softcap": "scores become cap * tanh(score / cap)",
    "grad_wire_dtype": (
        "dtype in which gradients, and partial outputs of some algorithms, are sent; default: "
        "fp32, for fp64 tensors fp64; auto, with algorithm auto: bf16 for bf16 tensors where that "
        "is predicted to be faster"
    ),
    "store": (
        "fraction of attention outputs that a checkpoint around the call keeps; default: that of "
        "the checkpoint"
    ),
    "head_chunks": (
        "number of chunks of key/value heads (with their query heads) whose rings run staggered: "
        "the last hops of one overlap with the compute of another, with that many times the "
        'messages; default: 1, or the choice of algorithm "auto"'
    ),
    "sequence_chunks": (
        "number of row chunks of every shard, computed one after the other, so that only one row "
        "chunk's queries, outputs and gradients are in memory at a time; on side "
        '"kv" the keys go round once per row chunk. `Plan.chunked` is for code that makes the '
        "queries one row chunk at a time; with host memory its forward receives keys once"
    ),
    "row_blocks": (
        "number of equal blocks of a shard's rows (the ranks of sequence parallelism), of each of "
        "which a row chunk has equally many rows"
    ),
}


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed; every field is a keyword of `mb.attention` and `mb.prepare`."""

    layout: LayoutName | Layout = "zigzag"
    mask: Mask | None = None
    algorithm: str = "burst"
    side: SideName = "auto"
    kernel: KernelName = "auto"
    softmax_scale: float | None = None
    softcap: float | None = None
    grad_wire_dtype: torch.dtype | WireDtype | None = None
    store: float | None = None
    head_chunks: int | None = None
    sequence_chunks: int = 1
    row_blocks: int = 1


AttentionOptions.__doc__ = "\n\n".join(
    [str(AttentionOptions.__doc__), *(f"{name}: {text}." for name, text in MEANING.items())]
)


class AttentionKeywords(TypedDict, total=False):
    """The fields of `AttentionOptions` as keywords, for editors and type checkers."""

    layout: LayoutName | Layout
    mask: Mask | None
    algorithm: str
    side: SideName
    kernel: KernelName
    softmax_scale: float | None
    softcap: float | None
    grad_wire_dtype: torch.dtype | WireDtype | None
    store: float | None
    head_chunks: int | None
    sequence_chunks: int
    row_blocks: int
