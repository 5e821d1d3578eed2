# SPDX-License-Identifier: Apache-2.0
"""The types of a schedule: tables of pairs and transfers over all ranks, and the view of one rank.

The tables are plain data. Their columns are integer arrays with one row per pair or transfer, so a
schedule of a thousand ranks is made, counted and timed by operations on whole arrays. `algorithms`
make the tables. `program` extracts the operations of one rank from them.

Time is counted in boundaries. Boundary t is before step t. At the boundaries after the last step,
ranks wait for the transfers that are still in flight. At a boundary a rank first waits for every
transfer that lands there. It then starts every transfer that is posted there. A transfer that is
posted and lands at the same boundary is blocking.
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
FAMILIES = ("kv", "query", "dkv", "dquery", "out")  # see `Chunk.family`
ALL = -1  # every bit set: all rows of a rank's own chunk, in the order of its shard
RINGS = ("flat", "inter", "intra")  # process groups, in the order in which a rank starts exchanges


class Grid(NamedTuple):
    """A grid of `inter` nodes with `intra` ranks each; rank = node * intra + index in the node."""

    inter: int
    intra: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.inter * self.intra

    def link(self, src: int, dst: int) -> str:
        """Return the link class between two ranks: "intra" within a node, else "inter"."""
        return LINKS[src // self.intra != dst // self.intra]


class Chunk(NamedTuple):
    """Some rows of one family of tensors of one owner, which are sent together.

    Attributes:
        family: "kv" and "query" are copies of the owner's tensors, which receivers keep. "dkv" and
            "dquery" are gradients, to which ranks add. "out" is a partial output with its lse,
            which ranks merge by online softmax.
        owner: Rank that owns the rows.
        rows: Bit set with one bit per bundle of the owner. A bundle is the set of rows that the
            same ranks use. The bundles are of keys for "kv" and "dkv", and of queries for other
            families.
    """

    family: str
    owner: int
    rows: int = ALL

    @property
    def accumulated(self) -> bool:
        """True if the chunk is a partial result, to which ranks add, and not a copy."""
        return self.family not in ("kv", "query")


class Hop(NamedTuple):
    """The transfer of one chunk from rank `src` to rank `dst`.

    Attributes:
        chunk: The chunk that is sent.
        src: Rank that sends.
        dst: Rank that receives.
        ring: Process group of the transfer: "flat", "intra" or "inter".
        link: Link class of the transfer: "intra" within a node, "inter" between nodes.
        post: Boundary (moment before a step) at which the transfer starts.
        land: Boundary at which both ranks wait for the end of the transfer.
    """

    chunk: Chunk
    src: int
    dst: int
    ring: str
    link: str
    post: int
    land: int


class Pair(NamedTuple):
    """The queries of one owner and the keys of one owner, for which a rank computes attention.

    If a chunk was received in several parts, the rank uses all parts with some rows of the pair. A
    kernel call computes whole parts. So rows of a part that are not rows of the pair must not be
    visible to the other owner of the pair (`Bundles.users`), or they would be computed twice.

    Attributes:
        query: Owner of the queries.
        key: Owner of the keys.
        query_rows: Bit set with one bit per bundle (group of rows) of the owner's queries.
        key_rows: Bit set with one bit per bundle of the owner's keys.
    """

    query: int
    key: int
    query_rows: int = ALL
    key_rows: int = ALL


@dataclass(frozen=True)
class Boundary:
    """The operations of one rank just before a step, and in the step.

    Attributes:
        index: Number of the step. After the last step, there are boundaries at which the rank only
            waits for transfers.
        posts: Transfers from or to this rank that start before the step.
        release: Received chunks whose buffers this rank releases before the step.
        pairs: Pairs of chunks that this rank computes in the step.
    """

    index: int
    posts: tuple[Hop, ...]
    release: tuple[Chunk, ...]
    pairs: tuple[Pair, ...]


class Pairs(NamedTuple):
    """The table of pairs of all ranks: parallel arrays with one entry per pair.

    Every visible combination of a query row and a key row is in exactly one pair.

    Attributes:
        rank: Rank that computes the pair.
        step: Step at which the rank computes it.
        query: Owner of the queries.
        key: Owner of the keys.
        query_rows: Bit set with one bit per bundle (group of rows) of the owner's queries.
        key_rows: Bit set with one bit per bundle of the owner's keys.
    """

    rank: np.ndarray
    step: np.ndarray
    query: np.ndarray
    key: np.ndarray
    query_rows: np.ndarray
    key_rows: np.ndarray


class Transfers(NamedTuple):
    """The table of transfers of all ranks: parallel arrays with one entry per transfer.

    A copy is sent by its owner, or by a rank that received all these rows in one message by
    boundary `post`. A transfer of a partial result sends the sum that `src` has for these rows, and
    clears the sum. The contribution of the owner itself is never sent. Messages between two ranks
    at one boundary and on one ring start in the order of the table.

    Attributes:
        family: Index of the family in `FAMILIES`.
        owner: Rank that owns the rows.
        rows: Bit set of the rows (one bit per bundle of the owner), as in `Chunk`.
        src: Rank that sends.
        dst: Rank that receives.
        ring: Index of the ring in `RINGS`.
        post: Boundary (moment before a step) at which the transfer starts.
        land: Boundary at which both ranks wait for its end.
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
        """One bool per transfer, true for partial results (gradients and partial outputs)."""
        return self.family >= FAMILIES.index("dkv")

    def where(self, rows: np.ndarray) -> Transfers:
        """Return the transfers that `rows` selects, by indices or by one bool per transfer."""
        return Transfers(*(column[rows] for column in self))

    def between(self, grid: Grid) -> np.ndarray:
        """Return one bool per transfer, true for transfers between nodes."""
        return self.src // grid.intra != self.dst // grid.intra

    def hops(self, grid: Grid) -> Iterator[Hop]:
        """Return an iterator over one `Hop` per transfer."""
        family, owner, rows, src, dst, ring, post, land = (column.tolist() for column in self)
        chunks = map(Chunk, [FAMILIES[index] for index in family], owner, rows)
        rings, links = [RINGS[index] for index in ring], map(grid.link, src, dst)
        return map(Hop, chunks, src, dst, rings, links, post, land)


