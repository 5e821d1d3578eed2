"""One ring over all ranks: the two-level ring of a single node, on a communicator of its own."""

from __future__ import annotations

from ..demand import Demand
from ..tables import Grid, Tables
from .burst import two_level


def tables(demand: Demand) -> Tables:
    """One ring, whatever the links between its ranks."""
    return two_level(demand, Grid(1, demand.grid.size), within="flat")
