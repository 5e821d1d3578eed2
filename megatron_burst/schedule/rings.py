"""What each rank computes, sends and receives at each step, as data.

The executor runs a schedule, the byte counters check it, cost reads it. It knows rank
numbers, the grid of nodes, and which rank wants which chunk; no tensors, no sizes, no groups.

Every rank computes one (query chunk, key chunk) pair per step. One family of chunks travels,
the other stays: in forward, and in backward with side "kv", keys and values travel; in
backward with side "query" the queries do, with what belongs to them. Gradients of the
travelling family travel behind it and end at their owner.

Time is counted in boundaries: boundary t lies before step t, boundaries after the last step
drain what is still in flight. At a boundary first everything that lands there is waited for,
then everything posted there is started; a hop that lands where it is posted blocks.

Source: BurstEngine section 3.1 (topology-aware ring) and Algorithms 1 and 2, compute before
communication; LoongTrain section 4.3 for `double_ring`. Variant of the gradient traffic: what
a rank adds to its own gradient stays home, and so does what a node adds to its own, so that
activations and gradients both make G - 1 hops (flat), or M (L - 1) intra-node and M - 1
inter-node hops (M nodes of L ranks). A hop that serves nobody further along is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .tables import ALGORITHMS, SIDES, Boundary, Chunk, Grid, Hop, Moves, Pair


@dataclass(frozen=True)
class Schedule:
    """One pass over all ranks. Build it with `forward` or `backward`.

    visible: bool [G, G], may queries of rank i see keys of rank j? Pairs that may not are not
    computed, and what only they need does not travel.
    route: "ring", or "direct" from each owner to those who want its chunk, one step ahead.
    kept: the last so many steps of the pass find their chunk already there (kept from forward).
    """

    algorithm: str
    grid: Grid
    side: str
    gradients: bool
    visible: np.ndarray = field(repr=False, compare=False)
    route: str = "ring"
    kept: int = 0

    @property
    def rings(self) -> Grid:
        """The grid the chunks move on: one ring over all ranks is a single 'node' of G."""
        two_level = self.route == "ring" and self.algorithm in ("burst", "double_ring")
        return self.grid if two_level else Grid(1, self.grid.size)

    def visitor(self, rank: int, step: int) -> int:
        """The owner of the travelling chunk that `rank` computes with at `step`."""
        nodes, width = self.rings
        node, index = divmod(rank, width)
        cycle, turn = divmod(step, width)
        return (node - cycle) % nodes * width + (index - turn) % width

    def pair(self, rank: int, step: int) -> Pair:
        visitor = self.visitor(rank, step)
        return Pair(rank, visitor) if self.side == "kv" else Pair(visitor, rank)

    def kept_chunks(self, rank: int) -> list[Chunk]:
        """The chunks that `rank` holds from the start besides its own."""
        steps = range(self.grid.size - self.kept, self.grid.size)
        wanted = [step for step in steps if self.visible[self.pair(rank, step)]]
        return [Chunk(self.side, self.visitor(rank, step)) for step in wanted]

    @cached_property
    def _meets(self) -> np.ndarray:
        """int [owner, cycle, turn]: the rank that the owner's chunk meets then."""
        nodes, width = self.rings
        owner, cycle, turn = np.ogrid[: self.grid.size, :nodes, :width]
        return (owner // width + cycle) % nodes * width + (owner % width + turn) % width

    @cached_property
    def wanted(self) -> np.ndarray:
        """bool [owner, cycle, turn]: does the rank the owner's chunk meets then compute with it?"""
        owner = np.arange(self.grid.size)[:, None, None]
        pairs = (self._meets, owner) if self.side == "kv" else (owner, self._meets)
        return self.visible[pairs]

    @cached_property
    def awaited(self) -> np.ndarray:
        """`wanted` without the pairs whose chunk was kept: these need not be brought."""
        nodes, width = self.rings
        awaited = self.wanted.copy()
        awaited.reshape(-1, nodes * width)[:, nodes * width - self.kept :] = False
        return awaited

    @cached_property
    def _moves(self) -> Moves:
        """Which chunks move on from where they are: `sends` lists it, `hop_counts` counts it.

        An activation moves while somebody further along awaits it, a gradient from the first
        rank that added to it. Turn 0 of a cycle adds to the gradient that this rank gathers for
        its node (in cycle 0: its own), which then crosses to the next node.
        """
        awaited, wanted = self.awaited, self.wanted
        if self._one_to_one:
            gradient = wanted & (np.arange(self.grid.size) > 0) & self.gradients
            return Moves(awaited & (np.arange(self.grid.size) > 0), None, gradient, None)
        later = np.flip(np.logical_or.accumulate(np.flip(awaited, 2), 2), 2)
        later_cycles = np.flip(
            np.logical_or.accumulate(np.flip(np.logical_or.reduce(awaited, 2), 1), 1), 1
        )
        so_far = np.logical_or.accumulate(wanted[:, :, 1:], 2) & self.gradients
        so_far_cycles = (
            np.logical_or.accumulate(np.logical_or.reduce(wanted, 2)[:, 1:], 1) & self.gradients
        )
        return Moves(
            intra=_padded(later[:, :, 1:], 2, 0),
            inter=_padded(later_cycles[:, 1:], 1, 0),
            intra_gradient=_padded(so_far, 2, 1),
            inter_gradient=_padded(so_far_cycles, 1, 1),
        )

    def sends(self, rank: int) -> Iterator[Hop]:
        """Every hop that starts at `rank`."""
        if self._one_to_one:
            yield from self._direct_sends(rank)
            return
        nodes, width = self.rings
        moves = self._moves
        for step in range(self.grid.size):
            at = (self.visitor(rank, step), *divmod(step, width))
            if moves.intra[at]:
                yield self._hop(rank, "intra", step, step, step + 1)
            if moves.intra_gradient[at]:
                land = step + 1 if self._blocks else step + 2
                yield self._hop(rank, "intra", step, step + 1, land, gradient=True)
        for cycle in range(nodes):
            first = cycle * width
            at = (self.visitor(rank, first), cycle)
            if moves.inter is not None and moves.inter[at]:
                yield self._hop(rank, "inter", first, first, first + width)
            if moves.inter_gradient is not None and moves.inter_gradient[at]:
                # The node's sum is whole one hop after its cycle; it crosses during the next.
                post = first + width + (width > 1)
                land = post if self._blocks else post + width
                yield self._hop(rank, "inter", first, post, land, gradient=True)

    def hop_counts(self) -> dict[tuple[bool, str], int]:
        """(gradient?, link class) -> how many hops all ranks together make; `sends`, counted."""
        nodes, width = self.rings
        moves, here = self._moves, self._meets
        if self._one_to_one:
            owner = np.arange(self.grid.size)[:, None, None]
            legs = [(False, moves.intra, owner), (True, moves.intra_gradient, owner)]
        else:
            beside = here // width * width + (here % width + 1) % width
            legs = [(False, moves.intra, beside), (True, moves.intra_gradient, beside)]
        counts = {(gradient, link): 0 for gradient in (False, True) for link in ("intra", "inter")}
        for gradient, moved, there in legs:
            local = here // self.grid.intra == there // self.grid.intra
            counts[gradient, "intra"] += int((moved & local).sum())
            counts[gradient, "inter"] += int((moved & ~local).sum())
        if moves.inter is not None and moves.inter_gradient is not None and nodes > 1:
            counts[False, "inter"] += int(moves.inter.sum())
            counts[True, "inter"] += int(moves.inter_gradient.sum())
        return counts

    @property
    def _blocks(self) -> bool:
        """double_ring waits for every gradient hop where it starts it."""
        return self.algorithm == "double_ring"

    @property
    def _one_to_one(self) -> bool:
        return self.route == "direct" or self.algorithm == "all_gather"

    def _hop(
        self, rank: int, ring: str, step: int, post: int, land: int, gradient: bool = False
    ) -> Hop:
        """The hop of the chunk that visits `rank` at `step` to the next rank of `ring`."""
        nodes, width = self.rings
        node, index = divmod(rank, width)
        if ring == "intra":
            dst = node * width + (index + 1) % width
        else:
            dst = (node + 1) % nodes * width + index
        chunk = Chunk("d" * gradient + self.side, self.visitor(rank, step))
        ring = "flat" if self.algorithm == "ring" else ring
        return Hop(chunk, rank, dst, ring, self.grid.link(rank, dst), post, land)

    def _direct_sends(self, rank: int) -> Iterator[Hop]:
        """The own chunk to everybody who wants it, and each visitor's gradient to its owner.

        all_gather starts everything at once; otherwise one step ahead, to hold two chunks only.
        """
        size = self.grid.size
        moves = self._moves
        for step in range(1, size):
            dst, visitor = (rank + step) % size, (rank - step) % size
            if moves.intra[rank, 0, step]:
                post = 0 if self.algorithm == "all_gather" else step - 1
                link = self.grid.link(rank, dst)
                yield Hop(Chunk(self.side, rank), rank, dst, "flat", link, post, step)
            if moves.intra_gradient[visitor, 0, step]:
                chunk, link = Chunk("d" + self.side, visitor), self.grid.link(rank, visitor)
                yield Hop(chunk, rank, visitor, "flat", link, step + 1, step + 2)

    def receives(self, rank: int) -> Iterator[Hop]:
        """Every hop that ends at `rank`."""
        nodes, width = self.rings
        node, index = divmod(rank, width)
        before = {node * width + (index - 1) % width, (node - 1) % nodes * width + index}
        if self._one_to_one:
            before = set(range(self.grid.size))
        for src in sorted(before - {rank}):
            yield from (hop for hop in self.sends(src) if hop.dst == rank)

    def program(self, rank: int, own_last: bool = False) -> tuple[Boundary, ...]:
        """The part of `rank`: its boundaries in order, the steps and the draining after them.

        own_last: the pair of the own chunks, which waits for nobody, is not computed at step 0 but
        while the last gradient hop travels; for head chunks that follow others.
        """
        size = self.grid.size
        sends, receives = list(self.sends(rank)), list(self.receives(rank))
        end = max([size, *(hop.land for hop in sends + receives)])
        own = 0
        if own_last and self.gradients:
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
        """For every travelling chunk this rank holds at some time, when it can be given up; the
        own one is computed with at step `own`."""
        chunks = {Chunk(self.side, rank), *self.kept_chunks(rank)}
        chunks |= {hop.chunk for hop in receives if not hop.chunk.gradient}
        steps = {Chunk(self.side, self.visitor(rank, s)): s + 1 for s in range(self.grid.size)}
        steps[Chunk(self.side, rank)] = own + 1
        last_use = {chunk: steps[chunk] for chunk in chunks}
        for hop in sends:
            if not hop.chunk.gradient:
                last_use[hop.chunk] = max(last_use[hop.chunk], hop.land)
        return last_use


def forward(
    algorithm: str, grid: Grid, *, visible: np.ndarray | None = None, route: str = "ring"
) -> Schedule:
    """The forward pass: keys and values travel, nothing comes home. Arguments as `Schedule`."""
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
    """The backward pass; `gradients=False` where the travelling family needs no gradient."""
    if side not in SIDES:
        raise ValueError(f"side must be one of {', '.join(SIDES)} or auto, got {side!r}")
    table = _table(grid, visible)
    return Schedule(check_algorithm(algorithm), grid, side, gradients, table, route, kept)


def check_algorithm(algorithm: str) -> str:
    """`algorithm`, if there is one of that name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm


def _table(grid: Grid, visible: np.ndarray | None) -> np.ndarray:
    return np.ones((grid.size, grid.size), dtype=bool) if visible is None else visible


def _padded(moves: np.ndarray, axis: int, side: int) -> np.ndarray:
    """`moves` with one more False along `axis`, at its end (side 0) or its beginning (side 1)."""
    width = [(0, 0)] * moves.ndim
    width[axis] = (side, 1 - side)
    return np.pad(moves, width)
