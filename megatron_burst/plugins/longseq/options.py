# SPDX-License-Identifier: Apache-2.0
"""The options of very long sequences: host memory, chunks of rows, tiles of MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...option_table import Auto, Option
from ...spine_options import SpineOptions


@dataclass(frozen=True)
class LongSequenceOptions(SpineOptions):
    """The options of the spine and of this plugin."""

    offload: Annotated[
        float | Auto,
        Option(
            "fraction of saved activations (inputs, attention store) offloaded to host memory; "
            "auto takes the largest that the link overlaps with compute and the host has memory "
            "for",
            alone=True,
            excludes=("attention_layout",),
        ),
    ] = 0.0
    host_memory: Annotated[
        str | None,
        Option(
            "host memory per node that --burst-offload may take, such as 1.5TB or 800GiB; default: "
            "80 % of what is free",
            alone=True,
        ),
    ] = None
    sequence_chunks: Annotated[
        int | Auto,
        Option(
            "chunks of tokens in which the attention half of a layer runs, so that queries, "
            "outputs and their gradients are never whole in memory",
            excludes=("attention_layout", "mask"),
        ),
    ] = 1
    mlp_tiles: Annotated[
        int | Auto,
        Option(
            "tiles of tokens in which the MLP half of a layer runs, each recomputed in backward",
            alone=True,
        ),
    ] = 1


def row_chunks(burst: LongSequenceOptions) -> int | Auto:
    """The number of chunks of rows in which attention halves run, as the option states it."""
    return burst.sequence_chunks