class Tables(NamedTuple):
    """All pairs that ranks compute in one pass, and all transfers between ranks.

    Attributes:
        steps: Number of compute steps. Waiting for transfers after the last compute step is not
            counted as a step.
        pairs: Pairs of all ranks.
        transfers: Transfers of all ranks.
        queries: Bundles of the query rows. A bundle is a group of rows of one owner that the same
            ranks use. Bit sets of query rows have one bit per bundle.
        keys: Bundles of the key rows. Bit sets of key rows have one bit per bundle.
    """

    steps: int
    pairs: Pairs
    transfers: Transfers
    queries: Bundles
    keys: Bundles

    def bundles(self, family: str) -> Bundles:
        """Return `keys` for the families "kv" and "dkv", and `queries` for other families.

        Each bit of `Chunk.rows` stands for one of these bundles: rows of the owner that the same
        ranks use.
        """
        return self.keys if family in ("kv", "dkv") else self.queries

    @property
    def digest(self) -> int:
        """Checksum of transfers and bundles, which ranks compare before they exchange rows."""
        checksum = 0
        for column in (*self.transfers, [self.queries.digest, self.keys.digest]):
            checksum = crc32(np.ascontiguousarray(column, dtype=np.int64).data, checksum)
        return checksum


def relay_chains(transfers: Transfers) -> dict[int, slice]:
    """Return the chains of transfers that the relay stream starts, by their first boundary.

    A boundary is the moment before a step. All copies are one chain, and all partial results are
    another chain. A chain has the transfers of a range of boundaries, which is the value. The relay
    stream starts a transfer as soon as the transfers that land at its boundary `post` have ended.
    There are no chains if all transfers of each chain start together, because a relay stream then
    gains nothing.
    """
    sums = transfers.accumulated
    posts = [np.unique(transfers.post[of]) for of in (~sums, sums) if of.any()]
    if all(len(post) < 2 for post in posts):
        return {}
    begins = sorted({int(post[0]) for post in posts})
    return {
        begin: slice(begin, end) for begin, end in zip(begins, [*begins[1:], None], strict=True)
    }


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
    """Return transfers of one family ("kv", "dkv", ...) on one ring ("flat", "intra", "inter").

    The other arguments are columns of `Transfers`.
    """
    codes = FAMILIES.index(family), RINGS.index(ring)
    families, rings = (np.full(len(owner), code, dtype=np.int8) for code in codes)
    return Transfers(families, owner, rows, src, dst, rings, post, land)
