"""Where rows lie in the buffers of chunks, in the order in which they travel.

Made with a plan: what is no slice of a buffer becomes an index, and all indices go to the device in
one copy. The order of rows is that of `schedule.bundles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..layout.sharding import to_device
from ..schedule.tables import Chunk, Tables

Where = slice | torch.Tensor  # rows of a buffer


class RowMaps:
    """How many rows chunks have, and where some rows lie among those of a chunk.

    `learn` what will be asked, then `finish`.
    """

    def __init__(self, tables: Tables):
        self._tables: Tables | None = tables
        self._numbers: dict[Any, np.ndarray] = {}
        self._counts: dict[Any, int] = {}
        self._found: dict[Any, Any] = {}

    def numbers(self, chunk: Chunk) -> np.ndarray:
        """The rows of a chunk as numbers in its owner's shard, in the order of its buffer."""
        assert self._tables is not None
        key = _key(chunk)
        if key not in self._numbers:
            ranges = self._tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
            parts = [np.arange(first, stop) for first, stop in ranges]
            self._numbers[key] = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        return self._numbers[key]

    def learn(self, chunk: Chunk, rows: int | None = None) -> None:
        """`count` of the chunk, and `where` these rows of it lie, will be asked for."""
        have = self.numbers(chunk)
        self._counts[_key(chunk)] = len(have)
        if rows is None or (chunk_rows := (*_key(chunk), rows)) in self._found:
            return
        want = self.numbers(chunk._replace(rows=rows))
        order = np.argsort(have, kind="stable")
        at = order[np.searchsorted(have, want, sorter=order)]
        first = int(at[0]) if len(at) else 0
        consecutive = np.array_equal(at, np.arange(first, first + len(at)))
        self._found[chunk_rows] = slice(first, first + len(at)) if consecutive else at

    def finish(self, device: torch.device) -> None:
        """Bring the indices to the device; nothing more can be learnt."""
        keys = [key for key, found in self._found.items() if not isinstance(found, slice)]
        if keys:
            indices = [self._found[key] for key in keys]
            parts = to_device(np.concatenate(indices), device).split([len(x) for x in indices])
            self._found.update(zip(keys, parts, strict=True))
        self._tables, self._numbers = None, {}

    def count(self, chunk: Chunk) -> int:
        """How many rows the chunk has."""
        return self._counts[_key(chunk)]

    def where(self, chunk: Chunk, rows: int) -> Where:
        """Where these rows lie in a buffer of the chunk."""
        return self._found[(*_key(chunk), rows)]


def _key(chunk: Chunk) -> tuple[bool, int, int]:
    """Families of the same rows share their maps."""
    return chunk.family in ("kv", "dkv"), chunk.owner, chunk.rows


def taken(tensors: tuple[torch.Tensor, ...], where: Where) -> tuple[torch.Tensor, ...]:
    """These rows of each tensor: views where they are a slice, else copies."""
    if isinstance(where, slice):
        return tuple(t[where] for t in tensors)
    return tuple(t.index_select(0, where) for t in tensors)
