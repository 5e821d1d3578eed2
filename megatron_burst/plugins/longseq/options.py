# SPDX-License-Identifier: Apache-2.0
"""Options for very long sequences: host memory, row chunks, MLP tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...option_table import Auto, Option
from ...spine_options import SpineOptions


@dataclass(frozen=True)
class LongSequenceOptions(SpineOptions):
    """The options of `SpineOptions`, and the options for very long sequences."""

    offload: Annotated[
        float | Auto,
        Option(
            "fraction of saved activations (inputs, attention store) offloaded to host memory; "
            "auto picks the largest fraction whose copies overlap with compute and that fits in "
            "host memory",
            alone=True,
            excludes=("attention_layout",),
        ),
    ] = 0.0
    host_memory: Annotated[
        str | None,
        Option(
            "host memory per node that --burst-offload may use, such as 1.5TB or 800GiB; default: "
            "80 % of the free memory",
            alone=True,
        ),
    ] = None
    sequence_chunks: Annotated[
        int | Auto,
        Option(
            "number of row chunks in which the attention half of a layer runs; only one chunk's "
            "queries, outputs and gradients are in memory at a time",
            excludes=("attention_layout", "mask"),
        ),
    ] = 1
    mlp_tiles: Annotated[
        int | Auto,
        Option(
            "number of tiles of tokens in which the MLP half of a layer runs; each tile is "
            "recomputed in backward",
            alone=True,
        ),
    ] = 1


def row_chunks(burst: LongSequenceOptions) -> int | Auto:
    """Return the option `sequence_chunks`: the number of row chunks of a rank's rows, or "auto"."""
    return burst.sequence_chunks
