# SPDX-License-Identifier: Apache-2.0
"""The schedule of one pass by name: which algorithm, on which grid, and the tables it makes.

`forward` and `backward` build it. The executor runs a schedule, the simulator times it, `cost`
counts its bytes, `show` draws it; all of them read the tables. They consist of rank numbers only:
tensors, sizes and process groups come in later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from .algorithms import ALGORITHMS, check_algorithm, direct
from .demand import BACKWARD, FORWARD, Demand, RowBytes, Wanted, everything
from .program import program
from .tables import (
    ALL,
    FAMILIES,
    RINGS,
    SIDES,
    Boundary,
    Chunk,
    Grid,
    Hop,
    Tables,
    Transfers,
)


@dataclass(frozen=True, eq=False)
class Schedule(Demand):
    """One pass over all ranks of a grid.

    algorithm: a name in `algorithms.ALGORITHMS`. route: "ring", the algorithm's own way, or
    "direct" from each owner to the ranks that use its chunk, one step ahead.
    """

    algorithm: str = "burst"
    route: str = "ring"

    @cached_property
    def tables(self) -> Tables:
        """Pairs and transfers of all ranks. Large for large grids; a plan does not keep them."""
        algorithm = ALGORITHMS[self.algorithm]
        if self.route == "direct" and algorithm.routed:
            return direct.tables(self)
        return algorithm.tables(self)

    @property
    def joined(self) -> bool:
        """Are the pairs of a step that have the same queries one call?"""
        asked, usual = self.wanted.joined, ALGORITHMS[self.algorithm].joins
        return self.side == "kv" and (usual if asked is None else asked)

    @property
    def summed(self) -> tuple[str, ...]:
        """Families of partial results: outputs in forward, gradients in backward."""
        return ("out",) if self.row_bytes.out else ("dquery", "dkv")

    def travels(self, known: dict[Any, Any]) -> tuple[list[tuple[str, bool]], set[str]]:
        """Whatever the mask hides: what its hops may travel on, (ring, carries partial results?),
        and the families that they may carry. known: where other masks have left this.

        As on the smallest grid with as many levels, which needs the same rings, whichever side has
        more bytes per row: an algorithm may choose by bytes what travels.
        """
        key = self.algorithm, self.route, self.side, self.grid, self.row_bytes
        if key not in known:
            moved = [(t.family, t.ring, t.accumulated) for t in self._typical()]
            hops = {hop for each in moved for hop in zip(*(x.tolist() for x in each), strict=True)}
            ways = product((False, True), ("flat", "intra", "inter"))
            there = {(sums, RINGS[ring]) for _, ring, sums in hops}
            known[key] = (
                [way[::-1] for way in ways if way in there],
                {FAMILIES[f] for f, *_ in hops},
            )
        return known[key]

    def _typical(self) -> Iterator[Transfers]:
        """The transfers on the smallest grid with as many levels, whichever side is larger."""
        grid = Grid(*(min(2, ranks) for ranks in self.grid))
        small = replace(self, grid=grid, wanted=everything(grid.size))
        for side in SIDES:
            dear = self.row_bytes._replace(**{side: 100 * sum(self.row_bytes)})
            yield replace(small, row_bytes=dear).tables.transfers

    def program(self, rank: int, own_last: bool = False) -> tuple[Boundary, ...]:
        """What `rank` does; own_last: as in `program.program`."""
        return program(self.tables, self.grid, rank, own_last)


def totals_of(
    schedule: Schedule, rank: int, hops: Iterable[Hop], met: Iterable[tuple[Chunk, Chunk]]
) -> dict[tuple[str, int], Chunk]:
    """Return, for each chunk of which a rank holds partial results, all rows that it ever holds.

    Args:
        schedule: Schedule of the pass.
        rank: The rank.
        hops: Hops from and to the rank.
        met: Queries and keys of each of its calls.

    Returns:
        The rows by family and owner.
    """
    rows: dict[tuple[str, int], int] = defaultdict(int)
    for queries, keys in met:
        for family in schedule.summed:
            part = keys if family == "dkv" else queries
            rows[family, part.owner] |= part.rows
    for hop in hops:
        if hop.chunk.accumulated:
            rows[hop.chunk[:2]] |= hop.chunk.rows
    for family in schedule.summed:
        rows[family, rank] = ALL
    return {(family, owner): Chunk(family, owner, of) for (family, owner), of in rows.items()}


def forward(
    algorithm: str,
    grid: Grid,
    *,
    wanted: Wanted | None = None,
    row_bytes: RowBytes = FORWARD,
    route: str = "ring",
) -> Schedule:
    """The schedule of a forward pass. Arguments as of `Schedule`; default: all see everything.

    Raises ValueError for an unknown algorithm.
    """
    name, wanted = check_algorithm(algorithm), wanted or everything(grid.size)
    return Schedule(grid, "kv", wanted, row_bytes, algorithm=name, route=route)


def backward(
    algorithm: str,
    grid: Grid,
    side: str,
    *,
    wanted: Wanted | None = None,
    row_bytes: RowBytes = BACKWARD,
    route: str = "ring",
) -> Schedule:
    """The schedule of a backward pass. Arguments as of `Schedule`; default: all see everything.

    Raises ValueError for an unknown algorithm or side.
    """
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)} or auto, got {side!r}")
    name, wanted = check_algorithm(algorithm), wanted or everything(grid.size)
    return Schedule(grid, side, wanted, row_bytes, algorithm=name, route=route)
