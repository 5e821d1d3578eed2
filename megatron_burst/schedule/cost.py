# SPDX-License-Identifier: Apache-2.0
"""The cost of a schedule: bytes per link class and visible pairs; and which side and route cost
least.

The counts are taken from the schedules and tiles that run, so they cannot differ from them. Sizes
are plain numbers, so no torch is needed. Source: BurstEngine section 3.1. Its saving from letting
queries travel in backward turns into a loss for grouped-query attention, where keys and values are
the smaller ones, so the side is computed from the sizes and not fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..layout import Layout, Span
from ..masks import Mask
from ..masks.tiling import Cutter
from . import rings
from .algorithms import ALGORITHMS
from .demand import Wanted
from .head_shares import shared_spans
from .rings import Schedule
from .sizes import Sizes
from .tables import FAMILIES, SIDES, Grid, Tables, Transfers
from .topology import Topology


@dataclass(frozen=True)
class Traffic:
    """Payload bytes one rank sends in one pass, by link class."""

    intra: int = 0
    inter: int = 0

    @property
    def total(self) -> int:
        """Bytes over both link classes."""
        return self.intra + self.inter

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.intra + other.intra, self.inter + other.inter)


def traffic(schedule: Schedule, rank: int | None, sizes: Sizes) -> Traffic:
    """Payload bytes that `rank` (None: all ranks of a ring together) sends when a schedule runs
    once.
    """
    moved = schedule.tables.transfers
    moved = moved if rank is None else moved.where(moved.src == rank)
    each, between = message_bytes(schedule, moved, sizes), moved.between(schedule.grid)
    return Traffic(int(each[~between].sum()), int(each[between].sum()))


def message_bytes(schedule: Schedule, moved: Transfers, sizes: Sizes) -> np.ndarray:
    """int64: payload bytes of each of these transfers of a schedule."""
    each = np.array(sizes.row_bytes(schedule), dtype=np.int64)
    return rows_sent(schedule.tables, moved) * each[moved.family]


def rows_sent(tables: Tables, moved: Transfers) -> np.ndarray:
    """int64: how many rows each of these transfers carries."""
    rows = np.zeros(len(moved.owner), dtype=np.int64)
    of_keys = np.array([name in ("kv", "dkv") for name in FAMILIES])[moved.family]
    for which, bundles in ((of_keys, tables.keys), (~of_keys, tables.queries)):
        rows[which] = bundles.rows_of(moved.owner[which], moved.rows[which])
    return rows


def head_traffic(
    links: Sequence[str], rank: int, sizes: Sizes, again: bool = False
) -> tuple[Traffic, Traffic]:
    """Payload bytes that one rank of a ulysses group sends in forward and in backward.

    links: the link class to each member of the group; rank: the sender's index in it. again: does
    backward bring queries again?
    """
    others = [link for peer, link in enumerate(links) if peer != rank]
    counts = {link: others.count(link) for link in ("intra", "inter")}
    both = sizes.scattered_bytes(len(links), again)
    forward, back = (Traffic(**{k: n * size for k, n in counts.items()}) for size in both)
    return forward, back


def forward_schedule(
    algorithm: str, grid: Grid, wanted: Wanted, sizes: Sizes, *, route: str = "auto"
) -> Schedule:
    """The schedule of a forward pass; route "auto" takes the one with fewer bytes.

    Other arguments as of `rings.Schedule`. Raises ValueError for an unknown algorithm.
    """
    ring = rings.forward(algorithm, grid, wanted=wanted, row_bytes=sizes.forward)
    return _by_route(ring, route, sizes)


def backward_schedule(
    algorithm: str,
    grid: Grid,
    wanted: Wanted,
    sizes: Sizes,
    *,
    side: str = "auto",
    route: str = "auto",
) -> Schedule:
    """The schedule of a backward pass; side and route "auto" take the ones with fewer bytes.

    Other arguments as of `rings.Schedule`. Raises ValueError for an unknown algorithm or side.
    """
    made = backward_schedules(algorithm, grid, [wanted], sizes, side=side, route=route)
    return made[0]


def backward_schedules(
    algorithm: str,
    grid: Grid,
    row_chunks: Sequence[Wanted],
    sizes: Sizes,
    *,
    side: str = "auto",
    route: str = "auto",
) -> list[Schedule]:
    """`backward_schedule` for each row chunk of one call, from what each of them wants.

    Side "auto" is one for all of them: the side with fewer bytes over all chunks, ranks and links,
    "kv" where they are equal. Where nothing is hidden one side is cheaper on both link classes.
    """
    sides = (side,) if side != "auto" else SIDES
    found: tuple[int, str, list[Schedule]] | None = None
    bytes_, many = sizes.backward, len(sides) > 1
    made = {
        each: [
            rings.backward(algorithm, grid, each, wanted=wanted, row_bytes=bytes_)
            for wanted in row_chunks
        ]
        for each in sides
    }
    for least, each in sorted((sum(map(_fewest_bytes, made[each])), each) for each in sides):
        if found is None or (least, each) < found[:2]:  # else there is no need to count
            passes = [_by_route(ring, route, sizes) for ring in made[each]]
            sent = many and sum(traffic(s, None, sizes).total for s in passes)
            found = min(found or (sent, each, passes), (sent, each, passes), key=lambda x: x[:2])
    return found[2] if found else []


def _fewest_bytes(schedule: Schedule) -> int:
    """Bytes that no route stays below: each rank gets what it wants once, and sends its sums once;
    0 where both sides travel.
    """
    of = schedule.travelling
    each = sum(getattr(schedule.row_bytes, family) for family in schedule.sent_families)
    return int(of.rows @ of.wanted.sum(axis=1)) * each * ALGORITHMS[schedule.algorithm].sided


def _by_route(ring: Schedule, route: str, sizes: Sizes) -> Schedule:
    """The schedule by `route`; "auto" is the route with fewer bytes between nodes and, of equals,
    with fewer bytes within nodes; "ring" where both are equal.
    """
    if route != "auto":
        return replace(ring, route=route)
    # Where all want all, both routes carry every row to every rank, and the ring uses the fast
    # links for it; some algorithms have no route. Then there is nothing to count.
    if ring.all_want_all or not ALGORITHMS[ring.algorithm].routed:
        return ring
    direct = replace(ring, route="direct")
    if _clearly_fewer(ring, ring.grid):
        return direct
    sent = {each: traffic(each, None, sizes) for each in (ring, direct)}
    return min(sent, key=lambda each: (sent[each].inter, sent[each].intra))


def _clearly_fewer(ring: Schedule, grid: Grid) -> bool:
    """Does route "direct" send fewer bytes between nodes, or in a single node, than ring hops to
    the farthest who want a row? Then there is no need to make the tables of the ring.

    Whichever way they go round, copies pass every node up to the last one that wants them, and
    gradients every node from the first one on.
    """
    of, width = ring.travelling, grid.intra if grid.inter > 1 else 1
    length = grid.size // width
    bundle, rank = np.divmod(np.flatnonzero(of.wanted), grid.size)
    ahead = (rank // width - of.owner[bundle] // width) % length
    bundle, ahead = bundle[ahead > 0], ahead[ahead > 0]
    first = np.flatnonzero(np.diff(bundle, prepend=-1))
    rows = of.rows[bundle]
    last = rows[first] @ np.maximum.reduceat(ahead, first)
    turned = rows[first] @ (length - np.minimum.reduceat(ahead, first))
    copy, gradient = (getattr(ring.row_bytes, name) for name in (ring.side, "d" + ring.side))
    hops = copy * last + gradient * turned, copy * turned + gradient * last
    return rows.sum() * (copy + gradient) < min(hops)


def visible_pairs(mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> int:
    """How many (query, key) pairs of two shards attend, exactly."""
    # How pairs are cut decides how long counting takes, not what is counted.
    cutter = Cutter(band_rows=256, table_rows=256)
    return sum(tile.visible for tile in cutter.tiles(mask, q_spans, k_spans))


def ring_spans(layout: Layout, topology: Topology, seq_len: int) -> list[tuple[Span, ...]]:
    """The spans that each member of a ring computes with: those of its whole ulysses group.

    The all-to-all gives every member the rows of all of them, in the order of `shared_spans`. All
    rings of a grid have the same spans, so these are the spans of rank 0's.
    """
    return [
        shared_spans([layout.spans(rank, seq_len) for rank in topology.ulysses_group(member)])
        for member in topology.ring(0)
    ]
