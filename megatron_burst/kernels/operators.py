"""The protocol of flash attention operators, and those for CPUs: torch's own, and the compiled one
of `csrc/` for narrow heads. `operators_cuda` has torch's for GPUs, `flash` those of packages.

Decides which widths and dtypes each serves, and spells the arguments of a tile as each operator
expects them. Windows are aligned to the last row and column, as in FlashAttention.

FlashAttention takes many sequences of different lengths in one call, given by where each begins.
Tiles that follow each other in rows and in columns become the sequences of one such call, whatever
lies between them: rows that see no column and columns that no row sees are sequences too. So a pair
of shards takes one call, or a few, however many documents it holds; `joined` decides which tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..layout.sharding import to_device
from ..masks.tiling import Tile
from . import native

# What tiles of one call are: triangles, or bands down the diagonal; or wholly visible
DIAGONAL, SQUARE = "diagonal", "square"
# Rows, or columns, between two tiles of one call, at most: to merge these takes about as long as
# a call of its own (4096 rows of 32 heads of width 128: 200 MB read and written).
GAP = 4096


class Lengths:
    """Rows and columns of each of many sequences, brought to each device once.

    sizes: (rows, columns) of each, one of which may be 0. idle: are there rows without columns?
    """

    def __init__(self, sizes: Sequence[tuple[int, int]] | np.ndarray):
        lengths = np.array(sizes, dtype=np.int32)
        rows, columns = lengths.max(axis=0).tolist()
        self._idle = np.repeat(lengths[:, 1] == 0, lengths[:, 0])  # bool [rows]
        self.idle = bool(self._idle.any())
        # Where the longest has one row FlashAttention 2 takes it that all have one.
        self.longest = (rows if lengths[:, 0].all() else max(rows, 2)), columns
        zero = np.zeros((1, 2), dtype=np.int32)
        self._ends = np.concatenate([zero, np.cumsum(lengths, axis=0, dtype=np.int32)])
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cumulative rows and columns, int32 [sequences + 1]; bool [rows]: has it no columns?"""
        if device not in self._there:
            ends = np.ascontiguousarray(self._ends.T).view(np.uint8).ravel()
            both = to_device(np.concatenate([ends, self._idle.view(np.uint8)]), device)
            bounds, idle = both.split([ends.size, self._idle.size])
            rows, columns = bounds.view(torch.int32).view(2, -1)
            self._there[device] = rows, columns, idle.view(torch.bool)
        return self._there[device]


class Joined(NamedTuple):
    """Tiles of one kind, each beginning in a row and a column behind those of the one before.

    whole: what they lie in. Every tile is a lower triangle if `whole` is called one, and has the
    band of `whole` if that has one, with the right edge on its diagonal. lengths: of the tiles, and
    of the rows and columns between them.
    """

    tiles: tuple[Tile, ...]
    whole: Tile
    lengths: Lengths


def joined(tiles: Sequence[Tile]) -> list[Tile | Joined]:
    """The tiles, of which those that follow each other are joined."""
    # One row and one column are a triangle as well as a square: as what there is besides.
    one = DIAGONAL if any(tile.triangle or tile.band for tile in tiles) else SQUARE
    chains: dict[str | None, list[_Chain]] = {DIAGONAL: [], SQUARE: [], None: []}
    for tile in sorted(tiles, key=lambda each: (each.rows.start, each.columns.start)):
        kind = _kind(tile, one)
        for chain in chains[kind] if kind else ():
            if chain.extend(tile):
                break
        else:
            chains[kind].append(_Chain(tile))
    found = sorted(chain for each in chains.values() for chain in each)
    return [chain.tiles[0] if len(chain.tiles) == 1 else chain.joined() for chain in found]


def _kind(tile: Tile, one: str) -> str | None:
    """What tiles of one call have in common; None: this one is computed alone. one: the kind of a
    tile of one row and one column."""
    if tile.table is not None or tile.rows.step not in (1, None):
        return None
    if tile.columns.step not in (1, None):
        return None
    (rows, columns), band = tile.shape, tile.band
    if band is None:
        return one if rows == columns == 1 else DIAGONAL if tile.triangle else SQUARE
    return DIAGONAL if rows == columns and band.right == 0 else None


