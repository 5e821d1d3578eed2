# SPDX-License-Identifier: Apache-2.0
"""What makes single ranks and messages of a ring slower than the rates say: arrays by rank.

The simulator multiplies by them. Which device is slow, and which messages cross it, is decided by
`tools.advise.forecast.faults`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..schedule.tables import Pairs, Transfers


@dataclass(frozen=True, eq=False)
class Disturbance:
    """Factors for the ranks of one ring, and the jitter of one draw.

    ranks: float [G], how many times as long each rank computes; links: float [G, G], how many times
    as long the bytes of a message from one rank to another take; jitter: standard deviation of the
    time of every pair and of every message, as a fraction of it; seed: of the draw.
    """

    ranks: np.ndarray
    links: np.ndarray
    jitter: float = 0.0
    seed: tuple[int, ...] = (0,)

    def of_bytes(self, moved: Transfers) -> np.ndarray:
        """float: factor for the bytes of each transfer."""
        return self.links[moved.src, moved.dst]

    def of_messages(self, moved: Transfers) -> np.ndarray:
        """float: the draw for each transfer as a whole."""
        return self._drawn(0, len(moved.src))

    def of_pairs(self, pairs: Pairs) -> np.ndarray:
        """float: factor for each row of `pairs`, with its draw."""
        return self.ranks[pairs.rank] * self._drawn(1, len(pairs.rank))

    def of_exchange(self) -> float:
        """Factor for an all-to-all of these ranks, which waits for every message and its draw."""
        return float((self.links.ravel() * self._drawn(2, self.links.size)).max())

    def _drawn(self, stream: int, count: int) -> np.ndarray:
        """Log-normal factors of mean 1 and of the jitter's standard deviation."""
        if not self.jitter:
            return np.ones(count)
        width = math.sqrt(math.log1p(self.jitter**2))
        random = np.random.default_rng([*self.seed, stream])
        return np.exp(width * random.standard_normal(count) - width * width / 2)
