# SPDX-License-Identifier: Apache-2.0
"""Chains, tables of hops and convolution windows of a sequence, and one rank's part of the tables.

A chain is all pieces of a document in order; a piece is a run of consecutive positions on one rank.
A hop is the transfer of a state, or of the map of some pieces, from one rank to another. All hops
of a round between two ranks are one message, in the order of the table. Results are cached in
`Groups` and freed with it. This module limits the number of cached results.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import torch

from ..comm.groups import Groups
from ..comm.rows import DeviceRoute, route_on_device
from ..layout.layouts import Layout
from ..layout.pieces import Chains, chains
from ..layout.routes import lineage, preceding_and_most
from ..layout.sharding import to_device
from ..schedule.scans import SCANS
from ..schedule.scans.blocks import StateBlocks
from ..schedule.scans.choice import ScanChoice, blocks_for, choose, links_of
from ..schedule.scans.hops import ALL_BLOCKS, MAP, Hops, Task, messages_of
from ..schedule.scans.sizes import Form, ScanSizes
from .maps import shape_of

Reverse = bool | Literal["both"]
CACHE_SIZE = 32  # number of results: a few kinds of layers times a few micro-batches


class PackedSequence(NamedTuple):
    """Sequence with its layout and documents, from which chains are made.

    Attributes:
        layout: Layout of the positions over the ranks.
        seq_len: Number of positions.
        bounds: Bounds of the documents; None means one document.
        tree: `masks.Tree` instead of documents, or None.
        reverse: True if states are passed from the last token of a document to the first. "both"
            for both directions in one scan, with the reversed documents as further documents.
    """

    layout: Layout
    seq_len: int
    bounds: tuple[int, ...] | None
    tree: Any = None
    reverse: Reverse = False


class Directions(NamedTuple):
    """Tables of hops of an algorithm for forward and backward, and this rank's part of each table.

    Attributes:
        hops: Table for forward and table for backward, with the hops of all ranks.
        programs: This rank's part of the forward table and of the backward table.
    """

    hops: tuple[Hops, Hops]
    programs: tuple[Program, Program]

    @property
    def digest(self) -> int:
        """Digest of the tables, which must be the same on all ranks."""
        digest = 0
        for hops in self.hops:
            for column in hops:
                digest = crc32(np.ascontiguousarray(column).tobytes(), digest)
        return digest


class ConvolutionWindow(NamedTuple):
    """Exchange of rows for a convolution: each piece needs the rows before it.

    A piece is a run of consecutive positions of one document on one rank. A window is the set of
    rows that one output of the convolution reads.

    Attributes:
        paths: Route that brings the preceding rows of x [s, ...] to each piece.
        order: Index into the concatenation of x and the received rows. It puts the preceding rows
            directly before each piece.
        ends: For each row of x, the first row of the window that ends at this row, as an index into
            `order`.
        longest: Number of rows in the longest message between any two ranks.
    """

    paths: DeviceRoute
    order: torch.Tensor
    ends: torch.Tensor
    longest: int


class TreeLevel(NamedTuple):
    """All pieces of one depth of a prefix tree.

    Attributes:
        pieces: Indices of the pieces, int64 [n].
        above: Indices of the parents of these pieces, without duplicates.
        nth: Index in `above` of the parent of each piece, int64 [n].
    """

    pieces: torch.Tensor
    above: torch.Tensor
    nth: torch.Tensor


class TreeWalk(NamedTuple):
    """Exchange of maps along a prefix tree, from the roots to the pieces of one rank.

    Attributes:
        paths: Route that brings this rank the maps of its pieces and of all their ancestors.
        levels: Received pieces by depth, without the roots, from the smallest depth on.
        own: Indices of this rank's pieces among the received pieces, in the order of the rank's
            rows.
        longest: Number of maps in the longest message between any two ranks.
        sent: Number of maps that this rank sends to ranks of its node, and to other nodes.
    """

    paths: DeviceRoute
    levels: tuple[TreeLevel, ...]
    own: torch.Tensor
    longest: int
    sent: tuple[int, int]


def chains_of(groups: Groups, sequence: PackedSequence) -> Chains:
    """Return the chains of a sequence, forward or reversed. Raise the errors of `layout.chains`.

    With reverse="both", the reversed documents follow the documents of the forward direction.
    """
    cache, key = groups.recent("linear", CACHE_SIZE), ("chains", sequence)
    cached = cache.find(key)
    if cached is not None:
        return cached
    pieces = chains(sequence.layout, sequence.seq_len, sequence.bounds, sequence.tree)
    if sequence.reverse:
        backward = pieces.reversed_rows()
        pieces = pieces.followed_by(backward) if sequence.reverse == "both" else backward
    return cache.keep(key, pieces)


def directions(
    groups: Groups, sequence: PackedSequence, algorithm: str, blocks: StateBlocks
) -> Directions:
    """Return the tables of hops of an algorithm, for states that are split into blocks."""
    cache, key = groups.recent("linear", CACHE_SIZE), ("directions", sequence, algorithm, blocks)
    cached = cache.find(key)
    if cached is not None:
        return cached
    forward = chains_of(groups, sequence)
    chain_pair = forward, forward.backward()
    tables = [
        SCANS[algorithm](Task(one_way, groups.topology, blocks.number)) for one_way in chain_pair
    ]
    programs = [
        program(hops, one_way, groups.rank, blocks)
        for hops, one_way in zip(tables, chain_pair, strict=True)
    ]
    return cache.keep(key, Directions((tables[0], tables[1]), (programs[0], programs[1])))


def choice_of(
    groups: Groups, sequence: PackedSequence, sizes: ScanSizes, algorithm: str, rates: Any
) -> ScanChoice | int:
    """Return the choice of algorithm "auto", or the number of blocks for another algorithm.

    "auto" selects the algorithm with the shortest predicted time at `rates`. None means nominal
    rates. A block is a part of a state that is sent as one tensor.
    """
    cache, key = groups.recent("linear", CACHE_SIZE), ("choice", sequence, sizes, algorithm, rates)
    choice = cache.find(key)
    if choice is None:
        problem = chains_of(groups, sequence), groups.topology, sizes, links_of(rates)
        choice = choose(*problem) if algorithm == "auto" else blocks_for(algorithm, *problem)
        cache.keep(key, choice)
    return choice


def window(
    groups: Groups, sequence: PackedSequence, width: int, device: torch.device
) -> ConvolutionWindow:
    """Return the exchange for the windows of `width` rows that end at the rows of this rank."""
    cache, key = groups.recent("linear", CACHE_SIZE), ("window", sequence, width, device)
    cached = cache.find(key)
    if cached is not None:
        return cached
    all_chains, me = chains_of(groups, sequence), groups.rank
    order, ends = _around(all_chains.table[all_chains.of(me)], width - 1)
    indices = to_device(order, device), to_device(ends, device)
    route, most = preceding_and_most(all_chains, width, me)
    return cache.keep(key, ConvolutionWindow(route_on_device(route, device), *indices, most))


def walk(groups: Groups, sequence: PackedSequence, device: torch.device) -> TreeWalk:
    """Return the exchange of maps along the tree of a sequence."""
    cache, key = groups.recent("linear", CACHE_SIZE), ("walk", sequence, device)
    cached = cache.find(key)
    if cached is not None:
        return cached
    path = lineage(chains_of(groups, sequence), groups.rank)
    depth = np.zeros_like(path.parents)
    for piece, above in enumerate(path.parents.tolist()):
        depth[piece] = depth[above] + 1 if above >= 0 else 0
    levels = []
    for level in range(1, int(depth.max()) + 1):
        pieces = np.flatnonzero(depth == level)
        parts = pieces, *np.unique(path.parents[pieces], return_inverse=True)
        levels.append(TreeLevel(*(to_device(part, device) for part in parts)))
    sent = path.route.leaving(groups.rank, groups.topology.per_node)
    own = to_device(path.own, device)
    tree_walk = TreeWalk(
        route_on_device(path.route, device), tuple(levels), own, path.longest, sent
    )
    return cache.keep(key, tree_walk)


def _around(pieces: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two int64 arrays: the fields `order` and `ends` of a `ConvolutionWindow`.

    Args:
        pieces: Pieces of the rank [n, 3 or more], sorted by first row. Column 1 is the first row,
            and column 2 is the number of rows.
        reach: Number of rows before a piece that the convolution reads.
    """
    first, length = pieces[:, 1], pieces[:, 2]
    rows, nth = int(length.sum()), np.arange(len(pieces))
    before = rows + nth[:, None] * reach + np.arange(reach)
    order = [part for i in nth for part in (before[i], np.arange(first[i], first[i] + length[i]))]
    ends = [np.arange(f, f + n) + i * reach for i, (f, n) in enumerate(pieces[:, 1:3].tolist())]
    return _joined(order), _joined(ends)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


