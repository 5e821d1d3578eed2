"""How fast the links and the device of a rank are, as measured or as stated by the user.

Plain numbers, for `forecast`; how they are measured is `probe`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What one rank's links and device carry; all ranks are taken to be alike.

    intra, inter: bytes per second that a rank sends within its node and between nodes, while it
    receives as many; a link class that the grid does not have may be math.inf.
    latency: seconds that each message occupies its link besides its bytes.
    compute: FLOP/s of the local attention (multiplications and additions counted apart, two
    products in forward, five in backward, visible pairs only); math.inf if it takes no time, None
    to have it measured with the plan's kernel.
    launch: seconds that each call of the local attention takes besides its FLOPs.
    """

    intra: float
    inter: float
    latency: float = 0.0
    compute: float | None = None
    launch: float = 0.0

    def __post_init__(self):
        for name in ("intra", "inter", "compute"):
            value = getattr(self, name)
            if name == "compute" and value is None:
                continue
            if not _is_number(value) or not value > 0:
                raise ValueError(f"rates: {name} must be a positive number, got {value!r}")
        for name in ("latency", "launch"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"rates: {name} must be seconds, 0 or more, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
