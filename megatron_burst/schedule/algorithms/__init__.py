"""The algorithms: functions from a `Demand` to `Tables`, each a file of its own and a line here.

Flags, errors, documentation and the choice of `auto` take the names from here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..demand import Demand
from ..tables import Tables
from . import all_gather, burst, double_ring, multicast, ring, tile, token_ring, two_way

ALGORITHMS: dict[str, Callable[[Demand], Tables]] = {
    "burst": burst.tables,
    "double_ring": double_ring.tables,
    "ring": ring.tables,
    "all_gather": all_gather.tables,
    "multicast": multicast.tables,
    "two_way": two_way.tables,
    "token_ring": token_ring.tables,
    "tile": tile.tables,
}

# A chunk may also go from its owner straight to each rank that uses it: route "direct".
ROUTED = ("burst", "double_ring", "ring")
# Not for `auto`. double_ring is burst that waits for every gradient. The others send both ways
# round, which gains nothing where a rank has one NIC.
NEVER_FASTEST = ("double_ring", "two_way", "token_ring")
# Backward computes elsewhere than forward did, so it finds no keys that forward kept.
KEEP_NONE = ("token_ring", "tile")
# The same whichever side is to travel.
SIDELESS = ("tile",)


def check_algorithm(algorithm: str) -> str:
    """`algorithm`; ValueError, with the list of names, if there is none of that name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm
