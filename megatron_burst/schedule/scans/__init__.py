# SPDX-License-Identifier: Apache-2.0
"""Algorithms that carry states along chains of pieces: a file and a line here.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable

from .all_gather import all_gather
from .hops import Hops, Task
from .scan import ring, scan
from .two_level import two_level

# Name -> what makes its table.
SCANS: dict[str, Callable[[Task], Hops]] = {
    "all_gather": all_gather,
    "scan": scan,
    "two_level": two_level,
    "ring": ring,
}
