"""Every chunk to every rank that uses it, all started at once: no hop waits for another."""

from __future__ import annotations

from ..demand import Demand
from ..tables import Tables
from . import direct


def tables(demand: Demand) -> Tables:
    """Direct sends, posted before the first step; a rank holds all chunks it uses."""
    return direct.tables(demand, ahead=demand.grid.size)
