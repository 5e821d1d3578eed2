"""LoongTrain's double ring (section 4.3): the two-level ring that waits for every gradient."""

from __future__ import annotations

from ..demand import Demand
from ..tables import Tables
from .burst import two_level


def tables(demand: Demand) -> Tables:
    """The two-level ring whose gradients land where they are posted."""
    return two_level(demand, demand.grid, blocks=True)
