"""From each owner straight to the ranks that use its chunk, and gradients straight back.

Rank r meets the chunk of r - t at step t, as on one ring. What saves bytes where a mask leaves each
chunk few readers (documents, windows) costs them where a ring would have used the fast links.
"""

from __future__ import annotations

import numpy as np

from ..demand import Demand
from ..tables import ALL, RINGS, Kept, Tables, Transfers, joined


def all_gather(demand: Demand) -> Tables:
    """Every chunk to every rank that uses it, all started at once: no hop waits for another.

    Sends are posted before the first step, and gradients are awaited at the end; a rank holds all
    chunks that it uses, and in the end all gradients of its own. So ranks need not be equally far:
    where documents leave one rank more to compute at a step than another, neither waits for it, as
    long as all have as much in total.
    """
    return tables(demand, ahead=demand.grid.size, at_end=True)


def tables(demand: Demand, *, ahead: int = 1, at_end: bool = False) -> Tables:
    """Chunks are sent `ahead` steps before their use, so that a rank holds `ahead` + 1 travelling
    chunks at most. at_end: ranks wait for gradients after the last step, not a step later."""
    size, bundles = demand.grid.size, demand.travelling
    owner, step = np.ogrid[:size, :size]
    there = (owner + step) % size
    rows = bundles.bits(np.take_along_axis(bundles.wanted, there[bundles.owner], axis=1))
    from_forward = step >= size - demand.kept

    def moves(rows: np.ndarray, gradient: bool) -> Transfers:
        owner, step = np.nonzero(rows)
        user, flat = (owner + step) % size, np.full_like(owner, RINGS.index("flat"))
        family, rows = np.full_like(owner, demand.family(gradient)), rows[owner, step]
        if gradient:  # complete after its step, and at home a step later
            land = np.full_like(step, size + 1) if at_end else step + 2
            return Transfers(family, owner, rows, user, owner, flat, step + 1, land)
        post = np.maximum(step - ahead, 0)
        return Transfers(family, owner, rows, owner, user, flat, post, step)

    of, at = np.nonzero(rows)
    own = np.flatnonzero(demand.visible.diagonal())
    pairs = demand.pairs(
        np.concatenate([own, there[of, at]]),
        np.concatenate([np.zeros_like(own), at]),
        np.concatenate([own, of]),
        np.concatenate([np.full(len(own), ALL), rows[of, at]]),
    )
    stays, keeper = np.nonzero((rows * from_forward).T)
    kept = Kept(there[keeper, stays], keeper, rows[keeper, stays])
    transfers = [moves(rows * ~from_forward, False)]
    if demand.gradients:
        transfers += [moves(rows, True)]
    return Tables(size, pairs, joined(*transfers), kept, demand.wanted.queries, demand.wanted.keys)
