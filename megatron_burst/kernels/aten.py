# SPDX-License-Identifier: Apache-2.0
"""Attention of a shard of queries to a shard of keys by operators of torch or of FlashAttention.

A tile is a rectangle of (query, key) pairs, and each tile is one operator call. If the operator
supports sequences of different lengths, one call computes many consecutive tiles. This module
converts tiles to the arguments of operators. The operators are defined in `operators`,
`operators_cuda` and `flash`.

Most backward operators require the attention output. If backward sends queries (side "query"), the
output is not sent, so `stand_in` computes a substitute from dout and delta. Operators with a delta
argument do not need the output.

Shape letters as in `base`. The operators get views [b, h, s, d] of our tensors [s, b, h, d].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ..layout.layouts import ShardPairs
from ..masks import Mask
from ..masks.tiles import Tile, Tiles
from ..masks.tiling import Cutter
from . import native, rowwise
from .base import Rows, Scoring
from .joined import JoinedTiles, joined
from .online_softmax import clear_, merge_
from .operators import Lengths, Operator, TileVisibility, Widths
from .rounded import rounded

if TYPE_CHECKING:
    from .block_lists import PairBlocks

_KEPT_TILES = 16  # for more tiles, plans are made in each call, which needs about 3 us per tile


class AtenKernel:
    """Kernel that computes a tile, or several joined tiles, in one operator call.

    Args:
        name: Name of the kernel in `registry.KERNELS`.
        operator: The operator.
    """

    softcaps = False
    maximum = False  # the operators return lse only
    writes_new = True  # see `base.WritingKernel`
    passed_over: tuple[str, ...] = ()

    def __init__(self, name: str, operator: Operator):
        self.name = name
        self.operator = operator
        self.deterministic = operator.deterministic
        self.cutter = Cutter(*operator.limits, windows=operator.windows)
        self._tables: dict[int, TileWork] = {}

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        operator = self.operator
        if q.device.type != operator.device:
            return f"runs on {operator.device} tensors, got {q.device.type}"
        if q.dtype not in operator.dtypes:
            return f"supports {', '.join(map(str, operator.dtypes))}, got {q.dtype}"
        if q.shape[-1] % operator.multiple or v.shape[-1] % operator.multiple:
            widths = (q.shape[-1], v.shape[-1])
            return f"requires widths that are multiples of {operator.multiple}, got {widths}"
        return operator.unfit(q.device, self._widths(q, v))

    def _widths(self, q: torch.Tensor, v: torch.Tensor) -> Widths:
        """Return the widths of keys and values, padded to the larger one if they must be equal."""
        widths = q.shape[-1], v.shape[-1]
        if widths[0] == widths[1] or self.operator.unfit(q.device, widths) is None:
            return widths
        return max(widths), max(widths)

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[TileWorks | None]:
        tiles, operator = self.cutter.all_tiles(mask, pairs), self.operator
        # If shapes repeat in every batch, a call without sequences is compiled only once.
        if not operator.joins or (operator.rounds and mask.cacheable):
            return [self._single_tiles(own_tiles) if own_tiles else None for own_tiles in tiles]
        works = []
        for pair, own_tiles in zip(pairs, tiles, strict=True):
            parts = joined(own_tiles)
            if operator.rounds:
                parts = rounded(parts, *(sum(span.length for span in spans) for spans in pair))
            works.append(tuple(self._joined_work(part) for part in parts) or None)
        return works

    def _joined_work(self, part: Tile | JoinedTiles) -> TileWork:
        if isinstance(part, Tile):
            return self.tile_work(part)
        work = TileWork.of(part.span, lengths=part.lengths)
        return work._replace(separate=self._single_tiles(part.tiles))

    def _single_tiles(self, tiles: Tiles) -> TileWorks:
        if len(tiles) <= _KEPT_TILES:
            return tuple(map(self.tile_work, tiles))
        return _SingleTiles(tiles, self)

    def tile_work(self, tile: Tile) -> TileWork:
        """Return the plan of one operator call for a tile."""
        if tile.table is None:
            return TileWork.of(tile)
        key = id(tile.table)  # tiles at the edges of a window share one array
        if key not in self._tables:
            hidden = torch.from_numpy(~tile.table)
            blind = hidden.all(dim=1)
            work = TileWork(tile, TileVisibility(), hidden, blind if blind.any() else None)
            self._tables[key] = work  # keeps the array alive, so its id stays unique
        return self._tables[key]._replace(tile=tile)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Iterable[TileWork],
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
        *,
        new: bool = False,
    ) -> None:
        assert max_logits is None, f"kernel {self.name} does not return the largest scores"
        value_width = v.shape[-1]
        if q.shape[-1] != value_width:
            width, value_pad = self._widths(q, v)
            q, k, v = _padded(q, width), _padded(k, width), _padded(v, value_pad)
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        for item in _calls(work, q, k, v):
            rows, columns, lengths = item.tile.rows, item.tile.columns, item.visibility.lengths
            whole = lengths is not None and lengths.total is not None
            r, c = (_ALL, _ALL) if whole else (rows, columns)
            inputs = q[:, :, r], k[:, :, c], v[:, :, c]
            part, stats = self.operator.forward(*inputs, item.visible(q), scoring.scale)
            if whole:
                part, stats = part[:, :, rows], stats[:, :, rows]
            # `merge_` skips rows with lse -inf. For a row that a bias hides entirely, operators
            # return lse 0, which would count like a key. For a row without columns, they return an
            # undefined lse.
            blind = item.blind
            if lengths is not None and lengths.idle:
                *_, blind = lengths.on(stats.device)
            if blind is not None:
                stats = stats.masked_fill(blind, float("-inf"))
            part = part.permute(2, 0, 1, 3)  # back to [s, b, h, w]
            if part.shape[-1] != value_width:  # columns beyond the width of the values are padding
                part = part[..., :value_width]
            stats = stats.permute(2, 0, 1)
            # Operators may return any output for rows that see no key.
            if new and blind is None and item.visibility.blocks is None and _all(rows, out):
                out.copy_(part)
                lse.copy_(stats)
            else:
                if new:
                    clear_(out, lse)
                merge_(out[rows], lse[rows], part, stats)
            new = False
        if new:  # there was no call
            clear_(out, lse)

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Iterable[TileWork],
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        *,
        new: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        q, dout, takes_delta = rows.q, rows.dout, self.operator.takes_delta
        out = rows.delta if takes_delta else rows.out
        if out is None:
            out = stand_in(dout, rows.delta)
        if k.shape[-1] != v.shape[-1]:
            width, value_pad = self._widths(k, v)
            q, k = _padded(q, width), _padded(k, width)
            dout, v = _padded(dout, value_pad), _padded(v, value_pad)
            out = out if takes_delta else _padded(out, value_pad)
        q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        dout, out = (
            dout.permute(1, 2, 0, 3),
            out.permute((1, 2, 0) if takes_delta else (1, 2, 0, 3)),
        )
        lse = rows.lse.permute(1, 2, 0)
        totals: tuple[torch.Tensor | None, ...] = (dq, dk, dv)
        for item in _calls(work, q, k, v):
            parts = item.tile.rows, item.tile.columns, item.tile.columns
            lengths = item.visibility.lengths
            whole = lengths is not None and lengths.total is not None
            r, c = (_ALL, _ALL) if whole else parts[:2]
            stats = lse[:, :, r]
            # lse covers the whole sequence: it is -inf only in rows that attend to no key, where
            # exp(-inf - -inf) would be NaN. With 0, their probabilities are exp(-inf) = 0.
            if item.blind is not None:
                stats = stats.masked_fill(stats == float("-inf"), 0.0)
            inputs = dout[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], out[:, :, r], stats
            grads = self.operator.backward(*inputs, item.visible(q), scoring.scale)
            # Add in the accumulation dtype; the gradients of the operator have the dtype of q.
            for total, grad, part, first in zip(totals, grads, parts, new, strict=True):
                if total is not None:
                    grad = (grad[:, :, part] if whole else grad).permute(2, 0, 1, 3)
                    if grad.shape[-1] != total.shape[-1]:  # padding
                        grad = grad[..., : total.shape[-1]]
                    if first and _all(part, total):
                        total.copy_(grad)
                        continue
                    if first:
                        total.zero_()
                    # `total[part] +=` would also copy the sum onto itself.
                    total[part].add_(grad)
            new = (False, False, False)
        for total, first in zip(totals, new, strict=True):
            if total is not None and first:  # there was no call
                total.zero_()


_ALL = slice(None)


def _all(rows: slice, x: torch.Tensor) -> bool:
    """Return True if a slice with positive step selects all rows of x, in their order."""
    return (rows.start, rows.stop, rows.step) == (0, len(x), 1)


class TileWork(NamedTuple):
    """Plan of one call of an attention operator.

    Attributes:
        tile: The tile, or the rows and columns that enclose joined tiles.
        visibility: Visible pairs as the operator's argument, without the bias of `hidden`.
        hidden: bool [rows, columns], True for pairs that the mask hides; None if the tile needs no
            table of pairs.
        blind: bool [rows], True for rows of the tile that see no column; None if there are no such
            rows.
        separate: One plan per joined tile. These plans are used if the operator cannot compute
            sequences of the lengths in `visibility` with these tensors.
    """

    tile: Tile
    visibility: TileVisibility
    hidden: torch.Tensor | None = None
    blind: torch.Tensor | None = None
    separate: Iterable[TileWork] = ()

    @classmethod
    def of(
        cls, tile: Tile, *, lengths: Lengths | None = None, blocks: PairBlocks | None = None
    ) -> TileWork:
        """Return the plan of a call for a tile without a table of pairs.

        Args:
            tile: The tile, or the rows and columns that enclose joined tiles.
            lengths: Rows and columns of each joined tile; None for a single tile.
            blocks: Lists of the visible blocks of the tile, or None.
        """
        window = tile.band
        # `Tile.band` is aligned to the first row and column, windows of operators to the last ones.
        # Sequences of joined tiles are squares, for which both are equal.
        if window is not None and lengths is None:
            rows, columns = tile.shape
            window = window.left + columns - rows, window.right + rows - columns
        return cls(tile, TileVisibility(tile.triangle, None, window, lengths, blocks))

    def visible(self, q: torch.Tensor) -> TileVisibility:
        """Return the visible pairs as the operator's argument, with a bias in the dtype of q."""
        if self.hidden is None:
            return self.visibility
        # The bias is made in every call: biases of all tiles in a plan would need two to eight
        # times the memory of the tables.
        bias = torch.zeros(self.hidden.shape, dtype=q.dtype, device=q.device)
        return TileVisibility(bias=bias.masked_fill_(self.hidden, float("-inf")))


