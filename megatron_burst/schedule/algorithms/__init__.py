# SPDX-License-Identifier: Apache-2.0
"""The table of algorithms: functions from a `Demand` to `Tables`, each in its own file.

Flags, errors, documentation and the choice of `auto` read the names and properties of algorithms
from `ALGORITHMS`. A file is imported when its algorithm first makes tables, so a run
imports only the algorithms that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ..demand import Demand
from ..tables import Tables


@dataclass(frozen=True)
class Algorithm:
    """The function that makes the tables of a pass, and its properties.

    Attributes:
        tables: Makes the tables of a pass from its demand.
        routed: Whether route "direct" is possible: owners send chunks directly to the ranks that
            use them.
        automatic: Whether `auto` tries the algorithm.
        keeps: Whether a rank computes the same pairs in backward as in forward.
        sided: Whether the tables depend on `demand.side`.
        holds_more: Whether a rank holds several chunks, or chunks that it does not use yet, to save
            time.
        holds_all: Whether a rank holds all chunks that it uses. `auto` then does not try the
            algorithm if ranks share heads, because chunks then have the rows of a whole ulysses
            group.
        few_rows: Whether a rank holds all chunks that it uses, and `auto` tries the algorithm only
            if ranks use few rows of other ranks.
        joins: Whether one kernel call computes with all keys that a rank has at a step.
        two_levels: Whether the algorithm is useful only for several nodes of several ranks.
        complexity: Order of simplicity; `auto` selects the lowest among equal predictions.
        handicap: Factor by which `auto` multiplies the predicted time.
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
    """Return `function` of the module `file`, which is imported at the first call."""

    def tables(demand: Demand) -> Tables:
        return getattr(import_module(f"{__name__}.{file}"), function)(demand)

    return tables


# `auto` does not try double_ring, because it equals burst but waits for every gradient. `auto` does
# not try two_way and token_ring, because sending in both directions gains nothing if a rank has one
# NIC. all_gather has a handicap because measured times are up to 1.17 times the prediction.
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
    """Return `algorithm`, or raise ValueError with the list of names if it is unknown."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm
