"""The algorithms: functions from a `Demand` to `Tables`, each a file of its own and a line here.

Flags, errors, documentation and the choice of `auto` take the names from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..demand import Demand
from ..tables import Tables
from . import all_gather, burst, double_ring, multicast, prefetch, ring, tile, token_ring, two_way


@dataclass(frozen=True)
class Algorithm:
    """How the tables of a pass are made, and what others have to know of it.

    routed: may chunks also go from their owner straight to each rank that uses them, route
    "direct"? automatic: does `auto` try it? keeps: does backward compute where forward did, so
    that it finds keys which forward kept? sided: does it matter which side is to travel?
    holds_more: does it hold chunks that it does not compute with yet, or several at once, memory
    for time? handicap: by what `auto` multiplies its predicted time.
    """

    tables: Callable[[Demand], Tables]
    routed: bool = False
    automatic: bool = True
    keeps: bool = True
    sided: bool = True
    holds_more: bool = False
    handicap: float = 1.0


# Not for `auto`: double_ring is burst that waits for every gradient; two_way and token_ring send
# both ways round, which gains nothing where a rank has one NIC. all_gather was measured at up to
# 1.17 times its prediction.
ALGORITHMS: dict[str, Algorithm] = {
    "burst": Algorithm(burst.tables, routed=True),
    "double_ring": Algorithm(double_ring.tables, routed=True, automatic=False),
    "ring": Algorithm(ring.tables, routed=True),
    "all_gather": Algorithm(all_gather.tables, holds_more=True, handicap=1.15),
    "multicast": Algorithm(multicast.tables, holds_more=True),
    "prefetch": Algorithm(prefetch.tables, holds_more=True),
    "two_way": Algorithm(two_way.tables, automatic=False),
    "token_ring": Algorithm(token_ring.tables, automatic=False, keeps=False),
    "tile": Algorithm(tile.tables, keeps=False, sided=False, holds_more=True),
}


def check_algorithm(algorithm: str) -> str:
    """`algorithm`; ValueError, with the list of names, if there is none of that name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm
