# SPDX-License-Identifier: Apache-2.0
"""The choices of a run of Megatron, as a user states them: `BurstConfig`, one field per flag.

Owns name, type, default and meaning of every choice; flags, recipe arguments and the tables of the
documentation come from here, and the names that a choice may have from `options`. Validates and
never rewrites: "auto" stays "auto" here and is resolved, from the tensors of a call, when a plan is
made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from .layout import LayoutName, check_fraction
from .options import (
    MEANING,
    AttentionKeywords,
    KernelName,
    SideName,
    WireDtype,
    algorithms,
)
from .schedule.scans import SCANS
from .schedule.topology import Placement
from .units import size_of

OFF = "megatron"  # the algorithm that keeps Megatron's attention
# How keys of sparse attention travel, and the algorithm that does so.
SPARSE = {"ring": "burst", "multicast": "multicast", "all_gather": "all_gather"}
Loss = Literal["off", "single_pass", "recompute"]
Pack = Literal["off", "documents", "trees"]
Auto = Literal["auto"]
# block_striped needs a block length: such layouts are made by `mb.layout.make`, not named.
NAMED_LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")


class Described(NamedTuple):
    """What is said of a field: its meaning, its flag where that is not `--burst-<name>`, the names
    it may have where its type does not say them, and what another text is."""

    meaning: str
    flag: str = ""
    names: tuple[str, ...] = ()
    text: Literal["SIZE", "FILE", "MODULE:NAME"] = "SIZE"


@dataclass(frozen=True)
class BurstConfig:
    """Choices for `mb.megatron.configure`, one per flag.

    Raises ValueError naming the flag for a value that cannot be.
    """

    algorithm: Annotated[
        str,
        Described(
            "attention across context-parallel ranks; auto takes the algorithm predicted to be "
            "fastest at measured link rates, for each kind of layers (with and without a sliding "
            "window); megatron keeps Megatron's attention",
            flag="--context-parallel-algo",
            names=(*algorithms(), "megatron"),
        ),
    ] = "burst"
    layout: Annotated[
        LayoutName | Auto,
        Described(
            "which positions each rank holds; balanced is for packed documents of mixed lengths; "
            "auto sends the fewest bytes: zigzag, or contiguous with attention in zigzag; "
            "default: zigzag; balanced with --burst-pack; striped with an attention store between "
            "0 and 1, whose recompute only it balances",
            names=(*NAMED_LAYOUTS, "auto"),
        ),
    ] = "zigzag"
    side: Annotated[SideName, Described(MEANING["side"])] = "auto"
    kernel: Annotated[
        KernelName,
        Described(MEANING["kernel"]),
    ] = "auto"
    intra_size: Annotated[
        int | None,
        Described(
            "context-parallel ranks per node; default: --hierarchical-context-parallel-sizes, else "
            "the ranks on one host"
        ),
    ] = None
    ulysses_size: Annotated[
        int | None,
        Described(
            "ranks that share heads by all-to-all, with any ring around them; required by hybrid; "
            "default of ulysses: all"
        ),
    ] = None
    placement: Annotated[
        Placement, Described("whether neighbouring ranks share heads or a ring")
    ] = "head_first"
    wire_dtype: Annotated[
        WireDtype | None,
        Described(MEANING["grad_wire_dtype"]),
    ] = None
    store: Annotated[
        float | None,
        Described(
            "fraction of attention outputs kept in memory under --recompute-granularity: 1.0 "
            "recomputes no attention, 0.5 a quarter of it (causal) for half the memory",
            flag="--burst-attention-store",
        ),
    ] = None
    lm_head_loss: Annotated[
        Loss,
        Described("LM head and loss fused, without materializing full logits"),
    ] = "off"
    linear: Annotated[
        str,
        Described(
            "how linear-attention and Mamba layers pass their state over context-parallel ranks; "
            "auto takes the way predicted to be fastest, megatron keeps Megatron's all-to-all of "
            "heads",
            names=("auto", *SCANS, OFF),
        ),
    ] = "auto"
    nccl_max_ctas: Annotated[
        int | None,
        Described(
            "maximum thread blocks per kernel on the NCCL communicators that are not Megatron's: "
            "fewer leave more multiprocessors to attention, but limit bandwidth; default: NCCL's "
            "choice"
        ),
    ] = None
    pack: Annotated[
        Pack,
        Described(
            "documents: repack the documents of every global batch, over the data-parallel ranks, "
            "into micro-batches of --seq-length tokens that are predicted to take equally long; "
            "trees: micro-batches are what mb.rl packs, also on one context-parallel rank"
        ),
    ] = "off"
    offload: Annotated[
        float | Auto,
        Described(
            "fraction of saved activations (inputs, attention store) offloaded to host memory; "
            "auto takes the largest that the link overlaps with compute and the host has memory for"
        ),
    ] = 0.0
    host_memory: Annotated[
        str | None,
        Described(
            "host memory per node that --burst-offload may take, such as 1.5TB or 800GiB; default: "
            "80 % of what is free"
        ),
    ] = None
    sequence_chunks: Annotated[
        int | Auto,
        Described(
            "chunks of tokens in which the attention half of a layer runs, so that queries, "
            "outputs and their gradients are never whole in memory"
        ),
    ] = 1
    mlp_tiles: Annotated[
        int | Auto,
        Described(
            "tiles of tokens in which the MLP half of a layer runs, each recomputed in backward"
        ),
    ] = 1
    head_chunks: Annotated[
        int | None,
        Described(MEANING["head_chunks"]),
    ] = None
    cluster: Annotated[
        str | None,
        Described(
            "a file of megatron-burst calibrate, whose rates --context-parallel-algo auto and "
            "--burst-linear auto use; default: the first measures, the second assumes nominal ones",
            text="FILE",
        ),
    ] = None
    attention_layout: Annotated[
        Literal["contiguous", "striped", "zigzag"] | None,
        Described(
            "layout of softmax attention, with an exchange of tokens around it; default: that of "
            "--burst-layout"
        ),
    ] = None
    mask: Annotated[
        str | None,
        Described(
            "a function of (layer, batch) that returns the attention mask of that layer, one of "
            "mb.masks or a custom one; default: causal, with the window of the layer",
            text="MODULE:NAME",
        ),
    ] = None
    sparse: Annotated[
        str,
        Described(
            "how layers of sparse attention (DSA) exchange index keys and latents over "
            "context-parallel ranks; auto as --context-parallel-algo says if keys travel in it, "
            "but multicast for burst; ring is burst's; megatron keeps Megatron's all-gather",
            names=("auto", *SPARSE, OFF),
        ),
    ] = "auto"

    def __post_init__(self):
        for name in CHOICES:
            self._check(name)
        if self.wire_dtype == "auto" and self.algorithm != "auto":
            raise ValueError(
                f"wire_dtype ({flag_of('wire_dtype')}) auto goes by the forecast of "
                f"{flag_of('algorithm')} auto, got {self.algorithm}; name fp32 or bf16"
            )

    def _check(self, name: str) -> None:
        """Raise ValueError unless the field has a value of its kind."""
        value, kind, names = getattr(self, name), kind_of(name), names_of(name)
        title, optional = f"{name} ({flag_of(name)})", _optional(name)
        if (value is None and optional) or (names and value in names):
            return
        if names and kind is str:
            shown = ", ".join(("None", *names) if optional else names)
            raise ValueError(f"{title} must be one of {shown}, got {value!r}")
        other = f" or {' or '.join(names)}" if names else ""
        if kind is float:
            check_fraction(title, value, other)
        if kind is int and (type(value) is not int or value < 1):
            raise ValueError(f"{title} must be an integer from 1 on{other}, got {value!r}")
        if kind is str and CHOICES[name].text == "SIZE":
            size_of(value, title)
        elif kind is str and not (isinstance(value, str) and value):
            raise ValueError(f"{title} must be the path of a file, got {value!r}")
        elif name == "mask" and not re.fullmatch(r"[\w.]+:[\w.]+", str(value)):
            raise ValueError(f"{title} must be MODULE:NAME of a function, got {value!r}")

    def keywords(self) -> AttentionKeywords:
        """What of it `mb.prepare` takes; "auto" is none of its layouts."""
        layout: Any = self.attention_layout or self.layout
        return {
            "layout": layout,
            "algorithm": self.algorithm,
            "side": self.side,
            "kernel": self.kernel,
            "grad_wire_dtype": self.wire_dtype,
            "head_chunks": self.head_chunks,
            "store": self.store,
        }


HINTS = get_type_hints(BurstConfig, include_extras=True)
CHOICES: dict[str, Described] = {
    each.name: get_args(HINTS[each.name])[1] for each in fields(BurstConfig)
}
TYPES = {name: get_args(HINTS[name])[0] for name in CHOICES}


def flag_of(name: str) -> str:
    """The flag of a field."""
    return CHOICES[name].flag or f"--burst-{name.replace('_', '-')}"


BurstConfig.__doc__ = "\n\n".join(
    [
        str(BurstConfig.__doc__),
        *(f"{name} (`{flag_of(name)}`): {each.meaning}." for name, each in CHOICES.items()),
    ]
)


def names_of(name: str) -> tuple[str, ...]:
    """The names that a field may have; none where it is a number."""
    return CHOICES[name].names or tuple(_literals(TYPES[name]))


def kind_of(name: str) -> type:
    """int or float, where it may be a number; else str."""
    types = (TYPES[name], *get_args(TYPES[name]))
    return next((kind for kind in (int, float) if kind in types), str)


def _optional(name: str) -> bool:
    return type(None) in get_args(TYPES[name])


def _literals(hint: Any) -> list[str]:
    """The strings of a Literal, also of one within a union."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [name for part in get_args(hint) for name in _literals(part)]
