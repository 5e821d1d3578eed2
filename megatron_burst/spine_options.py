# SPDX-License-Identifier: Apache-2.0
"""Options that exist without plugins: attention, layout, LM head, linear attention, packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .layout import LayoutName
from .option_table import Auto, Option, OptionSet
from .options import MEANING, AttentionKeywords, KernelName, SideName, WireDtype, algorithms
from .schedule.scans import SCANS
from .schedule.topology import Placement

OFF = "megatron"  # value of `algorithm` that keeps Megatron's own attention
Loss = Literal["off", "single_pass", "recompute"]
Pack = Literal["off", "documents", "trees"]
# Without block_striped, which requires a block length; use `mb.layout.make`.
NAMED_LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")


@dataclass(frozen=True)
class SpineOptions(OptionSet):
    """Options of a training run without plugins; base class of the option classes of plugins."""

    algorithm: Annotated[
        str,
        Option(
            "attention across context-parallel ranks; auto picks the algorithm that is predicted "
            "to be fastest at measured link rates, for each kind of layer (with and without a "
            "sliding window); megatron keeps Megatron's attention",
            flag="--context-parallel-algo",
            names=(*algorithms(), "megatron"),
            alone=True,
        ),
    ] = "burst"
    layout: Annotated[
        LayoutName | Auto,
        Option(
            "positions that each rank holds; balanced is for packed documents of mixed lengths; "
            "auto uses zigzag, or contiguous with zigzag for attention, and picks the choice with "
            "fewer bytes; default: zigzag; with --burst-pack documents: balanced; with a store "
            "between 0 and 1: striped, because only striped balances the recomputation",
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
            "context-parallel ranks per node; default: --hierarchical-context-parallel-sizes, "
            "otherwise the ranks on one host"
        ),
    ] = None
    ulysses_size: Annotated[
        int | None,
        Option(
            "number of ranks that share heads by all-to-all; required by hybrid; default of "
            "ulysses: all context-parallel ranks"
        ),
    ] = None
    placement: Annotated[
        Placement,
        Option(
            "head_first: neighbouring ranks share heads; context_first: neighbouring ranks form a "
            "ring"
        ),
    ] = "head_first"
    wire_dtype: Annotated[
        WireDtype | None,
        Option(MEANING["grad_wire_dtype"]),
    ] = None
    store: Annotated[
        float | None,
        Option(
            "fraction of attention outputs kept in memory with --recompute-granularity: 1.0 "
            "recomputes no attention, 0.5 recomputes a quarter of causal attention with half of "
            "that memory",
            flag="--burst-attention-store",
        ),
    ] = None
    lm_head_loss: Annotated[
        Loss,
        Option("fuse LM head and loss, without materializing full logits", alone=True),
    ] = "off"
    linear: Annotated[
        str,
        Option(
            "how linear-attention and Mamba layers pass their state over context-parallel ranks; "
            "auto picks the method that is predicted to be fastest; megatron keeps Megatron's "
            "all-to-all of heads",
            names=("auto", *SCANS, OFF),
        ),
    ] = "auto"
    nccl_max_ctas: Annotated[
        int | None,
        Option(
            "maximum thread blocks per kernel on the NCCL communicators of this package; with "
            "fewer blocks attention has more multiprocessors, but bandwidth is lower; default: "
            "NCCL's choice"
        ),
    ] = None
    pack: Annotated[
        Pack,
        Option(
            "documents: repack the documents of every global batch, over the data-parallel ranks, "
            "into micro-batches of --seq-length tokens that are predicted to take equally long; "
            "trees: micro-batches come from mb.rl, also with one context-parallel rank"
        ),
    ] = "off"
    head_chunks: Annotated[
        int | None,
        Option(MEANING["head_chunks"]),
    ] = None
    cluster: Annotated[
        str | None,
        Option(
            "file with rates from megatron-burst calibrate, for --context-parallel-algo auto and "
            "--burst-linear auto; default: --context-parallel-algo measures rates, --burst-linear "
            "uses nominal rates",
            text="FILE",
        ),
    ] = None
    attention_layout: Annotated[
        Literal["contiguous", "striped", "zigzag"] | None,
        Option(
            "layout of softmax attention, with an exchange of tokens around it; default: "
            "--burst-layout"
        ),
    ] = None
    mask: Annotated[
        str | None,
        Option(
            "function of (layer, batch) that returns the attention mask of that layer, from "
            "mb.masks or a custom mask; default: causal, with the window of the layer",
            text="MODULE:NAME",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire_dtype == "auto" and self.algorithm != "auto":
            raise ValueError(
                "wire_dtype (--burst-wire-dtype) auto requires --context-parallel-algo auto, got "
                f"{self.algorithm}; use fp32 or bf16"
            )

    def keywords(self) -> AttentionKeywords:
        """Return the options of attention as keyword arguments of `AttentionOptions`."""
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
