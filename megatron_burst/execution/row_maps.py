"""Where rows lie in the buffers of chunks, in the order in which they travel.

Made with a plan: what is no slice of a buffer becomes an index, and all indices go to the device in
one copy. The order of rows is that of `schedule.bundles`.
"""

from __future__ import annotations

from itertools import starmap
from typing import Any

import numpy as np
import torch

from ..layout.sharding import to_device
from ..schedule.tables import ALL, Chunk, Tables

Where = slice | torch.Tensor  # rows of a buffer


class RowMaps:
    """How many rows chunks have, and where some rows lie among those of a chunk.

    `learn` what will be asked, then `finish`.
    """

    def __init__(self, tables: Tables):
        self._tables: Any = tables  # None once finished
        self._counts: dict[Any, int] = {}
        self._found: dict[Any, Any] = {}
        self._sorted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def learn(self, chunk: Chunk, rows: int | None = None) -> None:
        """`count` of the chunk, and `where` these rows of it lie, will be asked for."""
        key = _key(chunk)
        if key not in self._counts:
            self._counts[key] = self._tables.bundles(chunk.family).count(chunk.owner, chunk.rows)
        if rows is None or (*key, rows) in self._found:
            return
        if rows == chunk.rows:  # most
            self._found[(*key, rows)] = slice(0, self._counts[key])
            return
        want = self._row_numbers(chunk._replace(rows=rows))
        at = want if chunk.rows == ALL else self._among(chunk, want)
        first = int(at[0]) if len(at) else 0
        consecutive = np.array_equal(at, np.arange(first, first + len(at)))
        self._found[(*key, rows)] = slice(first, first + len(at)) if consecutive else at

    def finish(self, device: torch.device) -> None:
        """Bring the indices to the device; nothing more can be learnt."""
        keys = [key for key, found in self._found.items() if not isinstance(found, slice)]
        if keys:
            indices = [self._found[key] for key in keys]
            parts = to_device(np.concatenate(indices), device).split([len(x) for x in indices])
            self._found.update(zip(keys, parts, strict=True))
        self._tables, self._sorted = None, {}

    def count(self, chunk: Chunk) -> int:
        """How many rows the chunk has."""
        return self._counts[_key(chunk)]

    def where(self, chunk: Chunk, rows: int) -> Where:
        """Where these rows lie in a buffer of the chunk."""
        return self._found[(*_key(chunk), rows)]

    def _among(self, chunk: Chunk, want: np.ndarray) -> np.ndarray:
        """Where these rows of its owner's shard lie in the buffer of a chunk."""
        key = _key(chunk)
        if key not in self._sorted:
            have = self._row_numbers(chunk)
            order = np.argsort(have, kind="stable")
            self._sorted[key] = have[order], order
        have, order = self._sorted[key]
        return order[np.searchsorted(have, want)]

    def _row_numbers(self, chunk: Chunk) -> np.ndarray:
        """The rows of a chunk in its owner's shard, in the order of its buffer."""
        ranges = self._tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        return np.concatenate([np.arange(0), *starmap(np.arange, ranges)])


def _key(chunk: Chunk) -> tuple[bool, int, int]:
    """Families of the same rows share their maps."""
    return chunk.family in ("kv", "dkv"), chunk.owner, chunk.rows


def taken(tensors: tuple[torch.Tensor, ...], where: Where) -> tuple[torch.Tensor, ...]:
    """These rows of each tensor: views where they are a slice, else copies."""
    if isinstance(where, slice):
        return tuple(t[where] for t in tensors)
    return tuple(t.index_select(0, where) for t in tensors)
