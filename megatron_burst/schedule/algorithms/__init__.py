# SPDX-License-Identifier: Apache-2.0
"""The algorithms: functions from a `Demand` to `Tables`, each a file here and a line of the table.

Flags, errors, documentation and the choice of `auto` take the names and all that tells algorithms
apart from the table. A file is imported when its algorithm first makes tables: a run reads the
algorithms that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ..demand import Demand
from ..tables import Tables


@dataclass(frozen=True)
class Algorithm:
    """How the tables of a pass are made, and what others have to know of it.

    routed: may chunks also go from their owner straight to each rank that uses them, route
    "direct"? automatic: does `auto` try it? keeps: does a rank compute the same pairs in
    backward as in forward? sided: does it matter which side is to travel?
    holds_more: does it hold chunks that it does not compute with yet, or several at once, memory
    for time? holds_all: all chunks that it uses, so that `auto` does not try it where ranks share
    heads, and have the rows of a whole group. few_rows: all chunks too, but `auto` tries it where a
    rank sees few rows of others. joins: are all keys that a rank has at a step one call?
    two_levels: does it differ from others only where nodes have several ranks? complexity: among
    equal predictions `auto` takes the lowest. handicap: by what `auto` multiplies its time.
    """

    tables: Callable[[Demand], Tables]
    routed: bool = False
    automatic: bool = True
    keeps: bool = True
    sided: bool = True
    holds_more: bool = False
    holds_all: bool = False
    few_rows: bool = False
    joins: bool = False
    two_levels: bool = False
    complexity: int = 9
    handicap: float = 1.0


def _made_by(file: str, function: str = "tables") -> Callable[[Demand], Tables]:
    """The function of a file of this folder, which is imported at the first call."""

    def tables(demand: Demand) -> Tables:
        return getattr(import_module(f"{__name__}.{file}"), function)(demand)

    return tables


# Not for `auto`: double_ring is burst that waits for every gradient; two_way and token_ring send
# both ways round, which gains nothing where a rank has one NIC. all_gather was measured at up to
# 1.17 times its prediction.
ALGORITHMS: dict[str, Algorithm] = {
    "burst": Algorithm(_made_by("burst"), routed=True, complexity=1),
    "double_ring": Algorithm(_made_by("burst", "double_ring"), routed=True, automatic=False),
    "ring": Algorithm(_made_by("burst", "ring"), routed=True, complexity=0),
    "all_gather": Algorithm(_made_by("direct", "all_gather"), holds_more=True, holds_all=True,
                            complexity=5, handicap=1.15),
    "multicast": Algorithm(_made_by("multicast"), holds_more=True, two_levels=True, complexity=2),
    "prefetch": Algorithm(_made_by("prefetch"), holds_more=True, few_rows=True, joins=True,
                          complexity=3),
    "two_way": Algorithm(_made_by("two_way"), automatic=False),
    "token_ring": Algorithm(_made_by("token_ring"), automatic=False, keeps=False),
    "tile": Algorithm(_made_by("tile"), keeps=False, sided=False, holds_more=True, complexity=4),
}  # fmt: skip


def check_algorithm(algorithm: str) -> str:
    """`algorithm`; ValueError, with the list of names, if there is none of that name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm
