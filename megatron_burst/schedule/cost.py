# SPDX-License-Identifier: Apache-2.0
"""Bytes that a schedule sends and pairs that it computes; choice of side and route by bytes.

The side selects the tensors that backward sends: queries, or keys and values. The route selects the
ring of the algorithm, or direct transfers. Bytes and pairs are counted in the schedules and tiles
that the executor runs. Sizes are plain numbers, so no torch is needed.

Source: BurstEngine, section 3.1. The paper saves bytes by sending queries in backward. With
grouped-query attention, keys and values are smaller than queries, so sending queries can cost more
bytes. So the side is chosen by the sizes.
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
from .demand import Visibility
from .head_shares import shared_spans
from .rings import Schedule
from .sizes import Sizes
from .tables import FAMILIES, SIDES, Grid, Tables, Transfers
from .topology import Topology


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that are sent within nodes (`intra`) and between nodes (`inter`)."""

    intra: int = 0
    inter: int = 0

    @property
    def total(self) -> int:
        """Total bytes of both link classes."""
        return self.intra + self.inter

    def __add__(self, addend: Traffic) -> Traffic:
        return Traffic(self.intra + addend.intra, self.inter + addend.inter)


def traffic(schedule: Schedule, rank: int | None, sizes: Sizes) -> Traffic:
    """Return the payload bytes that a rank sends in one pass.

    Args:
        schedule: Schedule of the pass.
        rank: A rank of the ring; None for the total of all ranks.
        sizes: Sizes of the attention call.
    """
    transfers = schedule.tables.transfers
    transfers = transfers if rank is None else transfers.where(transfers.src == rank)
    sent, between = message_bytes(schedule, transfers, sizes), transfers.between(schedule.grid)
    return Traffic(int(sent[~between].sum()), int(sent[between].sum()))


def message_bytes(schedule: Schedule, transfers: Transfers, sizes: Sizes) -> np.ndarray:
    """Return the payload bytes of each transfer in `transfers`, int64."""
    row_bytes = np.array(sizes.row_bytes(schedule), dtype=np.int64)
    return rows_sent(schedule.tables, transfers) * row_bytes[transfers.family]


def rows_sent(tables: Tables, transfers: Transfers) -> np.ndarray:
    """Return the number of rows of each transfer in `transfers`, int64."""
    rows = np.zeros(len(transfers.owner), dtype=np.int64)
    of_keys = np.array([name in ("kv", "dkv") for name in FAMILIES])[transfers.family]
    for selected, bundles in ((of_keys, tables.keys), (~of_keys, tables.queries)):
        rows[selected] = bundles.rows_of(transfers.owner[selected], transfers.rows[selected])
    return rows


def head_traffic(
    links: Sequence[str], rank: int, sizes: Sizes, resends_q: bool = False
) -> tuple[Traffic, Traffic]:
    """Return the bytes that a rank sends in the all-to-alls of its ulysses group.

    Args:
        links: Link class ("intra" or "inter") from the rank to each member of its group.
        rank: Index of the rank in the group.
        sizes: Sizes of one rank on the ring, after the all-to-all.
        resends_q: True if backward sends queries again, as with row chunks.

    Returns:
        Bytes in forward and bytes in backward.
    """
    peers = [link for peer, link in enumerate(links) if peer != rank]
    counts = {link: peers.count(link) for link in ("intra", "inter")}
    sent = sizes.scattered_bytes(len(links), resends_q)
    forward, back = (
        Traffic(**{name: count * size for name, count in counts.items()}) for size in sent
    )
    return forward, back


def key_sum_traffic(links: Sequence[str], rank: int, sizes: Sizes) -> Traffic:
    """Return the bytes that a rank sends to sum the gradients of keys that every rank holds.

    Args:
        links: Link class ("intra" or "inter") from the rank to each rank, including the rank
            itself.
        rank: The rank.
        sizes: Sizes of one rank's tensors.
    """
    peers = [link for peer, link in enumerate(links) if peer != rank]
    sent = 2 * key_sum_bytes(links, sizes)
    return Traffic(peers.count("intra") * sent, peers.count("inter") * sent)


