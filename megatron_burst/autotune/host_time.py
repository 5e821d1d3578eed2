# SPDX-License-Identifier: Apache-2.0
"""What launching takes of the processor, which runs ahead of a GPU until it needs longer itself.

A layer takes the longer of both. Decides the figures where nobody measured, and the one formula of
a pass; `advise` adds the rest of a layer. The figures are processor time without the driver's part
of a launch, so what they add up to is a floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

BACKWARD = 2.0  # three gradients are added where forward adds one result


@dataclass(frozen=True)
class HostTime:
    """Seconds of the thread that launches.

    call: of one attention call of forward, with the sum to which its result is added; one of
    backward takes BACKWARD times as long. exchange: of sending another rank what travels together,
    and of receiving as much; start: of a pass besides, once for each head chunk; layer: of the rest
    of a layer, in forward, and as much in backward; plan: of planning for a new pack of documents,
    before the first layer launches. `megatron-burst calibrate` measures them.

    Those that stand in fit the table of docs/performance.md, "Host time" (7 % off in the median,
    30 % at most); layer is what one of Megatron-Core with local modules took without its core
    attention, at 8 rows on a slower day of the same machine, over what the plain ring loop of the
    table took longer that day; plan is what layout and plan took on 8 ranks with 100 documents in
    layout balanced (11 ms; 18, 19 and 48 on 16, 64 and 256), rounded down. None is of a GPU's host.

    Raises ValueError that names the figure.
    """

    call: float = 25e-6
    exchange: float = 27e-6
    start: float = 0.3e-3
    layer: float = 0.6e-3
    plan: float = 10e-3

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                raise ValueError(f"host: {name} must be seconds, 0 or more, got {value!r}")

    def of_pass(
        self, calls: int, exchanges: int, head_chunks: int = 1, backward: bool = False
    ) -> float:
        """Seconds of a pass; calls, exchanges: of one rank and head chunk."""
        called = calls * self.call * (BACKWARD if backward else 1)
        return head_chunks * (self.start + called + exchanges * self.exchange)


ASSUMED = HostTime()
