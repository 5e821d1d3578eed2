"""The types that schedules are made of: grids, chunks, hops, pairs and boundaries.

Plain data. Which chunk goes where, and when, is decided in `rings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

RingAlgorithm = Literal["burst", "double_ring", "ring", "all_gather"]
Side = Literal["kv", "query"]
Route = Literal["ring", "direct"]
Link = Literal["intra", "inter"]

ALGORITHMS: tuple[RingAlgorithm, ...] = get_args(RingAlgorithm)
SIDES: tuple[Side, ...] = get_args(Side)
ROUTES: tuple[Route, ...] = get_args(Route)
LINKS: tuple[Link, ...] = get_args(Link)


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
        return "intra" if src // self.intra == dst // self.intra else "inter"


class Chunk(NamedTuple):
    """What travels: a family ("kv", "query", or a gradient, "dkv", "dquery") of one owner."""

    family: str
    owner: int

    @property
    def gradient(self) -> bool:
        """Is it a sum of gradients, which ranks add to, and not a copy of what the owner has?"""
        return self.family.startswith("d")


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
    """The owners of the query chunk and the key chunk of one local attention."""

    query: int
    key: int


@dataclass(frozen=True)
class Boundary:
    """What one rank does at one boundary, and the pair it computes after it (None: draining)."""

    index: int
    posts: tuple[Hop, ...]  # hops from or to this rank that start here
    release: tuple[Chunk, ...]  # chunks this rank has neither to compute with nor to send any more
    pair: Pair | None