def key_sum_bytes(links: Sequence[str], sizes: Sizes) -> int:
    """Return the bytes of one message of `key_sum_traffic`.

    A rank sends two messages of this size to each other rank.
    """
    elements = sizes.key_rows * sizes.backward.dkv // sizes.wire_itemsize
    return -(-elements // len(links)) * sizes.wire_itemsize


def forward_schedule(
    algorithm: str, grid: Grid, visibility: Visibility, sizes: Sizes, *, route: str = "auto"
) -> Schedule:
    """Return the schedule of a forward pass.

    Args:
        algorithm: A name in `algorithms.ALGORITHMS`.
        grid: Grid of the ranks.
        visibility: Ranks and rows that attend to each other.
        sizes: Sizes of the attention call.
        route: "ring", "direct" or "auto", which uses the route with fewer bytes.

    Raises:
        ValueError: There is no algorithm of that name.
    """
    ring = rings.forward(algorithm, grid, visibility=visibility, row_bytes=sizes.forward)
    return _by_route(ring, route, sizes)


def backward_schedule(
    algorithm: str,
    grid: Grid,
    visibility: Visibility,
    sizes: Sizes,
    *,
    side: str = "auto",
    route: str = "auto",
) -> Schedule:
    """Return the schedule of a backward pass.

    Args:
        algorithm: A name in `algorithms.ALGORITHMS`.
        grid: Grid of the ranks.
        visibility: Ranks and rows that attend to each other.
        sizes: Sizes of the attention call.
        side: Tensors that are sent: "kv" (keys and values), "query" or "auto", which selects the
            option with fewer bytes.
        route: "ring", "direct" or "auto", which uses the route with fewer bytes.

    Raises:
        ValueError: There is no algorithm or side of that name.
    """
    schedules = backward_schedules(algorithm, grid, [visibility], sizes, side=side, route=route)
    return schedules[0]


def backward_schedules(
    algorithm: str,
    grid: Grid,
    row_chunks: Sequence[Visibility],
    sizes: Sizes,
    *,
    side: str = "auto",
    route: str = "auto",
) -> list[Schedule]:
    """Return the backward schedule of each row chunk of one call.

    All row chunks send the same tensors. `side` "auto" selects the tensors with fewer bytes in
    total over all chunks, ranks and links, and "kv" if the bytes are equal.

    Args:
        algorithm: A name in `algorithms.ALGORITHMS`.
        grid: Grid of the ranks.
        row_chunks: Ranks and rows that attend to each other, for each row chunk.
        sizes: Sizes of the attention call.
        side: Same as in `backward_schedule`.
        route: Same as in `backward_schedule`.

    Raises:
        ValueError: There is no algorithm or side of that name.
    """
    sides = (side,) if side != "auto" else SIDES
    best: tuple[int, str, list[Schedule]] | None = None
    bytes_, compares = sizes.backward, len(sides) > 1
    rings_by_side = {
        side_name: [
            rings.backward(algorithm, grid, side_name, visibility=visibility, row_bytes=bytes_)
            for visibility in row_chunks
        ]
        for side_name in sides
    }
    for least, side_name in sorted(
        (sum(map(_fewest_bytes, rings_by_side[side_name])), side_name) for side_name in sides
    ):
        if best is None or (least, side_name) < best[:2]:  # else the lower bound exceeds the best
            passes = [_by_route(ring, route, sizes) for ring in rings_by_side[side_name]]
            sent = compares and sum(traffic(s, None, sizes).total for s in passes)
            candidate = sent, side_name, passes
            best = min(best or candidate, candidate, key=lambda choice: choice[:2])
    return best[2] if best else []


def _fewest_bytes(schedule: Schedule) -> int:
    """Return a lower bound on the bytes that a pass sends by any route.

    In every route, each row that a rank uses is received at least once, and its partial gradient is
    sent at least once. The bound is 0 if the algorithm sends both queries and keys.
    """
    bundles = schedule.travelling
    row_bytes = sum(getattr(schedule.row_bytes, family) for family in schedule.sent_families)
    return (
        int(bundles.rows @ bundles.users.sum(axis=1))
        * row_bytes
        * ALGORITHMS[schedule.algorithm].sided
    )


def _by_route(ring: Schedule, route: str, sizes: Sizes) -> Schedule:
    """Return the schedule with the transfers of a route.

    "auto" selects the route with fewer bytes. Bytes between nodes are compared first, then bytes
    within nodes. If all bytes are equal, the route is "ring".

    Args:
        ring: Schedule with the transfers of its algorithm.
        route: "ring", "direct" (from each owner directly to the ranks that use the rows) or "auto".
        sizes: Sizes of the attention call.
    """
    if route != "auto":
        return replace(ring, route=route)
    # If every rank uses every row, both routes send every row to every rank, and the ring uses the
    # fast links. Some algorithms have one route only.
    if ring.all_use_all or not ALGORITHMS[ring.algorithm].routed:
        return ring
    direct = replace(ring, route="direct")
    clear = _clear_route(ring, ring.grid)
    if clear is not None:
        return direct if clear == "direct" else ring
    sent = {schedule: traffic(schedule, None, sizes) for schedule in (ring, direct)}
    return min(sent, key=lambda schedule: (sent[schedule].inter, sent[schedule].intra))


def _clear_route(ring: Schedule, grid: Grid) -> str | None:
    """Return the route that certainly sends fewer bytes; None if tables of transfers must decide.

    The ring may run in either direction. Bytes between nodes are compared, or bytes within the node
    if there is only one node. On a ring, a copy passes every node up to its last user, and a
    gradient passes every node from the first user on. Direct transfers send both once per user.
    """
    bundles, width = ring.travelling, grid.intra if grid.inter > 1 else 1
    users, home = np.count_nonzero(bundles.users, axis=1), bundles.owner // grid.intra
    at_home = bundles.users.reshape(-1, *grid)[np.arange(len(home)), home]
    crossings = bundles.rows @ (users - np.count_nonzero(at_home, axis=1))
    if int(bundles.rows[users > 0].sum()) * grid.inter < crossings:
        return "ring"  # on a ring, a row crosses at most once to each node
    length = grid.size // width
    bundle, rank = np.divmod(np.flatnonzero(bundles.users), grid.size)
    ahead = (rank // width - bundles.owner[bundle] // width) % length
    bundle, ahead = bundle[ahead > 0], ahead[ahead > 0]
    first = np.flatnonzero(np.diff(bundle, prepend=-1))
    rows = bundles.rows[bundle]
    last = rows[first] @ np.maximum.reduceat(ahead, first)
    turned = rows[first] @ (length - np.minimum.reduceat(ahead, first))
    copy, gradient = (getattr(ring.row_bytes, name) for name in (ring.side, "d" + ring.side))
    hops = copy * last + gradient * turned, copy * turned + gradient * last
    if rows.sum() * (copy + gradient) < min(hops):
        return "direct"
    # With one ring over all ranks, the bytes of both routes are equal.
    return "ring" if 1 in grid else None


def visible_pairs(mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> int:
    """Return the exact number of visible pairs of the queries and keys of two shards."""
    # The sizes affect the time of counting, not its result.
    cutter = Cutter(band_rows=256, table_rows=256)
    return sum(tile.visible for tile in cutter.tiles(mask, q_spans, k_spans))


def ring_spans(layout: Layout, topology: Topology, seq_len: int) -> list[Sequence[Span]]:
    """Return the spans of the rows with which each rank of a ring computes.

    A span is a run of regularly spaced positions. If ranks share heads (ulysses), an all-to-all
    gives each rank the rows of all ranks of its ulysses group, in the order of `shared_spans`. All
    rings of a grid have the same spans, so the result is computed for the ring of rank 0. If
    `seq_len` is 0, no rank has spans.
    """
    if not seq_len:
        return [()] * topology.ring_size
    if topology.ulysses == 1:
        return [layout.span_array(rank, seq_len) for rank in topology.ring(0)]
    return [
        shared_spans([layout.spans(rank, seq_len) for rank in topology.ulysses_group(member)])
        for member in topology.ring(0)
    ]
