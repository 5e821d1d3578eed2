# SPDX-License-Identifier: Apache-2.0
"""The option `sparse`: how layers of sparse attention exchange keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...option_table import Option
from ...spine_options import OFF, SpineOptions

# Name of an exchange of keys -> algorithm of the ring.
SPARSE = {"ring": "burst", "multicast": "multicast", "all_gather": "all_gather"}


@dataclass(frozen=True)
class SparseOptions(SpineOptions):
    """The options of `SpineOptions`, and the option `sparse`."""

    sparse: Annotated[
        str,
        Option(
            "how layers of sparse attention (DSA) exchange index keys and latents over "
            "context-parallel ranks; auto uses multicast if --context-parallel-algo is burst or "
            "sends no keys, otherwise that algorithm; ring is the algorithm burst; megatron keeps "
            "Megatron's all-gather",
            names=("auto", *SPARSE, OFF),
        ),
    ] = "auto"
