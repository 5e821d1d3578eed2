# SPDX-License-Identifier: Apache-2.0
"""What a pass asks of an algorithm: which pairs to compute, and which rows have to travel.

Of a call in row chunks, each chunk asks for itself: `row_cuts` says which queries it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..layout import Layout, Span
from ..layout.layouts import Shards, counted
from ..layout.row_chunks import chunk_runs
from ..masks import Mask
from ..masks.seen import Seen, rows_seen, united
from .bundles import Bundles, bundled, spans_of
from .head_shares import shared_spans
from .tables import ALL, Grid, Pairs, Side, Tables, Transfers
from .topology import Topology

GRAIN = 1024  # intervals of rows are told in steps of a shard's length over this, or of one row


class RowBytes(NamedTuple):
    """Bytes of one row of each family; 0 where it does not travel: gradients in forward or that
    nobody needs, partial outputs in backward.
    """

    kv: int = 1
    query: int = 1
    dkv: int = 1
    dquery: int = 1
    out: int = 0


FORWARD, BACKWARD = RowBytes(dkv=0, dquery=0, out=1), RowBytes()


@dataclass(frozen=True, eq=False)
class Wanted:
    """Which pairs of chunks see something, and which rows of them: of all ranks of a ring.

    visible: bool [G, G], may queries of rank i see keys of rank j? queries, keys: the rows of every
    chunk by the ranks that have to do with them. joined: are the pairs of a step one call, so that
    few steps are better? None: as the algorithm has it. common: what algorithms make of this for
    several passes.
    """

    visible: np.ndarray
    queries: Bundles
    keys: Bundles
    joined: bool | None = None
    common: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def whole(self) -> Wanted:
        """The same with whole chunks, whichever rows of them are wanted."""
        return replace(self, queries=self.queries.whole(), keys=self.keys.whole())


@dataclass(frozen=True, eq=False)
class Demand:
    """One pass over all ranks of a grid.

    side: which family travels where only one does, "kv" or "query". row_bytes: of each family.
    """

    grid: Grid
    side: Side
    wanted: Wanted = field(repr=False)
    row_bytes: RowBytes = BACKWARD

    @property
    def gradients(self) -> bool:
        """Do gradients of the travelling side travel?"""
        return getattr(self.row_bytes, "d" + self.side) > 0

    @property
    def travelling(self) -> Bundles:
        """The bundles of the travelling side."""
        return self.wanted.keys if self.side == "kv" else self.wanted.queries

    @property
    def all_want_all(self) -> bool:
        """Does every rank want every row of the travelling side?"""
        wanted = self.travelling.wanted  # its owner never does
        return np.count_nonzero(wanted) == len(wanted) * (self.grid.size - 1)

    def ahead(self, messages: Sequence[np.ndarray], chunks: int, least: int) -> int:
        """How many steps before their use messages may be sent: `least`, or as many times twice
        that as no rank gets more rows in so many steps than `chunks` whole chunks have: of copies,
        and where gradients go back, of these. messages: rank, step, source and rows of each.
        """
        if self.all_want_all:
            return least
        rank, step, source, rows = messages
        of, steps = self.travelling, int(step.max(initial=0)) + 1
        room = chunks * np.bincount(of.owner, of.rows, 1).max()
        got = []  # by end: when messages are used, ends apart, and rows until each
        for to in (rank, source) if self.gradients else (rank,):
            # Some window has its share: where that is too much, nothing has to be sorted.
            if np.bincount(to, rows, 1).max() > room * -(-steps // min(2 * least + 1, steps)):
                return least
            used = to.astype(np.int64) * 2 * steps + step
            order = np.argsort(used)
            got.append((used[order], np.cumsum(rows[order])))
        while least < steps:
            window = min(2 * least + 1, steps)
            for used, until in got:  # a window that ends with a message
                before = np.searchsorted(used, used - window, side="right")
                if (until - np.append(0, until)[before]).max(initial=0) > room:
                    return least
            least *= 2
        return least

    @property
    def visible(self) -> np.ndarray:
        """Bool [G, G]: may queries of rank i see keys of rank j?"""
        return self.wanted.visible

    def used(self, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Does `rank` compute with the travelling chunk of `owner`? Arrays of ranks."""
        return self.visible[(rank, owner) if self.side == "kv" else (owner, rank)]

    @property
    def sent_families(self) -> tuple[str, ...]:
        """What travels: copies of one side and, where these are needed, their gradients."""
        return (self.side, "d" + self.side) if self.gradients else (self.side,)

    def pairs(
        self,
        rank: np.ndarray,
        step: np.ndarray,
        owner: np.ndarray,
        rows: np.ndarray,
        own: np.ndarray | None = None,
    ) -> Pairs:
        """`rank` computes with these rows of the travelling chunk of `owner` at `step`.

        And every rank with its own chunk, at steps `own` [G], default 0: it waits for no hop, so it
        hides the first ones.
        """
        home = np.flatnonzero(self.visible.diagonal()).astype(rank.dtype)
        rank, owner = (np.concatenate([home, each]) for each in (rank, owner))
        step = np.concatenate([np.zeros_like(home) if own is None else own[home], step])
        rows = np.concatenate([np.full(len(home), ALL), rows])
        whole = np.broadcast_to(np.int64(ALL), rows.shape)
        if self.side == "kv":
            return Pairs(rank, step, query=rank, key=owner, query_rows=whole, key_rows=rows)
        return Pairs(rank, step, query=owner, key=rank, query_rows=rows, key_rows=whole)

    def as_tables(
        self,
        steps: int,
        pairs: Pairs,
        parts: Sequence[Transfers],
        travelling: Bundles | None = None,
    ) -> Tables:
        """The schedule of these pairs and of all parts of the transfers.

        travelling: the bundles of the travelling side, where the algorithm has cut some.
        """
        queries, keys = self.wanted.queries, self.wanted.keys
        if travelling is not None:
            queries, keys = (queries, travelling) if self.side == "kv" else (travelling, keys)
        moved = Transfers(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        return Tables(steps, pairs, moved, queries, keys)


def everything(size: int, rows: int = 1) -> Wanted:
    """Every rank sees all of every chunk of so many rows."""
    visible = np.ones((size, size), dtype=bool)
    ranks = np.arange(size)
    zero = np.zeros(size, dtype=np.int64)
    bundles = bundled(ranks, zero, np.full(size, rows), visible)
    return Wanted(visible, bundles, bundles)


def wanted(mask: Mask, q_shards: Shards, k_shards: Shards, joined: bool | None = None) -> Wanted:
    """What the ranks with these queries and keys want of each other; a shard is spans, or none."""
    queries, keys = rows_seen(mask, q_shards, k_shards)
    return Wanted(
        queries.ranks(len(q_shards)),
        _bundles(queries, len(q_shards)),
        _bundles(keys, len(k_shards)),
        joined,
    )


def _bundles(seen: Seen, size: int) -> Bundles:
    """The bundles of so many shards."""
    rows = np.bincount(seen.owner, seen.stop - seen.first, size).astype(np.int64)
    # In cells of equal size, so that runs of rows are found by a cumulative sum over a fixed grid
    # and not by sorting the edges of a million parts.
    grain = max(1, int(rows.max(initial=1)) // GRAIN)
    ends = -(-rows // grain)
    cells = int(ends.max(initial=0)) + 1  # cells of `grain` rows of one shard, and its end
    low, stop = (seen.owner * cells + x for x in (seen.first // grain, -(-seen.stop // grain)))
    piece, rank, *rest = seen.parts
    owner = seen.owner[piece]
    begin, end = (owner * cells + x for x in (rest[0] // grain, -(-rest[1] // grain)))
    whole, all_ = seen.whole.copy(), (begin == low[piece]) & (end == stop[piece])
    whole[piece[all_], rank[all_]] = True
    begin, end, rank = (x[~all_] for x in (begin, end, rank))
    # Runs of rows lie between two edges; at the end of a shard none begins.
    edge = np.zeros(len(rows) * cells, dtype=bool)
    edge[np.concatenate([low, stop, begin, end])] = True
    edge[np.arange(len(rows)) * cells + ends] = False
    before = np.cumsum(edge, dtype=np.int32) - edge  # how many runs begin before each cell
    owner, first = np.divmod(np.flatnonzero(edge), cells)
    run = np.arange(len(owner))
    piece = np.searchsorted(before[stop], run, side="right")
    covered = united(whole, piece, np.searchsorted(before[low], run, side="right") - piece)
    count = before[end] - before[begin]
    covered[counted(before[begin], count), np.repeat(rank, count)] = True
    first *= grain
    last = np.append(owner[1:] != owner[:-1], True)
    return bundled(
        owner, first, np.where(last, rows[owner], np.append(first[1:], 0)) - first, covered
    )


class RowCut(NamedTuple):
    """One chunk: its rows of a shard as runs (first, stop), the same ones of every rank; for each
    rank of a ring the spans of its queries, those of the whole ulysses group; and for each rank
    those of its own.
    """

    runs: list[tuple[int, int]]
    shards: tuple[tuple[Span, ...], ...]
    own: tuple[list[Span], ...]


def row_cuts(
    layout: Layout, topology: Topology, seq_len: int, count: int, blocks: int = 1
) -> Iterator[RowCut]:
    """`count` chunks; blocks: of sequence parallelism, see `layout.row_chunks`."""
    members = [topology.ulysses_group(member) for member in topology.ring(0)]
    # Asked for once, not per chunk: a rank may hold two spans of every document of a pack.
    whole = [layout.spans(rank, seq_len) for rank in range(layout.cp_size)]
    starts = [[0, *accumulate(span.length for span in spans)] for spans in whole]
    for taken in chunk_runs(layout, seq_len // layout.cp_size, count, blocks):
        own = tuple(spans_of(taken, *each) for each in zip(whole, starts, strict=True))
        shards = (shared_spans([own[rank] for rank in ranks]) for ranks in members)
        yield RowCut(taken, tuple(shards), own)
