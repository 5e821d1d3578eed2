"""The queries of each row chunk, on every rank of a ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..layout import Layout, Span
from ..layout.row_chunks import row_chunks, runs
from .bundles import spans_of
from .head_shares import shared_rows
from .topology import Topology


class RowCut(NamedTuple):
    """One chunk: its rows of a shard, the same ones of every rank, and for each rank of a ring the
    spans of its queries, those of the whole ulysses group."""

    rows: np.ndarray
    shards: tuple[tuple[Span, ...], ...]


def row_cuts(
    layout: Layout, topology: Topology, seq_len: int, count: int, blocks: int = 1
) -> Iterator[RowCut]:
    """`count` chunks; blocks: of sequence parallelism, see `layout.row_chunks`."""
    members = [topology.ulysses_group(member) for member in topology.ring(0)]
    for rows in row_chunks(layout, seq_len // layout.cp_size, count, blocks):
        shards = (
            shared_rows([own_spans(layout, rank, seq_len, rows) for rank in ranks]).spans
            for ranks in members
        )
        yield RowCut(rows, tuple(shards))


def own_spans(layout: Layout, rank: int, seq_len: int, rows: np.ndarray) -> list[Span]:
    """The positions of these rows of a rank."""
    return spans_of(runs(rows), layout.spans(rank, seq_len))
