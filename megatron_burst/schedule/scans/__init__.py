"""Algorithms that carry states along chains of pieces: one file each, one line here.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable

from .hops import Hops, Task
from .ring import ring

# Name -> what makes its table.
SCANS: dict[str, Callable[[Task], Hops]] = {"ring": ring}