class StateHop(NamedTuple):
    """Hop that sends the state before piece `first`, or the map of pieces `first` to `last`."""

    kind: int
    first: int
    last: int
    block: int


class RankMessage(NamedTuple):
    """Hops to or from one rank in a round, sent as one message."""

    peer: int
    hops: tuple[StateHop, ...]


class Round(NamedTuple):
    """Messages that one rank exchanges concurrently, in round `number` of the table."""

    number: int
    sends: tuple[RankMessage, ...]
    receives: tuple[RankMessage, ...]


class States(NamedTuple):
    """Shape [batch, *sizes] and dtype of the states that are sent.

    Attributes:
        batch: Batch size.
        sizes: Sizes (h heads, d rows, w columns).
        form: Kind of transition in the maps, one of `maps.FORMS`.
        dtype: Dtype of the states.
    """

    batch: int
    sizes: tuple[int, int, int]
    form: Form
    dtype: torch.dtype

    @property
    def bytes(self) -> ScanSizes:
        """`ScanSizes` of the states, for counting bytes."""
        return ScanSizes(self.batch, *self.sizes, self.form, self.dtype.itemsize)


class Program(NamedTuple):
    """Hops of one rank in a table, and the pieces of the rank.

    Attributes:
        rounds: Rounds in which the rank sends or receives.
        own: Indices of the rank's pieces, in the order of its rows.
        begins: For each piece of all ranks: True if the piece begins a document.
        ends: For each piece of all ranks: True if the piece ends a document.
        document: Document of each of the rank's pieces.
        blocks: Blocks into which states are split.
    """

    rounds: tuple[Round, ...]
    own: tuple[int, ...]
    begins: list[bool]
    ends: list[bool]
    document: tuple[int, ...]
    blocks: StateBlocks

    def shapes(self, hop: StateHop, states: States) -> list[torch.Size]:
        """Return the shapes of the tensors that a hop sends, in order.

        For a map these are the transition, if the form has one, and the increment.
        """
        heads, rows, columns = self.blocks.sizes if hop.block == ALL_BLOCKS else self.blocks.shape
        shapes = [torch.Size((states.batch, heads, rows, columns))]
        transition = shape_of(states.form, states.batch, (heads, rows, columns))
        if hop.kind == MAP and transition is not None:
            shapes.insert(0, torch.Size(transition))
        return shapes


