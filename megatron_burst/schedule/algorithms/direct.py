"""From each owner straight to the ranks that use its chunk, and gradients straight back.

Rank r meets the chunk of r - t at step t, as on one ring. What saves bytes where a mask leaves each
chunk few readers (documents, windows) costs them where a ring would have used the fast links.
"""

from __future__ import annotations

import numpy as np

from ..demand import Demand
from ..tables import Kept, Tables, transfers
from .flat_ring import FlatRing


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
    ring = FlatRing(demand, demand.travelling)
    rank, step, owner, rows = ring.met
    sent = ~ring.from_forward[step]
    post = np.maximum(step - ahead, 0)
    copies = (owner, rows, owner, rank, post, step)
    parts = [transfers(demand.side, "flat", *(column[sent] for column in copies))]
    if demand.gradients:  # complete after its step, and at home a step later
        land = np.full_like(step, ring.size + 1) if at_end else step + 2
        family = "d" + demand.side
        parts += [transfers(family, "flat", owner, rows, rank, owner, step + 1, land)]
    by_step = np.flatnonzero(~sent)[np.argsort(step[~sent], kind="stable")]
    kept = Kept(*(column[by_step] for column in (rank, owner, rows)))
    return demand.as_tables(ring.size, demand.pairs(rank, step, owner, rows), parts, kept)
