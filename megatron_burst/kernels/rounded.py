# SPDX-License-Identifier: Apache-2.0
"""Rounding of joined tiles, so that the calls for many packs of documents have only a few shapes.

cuDNN compiles a graph for every number of sequences, every largest length and every number of rows
of the tensors. These numbers differ between packs. So this module splits joined tiles into calls of
a few shapes. Shape i has 2 * 4^i sequences of at most T / 4^i rows and columns, where T is the
number of rows of the larger shard, rounded up. If a call has fewer sequences, sequences without
rows and columns are added.

In backward, cuDNN reserves memory for the number of sequences times the largest length, so every
shape needs twice the memory of one call for T rows. In cuDNN 9.4 and newer, the time of forward
depends on the actual lengths, not on the largest length (release notes).

Operators get whole shards, padded to T rows. The first sequence begins at the first row of the
call. Rows before and after the sequences are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..masks.tiles import Tile, Tiles
from .joined import JoinedTiles
from .operators import Lengths

SMALLEST = 256  # torch refuses calls whose largest length is 128 or less
RATIO = 4  # ratio of the largest lengths of two successive shapes
FILL = 2  # rows of all sequences of a shape, in multiples of T
WIDEST = 128  # width of keys and values of joined calls
OFFSETS = 2**31  # torch computes the first element of a sequence in int32


class CallShape(NamedTuple):
    """Shape of a call.

    Attributes:
        sequences: Number of sequences.
        longest: Maximum number of rows and of columns of a sequence.
    """

    sequences: int
    longest: int


class RoundedLengths(Lengths):
    """Lengths of the sequences of one call on whole shards that are padded to `total` rows.

    Args:
        sizes: (rows, columns) of each sequence; one of the two numbers may be 0.
        first: Row and column of the shards at which the first sequence begins.
        shape: Shape of the call.
        total: Number of rows of the padded shards.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]] | np.ndarray,
        first: tuple[int, int],
        shape: CallShape,
        total: int,
    ):
        super().__init__(sizes)
        assert len(self.sizes) <= shape.sequences
        assert max(self.longest) <= shape.longest
        self.total, self.longest = total, (shape.longest, shape.longest)
        fill = np.repeat(self._ends[-1:], shape.sequences - len(self.sizes), axis=0)
        self._ends = np.concatenate([self._ends, fill]) + np.array(first, dtype=np.int32)

    def fit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        assert self.total is not None
        width = max(q.shape[-1], v.shape[-1])
        row = max(q.shape[1] * width, *(x.stride(2) for x in (q, k, v)))
        return super().fit(q, k, v) and width <= WIDEST and row * self.total < OFFSETS


def rounded(
    parts: Sequence[Tile | JoinedTiles], rows: int, columns: int
) -> list[Tile | JoinedTiles]:
    """Split joined tiles into calls of a few shapes; a single tile also becomes such a call.

    Tiles with a table, or whose rows or columns have a step above 1, are returned unchanged.

    Args:
        parts: Result of `joined.joined`, without bands.
        rows: Number of rows of the query shard.
        columns: Number of rows of the key shard.
    """
    total = rounded_up(max(rows, columns))
    calls: list[Tile | JoinedTiles] = []
    for part in parts:
        single = isinstance(part, Tile)
        if single and (part.table is not None or {part.rows.step, part.columns.step} - {1, None}):
            calls.append(part)
        elif single:
            calls += _calls(JoinedTiles(Tiles.of((part,)), part, Lengths([part.shape])), total)
        else:
            calls += _calls(part, total)
    return calls


def rounded_up(rows: int) -> int:
    """Round up to a number with at most four significant binary digits, at least 256."""
    rows = max(rows, SMALLEST)
    step = 1 << (rows.bit_length() - 4)
    return -(-rows // step) * step


def shapes(total: int) -> list[CallShape]:
    """Return the shapes for shards of `total` rows, in ascending order of the largest length."""
    descending, scale = list[CallShape](), 1
    while not descending or -(-total // scale) >= SMALLEST:
        descending.append(CallShape(FILL * scale, -(-total // scale)))
        scale *= RATIO
    return descending[::-1]


def _calls(part: JoinedTiles, total: int) -> Iterator[JoinedTiles]:
    span, sizes = part.span, part.lengths.sizes
    assert span.band is None
    ends = np.concatenate([np.zeros((1, 2), dtype=np.int64), np.cumsum(sizes, axis=0)])
    ends += (span.rows.start, span.columns.start)
    full: np.ndarray = np.all(sizes > 0, axis=1)
    before = np.concatenate([[0], np.cumsum(full)])  # number of tiles before each sequence
    choices = shapes(total)
    for start, stop in _runs(sizes.max(axis=1).tolist(), choices):
        inside = np.flatnonzero(full[start:stop])
        if not len(inside):  # only gaps between tiles
            continue
        start, stop = start + int(inside[0]), start + int(inside[-1]) + 1
        (row, column), (last_row, last_column) = ends[start].tolist(), ends[stop].tolist()
        shape = _shape(choices, int(sizes[start:stop].max()))
        yield JoinedTiles(
            part.tiles[int(before[start]) : int(before[stop])],
            Tile(slice(row, last_row, 1), slice(column, last_column, 1), triangle=span.triangle),
            RoundedLengths(sizes[start:stop], (row, column), shape, total),
        )


def _runs(lengths: Sequence[int], choices: Sequence[CallShape]) -> Iterator[tuple[int, int]]:
    """Split sequences into as few runs as possible; yield start and stop of each run.

    Each run fits one of the shapes `choices`.
    """
    start, longest = 0, 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i + 1 - start > _shape(choices, longest).sequences:
            yield start, i
            start, longest = i, length
    yield start, len(lengths)


def _shape(choices: Sequence[CallShape], longest: int) -> CallShape:
    return next(shape for shape in choices if shape.longest >= longest)
