# SPDX-License-Identifier: Apache-2.0
"""What the simulator did when: for pictures of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class TimeSpan(NamedTuple):
    """Something that a rank's device or links do. what: "compute", "intra" or "inter" (sending);
    start and end in seconds from the beginning of the pass; peer: who receives what is sent."""

    rank: int
    what: str
    start: float
    end: float
    peer: int = -1


@dataclass
class Recording:
    """Filled by `simulator.pass_time`, in the order in which it simulates."""

    spans: list[TimeSpan] = field(default_factory=list)

    def computed(self, start: np.ndarray, end: np.ndarray) -> None:
        """Every rank computes from `start` to `end` [G]; nothing where they are equal."""
        for rank in np.flatnonzero(end > start).tolist():
            self.spans.append(TimeSpan(rank, "compute", float(start[rank]), float(end[rank])))

    def sent(
        self, ends: np.ndarray, between: np.ndarray, taken: np.ndarray, end: np.ndarray
    ) -> None:
        """Messages from ranks `ends[0]` to ranks `ends[1]`; between: do they cross nodes?"""
        for src, dst, far, seconds, until in zip(*ends, between, taken, end, strict=True):
            what = "inter" if far else "intra"
            self.spans.append(
                TimeSpan(int(src), what, float(until - seconds), float(until), int(dst))
            )
