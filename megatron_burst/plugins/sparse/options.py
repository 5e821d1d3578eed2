# SPDX-License-Identifier: Apache-2.0
"""The option of sparse attention: how its keys are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...option_table import Option
from ...spine_options import OFF, SpineOptions

# How keys of sparse attention travel, and the algorithm that does so.
SPARSE = {"ring": "burst", "multicast": "multicast", "all_gather": "all_gather"}


@dataclass(frozen=True)
class SparseOptions(SpineOptions):
    """The options of the spine and of this plugin."""

    sparse: Annotated[
        str,
        Option(
            "how layers of sparse attention (DSA) exchange index keys and latents over "
            "context-parallel ranks; auto as --context-parallel-algo says if keys travel in it, "
            "but multicast for burst; ring is burst's; megatron keeps Megatron's all-gather",
            names=("auto", *SPARSE, OFF),
        ),
    ] = "auto"
