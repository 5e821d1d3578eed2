"""Random passes for the tests of schedules: grids, masks, layouts, and what travels.

hypothesis draws the kinds, which shrink; the numbers inside come from a generator that it seeds.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from megatron_burst import layout, masks
from megatron_burst.layout import Span
from megatron_burst.schedule.demand import RowBytes
from megatron_burst.schedule.program import hops_of
from megatron_burst.schedule.tables import Grid

GRIDS = [Grid(inter, intra) for inter in range(1, 5) for intra in range(1, 5)]
GRIDS += [Grid(1, 8), Grid(8, 1)]
SMALL = [grid for grid in GRIDS if grid.size <= 9]
LAYOUTS = ("contiguous", "zigzag", "striped", "block_striped", "zigzag in documents", "uneven")
MASKS = (
    "full", "causal", "window", "documents", "blocks", "dilated", "prefix", "dense", "two windows",
)  # fmt: skip


class World(NamedTuple):
    """Who holds which positions, and which of them see each other."""

    grid: Grid
    shards: list[tuple[Span, ...]]
    mask: masks.Mask


class Pass(NamedTuple):
    """What a pass asks besides its world. side "": forward."""

    side: str
    row_bytes: RowBytes
    whole: bool
    route: str


def sends(schedule, rank):
    """Every hop that starts at `rank`."""
    return [hop for hop in hops_of(schedule.tables, schedule.grid, rank) if hop.src == rank]


@st.composite
def worlds(draw, grids=GRIDS):
    grid, kind, mask = (draw(st.sampled_from(x)) for x in (grids, LAYOUTS, MASKS))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = 2 * int(random.integers(1, 4))
    length, bounds = rows * grid.size, None
    if kind == "zigzag in documents":
        bounds = np.array([0, *np.cumsum(random.integers(1, 3, rows // 2))]) * 2 * grid.size
        length = int(bounds[-1])
    shards = _shards(kind, grid.size, length, bounds, random)
    return World(grid, shards, _mask(mask, length, bounds, random))


@st.composite
def passes(draw, world):
    """A forward or backward pass over this world."""
    side, whole, route = (
        draw(st.sampled_from(x)) for x in (("", "kv", "query"), (False, True), ("ring", "direct"))
    )
    # Of unequal bytes, so that either direction of a ring may be the better one.
    kv, query, dkv, dquery, out = draw(st.lists(st.integers(1, 9), min_size=5, max_size=5))
    gradients = (dkv, dquery) if side and draw(st.booleans()) else (0, 0)
    row_bytes = RowBytes(kv, query, *gradients, out=0 if side else out)
    return Pass(side, row_bytes, whole, route)


def _shards(kind, size, length, bounds, random):
    if kind == "uneven":
        return _uneven(size, length, random)
    name, more = kind, {}
    if kind == "block_striped":
        more = {"block": length // 2 if length % (2 * size) == 0 else length}
    if kind == "zigzag in documents":
        name, more = "zigzag", {"cu_seqlens": bounds}
    order = layout.make(name, cp_size=size, **more)
    return [order.spans(rank, length) for rank in range(size)]


def _uneven(size, length, random):
    """Every position at some rank, as it comes: shards of any length, also none at all."""
    cuts = np.unique([0, *random.integers(0, length, 2 * size), length]).tolist()
    spans = [Span(a, 1, b - a) for a, b in pairwise(cuts)]
    at = random.integers(0, size, len(spans))
    return [tuple(span for span, to in zip(spans, at, strict=True) if to == rank)
            for rank in range(size)]  # fmt: skip


def _mask(kind, length, bounds, random):
    def documents():
        if bounds is not None:
            return masks.Documents(bounds)
        cuts = random.integers(0, length, int(random.integers(0, 5)))
        return masks.Documents(np.array([0, *np.sort(cuts), length]))

    def blocks():
        sizes = [block for block in (1, 2, 3, 4, 8) if length % block == 0]
        block = int(random.choice(sizes))
        return masks.BlockSparse(random.random((length // block,) * 2) < random.random(), block)

    def window():
        return masks.Window(int(random.integers(0, length)), int(random.integers(0, 3)))

    return {
        "full": masks.Full,
        "causal": masks.Causal,
        "window": window,
        "documents": lambda: documents() & masks.Causal(),
        "blocks": blocks,
        "dilated": lambda: masks.Dilated(int(random.integers(1, 6))) & masks.Causal(),
        "prefix": lambda: masks.Causal() | masks.Prefix(int(random.integers(0, length))),
        "dense": lambda: masks.Dense(random.random((length, length)) < random.random()),
        "two windows": lambda: window() | masks.Window(0, 0) & documents(),
    }[kind]()
