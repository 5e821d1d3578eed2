"""The ring schedules: what each rank computes, sends and receives at each step, as data.

This module owns the order in which chunks travel, for one ring over all ranks, for the two-level
ring, and for chunks that go straight to those who use them. The executor runs a schedule, the
simulator times it, `cost` counts its bytes. A schedule consists of rank numbers only: tensors,
sizes and process groups come in later.

At every step each rank computes one pair, (query chunk, key chunk). One family of chunks travels
and the other stays: in forward, and in backward with side "kv", keys and values travel; in
backward with side "query" the queries travel, with dO, lse and delta. Gradients of the travelling
family travel one step behind it and end at their owner.

Time is counted in boundaries: boundary t lies before step t, and the boundaries after the last
step drain what is still in flight. At a boundary a rank first waits for everything that lands
there and then starts everything that is posted there, so a hop that lands where it is posted
blocks.

Source: BurstEngine section 3.1 (topology-aware ring) and Algorithms 1 and 2, with communication
started before computation; LoongTrain section 4.3 for `double_ring`. One difference in the
gradient traffic: what a rank adds to its own gradient stays on it, and what a node adds to its
own stays in it. Activations and gradients therefore both make G - 1 hops on a flat ring, or
M (L - 1) intra-node and M - 1 inter-node hops (M nodes of L ranks). Hops that no rank further
along needs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .moves import Moves, locations, moves
from .tables import ALGORITHMS, SIDES, Boundary, Chunk, Grid, Hop, Pair, Side


@dataclass(frozen=True)
class Schedule:
    """One pass over all ranks of a grid; `forward` and `backward` build it.

    algorithm: one of `tables.ALGORITHMS`. side: which family travels, "kv" or "query".
    gradients: does the travelling family need gradients, so that these travel as well?
    visible: bool [G, G], may queries of rank i see keys of rank j? Pairs that may not are not
        computed, and what only they need does not travel.
    route: "ring", or "direct" from each owner to the ranks that use its chunk, one step ahead.
    kept: for how many of its last steps a rank kept the chunk from forward.
    """

    algorithm: str
    grid: Grid
    side: Side
    gradients: bool
    visible: np.ndarray = field(repr=False, compare=False)
    route: str = "ring"
    kept: int = 0

    @property
    def rings(self) -> Grid:
        """The grid on which chunks move: one ring over all ranks is a single 'node' of G ranks."""
        two_level = self.route == "ring" and self.algorithm in ("burst", "double_ring")
        return self.grid if two_level else Grid(1, self.grid.size)

    def owner_at(self, rank: int, step: int) -> int:
        """The owner of the travelling chunk that `rank` computes with at `step`."""
        nodes, width = self.rings
        node, index = divmod(rank, width)
        outer, inner = divmod(step, width)
        return (node - outer) % nodes * width + (index - inner) % width

    def pair(self, rank: int, step: int) -> Pair:
        """The pair of chunks that `rank` computes at `step`, where `visible` shows any of it."""
        owner = self.owner_at(rank, step)
        return Pair(rank, owner) if self.side == "kv" else Pair(owner, rank)

    def kept_chunks(self, rank: int) -> list[Chunk]:
        """The chunks that `rank` holds from the start besides its own: those kept from forward."""
        steps = range(self.grid.size - self.kept, self.grid.size)
        used = [step for step in steps if self.visible[self.pair(rank, step)]]
        return [Chunk(self.side, self.owner_at(rank, step)) for step in used]

    @cached_property
    def _moves(self) -> Moves:
        """Which chunks move on from where they are: `sends` lists it, `hop_counts` counts it."""
        return moves(
            self.rings, self.side, self.visible,
            kept=self.kept, gradients=self.gradients, direct=self._one_to_one,
        )  # fmt: skip

    def sends(self, rank: int) -> Iterator[Hop]:
        """Every hop that starts at `rank`."""
        if self._one_to_one:
            yield from self._direct_sends(rank)
            return
        nodes, width = self.rings
        moves = self._moves
        for step in range(self.grid.size):
            at = (self.owner_at(rank, step), *divmod(step, width))
            if moves.intra[at]:
                # Posted before the step that computes with it: the copy to the next rank travels
                # while this rank computes (BurstEngine Algorithm 1).
                yield self._hop(rank, "intra", step, step, step + 1)
            if moves.intra_gradient[at]:
                # Complete only after the step, so it travels beside the next one, a step behind its
                # chunk. When it lands, the receiver has its own part ready.
                land = step + 1 if self._blocks else step + 2
                yield self._hop(rank, "intra", step, step + 1, land, gradient=True)
        for outer in range(nodes):
            first = outer * width
            at = (self.owner_at(rank, first), outer)
            if moves.inter is not None and moves.inter[at]:
                # A whole outer step to cross the slow link: it hides behind `width` pairs.
                yield self._hop(rank, "inter", first, first, first + width)
            if moves.inter_gradient is not None and moves.inter_gradient[at]:
                # The last part of a node's sum takes one intra-node hop more, if there are any.
                # The sum then crosses during the next outer step.
                post = first + width + (width > 1)
                land = post if self._blocks else post + width
                yield self._hop(rank, "inter", first, post, land, gradient=True)

    def hop_counts(self) -> dict[tuple[bool, str], int]:
        """(gradient?, link class) -> how many hops all ranks together make.

        The same hops as `sends`, counted on whole arrays: choosing a side and a route needs the
        counts of many schedules, and a list of hops grows with the square of the ranks.
        """
        nodes, width = self.rings
        moves, here = self._moves, locations(self.rings)
        if self._one_to_one:
            owner = np.arange(self.grid.size)[:, None, None]
            hops = [(False, moves.intra, owner), (True, moves.intra_gradient, owner)]
        else:
            beside = here // width * width + (here % width + 1) % width
            hops = [(False, moves.intra, beside), (True, moves.intra_gradient, beside)]
        counts = {(gradient, link): 0 for gradient in (False, True) for link in ("intra", "inter")}
        for gradient, moved, there in hops:
            # A flat ring crosses nodes as well: only the two ranks say which link a hop takes.
            local = here // self.grid.intra == there // self.grid.intra
            counts[gradient, "intra"] += int((moved & local).sum())
            counts[gradient, "inter"] += int((moved & ~local).sum())
        if moves.inter is not None and moves.inter_gradient is not None and nodes > 1:
            counts[False, "inter"] += int(moves.inter.sum())
            counts[True, "inter"] += int(moves.inter_gradient.sum())
        return counts

    @property
    def _blocks(self) -> bool:
        """Does a gradient hop land where it is posted? LoongTrain's double ring waits for each."""
        return self.algorithm == "double_ring"

    @property
    def _one_to_one(self) -> bool:
        """Do chunks go straight from their owner to each user?"""
        return self.route == "direct" or self.algorithm == "all_gather"

    def _hop(
        self, rank: int, ring: str, step: int, post: int, land: int, gradient: bool = False
    ) -> Hop:
        """The hop to the next rank of `ring`, of the chunk that `rank` computes with at `step`."""
        nodes, width = self.rings
        node, index = divmod(rank, width)
        if ring == "intra":
            dst = node * width + (index + 1) % width
        else:
            dst = (node + 1) % nodes * width + index
        chunk = Chunk("d" * gradient + self.side, self.owner_at(rank, step))
        # One ring over all ranks has its own communicator, although its hops cross either link.
        ring = "flat" if self.algorithm == "ring" else ring
        return Hop(chunk, rank, dst, ring, self.grid.link(rank, dst), post, land)

    def _direct_sends(self, rank: int) -> Iterator[Hop]:
        """The rank's own chunk to every rank that uses it, and gradients back to their owners.

        all_gather starts everything at once; otherwise a chunk is sent one step ahead of its use,
        so that a rank holds two travelling chunks at most.
        """
        size = self.grid.size
        moves = self._moves
        for step in range(1, size):
            dst, owner = (rank + step) % size, (rank - step) % size
            if moves.intra[rank, 0, step]:
                post = 0 if self.algorithm == "all_gather" else step - 1
                link = self.grid.link(rank, dst)
                yield Hop(Chunk(self.side, rank), rank, dst, "flat", link, post, step)
            if moves.intra_gradient[owner, 0, step]:
                chunk, link = Chunk("d" + self.side, owner), self.grid.link(rank, owner)
                yield Hop(chunk, rank, owner, "flat", link, step + 1, step + 2)

    def receives(self, rank: int) -> Iterator[Hop]:
        """Every hop that ends at `rank`."""
        nodes, width = self.rings
        node, index = divmod(rank, width)
        # The only ranks that send here: the neighbours before this one on its two rings.
        before = {node * width + (index - 1) % width, (node - 1) % nodes * width + index}
        if self._one_to_one:
            before = set(range(self.grid.size))
        for src in sorted(before - {rank}):
            yield from (hop for hop in self.sends(src) if hop.dst == rank)

    def program(self, rank: int, own_last: bool = False) -> tuple[Boundary, ...]:
        """What `rank` does: its boundaries in order, of the steps and of the draining after them.

        own_last: compute the pair of the rank's own chunks, which depends on no hop, not at step 0
        but while the last gradient hop travels. For head chunks that run behind others: the pairs
        of those hide its first hops, and its own pair hides its last.
        """
        size = self.grid.size
        sends, receives = list(self.sends(rank)), list(self.receives(rank))
        end = max([size, *(hop.land for hop in sends + receives)])
        own = 0
        if own_last and self.gradients:
            # The last boundary that posts a gradient: the own pair runs beside that hop.
            own = max([size, *(hop.post for hop in sends if hop.chunk.gradient)])
            end = max(end, own + 1)
        posts: list[list[Hop]] = [[] for _ in range(end + 1)]
        for hop in sends + receives:
            posts[hop.post].append(hop)
        release: list[list[Chunk]] = [[] for _ in range(end + 1)]
        for chunk, boundary in self._last_use(rank, sends, receives, own).items():
            release[boundary].append(chunk)
        pairs = [self.pair(rank, step) for step in range(size)] + [None] * (end + 1 - size)
        pairs[0], pairs[own] = (None, pairs[0]) if own else (pairs[0], pairs[0])
        parts = zip(posts, release, pairs, strict=True)
        return tuple(Boundary(i, tuple(p), tuple(r), pair) for i, (p, r, pair) in enumerate(parts))

    def _last_use(
        self, rank: int, sends: list[Hop], receives: list[Hop], own: int
    ) -> dict[Chunk, int]:
        """The boundary at which each travelling chunk that this rank holds can be released.

        own: the step at which the rank computes with its own chunk.
        """
        chunks = {Chunk(self.side, rank), *self.kept_chunks(rank)}
        chunks |= {hop.chunk for hop in receives if not hop.chunk.gradient}
        steps = {Chunk(self.side, self.owner_at(rank, s)): s + 1 for s in range(self.grid.size)}
        steps[Chunk(self.side, rank)] = own + 1
        last_use = {chunk: steps[chunk] for chunk in chunks}
        for hop in sends:
            # A buffer stays in use while it is sent from, also after the last pair that reads it.
            if not hop.chunk.gradient:
                last_use[hop.chunk] = max(last_use[hop.chunk], hop.land)
        return last_use


def forward(
    algorithm: str, grid: Grid, *, visible: np.ndarray | None = None, route: str = "ring"
) -> Schedule:
    """The schedule of a forward pass: keys and values travel. Arguments as of `Schedule`.

    Raises ValueError for an unknown algorithm.
    """
    return Schedule(check_algorithm(algorithm), grid, "kv", False, _table(grid, visible), route)


def backward(
    algorithm: str,
    grid: Grid,
    side: str,
    *,
    gradients: bool = True,
    visible: np.ndarray | None = None,
    route: str = "ring",
    kept: int = 0,
) -> Schedule:
    """The schedule of a backward pass. Arguments as of `Schedule`.

    Raises ValueError for an unknown algorithm or side.
    """
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)} or auto, got {side!r}")
    table = _table(grid, visible)
    return Schedule(check_algorithm(algorithm), grid, side, gradients, table, route, kept)


def check_algorithm(algorithm: str) -> str:
    """`algorithm`; ValueError, with the list of names, if there is none of that name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm


def _table(grid: Grid, visible: np.ndarray | None) -> np.ndarray:
    return np.ones((grid.size, grid.size), dtype=bool) if visible is None else visible
