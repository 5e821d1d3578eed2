# SPDX-License-Identifier: Apache-2.0
"""The input of an algorithm (`Demand`): what a pass computes, and which rows ranks need for it.

A pass is the forward or the backward of one attention call. If a call runs in row chunks (parts of
the rows, one after the other), each row chunk has its own demand. `row_chunk_spans` yields the
positions of each row chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..layout import Layout, Span, Spans
from ..layout.layouts import Shards, counted
from ..layout.row_chunks import chunk_runs
from ..masks import Mask
from ..masks.seen import VisibleRows, rows_seen, united, with_ranks
from .bundles import Bundles, bundled, bundles_of_sets, spans_of
from .head_shares import shared_spans
from .tables import ALL, Grid, Pairs, Side, Tables, Transfers
from .topology import Topology

GRAIN = 1024  # runs of rows begin and end at multiples of 1 / GRAIN of a shard, or of one row


class RowBytes(NamedTuple):
    """Bytes of one row in each family of tensors; 0 for a family that is not sent.

    The families are keys and values (`kv`), queries (`query`), the gradients of both (`dkv` and
    `dquery`), and partial outputs (`out`). Forward sends no gradients. Backward sends no partial
    outputs, and no gradients that are not needed.
    """

    kv: int = 1
    query: int = 1
    dkv: int = 1
    dquery: int = 1
    out: int = 0


FORWARD, BACKWARD = RowBytes(dkv=0, dquery=0, out=1), RowBytes()


@dataclass(frozen=True, eq=False)
class Visibility:
    """The ranks of a ring that attend to each other's chunks, and the rows that they use.

    Attributes:
        visible: bool [G, G], true if some query of rank i attends to some key of rank j.
        queries: Query rows of all ranks, grouped into bundles: rows that the same ranks use.
        keys: Key rows of all ranks, grouped into bundles.
        joined: True if one kernel call computes all pairs of a step, False if each pair is a call.
            None selects the default of the algorithm.
        streams: True if the device runs a relay stream beside its computation, so relays wait for
            their receives only (`comm.relays`).
        common: Cache in which algorithms keep results for other passes.
    """

    visible: np.ndarray
    queries: Bundles
    keys: Bundles
    joined: bool | None = None
    streams: bool = False
    common: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def whole(self) -> Visibility:
        """Return a copy in which a rank that uses some row of a chunk uses the whole chunk."""
        return replace(self, queries=self.queries.whole(), keys=self.keys.whole())


@dataclass(frozen=True, eq=False)
class Demand:
    """The pairs that all ranks compute in one pass, and the rows that they need from each other.

    Attributes:
        grid: Grid of the ranks.
        side: Tensors that are sent: "kv" (keys and values) or "query". Algorithms that send both
            ignore `side`.
        visibility: Ranks and rows that attend to each other.
        row_bytes: Bytes of a row of each family.
    """

    grid: Grid
    side: Side
    visibility: Visibility = field(repr=False)
    row_bytes: RowBytes = BACKWARD

    @property
    def gradients(self) -> bool:
        """True if this pass sends gradients of the sent tensors back to their owners."""
        return getattr(self.row_bytes, "d" + self.side) > 0

    @property
    def travelling(self) -> Bundles:
        """Bundles (rows of one owner that the same ranks use) of the tensors that are sent."""
        return self.visibility.keys if self.side == "kv" else self.visibility.queries

    @property
    def all_use_all(self) -> bool:
        """True if every rank uses every row of the tensors that are sent."""
        users = self.travelling.users  # false for the owner of a bundle
        return np.count_nonzero(users) == len(users) * (self.grid.size - 1)

    def ahead(self, messages: Sequence[np.ndarray], chunks: int, least: int) -> int:
        """Return the number of steps that may pass between the sending and the use of a message.

        The result is `least`, doubled as often as the memory allows. In every window of about twice
        as many steps as the result, a rank may receive at most the rows of `chunks` whole chunks.
        If gradients are sent back, the same limit applies to the gradients that each sender
        receives.

        Args:
            messages: Four arrays with one entry per message: receiver, step of use, sender and
                number of rows.
            chunks: Number of whole chunks whose rows may be in memory.
            least: Smallest result.
        """
        if self.all_use_all:
            return least
        rank, step, source, rows = messages
        bundles, steps = self.travelling, int(step.max(initial=0)) + 1
        room = chunks * np.bincount(bundles.owner, bundles.rows, 1).max()
        # For receivers, then for senders: sorted times of use, with a gap of `steps` between ranks,
        # and the cumulative rows.
        used_rows = []
        for end in (rank, source) if self.gradients else (rank,):
            # Some window has at least the mean number of rows. If the mean exceeds the limit, do
            # not sort.
            if np.bincount(end, rows, 1).max() > room * -(-steps // min(2 * least + 1, steps)):
                return least
            used = end.astype(np.int64) * 2 * steps + step
            order = np.argsort(used)
            used_rows.append((used[order], np.cumsum(rows[order])))
        while least < steps:
            window = min(2 * least + 1, steps)
            for used, until in used_rows:  # each window ends with a message
                before = np.searchsorted(used, used - window, side="right")
                if (until - np.append(0, until)[before]).max(initial=0) > room:
                    return least
            least *= 2
        return least

    @property
    def visible(self) -> np.ndarray:
        """Bool [G, G] for G ranks: [i, j] is true if some query of rank i sees some key of j."""
        return self.visibility.visible

    def used(self, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return whether a rank computes with rows that an owner sends, one bool per entry.

        Args:
            owner: Ranks that own the rows.
            rank: Ranks that may use the rows, an array of the same shape.
        """
        return self.visible[(rank, owner) if self.side == "kv" else (owner, rank)]

    @property
    def sent_families(self) -> tuple[str, ...]:
        """Families of tensors that are sent: `side`, and its gradients if they are needed."""
        return (self.side, "d" + self.side) if self.gradients else (self.side,)

    def pairs(
        self,
        rank: np.ndarray,
        step: np.ndarray,
        owner: np.ndarray,
        rows: np.ndarray,
        own: np.ndarray | None = None,
    ) -> Pairs:
        """Return the table of all pairs: pairs of each rank's own chunks, and of received chunks.

        Args:
            rank: Rank that computes each pair with a received chunk.
            step: Step of each pair.
            owner: Owner of each received chunk.
            rows: Bit set of each received chunk's rows (one bit per bundle of the owner).
            own: int [G], step of the pair of each rank's own chunks. Default: 0, because this pair
                needs no transfer, so its computation hides the first transfers.
        """
        home = np.flatnonzero(self.visible.diagonal()).astype(rank.dtype)
        rank, owner = (np.concatenate([home, column]) for column in (rank, owner))
        step = np.concatenate([np.zeros_like(home) if own is None else own[home], step])
        rows = np.concatenate([np.full(len(home), ALL), rows])
        all_rows = np.broadcast_to(np.int64(ALL), rows.shape)
        if self.side == "kv":
            return Pairs(rank, step, query=rank, key=owner, query_rows=all_rows, key_rows=rows)
        return Pairs(rank, step, query=owner, key=rank, query_rows=rows, key_rows=all_rows)

    def as_tables(
        self,
        steps: int,
        pairs: Pairs,
        parts: Sequence[Transfers],
        travelling: Bundles | None = None,
    ) -> Tables:
        """Return `Tables`: the pairs and the transfers of one pass, for all ranks.

        Args:
            steps: Number of steps. Boundaries after the last step, at which ranks only wait for
                transfers, are not counted.
            pairs: Pairs of chunks that ranks compute.
            parts: Several `Transfers`, which are concatenated.
            travelling: Bundles (rows of one owner that the same ranks use) of the tensors that are
                sent. Default: `self.travelling`. An algorithm that splits bundles passes the split
                bundles.
        """
        queries, keys = self.visibility.queries, self.visibility.keys
        if travelling is not None:
            queries, keys = (queries, travelling) if self.side == "kv" else (travelling, keys)
        transfers = Transfers(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        return Tables(steps, pairs, transfers, queries, keys)


def all_visible(size: int, rows: int = 1) -> Visibility:
    """Return the `Visibility` of a full mask on `size` ranks with chunks of `rows` rows."""
    visible = np.ones((size, size), dtype=bool)
    ranks = np.arange(size)
    zero = np.zeros(size, dtype=np.int64)
    bundles = bundled(ranks, zero, np.full(size, rows), visible)
    return Visibility(visible, bundles, bundles)


def visibility_of(
    mask: Mask,
    q_shards: Shards,
    k_shards: Shards,
    joined: bool | None = None,
    streams: bool = False,
) -> Visibility:
    """Return which ranks of a ring attend to each other's chunks, and to which rows.

    Args:
        mask: The mask.
        q_shards: Query spans of each rank; a shard may have no spans.
        k_shards: Key spans of each rank; there may be no keys.
        joined: True if one kernel call computes all pairs of a step; None for the algorithm's
            default.
        streams: Same as in `Visibility`.
    """
    if not any(map(len, k_shards)):
        return own_visibility(q_shards, k_shards, joined)
    queries, keys = rows_seen(mask, q_shards, k_shards, GRAIN)
    return Visibility(
        queries.ranks(len(q_shards)),
        _bundles(queries, len(q_shards)),
        _bundles(keys, len(k_shards)),
        joined,
        streams,
    )


def own_visibility(q_shards: Shards, k_shards: Shards, joined: bool | None = None) -> Visibility:
    """Return the `Visibility` in which each rank uses only its own shards.

    Callers use it if all ranks hold all keys, or if there are no keys. The arguments are the same
    as in `visibility_of`.
    """
    seen = np.diag([len(q) > 0 and len(k) > 0 for q, k in zip(q_shards, k_shards, strict=True)])
    return Visibility(seen, _own_bundles(q_shards), _own_bundles(k_shards), joined)


def _own_bundles(shards: Shards) -> Bundles:
    rows = np.array([sum(span.length for span in shard) for shard in shards], dtype=np.int64)
    owner = np.flatnonzero(rows)
    return bundled(
        owner, np.zeros_like(owner), rows[owner], np.zeros((len(owner), len(rows)), dtype=bool)
    )


def _bundles(seen: VisibleRows, size: int) -> Bundles:
    """Group the rows of each shard into bundles: rows that the same ranks use.

    Args:
        seen: Rows of all shards, and the ranks that use them.
        size: Number of shards.
    """
    rows = np.bincount(seen.owner, seen.stop - seen.first, size).astype(np.int64)
    # Divide shards into cells of equal size. A cumulative sum over a fixed grid then yields the
    # runs of rows. This is faster than sorting the edges of up to a million pieces.
    grain = seen.grain
    ends = -(-rows // grain)
    cells = int(ends.max(initial=0)) + 1  # cells per shard: `grain` rows each, and an end cell
    low, stop = (
        seen.owner * cells + column for column in (seen.first // grain, -(-seen.stop // grain))
    )
    piece, rank, *limits = seen.partial
    owner = seen.owner[piece]
    begin, end = (owner * cells + column for column in (limits[0] // grain, -(-limits[1] // grain)))
    covers = (begin == low[piece]) & (end == stop[piece])
    used = np.flatnonzero(covers & (rank != owner))  # rows are not sent to their owner
    whole = with_ranks(seen.full, piece[used], rank[used])
    begin, end, rank = (column[~covers] for column in (begin, end, rank))
    # A run of rows is between two edges. No run begins at the end of a shard.
    edge = np.zeros(len(rows) * cells, dtype=bool)
    edge[np.concatenate([low, stop, begin, end])] = True
    edge[np.arange(len(rows)) * cells + ends] = False
    before = np.cumsum(edge, dtype=np.int32) - edge  # number of runs that begin before each cell
    owner = np.repeat(np.arange(size), np.count_nonzero(edge.reshape(size, cells), axis=1))
    first = np.flatnonzero(edge) - owner * cells
    # Numbers of pieces that end before each run, and that begin before its end.
    piece, begun = (
        np.cumsum(np.bincount(before[column], minlength=len(owner) + 1))[: len(owner)]
        for column in (stop, low)
    )
    pieces = begun - piece
    covered, count = united(whole, piece, pieces), before[end] - before[begin]
    at, rank = counted(before[begin], count), np.repeat(rank, count)
    covered = with_ranks(covered, at, rank)
    first *= grain
    last = np.append(owner[1:] != owner[:-1], True)
    length = np.where(last, rows[owner], np.append(first[1:], 0)) - first
    return bundles_of_sets(owner, first, length, covered, seen.size)


class RowChunkSpans(NamedTuple):
    """The positions of one row chunk.

    Attributes:
        runs: Rows of the chunk as ranges (first, stop) of a rank's rows; the same on all ranks.
        shards: For each rank of a ring, the spans (regularly spaced positions) of its queries after
            the all-to-all. These are the chunk's queries of all ranks in its ulysses group.
        own: For each rank, the spans of its own queries in the chunk, before the all-to-all.
    """

    runs: list[tuple[int, int]]
    shards: tuple[tuple[Span, ...], ...]
    own: tuple[list[Span], ...]


def row_chunk_spans(
    layout: Layout, topology: Topology, seq_len: int, count: int, blocks: int = 1
) -> Iterator[RowChunkSpans]:
    """Yield the positions of each row chunk.

    Args:
        layout: The layout.
        topology: Placement of the ranks.
        seq_len: Length of the whole sequence.
        count: Number of row chunks.
        blocks: Number of blocks of rows for sequence parallelism; see `layout.row_chunks`.
    """
    groups = [topology.ulysses_group(rank) for rank in topology.ring(0)]
    # Computed once for all chunks: a rank may hold two spans of every document of a pack.
    ranks_spans = [Spans.of(layout.spans(rank, seq_len)) for rank in range(layout.cp_size)]
    for runs in chunk_runs(layout, seq_len // layout.cp_size, count, blocks):
        ranges = np.array(runs, dtype=np.int64).reshape(-1, 2)
        own = tuple(list(spans_of(ranges, spans)) for spans in ranks_spans)
        shards = (shared_spans([own[rank] for rank in members]) for members in groups)
        yield RowChunkSpans(runs, tuple(shards), own)
