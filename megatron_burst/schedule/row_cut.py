"""The queries of each row chunk, on every rank of a ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..layout import Layout, Span
from ..layout.row_chunks import row_chunks, runs
from .bundles import first_rows, spans_of
from .head_shares import shared_rows
from .topology import Topology


class RowCut(NamedTuple):
    """One chunk: its rows of a shard, the same ones of every rank; for each rank of a ring the
    spans of its queries, those of the whole ulysses group; and for each rank those of its own."""

    rows: np.ndarray
    shards: tuple[tuple[Span, ...], ...]
    own: tuple[list[Span], ...]


def row_cuts(
    layout: Layout, topology: Topology, seq_len: int, count: int, blocks: int = 1
) -> Iterator[RowCut]:
    """`count` chunks; blocks: of sequence parallelism, see `layout.row_chunks`."""
    members = [topology.ulysses_group(member) for member in topology.ring(0)]
    # Asked for once, not per chunk: a rank may hold two spans of every document of a pack.
    whole = [layout.spans(rank, seq_len) for rank in range(layout.cp_size)]
    starts = [first_rows(spans) for spans in whole]
    for rows in row_chunks(layout, seq_len // layout.cp_size, count, blocks):
        taken = runs(rows)
        own = tuple(spans_of(taken, *each) for each in zip(whole, starts, strict=True))
        shards = (shared_rows([own[rank] for rank in ranks]).spans for ranks in members)
        yield RowCut(rows, tuple(shards), own)