class _Chain:
    """Tiles of one kind, for one call."""

    def __init__(self, first: Tile):
        self.tiles = [first]
        self._band = first.band
        self._longest = 0 if first.band else first.shape[0]  # rows of those without a band

    def __lt__(self, other: _Chain) -> bool:
        a, b = self.tiles[0], other.tiles[0]
        return (a.rows.start, a.columns.start) < (b.rows.start, b.columns.start)

    def extend(self, tile: Tile) -> bool:
        """Add a tile, if it follows closely and can be computed by the same call."""
        last = self.tiles[-1]
        if not 0 <= tile.rows.start - last.rows.stop <= GAP:
            return False
        if not 0 <= tile.columns.start - last.columns.stop <= GAP:
            return False
        # A triangle is a band that is as wide as it has rows.
        band = self._band or tile.band
        rows = tile.rows.stop - tile.rows.start
        longest = self._longest if tile.band else max(self._longest, rows)
        if tile.band not in (None, band) or (band is not None and longest > band.left + 1):
            return False
        self.tiles.append(tile)
        self._band, self._longest = band, longest
        return True

    def joined(self) -> Joined:
        first, last = self.tiles[0], self.tiles[-1]
        rows = slice(first.rows.start, last.rows.stop, 1)
        columns = slice(first.columns.start, last.columns.stop, 1)
        causal = self._band is None and any(tile.triangle for tile in self.tiles)
        ends = [(t.rows.start, t.columns.start, t.rows.stop, t.columns.stop) for t in self.tiles]
        at = np.array(ends, dtype=np.int64).reshape(-1, 2, 2)  # start and stop, rows and columns
        # Before each tile the rows between, and then the columns between: most are none.
        between = at[:, 0] - np.concatenate([at[:1, 0], at[:-1, 1]])
        sizes = np.zeros((len(at), 3, 2), dtype=np.int64)
        sizes[:, 0, 0], sizes[:, 1, 1] = between.T
        sizes[:, 2] = at[:, 1] - at[:, 0]
        sizes = sizes.reshape(-1, 2)
        sizes = sizes[sizes.any(axis=1)]
        whole = Tile(rows, columns, triangle=causal, band=self._band)
        return Joined(tuple(self.tiles), whole, Lengths(sizes))


aten = torch.ops.aten

Window = tuple[int, int]
Widths = tuple[int, int]  # of queries and keys, and of values
ONE_WIDTH = "takes keys and values of one width"  # and gets them padded


class Shown(NamedTuple):
    """Which columns each row sees in one call. Row m of s sees column n of t if causal (s = t):
    n <= m; with a bias: where it is not -inf; with a window (left, right): m + t - s - left <= n <=
    m + t - s + right; else always.

    lengths: of many sequences end to end in one batch entry, b = 1, of which each is as above.
    """

    causal: bool = False
    bias: torch.Tensor | None = None
    window: Window | None = None
    lengths: Lengths | None = None


class Operator(Protocol):
    """One stock operator pair on [b, h, s, d]; lse is [b, h, s].

    Of many sequences some may have no rows or no columns. Rows without columns get gradients 0, and
    any finite out and any lse; columns without rows get gradients 0.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    multiple: int  # widths must be a multiple of this
    limits: tuple[int | None, int | None]  # of `masks.tiling.Cutter`; tables come as a bias
    windows: bool  # takes a window
    joins: bool  # takes many sequences of different lengths in one call
    deterministic: bool  # if torch.use_deterministic_algorithms asks for it
    takes_delta: bool  # backward gets delta [b, h, s] where others get out

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        """Why a device of the right type cannot serve widths of keys and of values, or None.
        Widths that differ are asked about first as they are, and then padded to the greater."""
        ...

    def forward(self, q, k, v, shown: Shown, scale: float) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self, dout, q, k, v, out, lse, shown: Shown, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class CpuFlash:
    """torch's flash attention for CPUs."""

    device = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    multiple = 1
    limits: tuple[int | None, int | None] = (192, 256)  # it skips little of a triangle: cut it
    windows = False
    deterministic = True
    takes_delta = False
    joins = False

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        return None if widths[0] == widths[1] else ONE_WIDTH

    def forward(self, q, k, v, shown, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, shown.causal, attn_mask=shown.bias, scale=scale
        )

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, shown.causal, attn_mask=shown.bias, scale=scale
        )


class CpuNarrow:
    """The compiled attention of narrow heads (`csrc/narrow.h`), where it was built.

    As fast as the processor adds and multiplies: 3 to 5 times torch's at width 8, 1.5 to 1.8 times
    at 16 (benchmarks/csrc.py). At 24 and 32 torch's is as fast, so those are not served. All
    it returns is float32.
    """

    device = "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    multiple = 1
    limits: tuple[int | None, int | None] = (None, None)
    windows = True
    deterministic = True
    takes_delta = True
    joins = False

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        if max(widths) > native.NARROW:
            return f"takes widths up to {native.NARROW}, got {max(widths)}"
        if native.serves(device.type):
            return None if widths[0] == widths[1] else ONE_WIDTH
        return f"needs the compiled library of csrc/, and there is no {native.FILE}: `make csrc`"

    def forward(self, q, k, v, shown, scale):
        return native.narrow_forward(q, k, v, _from_first(q, k, shown), scale)

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        band = _from_first(q, k, shown)
        return native.narrow_backward(dout, q, k, v, lse, out, band, scale)  # out: delta


def _from_first(q: torch.Tensor, k: torch.Tensor, shown: Shown) -> Window:
    """(left, right) counted from the first row and column: row m sees m - left to m + right."""
    s, t = q.shape[2], k.shape[2]
    if shown.window is None:
        return s, 0 if shown.causal else t
    return shown.window[0] - (t - s), shown.window[1] + (t - s)
