# SPDX-License-Identifier: Apache-2.0
"""What a schedule is made of: tables of pairs and transfers over all ranks, and one rank's view.

Plain data; columns are integer arrays, one row per pair or transfer, so that a schedule of a
thousand ranks is made, counted and timed by operations on whole arrays. Which chunk goes where, and
when, is decided in `algorithms`; `program` turns the tables into what one rank does.

Time is counted in boundaries: boundary t lies before step t, and the boundaries after the last
step drain what is still in flight. At a boundary a rank first waits for everything that lands
there and then starts everything that is posted there, so a transfer that lands where it is posted
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args
from zlib import crc32

import numpy as np

from .bundles import Bundles

Side = Literal["kv", "query"]
Route = Literal["ring", "direct"]
Link = Literal["intra", "inter"]

SIDES: tuple[Side, ...] = get_args(Side)
ROUTES: tuple[Route, ...] = get_args(Route)
LINKS: tuple[Link, ...] = get_args(Link)
FAMILIES = ("kv", "query", "dkv", "dquery", "out")  # what each means: `Chunk`
ALL = -1  # every bit set: all rows of a rank's own chunk, in the order of its shard
RINGS = ("flat", "inter", "intra")  # in the order in which a rank starts their exchanges


class Grid(NamedTuple):
    """`inter` nodes of `intra` ranks; rank = node * intra + index in the node."""

    inter: int
    intra: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.inter * self.intra

    def link(self, src: int, dst: int) -> str:
        """The link class between two ranks: "intra" within a node, else "inter"."""
        return LINKS[src // self.intra != dst // self.intra]


class Chunk(NamedTuple):
    """What travels: a family of tensors of one owner, some of its rows.

    family: "kv" and "query" are copies of what the owner has, which ranks keep; "dkv" and "dquery"
    are gradients, to which ranks add; "out" is a partial output with its lse, which ranks merge by
    online softmax. rows: bit set over the owner's bundles (`bundles`), of keys for "kv" and "dkv",
    else of queries.
    """

    family: str
    owner: int
    rows: int = ALL

    @property
    def accumulated(self) -> bool:
        """Is it a partial result, to which ranks add, and not a copy of what the owner has?"""
        return self.family not in ("kv", "query")


class Hop(NamedTuple):
    """One chunk from rank `src` to rank `dst`, started at boundary `post`, there by `land`."""

    chunk: Chunk
    src: int
    dst: int
    ring: str  # "flat", "intra" or "inter": whose process group carries it
    link: str  # "intra" or "inter": the link class it crosses
    post: int
    land: int


class Pair(NamedTuple):
    """The owners of the query chunk and the key chunk of one local attention, and which of their
    rows: bit sets over bundles. Of a chunk that came in parts, the parts with such rows.
    """

    query: int
    key: int
    query_rows: int = ALL
    key_rows: int = ALL


@dataclass(frozen=True)
class Boundary:
    """What one rank does at one boundary, and the pairs it computes after it (none: it waits)."""

    index: int
    posts: tuple[Hop, ...]  # hops from or to this rank that start here
    release: tuple[Chunk, ...]  # chunks this rank has neither to compute with nor to send any more
    pairs: tuple[Pair, ...]


class Pairs(NamedTuple):
    """Columns: `rank` computes queries of `query` with keys of `key` at `step`; rows as of `Pair`.

    Every query row and key row that see each other are in exactly one pair.
    """

    rank: np.ndarray
    step: np.ndarray
    query: np.ndarray
    key: np.ndarray
    query_rows: np.ndarray
    key_rows: np.ndarray


class Transfers(NamedTuple):
    """Columns: the rows `rows` of the chunk `family` (an index of `FAMILIES`) of `owner` go from
    `src` to `dst` on `ring` (an index of `RINGS`), started at boundary `post`, there by `land`.

    Copies come from the owner, or from one message that landed at `src` by `post`. A partial result
    takes what `src` has added up of these rows so far, and clears it; what the owner itself adds
    never travels. Between two ranks, messages of one boundary and ring start in this order.
    """

    family: np.ndarray
    owner: np.ndarray
    rows: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    ring: np.ndarray
    post: np.ndarray
    land: np.ndarray

    @property
    def accumulated(self) -> np.ndarray:
        """Which of them carry partial results?"""
        return self.family >= FAMILIES.index("dkv")

    def where(self, rows: np.ndarray) -> Transfers:
        """These rows (indices, or bool per row)."""
        return Transfers(*(column[rows] for column in self))

    def between(self, grid: Grid) -> np.ndarray:
        """Which of them cross between nodes?"""
        return self.src // grid.intra != self.dst // grid.intra

    def hops(self, grid: Grid) -> Iterator[Hop]:
        """One `Hop` per row."""
        for family, owner, rows, src, dst, ring, post, land in zip(
            *(column.tolist() for column in self), strict=True
        ):
            chunk = Chunk(FAMILIES[family], owner, rows)
            yield Hop(chunk, src, dst, RINGS[ring], grid.link(src, dst), post, land)


class Tables(NamedTuple):
    """A schedule of one pass. steps: how many there are before the draining.

    queries, keys: the bundles over which rows are bit sets.
    """

    steps: int
    pairs: Pairs
    transfers: Transfers
    queries: Bundles
    keys: Bundles

    def bundles(self, family: str) -> Bundles:
        """Those of the rows of a family."""
        return self.keys if family in ("kv", "dkv") else self.queries

    @property
    def digest(self) -> int:
        """A number that tells other tables of transfers, or other bundles, from these."""
        found = 0
        bundles = (x for each in (self.queries, self.keys) for x in (each.number, *each.runs))
        for column in (*self.transfers, *bundles):
            found = crc32(np.ascontiguousarray(column, dtype=np.int64).data, found)
        return found


def transfers(
    family: str,
    ring: str,
    owner: np.ndarray,
    rows: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    post: np.ndarray,
    land: np.ndarray,
) -> Transfers:
    """Transfers of one family on one ring; the other columns as of `Transfers`."""
    codes = FAMILIES.index(family), RINGS.index(ring)
    families, rings = (np.full(len(owner), code, dtype=np.int8) for code in codes)
    return Transfers(families, owner, rows, src, dst, rings, post, land)
