# SPDX-License-Identifier: Apache-2.0
"""Chains, tables and windows of a sequence, made once per grid, and one rank's part of the tables.

All hops of a round between two ranks are one message, in the order of the table. What is made lies
in the cache that `Groups` carries and has its lifetime; this module decides how much of it is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from ..comm.groups import Groups
from ..comm.rows import Paths, paths
from ..layout.layouts import Layout
from ..layout.pieces import Chains, chains
from ..layout.routes import lineage, preceding_and_most
from ..layout.sharding import to_device
from ..schedule.scans import SCANS
from ..schedule.scans.blocks import StateBlocks
from ..schedule.scans.choice import ScanChoice, blocks_for, choose, links_of
from ..schedule.scans.hops import ALL_BLOCKS, MAP, Hops, Task
from ..schedule.scans.sizes import Form, ScanSizes
from .maps import shape_of

KEPT = 32  # of all kinds together: layers of a few kinds, documents of a few micro-batches


class PackedSequence(NamedTuple):
    """What chains are made of; bounds: of the documents, None for one; tree: a `masks.Tree`, in
    place of these.
    """

    layout: Layout
    seq_len: int
    bounds: tuple[int, ...] | None
    tree: Any = None


class Directions(NamedTuple):
    """The tables of an algorithm, and this rank's part of them, forward and backward."""

    hops: tuple[Hops, Hops]
    programs: tuple[Program, Program]

    @property
    def digest(self) -> int:
        """A digest of the tables: ranks with different ones would exchange the wrong states."""
        digest = 0
        for hops in self.hops:
            for column in hops:
                digest = crc32(np.ascontiguousarray(column).tobytes(), digest)
        return digest


class ConvolutionWindow(NamedTuple):
    """How the rows before each piece come to it: paths, for x [s, ...]; order: of the rows of x
    and of what came, one behind the other, so that each piece follows the rows before it; ends:
    those of the windows that end at a row of x, in the order of its rows, counted by their first
    row. longest: rows of the longest message between any two ranks.
    """

    paths: Paths
    order: torch.Tensor
    ends: torch.Tensor
    longest: int


class TreeLevel(NamedTuple):
    """All pieces of one depth. pieces: int64 [n]; above: those that they continue, each once; nth:
    int64 [n], of each the index of its own in `above`.
    """

    pieces: torch.Tensor
    above: torch.Tensor
    nth: torch.Tensor


class TreeWalk(NamedTuple):
    """How one rank follows a tree to its own pieces. paths: bring the maps of these, and of all
    before them, in order; levels: of them, from the roots on; own: which are this rank's, in the
    order of its rows. longest: pieces in the longest message between any two ranks; sent: how many
    this rank sends within its node, and to others.
    """

    paths: Paths
    levels: tuple[TreeLevel, ...]
    own: torch.Tensor
    longest: int
    sent: tuple[int, int]


def chains_of(groups: Groups, sequence: PackedSequence) -> Chains:
    """The chains of a sequence; ValueError as of `layout.chains`."""
    cache, key = groups.recent("linear", KEPT), ("chains", sequence)
    found = cache.find(key)
    return cache.keep(key, chains(*sequence)) if found is None else found


def directions(
    groups: Groups, sequence: PackedSequence, algorithm: str, blocks: StateBlocks
) -> Directions:
    """The tables of an algorithm for a sequence, with states in these blocks."""
    cache, key = groups.recent("linear", KEPT), ("directions", sequence, algorithm, blocks)
    found = cache.find(key)
    if found is not None:
        return found
    forward = chains_of(groups, sequence)
    both = forward, forward.backward()
    tables = [SCANS[algorithm](Task(one, groups.topology, blocks.number)) for one in both]
    programs = [
        program(hops, one, groups.rank, blocks) for hops, one in zip(tables, both, strict=True)
    ]
    return cache.keep(key, Directions((tables[0], tables[1]), (programs[0], programs[1])))


def choice_of(
    groups: Groups, sequence: PackedSequence, sizes: ScanSizes, algorithm: str, rates: Any
) -> ScanChoice | int:
    """For algorithm "auto" the one predicted to be fastest at these rates, nominal ones if None;
    for another the number of its blocks.
    """
    cache, key = groups.recent("linear", KEPT), ("choice", sequence, sizes, algorithm, rates)
    found = cache.find(key)
    if found is None:
        given = chains_of(groups, sequence), groups.topology, sizes, links_of(rates)
        found = choose(*given) if algorithm == "auto" else blocks_for(algorithm, *given)
        cache.keep(key, found)
    return found


def window(
    groups: Groups, sequence: PackedSequence, width: int, device: torch.device
) -> ConvolutionWindow:
    """The window of `width` rows that ends at each row."""
    cache, key = groups.recent("linear", KEPT), ("window", sequence, width, device)
    found = cache.find(key)
    if found is not None:
        return found
    all_chains, me = chains_of(groups, sequence), groups.rank
    order, ends = _around(all_chains.table[all_chains.of(me)], width - 1)
    indices = to_device(order, device), to_device(ends, device)
    route, most = preceding_and_most(all_chains, width, me)
    return cache.keep(key, ConvolutionWindow(paths(route, device), *indices, most))


