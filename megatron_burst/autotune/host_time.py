# SPDX-License-Identifier: Apache-2.0
"""CPU time of kernel launches, which limits a run if it exceeds the time of the GPU.

The time of a layer is the larger of its launch time and its GPU time. This module has default
values, for hosts that are not measured, and the launch time of an attention pass. `advise` adds the
launch time of the other parts of a layer. The values exclude the driver's part of a launch, so
their sum is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

BACKWARD = 2.0  # backward adds three gradients, forward adds one result


@dataclass(frozen=True)
class HostTime:
    """CPU seconds of the thread that launches kernels; `megatron-burst calibrate` measures them.

    The defaults fit the host times in docs/performance.md (median error 7 %, largest 30 %).
    The default of `layer` was measured on a Megatron-Core layer with local modules and without core
    attention, at 8 rows. It was then multiplied by a ratio, because the machine was not equally
    fast on that day: the plain ring loop's time in the table divided by its time on that day. The
    default of `plan` is at least the time to make a layout and a plan for 100 documents on 8 ranks:
    6 ms with `balanced`, 8 ms if padded, 9 ms with `striped`. With `balanced`, 64 ranks need 8 ms
    and 1,024 ranks need 106 ms. No value was measured on a host with a GPU.

    Attributes:
        call: Seconds of one attention call of forward, including the addition of its result. A call
            of backward needs BACKWARD times as long.
        exchange: Seconds to send one message to another rank and to receive one.
        start: Seconds of each head chunk of a pass, in addition to its calls and exchanges.
        layer: Seconds of a layer without its attention, in forward and again in backward.
        plan: Seconds to plan for a new pack of documents, before the first layer launches.

    Raises:
        ValueError: A value is not a finite number >= 0. The message names the value.
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
                raise ValueError(f"host: {name} (seconds) must be finite and >= 0, got {value!r}")

    def of_pass(
        self, calls: int, exchanges: int, head_chunks: int = 1, backward: bool = False
    ) -> float:
        """Return the CPU seconds of one pass.

        Args:
            calls: Number of attention calls of one head chunk.
            exchanges: Number of exchanges of one head chunk.
            head_chunks: Number of head chunks.
            backward: True for a backward pass.
        """
        called = calls * self.call * (BACKWARD if backward else 1)
        return head_chunks * (self.start + called + exchanges * self.exchange)


ASSUMED = HostTime()
