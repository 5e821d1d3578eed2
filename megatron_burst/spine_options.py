# SPDX-License-Identifier: Apache-2.0
"""The options of the spine: attention, layout, LM head, linear attention and packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .layout import LayoutName
from .option_table import Auto, Option, OptionSet
from .options import MEANING, AttentionKeywords, KernelName, SideName, WireDtype, algorithms
from .schedule.scans import SCANS
from .schedule.topology import Placement

OFF = "megatron"  # the algorithm that keeps Megatron's attention
Loss = Literal["off", "single_pass", "recompute"]
Pack = Literal["off", "documents", "trees"]
# block_striped needs a block length: such layouts are made by `mb.layout.make`, not named.
NAMED_LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")


@dataclass(frozen=True)
class SpineOptions(OptionSet):
    """The options that every run has."""

    algorithm: Annotated[
        str,
        Option(
            "attention across context-parallel ranks; auto takes the algorithm predicted to be "
            "fastest at measured link rates, for each kind of layers (with and without a sliding "
            "window); megatron keeps Megatron's attention",
            flag="--context-parallel-algo",
            names=(*algorithms(), "megatron"),
            alone=True,
        ),
    ] = "burst"
    layout: Annotated[
        LayoutName | Auto,
        Option(
            "which positions each rank holds; balanced is for packed documents of mixed lengths; "
            "auto sends the fewest bytes: zigzag, or contiguous with attention in zigzag; "
            "default: zigzag; balanced with --burst-pack; striped with an attention store between "
            "0 and 1, whose recompute only it balances",
            names=(*NAMED_LAYOUTS, "auto"),
        ),
    ] = "zigzag"
    side: Annotated[SideName, Option(MEANING["side"])] = "auto"
    kernel: Annotated[
        KernelName,
        Option(MEANING["kernel"]),
    ] = "auto"
    intra_size: Annotated[
        int | None,
        Option(
            "context-parallel ranks per node; default: --hierarchical-context-parallel-sizes, else "
            "the ranks on one host"
        ),
    ] = None
    ulysses_size: Annotated[
        int | None,
        Option(
            "ranks that share heads by all-to-all, with any ring around them; required by hybrid; "
            "default of ulysses: all"
        ),
    ] = None
    placement: Annotated[Placement, Option("whether neighbouring ranks share heads or a ring")] = (
        "head_first"
    )
    wire_dtype: Annotated[
        WireDtype | None,
        Option(MEANING["grad_wire_dtype"]),
    ] = None
    store: Annotated[
        float | None,
        Option(
            "fraction of attention outputs kept in memory under --recompute-granularity: 1.0 "
            "recomputes no attention, 0.5 a quarter of it (causal) for half the memory",
            flag="--burst-attention-store",
        ),
    ] = None
    lm_head_loss: Annotated[
        Loss,
        Option("LM head and loss fused, without materializing full logits", alone=True),
    ] = "off"
    linear: Annotated[
        str,
        Option(
            "how linear-attention and Mamba layers pass their state over context-parallel ranks; "
            "auto takes the way predicted to be fastest, megatron keeps Megatron's all-to-all of "
            "heads",
            names=("auto", *SCANS, OFF),
        ),
    ] = "auto"
    nccl_max_ctas: Annotated[
        int | None,
        Option(
            "maximum thread blocks per kernel on the NCCL communicators that are not Megatron's: "
            "fewer leave more multiprocessors to attention, but limit bandwidth; default: NCCL's "
            "choice"
        ),
    ] = None
    pack: Annotated[
        Pack,
        Option(
            "documents: repack the documents of every global batch, over the data-parallel ranks, "
            "into micro-batches of --seq-length tokens that are predicted to take equally long; "
            "trees: micro-batches are what mb.rl packs, also on one context-parallel rank"
        ),
    ] = "off"
    head_chunks: Annotated[
        int | None,
        Option(MEANING["head_chunks"]),
    ] = None
    cluster: Annotated[
        str | None,
        Option(
            "a file of megatron-burst calibrate, whose rates --context-parallel-algo auto and "
            "--burst-linear auto use; default: the first measures, the second assumes nominal ones",
            text="FILE",
        ),
    ] = None
    attention_layout: Annotated[
        Literal["contiguous", "striped", "zigzag"] | None,
        Option(
            "layout of softmax attention, with an exchange of tokens around it; default: that of "
            "--burst-layout"
        ),
    ] = None
    mask: Annotated[
        str | None,
        Option(
            "a function of (layer, batch) that returns the attention mask of that layer, one of "
            "mb.masks or a custom one; default: causal, with the window of the layer",
            text="MODULE:NAME",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire_dtype == "auto" and self.algorithm != "auto":
            raise ValueError(
                "wire_dtype (--burst-wire-dtype) auto goes by the forecast of "
                f"--context-parallel-algo auto, got {self.algorithm}; name fp32 or bf16"
            )

    def keywords(self) -> AttentionKeywords:
        """The keyword arguments of `mb.prepare` that these options state."""
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
