"""What a pass asks of an algorithm: which pairs are to be computed, and what has to travel."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .tables import FAMILIES, Grid, Pairs, Side


@dataclass(frozen=True)
class Demand:
    """One pass over all ranks of a grid.

    side: which family travels, "kv" or "query".
    gradients: does it need gradients, so that these travel as well?
    visible: bool [G, G], may queries of rank i see keys of rank j? Other pairs are not computed,
    and what only they need does not travel.
    kept: for how many of its last steps a rank kept the chunk from forward.
    """

    grid: Grid
    side: Side
    gradients: bool
    visible: np.ndarray = field(repr=False, compare=False)
    kept: int = 0

    def used(self, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Does `rank` compute with the travelling chunk of `owner`? Arrays of ranks."""
        return self.visible[(rank, owner) if self.side == "kv" else (owner, rank)]

    def family(self, gradient: bool) -> int:
        """The index of the travelling family, or of its gradient, in `FAMILIES`."""
        return FAMILIES.index("d" * gradient + self.side)

    def pairs(self, rank: np.ndarray, step: np.ndarray, owner: np.ndarray) -> Pairs:
        """`rank` computes with the travelling chunk of `owner` at `step`."""
        if self.side == "kv":
            return Pairs(rank, step, query=rank, key=owner)
        return Pairs(rank, step, query=owner, key=rank)