class TileWorks(Sized, Iterable[TileWork], Protocol):
    """The operator calls of a pair of shards, with their number."""


class _SingleTiles:
    """One plan per tile. Iteration makes the plans, which are not kept.

    Args:
        tiles: The tiles.
        kernel: The kernel that computes them.
    """

    def __init__(self, tiles: Tiles, kernel: AtenKernel):
        self._tiles, self._kernel = tiles, kernel

    def __len__(self) -> int:
        return len(self._tiles)

    def __iter__(self) -> Iterator[TileWork]:
        return map(self._kernel.tile_work, self._tiles)


def _calls(
    work: Iterable[TileWork], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[TileWork]:
    """Yield one plan per operator call for tensors [b, heads, s, d].

    Operators compute sequences of different lengths only with batch size 1. With larger batches,
    every tile is a separate call.
    """
    for work_item in work:
        lengths = work_item.visibility.lengths
        if lengths is None or lengths.fit(q, k, v):
            yield work_item
        else:
            yield from work_item.separate


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return a substitute O' for the attention output, with rowsum(dout * O') = delta.

    Backward operators use the attention output only to compute this sum (FlashAttention-2, arXiv
    2307.08691, Algorithm 2). Let m be the largest |dout| of a row, and n = dout / m. Then O' = n *
    (delta / m / |n|^2), or 0 if dout is 0. Without the division by m, rows with tiny gradients
    would lose all accuracy.

    If O' exceeds the range of float16, O' = sign(dout) * (delta / |dout|_1) is used. Its elements
    are never larger than those of the output. But they are all rounded in the same direction, so
    rounding errors do not average out.

    Args:
        dout: [s, b, h, w].
        delta: [s, b, h] in the accumulation dtype.

    Returns:
        [s, b, h, w] in the dtype of dout.
    """
    fused = native.stand_in(dout, delta)
    if fused is None:
        fused = rowwise.stand_in(dout, delta)
    if fused is not None:
        return fused
    wide_dout, delta = dout.to(delta.dtype), delta.unsqueeze(-1)
    largest = wide_dout.abs().amax(dim=-1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)  # avoids 0 / 0
    scaled = wide_dout / largest
    tiny = torch.finfo(wide_dout.dtype).tiny
    factor = delta / largest / scaled.square().sum(dim=-1, keepdim=True).clamp_min(tiny)
    if dout.dtype != torch.float16:  # other dtypes have the range of the sums
        return (scaled * factor).to(dout.dtype)
    sign_factor = delta / scaled.abs().sum(dim=-1, keepdim=True).clamp_min(tiny) / largest
    fits = factor.abs() <= torch.finfo(dout.dtype).max
    return torch.where(fits, scaled * factor, scaled.sign() * sign_factor).to(dout.dtype)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last dimension of x with zeros to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
