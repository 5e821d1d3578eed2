"""Every chunk to every rank that uses it, all started at once: no hop waits for another.

Gradients are awaited at the end. So ranks need not be equally far: where documents leave one rank
more to compute at a step than another, neither waits for it, as long as all have as much in total.
"""

from __future__ import annotations

from ..demand import Demand
from ..tables import Tables
from . import direct


def tables(demand: Demand) -> Tables:
    """Direct sends, posted before the first step; a rank holds all chunks it uses, and in the end
    all gradients of its own."""
    return direct.tables(demand, ahead=demand.grid.size, at_end=True)
