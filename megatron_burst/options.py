# SPDX-License-Identifier: Apache-2.0
"""Options of an attention call: names, types, defaults and meanings.

This module also defines the names of kernels. The sub-packages `layout` and `schedule` define the
names of layouts, algorithms and sides. `planning.validate` checks the values on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from .layout import Layout, LayoutName, Replicated
from .masks import Mask
from .schedule.algorithms import ALGORITHMS as RING_ALGORITHMS
from .schedule.tables import Side

if TYPE_CHECKING:
    import torch

KernelName = Literal[
    "auto", "aten", "aten_cudnn", "flash3", "flash4", "flex", "triton", "reference"
]
KeyLayout = LayoutName | Literal["replicated"] | Layout | Replicated
SideName = Literal["auto", Side]
WireDtype = Literal["fp32", "bf16", "auto"]
# Algorithm that shares heads by all-to-all -> algorithm of the ring around it.
WITH_SHARED_HEADS = {"ulysses": "ring", "hybrid": "burst"}


def algorithms() -> tuple[str, ...]:
    """Return all values of the option `algorithm`."""
    return (*RING_ALGORITHMS, *WITH_SHARED_HEADS, "auto")


def ring_algorithm(algorithm: str) -> str:
    """Return the ring algorithm: "ring" for "ulysses", "burst" for "hybrid", else `algorithm`."""
    return WITH_SHARED_HEADS.get(algorithm, algorithm)


KERNELS: tuple[str, ...] = get_args(KernelName)
SIDES: tuple[str, ...] = get_args(SideName)
WIRE_DTYPES: tuple[str, ...] = get_args(WireDtype)


# Meaning of each option. Docstrings, help texts of flags and recipes use the same text.
MEANING: Mapping[str, str] = {
    "layout": "positions that each rank holds: a name (see `mb.layout`) or a `Layout`",
    "key_layout": (
        "positions of the keys that each rank holds, if keys and values are another sequence than "
        'the queries: a layout, or "replicated" (`mb.layout.Replicated`) if every rank holds all '
        "keys; requires `mask`; None: keys are the sequence of the queries, in their layout"
    ),
    "mask": "a mask from `mb.masks`; None: `Causal()`",
    "algorithm": (
        'one of `options.algorithms()`; "hybrid" and "ulysses" need groups that share heads; '
        '"auto" picks the algorithm, side and head chunks that are predicted to be fastest'
    ),
    "side": "tensors that are sent in backward; auto picks the side with fewer bytes",
    "kernel": (
        "local attention kernel; auto picks the first that supports the call; flash3 and flash4 "
        "are the installed FlashAttention packages"
    ),
    "softmax_scale": "scale of the scores; None: d ** -0.5",
    "softcap": "scores become cap * tanh(score / cap)",
    "grad_wire_dtype": (
        "dtype in which gradients, and partial outputs of some algorithms, are sent; default: "
        "fp32 (fp64 for fp64 tensors); auto requires algorithm auto and sends bf16 for bf16 "
        "tensors if that is predicted to be faster"
    ),
    "store": (
        "fraction of attention outputs that a checkpoint around the call keeps; default: the "
        "fraction of the checkpoint"
    ),
    "head_chunks": (
        "number of head chunks (key/value heads with their query heads), each with its own ring; "
        "rings start one after the other, so the last hops of a chunk overlap with computation of "
        'the next chunk, but there are more messages; default: 1, or the choice of algorithm "auto"'
    ),
    "sequence_chunks": (
        "number of row chunks of every shard; they are computed one after the other, so memory "
        "holds the queries, outputs and gradients of one row chunk at a time; with side "
        '"kv", keys are sent once per row chunk; `Plan.chunked` is for code that produces '
        "queries one row chunk at a time; with host memory its forward receives keys once"
    ),
    "row_blocks": (
        "number of equal blocks of a shard's rows (the ranks of sequence parallelism); a row chunk "
        "has the same number of rows of each block"
    ),
}


@dataclass(frozen=True)
class AttentionOptions:
    """Options of an attention call.

    Each field is a keyword of `mb.attention` and `mb.prepare`.
    """

    layout: LayoutName | Layout = "zigzag"
    key_layout: KeyLayout | None = None
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
    [
        str(AttentionOptions.__doc__).rstrip(),
        "\n".join(["    Args:", *(f"        {name}: {text}." for name, text in MEANING.items())]),
    ]
)


class AttentionKeywords(TypedDict, total=False):
    """Fields of `AttentionOptions` as keywords, for editors and type checkers."""

    layout: LayoutName | Layout
    key_layout: KeyLayout | None
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
