# SPDX-License-Identifier: Apache-2.0
"""The table of scan algorithms, which send states of linear attention from piece to piece.

A piece is a run of consecutive positions of a document on one rank. Each algorithm is in its own
file. This package needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from .all_gather import all_gather
from .hops import Hops, Task
from .scan import ring, scan
from .two_level import two_level

# Each function makes the table of hops of a task.
SCANS: dict[str, Callable[[Task], Hops]] = {
    "all_gather": all_gather,
    "scan": scan,
    "two_level": two_level,
    "ring": ring,
}
