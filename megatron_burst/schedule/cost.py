"""What a schedule costs: bytes per link class, work per rank, and which choice is cheaper.

Reads schedules and tiles, so the figures cannot drift from what runs. Sizes are plain numbers:
no torch. Source: BurstEngine section 3.1 ("Bytes, exactly"); for grouped-query attention the
paper's saving inverts, which is why the side is computed and not fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..layout import LAYOUTS, Layout, Span, make
from ..masks import Mask
from ..masks.tiling import Cutter
from . import rings
from .rings import Schedule
from .tables import ROUTES, SIDES, Chunk, Grid
from .topology import Topology


@dataclass(frozen=True)
class Sizes:
    """One rank's share of one attention call in its ring. `*_itemsize` are bytes per element."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    itemsize: int
    stat_itemsize: int  # lse and delta
    wire_itemsize: int  # travelling gradients
    needs_grad: tuple[bool, bool, bool]  # q, k, v

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Payload bytes of one chunk; a gradient nobody wants does not travel."""
        query, key, value, out = self._elements
        q, k, v = self.needs_grad
        if chunk.family == "kv":
            return (key + value) * self.itemsize
        if chunk.family == "dkv":
            return (k * key + v * value) * self.wire_itemsize
        if chunk.family == "dquery":
            return q * query * self.wire_itemsize
        stats = 2 * self.tokens * self.batch * self.heads * self.stat_itemsize
        return (query + out) * self.itemsize + stats

    def gradients_travel(self, side: str) -> bool:
        return self.chunk_bytes(Chunk("d" + side, 0)) > 0

    @property
    def _elements(self) -> tuple[int, int, int, int]:
        """Elements of q, k, v and out."""
        rows = self.tokens * self.batch
        heads, kv_heads = rows * self.heads, rows * self.kv_heads
        return (
            heads * self.width,
            kv_heads * self.width,
            kv_heads * self.value_width,
            heads * self.value_width,
        )

    def scattered_bytes(self, ranks: int) -> tuple[int, int]:
        """What one rank of a ulysses group of `ranks` sends to one other, forward and backward."""
        query, key, value, out = self._elements
        q, k, v = self.needs_grad
        forward = (query + key + value + out) * self.itemsize
        back = out * self.itemsize + (q * query + k * key + v * value) * self.wire_itemsize
        return forward // ranks, back // ranks


@dataclass(frozen=True)
class Traffic:
    """Payload bytes one rank sends in one pass, by link class."""

    intra: int = 0
    inter: int = 0

    @property
    def total(self) -> int:
        return self.intra + self.inter

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.intra + other.intra, self.inter + other.inter)


def traffic(schedule: Schedule, rank: int, sizes: Sizes) -> Traffic:
    """The bytes `rank` sends when a schedule runs once."""
    sent = {"intra": 0, "inter": 0}
    for hop in schedule.sends(rank):
        sent[hop.link] += sizes.chunk_bytes(hop.chunk)
    return Traffic(**sent)


def head_traffic(links: Sequence[str], rank: int, sizes: Sizes) -> tuple[Traffic, Traffic]:
    """The bytes `rank` of a ulysses group sends, forward and backward; `links` to each of it."""
    others = [link for peer, link in enumerate(links) if peer != rank]
    counts = {link: others.count(link) for link in ("intra", "inter")}
    both = sizes.scattered_bytes(len(links))
    forward, back = (Traffic(**{k: n * size for k, n in counts.items()}) for size in both)
    return forward, back


def forward_schedule(
    algorithm: str, grid: Grid, visible: np.ndarray, sizes: Sizes, *, route: str = "auto"
) -> Schedule:
    """The forward schedule of a plan; route "auto" takes fewer bytes. Others as in `Schedule`."""
    return _by_route(
        lambda route: rings.forward(algorithm, grid, visible=visible, route=route), route, sizes
    )


def backward_schedule(
    algorithm: str,
    grid: Grid,
    visible: np.ndarray,
    sizes: Sizes,
    *,
    side: str = "auto",
    route: str = "auto",
    kept: int = 0,
) -> Schedule:
    """The backward schedule of a plan; "auto" takes fewer bytes. Others as in `Schedule`.

    Keys can be kept where they are what travels: then side "auto" is "kv", and side "query"
    keeps none.
    """

    def of(side: str) -> Schedule:
        def by(route: str) -> Schedule:
            return rings.backward(
                algorithm, grid, side, gradients=sizes.gradients_travel(side), visible=visible,
                route=route, kept=kept if side == "kv" else 0,
            )  # fmt: skip

        return _by_route(by, route, sizes)

    if side == "auto":
        side = "kv" if kept else cheaper_side(of, sizes)
    return of(side)


def _by_route(make_schedule: Callable[[str], Schedule], route: str, sizes: Sizes) -> Schedule:
    """The schedule by `route`; "auto": the cheaper, and where everything is wanted the ring."""
    if route != "auto":
        return make_schedule(route)
    ring = make_schedule("ring")
    if ring.visible.all() or ring.algorithm == "all_gather":
        return ring
    return make_schedule(cheaper_route(make_schedule, sizes))


def cheaper_side(backward: Callable[[str], Schedule], sizes: Sizes) -> str:
    """The side with fewer bytes over all ranks and links; "kv" where they are equal.

    backward: side -> its schedule. On one ring both sides make the same hops, so one side is
    cheaper on both link classes or on neither, and the sum of both decides.
    """
    return min(SIDES, key=lambda side: total_traffic(backward(side), sizes).total)


def cheaper_route(make_schedule: Callable[[str], Schedule], sizes: Sizes) -> str:
    """ "ring", or "direct" where that sends fewer bytes between nodes, or as many there and fewer
    within nodes. make_schedule: route -> its schedule."""

    def bytes_sent(route: str) -> tuple[int, int]:
        total = total_traffic(make_schedule(route), sizes)
        return total.inter, total.intra

    return min(ROUTES, key=bytes_sent)


def total_traffic(schedule: Schedule, sizes: Sizes) -> Traffic:
    """The bytes that all ranks of a ring send when a schedule runs once."""
    families = {False: Chunk(schedule.side, 0), True: Chunk("d" + schedule.side, 0)}
    sent = {"intra": 0, "inter": 0}
    for (gradient, link), hops in schedule.hop_counts().items():
        sent[link] += hops * sizes.chunk_bytes(families[gradient])
    return Traffic(**sent)


# --- work ----------------------------------------------------------------------------------


def visible_pairs(mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> int:
    """How many (query, key) pairs of two shards attend; exact."""
    cutter = Cutter(band_rows=256, table_rows=256)
    return sum(tile.visible for tile in cutter.tiles(mask, q_spans, k_spans))


def ring_spans(layout: Layout, topology: Topology, seq_len: int) -> list[tuple[Span, ...]]:
    """The positions each member of a ring computes with: those of its whole ulysses group. The
    rings of a grid are alike."""
    return [
        tuple(s for rank in topology.ulysses_group(member) for s in layout.spans(rank, seq_len))
        for member in topology.ring(0)
    ]


def work(layout: Layout, mask: Mask, seq_len: int) -> list[int]:
    """Visible pairs that each rank's queries have, over all keys.

    Ranks that share heads compute the sum of their group's, each for its part of the heads.
    """
    whole = (Span(0, 1, seq_len),)
    mask.check(seq_len)
    return [
        visible_pairs(mask, layout.spans(rank, seq_len), whole) for rank in range(layout.cp_size)
    ]


def imbalance(
    layout: Layout,
    mask: Mask,
    seq_len: int,
    *,
    topology: Topology | None = None,
    algorithm: str = "ring",
) -> float:
    """The busiest rank's work over the mean, summed over steps: 1.0 is perfect balance.

    Every step waits for its slowest rank, so the algorithm, which says who meets whom at which
    step, matters, and so do the nodes and the ranks that share heads. Without `topology`: one
    ring over all ranks.
    """
    size = layout.cp_size
    topology = topology or Topology(size, size)
    if topology.size != size:
        raise ValueError(f"topology has {topology.size} ranks, the layout {size}")
    mask.check(seq_len)
    spans = ring_spans(layout, topology, seq_len)
    pairs = np.array([[visible_pairs(mask, q, k) for k in spans] for q in spans])
    grid = Grid(topology.inter_size, topology.intra_size)
    return imbalance_of(rings.forward(algorithm, grid), pairs)


def imbalance_of(schedule: Schedule, pairs: np.ndarray) -> float:
    """As `imbalance`, of a schedule; pairs: int [G, G], visible pairs of shards i and j."""
    ranks = range(schedule.grid.size)
    busiest = sum(max(int(pairs[schedule.pair(rank, step)]) for rank in ranks) for step in ranks)
    total = int(pairs.sum())
    return busiest * len(ranks) / total if total else 1.0


def best_layout(
    mask: Mask,
    cp_size: int,
    seq_len: int,
    *,
    topology: Topology | None = None,
    algorithm: str = "ring",
) -> str:
    """The layout with the least imbalance; zigzag, Megatron's own, where several are equal."""

    def badness(name: str) -> tuple[float, bool]:
        layout = make(name, cp_size=cp_size)
        found = imbalance(layout, mask, seq_len, topology=topology, algorithm=algorithm)
        return round(found, 3), name != "zigzag"

    return min(LAYOUTS, key=badness)
