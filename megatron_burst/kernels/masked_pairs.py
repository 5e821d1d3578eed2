# SPDX-License-Identifier: Apache-2.0
"""Pairs of shards under one mask, for kernels that compute equal tiles of any mask.

Tile grids and device arrays are made at first use, for all pairs of a plan at once. So the mask is
evaluated once and the arrays are copied once per plan, not once per pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from ..layout import Span
from ..layout.sharding import to_device
from ..masks import Mask
from .tile_grid import TileGrid, tile_grid, tile_grids

COARSE = 128  # tile size for testing whether a pair of shards has a visible tile
ALIGNED = 16  # bytes: a descriptor requires it for every stride


class MaskedPairs:
    """All pairs of shards that were planned for one mask."""

    def __init__(self, mask: Mask):
        self.mask = mask
        self.spans: list[tuple[Sequence[Span], Sequence[Span]]] = []
        self.grids: dict[tuple[int, int], list[TileGrid]] = {}

    def add(self, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> int:
        """Add a pair of shards and return its index."""
        self.spans.append((q_spans, k_spans))
        return len(self.spans) - 1

    def shape(self, pair: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of a pair."""
        rows, columns = (sum(span.length for span in spans) for spans in self.spans[pair])
        return rows, columns

    def tiles(self, rows: int, columns: int) -> list[TileGrid]:
        """Return one tile grid per pair of shards, with tiles of `rows` x `columns`."""
        grids = self.grids.setdefault((rows, columns), [])
        grids += tile_grids(self.mask, self.spans[len(grids) :], rows, columns)
        return grids


def any_visible(mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> bool:
    """Return True if any query of one shard sees any key of the other shard."""
    q, k = (np.array([(s.start, s.last) for s in spans]).ravel() for spans in (q_spans, k_spans))
    if mask.visible(q[:, None], k[None, :]).any():  # the ends of spans suffice for most pairs
        return True
    return bool(tile_grid(mask, q_spans, k_spans, COARSE, COARSE))


def copy_together(arrays: Iterable[np.ndarray], device: torch.device) -> dict[int, torch.Tensor]:
    """Copy int32 arrays to `device` in one transfer.

    Args:
        arrays: The arrays; an array that occurs twice is copied once.
        device: Device of the result.

    Returns:
        Dictionary from the `id` of each array to its tensor. Each tensor starts at a multiple of 16
        bytes.
    """
    distinct = {id(x): x for x in arrays}
    unit = ALIGNED // np.dtype(np.int32).itemsize
    sizes = [x.size + -x.size % unit for x in distinct.values()]
    packed, at = np.zeros(sum(sizes), dtype=np.int32), 0
    for size, x in zip(sizes, distinct.values(), strict=True):
        packed[at : at + x.size] = x.ravel()
        at += size
    parts = zip(distinct.items(), to_device(packed, device).split(sizes), strict=True)
    return {key: part[: x.size].view(x.shape) for (key, x), part in parts}


def copy_pairs(
    pairs: Iterable[tuple[np.ndarray, ...]], device: torch.device
) -> list[tuple[torch.Tensor, ...]]:
    """Copy the int32 arrays of all pairs to `device` in one transfer."""
    pairs = list(pairs)
    tensors = copy_together(chain.from_iterable(pairs), device)
    return [tuple(tensors[id(x)] for x in arrays) for arrays in pairs]