def program(hops: Hops, chains: Chains, rank: int, blocks: StateBlocks) -> Program:
    """Return the hops of `rank` in a table, by round and message."""
    own_rows = np.flatnonzero((hops.source == rank) | (hops.destination == rank))
    own_hops = Hops(*(column[own_rows] for column in hops))
    messages, index = messages_of(own_hops)
    by_message = np.argsort(index, kind="stable")
    ends = np.append(0, np.cumsum(np.bincount(index)))
    columns = (own_hops.kind, own_hops.first, own_hops.last, own_hops.block)
    state_hops = list(map(StateHop, *(column[by_message].tolist() for column in columns)))
    by_round: dict[int, tuple[list[RankMessage], list[RankMessage]]] = {}
    for message in np.argsort(by_message[ends[:-1]]).tolist():  # in the order of the table
        number, source, destination = messages[:, message].tolist()
        sends, receives = by_round.setdefault(number, ([], []))
        way, peer = (sends, destination) if source == rank else (receives, source)
        way.append(RankMessage(peer, tuple(state_hops[ends[message] : ends[message + 1]])))
    rounds = tuple(Round(number, *map(tuple, ways)) for number, ways in by_round.items())
    own = chains.of(rank)
    return Program(
        rounds, tuple(own.tolist()), chains.begins.tolist(), chains.ends.tolist(),
        tuple(chains.document[own].tolist()), blocks,
    )  # fmt: skip


def longest_message(hops: Hops, blocks: StateBlocks, states: States) -> tuple[int, int]:
    """Return two maxima over the messages of a table: bytes, and upper bound of tensors.

    The two maxima may belong to different messages.
    """
    if not len(hops):
        return 0, 0
    message = messages_of(hops)[1]
    total = np.bincount(message, weights=states.bytes.of(hops, blocks.number))
    return int(total.max()), 2 * int(np.bincount(message).max())
