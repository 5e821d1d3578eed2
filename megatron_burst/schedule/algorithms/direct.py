"""From each owner straight to the ranks that use its chunk, and gradients straight back.

Rank r meets the chunk of r - t at step t, as on one ring. What saves bytes where a mask leaves each
chunk few readers (documents, windows) costs them where a ring would have used the fast links.
"""

from __future__ import annotations

import numpy as np

from ..demand import Demand
from ..tables import RINGS, Kept, Tables, Transfers, joined


def tables(demand: Demand, *, ahead: int = 1) -> Tables:
    """Chunks are sent `ahead` steps before their use, so that a rank holds `ahead` + 1 travelling
    chunks at most."""
    size = demand.grid.size
    owner, step = np.ogrid[:size, :size]
    there = (owner + step) % size
    used = demand.used(owner, there)
    from_forward = step >= size - demand.kept
    away = step > 0  # a rank sends itself nothing

    def moves(which: np.ndarray, gradient: bool) -> Transfers:
        owner, step = np.nonzero(which)
        user, flat = (owner + step) % size, np.full_like(owner, RINGS.index("flat"))
        family = np.full_like(owner, demand.family(gradient))
        if gradient:  # complete after its step, and at home a step later
            return Transfers(family, owner, user, owner, flat, step + 1, step + 2)
        post = np.maximum(step - ahead, 0)
        return Transfers(family, owner, owner, user, flat, post, step)

    computed_by, computed_at = np.nonzero(used)
    pairs = demand.pairs((computed_by + computed_at) % size, computed_at, computed_by)
    at, of = np.nonzero((used & from_forward).T)
    transfers = joined(
        moves(used & away & ~from_forward, False), moves(used & away & demand.gradients, True)
    )
    return Tables(size, pairs, transfers, Kept((of + at) % size, of))
