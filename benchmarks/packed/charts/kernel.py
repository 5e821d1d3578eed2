"""Time of a local attention call, by its rectangles of queries and keys.

Two constants per pass are derived from published speeds of a single GPU: the rate for a long causal
sequence, and the cost of a row in keys. Rectangles are rounded up to tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from .documents import area, magi_packs

HEADS, KV_HEADS, WIDTH, TOKENS = 64, 8, 128, 8192
TILE = 128  # approximate rows and columns of a tile of FlashAttention-3 at width 128
FLOPS = (4.0 * HEADS * WIDTH, 2.5 * 4.0 * HEADS * WIDTH)  # per visible pair, forward and backward
# One H100, 32K tokens, TFLOP/s forward and backward, read off MagiAttention's charts, +- 2 %:
# (causal, packed causal) of each kernel.
ALONE = {"FA3": ((680.0, 585.0), (585.0, 425.0))}
PACK = 1 << 15


def tiled(rows: np.ndarray) -> np.ndarray:
    """Round rows up to whole tiles."""
    return np.ceil(rows / TILE) * TILE


@dataclass(frozen=True)
class Kernel:
    """One pass of a kernel.

    Attributes:
        rate: FLOP/s of pairs in tiles.
        edge: Additional cost of a row, in keys.
        flops: FLOPs of a pair.
        backward: True if rows of keys count like rows of queries.
    """

    rate: float
    edge: float
    flops: float
    backward: bool

    @property
    def per_pair(self) -> float:
        """Return seconds of a pair in a tile."""
        return self.flops / self.rate

    def tiles(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return seconds of tiles in which all rows see all keys."""
        return tiled(rows) * tiled(keys) * self.per_pair

    def triangle(self, rows: np.ndarray) -> np.ndarray:
        """Return seconds of tiles in which each row sees the rows before it and itself."""
        whole = tiled(rows)
        return whole * (whole + TILE) / 2 * self.per_pair

    def besides(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return additional seconds of the rows of a call; `keys` are the keys that they see."""
        tile_rows = (tiled(rows) + tiled(keys)) / 2 if self.backward else tiled(rows)
        return self.edge * tile_rows * self.per_pair

    def own(self, rows: np.ndarray, causal: bool) -> np.ndarray:
        """Return seconds of attention within each document; `rows` are lengths of documents."""
        pairs = self.triangle(rows) if causal else self.tiles(rows, rows)
        return pairs + self.besides(rows, rows)

    def rectangle(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return seconds of rows of a document that all see the same number of its keys."""
        return self.tiles(rows, keys) + self.besides(rows, keys)


@cache
def kernels(name: str) -> tuple[Kernel, Kernel]:
    """Return forward and backward of a kernel with the speeds of `ALONE`."""
    packs = magi_packs(PACK)
    whole = np.array([float(PACK)])
    fitted_kernels = []
    for backward, (causal, packed) in enumerate(ALONE[name]):
        flops = FLOPS[backward]
        low, high = 0.0, 8192.0
        for _ in range(50):  # bisection: a larger cost per row makes short documents slower
            edge = (low + high) / 2
            kernel = Kernel(1.0, edge, flops, bool(backward))
            ratio = np.mean([_speed(kernel, lengths) for lengths in packs]) / _speed(kernel, whole)
            low, high = (edge, high) if ratio > packed / causal else (low, edge)
        kernel = Kernel(1.0, low, flops, bool(backward))
        fitted_kernels.append(replace(kernel, rate=causal * 1e12 / _speed(kernel, whole)))
    return fitted_kernels[0], fitted_kernels[1]


def _speed(kernel: Kernel, lengths: np.ndarray) -> float:
    """Return FLOP/s of visible pairs of causal documents."""
    pairs = kernel.flops * area(lengths, True)
    return pairs / float(kernel.own(lengths.astype(float), True).sum())
