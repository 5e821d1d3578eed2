# SPDX-License-Identifier: Apache-2.0
"""The table of algorithms. An algorithm makes the `Tables` of a pass from its `Demand`.

Flags, errors, documentation and the choice of `auto` read the names and properties of algorithms
from `ALGORITHMS`. A file is imported when one of its algorithms first makes tables, so a run
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
    """An algorithm: the function that makes the schedule of a pass, and its properties.

    Attributes:
        tables: Function that makes the pairs and transfers of all ranks (`Tables`) from the demand
            of a pass.
        routed: True if the algorithm supports route "direct", in which owners send chunks directly
            to the ranks that use them.
        automatic: True if `auto` tries the algorithm.
        keeps: True if a rank computes the same pairs in backward as in forward.
        sided: True if the result of `tables` depends on `demand.side`.
        holds_more: True if a rank holds several received chunks, or chunks that it does not use
            yet, to save time.
        holds_all: True if a rank holds, at one time, all chunks that it uses. `auto` then does not
            try the algorithm if ranks share heads, because chunks then have the rows of a whole
            ulysses group.
        few_rows: True if a rank holds, at one time, all rows that it uses. `auto` then tries the
            algorithm only if these are few rows.
        joins: True if, by default, one kernel call computes all pairs of a step.
        relays: True if no copy that is sent, and no partial result after the first, depends on a
            computation. The relay stream then sends them (`comm.relays`).
        two_levels: True if `auto` tries the algorithm only on several nodes with several ranks
            each.
        complexity: Number by which `auto` orders algorithms with equal predictions; the lowest is
            selected.
        handicap: Factor by which `auto` multiplies the predicted time of the algorithm.
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
    relays: bool = False
    two_levels: bool = False
    complexity: int = 9
    handicap: float = 1.0


def _made_by(file: str, function: str = "tables") -> Callable[[Demand], Tables]:
    """Return a function that calls `function` of module `file`, imported at the first call."""

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
                          relays=True, complexity=3),
    "two_way": Algorithm(_made_by("two_way"), automatic=False),
    "token_ring": Algorithm(_made_by("token_ring"), automatic=False, keeps=False),
    "tile": Algorithm(_made_by("tile"), keeps=False, sided=False, holds_more=True, complexity=4),
}  # fmt: skip


def check_algorithm(algorithm: str) -> str:
    """Return `algorithm`; raise ValueError with the list of names if it is unknown."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm
