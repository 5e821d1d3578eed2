# SPDX-License-Identifier: Apache-2.0
"""The schedule of one pass over a grid of ranks, made from the name of its algorithm.

`forward` and `backward` make a schedule. The executor runs the schedule, the simulator times it,
`cost` counts its bytes, and `show` draws it. All of them read its tables. The tables contain only
rank numbers; tensors, sizes and process groups are added later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from .algorithms import ALGORITHMS, check_algorithm, direct
from .demand import BACKWARD, FORWARD, Demand, RowBytes, Visibility, all_visible
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
    relay_chains,
)


@dataclass(frozen=True, eq=False)
class Schedule(Demand):
    """The schedule of one pass over all ranks of a grid.

    Attributes:
        algorithm: A name in `algorithms.ALGORITHMS`.
        route: "ring" for the transfers of the algorithm. "direct" if owners send each chunk
            directly to the ranks that use it, one or more steps before its use.
    """

    algorithm: str = "burst"
    route: str = "ring"

    @cached_property
    def tables(self) -> Tables:
        """Pairs and transfers of all ranks.

        Tables of large grids are large, so a plan does not keep them.
        """
        algorithm = ALGORITHMS[self.algorithm]
        if self.route == "direct" and algorithm.routed:
            return direct.tables(self)
        return algorithm.tables(self)

    @property
    def joined(self) -> bool:
        """True if one kernel call computes all pairs of a step that have the same queries."""
        requested, default = self.visibility.joined, ALGORITHMS[self.algorithm].joins
        return self.side == "kv" and (default if requested is None else requested)

    @cached_property
    def chains(self) -> dict[int, slice]:
        """Chains of transfers on the relay stream (`relay_chains`); empty without such a stream."""
        if not (self.visibility.streams and ALGORITHMS[self.algorithm].relays):
            return {}
        return relay_chains(self.tables.transfers)

    @property
    def summed(self) -> tuple[str, ...]:
        """Families of the results that ranks sum: outputs in forward, gradients in backward."""
        return ("out",) if self.row_bytes.out else ("dquery", "dkv")

    def travels(self, cache: dict[Any, Any]) -> tuple[list[tuple[str, bool]], set[str]]:
        """Return the process groups and the families that this pass may use, with any mask.

        The result is computed on the smallest grid with the same levels, which needs the same
        rings. It combines two tables of transfers, one for large rows of keys and one for large
        rows of queries, because an algorithm may choose by bytes which tensors it sends.

        Args:
            cache: Dictionary in which results are stored; they do not depend on the mask.

        Returns:
            A list of pairs (name of a process group, True if its transfers carry partial results),
            and the set of the families that are sent, such as "kv".
        """
        key = self.algorithm, self.route, self.side, self.grid, self.row_bytes
        if key not in cache:
            moved = [(t.family, t.ring, t.accumulated) for t in self._typical()]
            hops = {
                hop
                for columns in moved
                for hop in zip(*(column.tolist() for column in columns), strict=True)
            }
            ways = product((False, True), ("flat", "intra", "inter"))
            used = {(sums, RINGS[ring]) for _, ring, sums in hops}
            cache[key] = (
                [way[::-1] for way in ways if way in used],
                {FAMILIES[f] for f, *_ in hops},
            )
        return cache[key]

    def _typical(self) -> Iterator[Transfers]:
        """Yield transfers on the smallest grid, for large key rows, then for large query rows."""
        grid = Grid(*(min(2, ranks) for ranks in self.grid))
        small = replace(self, grid=grid, visibility=all_visible(grid.size))
        for side in SIDES:
            row_bytes = self.row_bytes._replace(**{side: 100 * sum(self.row_bytes)})
            yield replace(small, row_bytes=row_bytes).tables.transfers

    def program(self, rank: int, own_last: bool = False) -> tuple[Boundary, ...]:
        """Return the operations of `rank` before and in each step.

        `own_last` is the same as in `program.program`.
        """
        return program(self.tables, self.grid, rank, own_last)


def totals_of(
    schedule: Schedule, rank: int, hops: Iterable[Hop], calls: Iterable[tuple[Chunk, Chunk]]
) -> dict[tuple[str, int], Chunk]:
    """Return the rows for which a rank sums partial results in a pass, for each family and owner.

    Args:
        schedule: Schedule of the pass.
        rank: The rank.
        hops: Transfers from and to the rank.
        calls: Queries and keys of each kernel call of the rank.

    Returns:
        (family, owner) -> chunk with these rows. A family is "out", "dquery" or "dkv".
    """
    rows: dict[tuple[str, int], int] = defaultdict(int)
    for queries, keys in calls:
        for family in schedule.summed:
            part = keys if family == "dkv" else queries
            rows[family, part.owner] |= part.rows
    for hop in hops:
        if hop.chunk.accumulated:
            rows[hop.chunk[:2]] |= hop.chunk.rows
    for family in schedule.summed:
        rows[family, rank] = ALL
    return {(family, owner): Chunk(family, owner, bits) for (family, owner), bits in rows.items()}


def forward(
    algorithm: str,
    grid: Grid,
    *,
    visibility: Visibility | None = None,
    row_bytes: RowBytes = FORWARD,
    route: str = "ring",
) -> Schedule:
    """Return the schedule of a forward pass.

    Args:
        algorithm: A name in `algorithms.ALGORITHMS`.
        grid: Grid of the ranks.
        visibility: Ranks and rows that attend to each other; default: all.
        row_bytes: Bytes of a row of each family.
        route: Same as in `Schedule`.

    Raises:
        ValueError: There is no algorithm of that name.
    """
    name, visibility = check_algorithm(algorithm), visibility or all_visible(grid.size)
    return Schedule(grid, "kv", visibility, row_bytes, algorithm=name, route=route)


def backward(
    algorithm: str,
    grid: Grid,
    side: str,
    *,
    visibility: Visibility | None = None,
    row_bytes: RowBytes = BACKWARD,
    route: str = "ring",
) -> Schedule:
    """Return the schedule of a backward pass.

    Args:
        algorithm: A name in `algorithms.ALGORITHMS`.
        grid: Grid of the ranks.
        side: Tensors that are sent: "kv" (keys and values) or "query".
        visibility: Ranks and rows that attend to each other; default: all.
        row_bytes: Bytes of a row of each family.
        route: Same as in `Schedule`.

    Raises:
        ValueError: There is no algorithm or side of that name.
    """
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)} or auto, got {side!r}")
    name, visibility = check_algorithm(algorithm), visibility or all_visible(grid.size)
    return Schedule(grid, side, visibility, row_bytes, algorithm=name, route=route)