def walk(groups: Groups, sequence: PackedSequence, device: torch.device) -> TreeWalk:
    """How the rank follows the tree of a sequence."""
    cache, key = groups.recent("linear", KEPT), ("walk", sequence, device)
    kept = cache.find(key)
    if kept is not None:
        return kept
    found = lineage(chains_of(groups, sequence), groups.rank)
    depth = np.zeros_like(found.parents)
    for piece, above in enumerate(found.parents.tolist()):
        depth[piece] = depth[above] + 1 if above >= 0 else 0
    levels = []
    for each in range(1, int(depth.max()) + 1):
        pieces = np.flatnonzero(depth == each)
        parts = pieces, *np.unique(found.parents[pieces], return_inverse=True)
        levels.append(TreeLevel(*(to_device(part, device) for part in parts)))
    sent = found.route.leaving(groups.rank, groups.topology.per_node)
    own = to_device(found.own, device)
    tree_walk = TreeWalk(paths(found.route, device), tuple(levels), own, found.longest, sent)
    return cache.keep(key, tree_walk)


def _around(pieces: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """`order` and `ends` of a `ConvolutionWindow`, for pieces in the order of rows."""
    first, length = pieces[:, 1], pieces[:, 2]
    rows, nth = int(length.sum()), np.arange(len(pieces))
    before = rows + nth[:, None] * reach + np.arange(reach)
    order = [part for i in nth for part in (before[i], np.arange(first[i], first[i] + length[i]))]
    ends = [np.arange(f, f + n) + i * reach for i, (f, n) in enumerate(pieces[:, 1:3].tolist())]
    return _joined(order), _joined(ends)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


class StateHop(NamedTuple):
    """A row of `Hops`: the state that enters piece `first`, or the map of `first` to `last`."""

    kind: int
    first: int
    last: int
    block: int


class Parcel(NamedTuple):
    """What goes to, or comes from, one rank in a round: one message."""

    peer: int
    hops: tuple[StateHop, ...]


class Round(NamedTuple):
    """What one rank sends and receives at once, in round `number` of the table."""

    number: int
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]


class States(NamedTuple):
    """What travels: states [batch, *sizes], sizes (h, d, w), in `dtype`, and maps of them whose
    transitions have this form, see `maps.FORMS`.
    """

    batch: int
    sizes: tuple[int, int, int]
    form: Form
    dtype: torch.dtype

    @property
    def bytes(self) -> ScanSizes:
        """What they cost."""
        return ScanSizes(self.batch, *self.sizes, self.form, self.dtype.itemsize)


class Program(NamedTuple):
    """What one rank runs of a table. own: its pieces, in the order of its rows; begins, ends: of
    all pieces; document: of its own.
    """

    rounds: tuple[Round, ...]
    own: tuple[int, ...]
    begins: list[bool]
    ends: list[bool]
    document: tuple[int, ...]
    blocks: StateBlocks

    def shapes(self, hop: StateHop, states: States) -> list[torch.Size]:
        """Shapes of what a hop carries, in order: the transition, if maps have one, and the
        state.
        """
        heads, rows, columns = self.blocks.sizes if hop.block == ALL_BLOCKS else self.blocks.shape
        shapes = [torch.Size((states.batch, heads, rows, columns))]
        transition = shape_of(states.form, states.batch, (heads, rows, columns))
        if hop.kind == MAP and transition is not None:
            shapes.insert(0, torch.Size(transition))
        return shapes


def program(hops: Hops, chains: Chains, rank: int, blocks: StateBlocks) -> Program:
    """The part of `rank`."""
    own_rows = np.flatnonzero((hops.source == rank) | (hops.destination == rank))
    by_round: dict[int, tuple[dict[int, list[StateHop]], dict[int, list[StateHop]]]] = {}
    for row in zip(*(column[own_rows].tolist() for column in hops), strict=True):
        number, source, destination, *hop = row
        sends, receives = by_round.setdefault(number, ({}, {}))
        way, peer = (sends, destination) if source == rank else (receives, source)
        way.setdefault(peer, []).append(StateHop(*hop))
    rounds = tuple(
        Round(number, *(_parcels(way) for way in ways)) for number, ways in by_round.items()
    )
    own = chains.of(rank)
    return Program(
        rounds, tuple(own.tolist()), chains.begins.tolist(), chains.ends.tolist(),
        tuple(chains.document[own].tolist()), blocks,
    )  # fmt: skip


def _parcels(way: dict[int, list[StateHop]]) -> tuple[Parcel, ...]:
    return tuple(Parcel(peer, tuple(some)) for peer, some in way.items())


def longest_message(hops: Hops, blocks: StateBlocks, states: States) -> tuple[int, int]:
    """The bytes of the longest message of a table, and how many tensors one has at most."""
    if not len(hops):
        return 0, 0
    key = np.stack([hops.round, hops.source, hops.destination])
    message = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    total = np.bincount(message, weights=states.bytes.of(hops, blocks.number))
    return int(total.max()), 2 * int(np.bincount(message).max())
