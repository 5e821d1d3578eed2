# SPDX-License-Identifier: Apache-2.0
"""Attention of a pair of shards by stock operators: one operator call for every tile, or for many
that follow each other where the operator takes sequences of different lengths.

This module decides how a tile becomes the arguments of such a call; `operators` and `flash` hold
the operators.

Stock backward operators want the attention output. On the query side it does not travel, so a
stand-in is rebuilt from what does (see `stand_in`), and no operator needs a patch. An operator
that takes delta gets it directly.

Shape letters as in `base`. The operators want [b, h, s, d], which are views of our tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..layout import Span
from ..masks import Mask
from ..masks.tiling import Cutter, Tile
from . import native, rowwise
from .base import Rows, Scoring
from .joined import Joined, joined
from .online_softmax import merge_
from .operators import Lengths, Operator, Shown, Widths, Window


class AtenKernel:
    """The kernel around one operator; `name` is its entry in `registry.KERNELS`."""

    softcaps = False
    maximum = False  # the operators return lse alone
    passed_over: tuple[str, ...] = ()

    def __init__(self, name: str, operator: Operator):
        self.name = name
        self.operator = operator
        self.deterministic = operator.deterministic
        self.cutter = Cutter(*operator.limits, windows=operator.windows)
        self._tables: dict[int, _TileWork] = {}

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        operator = self.operator
        if q.device.type != operator.device:
            return f"runs on {operator.device} tensors, got {q.device.type}"
        if q.dtype not in operator.dtypes:
            return f"takes {', '.join(map(str, operator.dtypes))}, got {q.dtype}"
        if q.shape[-1] % operator.multiple or v.shape[-1] % operator.multiple:
            widths = (q.shape[-1], v.shape[-1])
            return f"needs widths that {operator.multiple} divides, got {widths}"
        return operator.unfit(q.device, self._widths(q, v))

    def _widths(self, q: torch.Tensor, v: torch.Tensor) -> Widths:
        """The widths of keys and of values that the operator gets: one if it takes no two."""
        widths = q.shape[-1], v.shape[-1]
        if widths[0] == widths[1] or self.operator.unfit(q.device, widths) is None:
            return widths
        return max(widths), max(widths)

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> tuple[_TileWork, ...] | None:
        tiles = self.cutter.tiles(mask, q_spans, k_spans)
        if not self.operator.joins:
            return tuple(self._tile_work(tile) for tile in tiles) or None
        return tuple(self._joined_work(part) for part in joined(tiles)) or None

    def _joined_work(self, part: Tile | Joined) -> _TileWork:
        if isinstance(part, Tile):
            return self._tile_work(part)
        apart = tuple(self._tile_work(tile) for tile in part.tiles)
        return _TileWork(part.whole, None, None, part.lengths, apart)

    def _tile_work(self, tile: Tile) -> _TileWork:
        if tile.table is None:
            return _TileWork(tile, None, None)
        key = id(tile.table)  # equal edges of a window are the same array
        if key not in self._tables:
            hidden = torch.from_numpy(~tile.table)
            blind = hidden.all(dim=1)
            work = _TileWork(tile, hidden, blind if blind.any() else None)
            self._tables[key] = work  # holds the array, so that no other can get its id
        return self._tables[key]._replace(tile=tile)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Sequence[_TileWork],
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        assert max_logits is None
        value_width = v.shape[-1]
        width, wide = self._widths(q, v)
        q, k, v = _heads_first(q, width), _heads_first(k, width), _heads_first(v, wide)
        for item in _items(work, len(q)):
            r, c = item.tile.rows, item.tile.columns
            given = q[:, :, r], k[:, :, c], v[:, :, c]
            part, stats = self.operator.forward(*given, item.shown(q), scoring.scale)
            # `merge_` leaves rows alone where lse is -inf. Operators return 0 for a row that a bias
            # hides entirely, which would weigh like a key, and anything for one without columns.
            blind = item.blind
            if item.lengths is not None and item.lengths.idle:
                *_, blind = item.lengths.on(stats.device)
            if blind is not None:
                stats = stats.masked_fill(blind, float("-inf"))
            # Back to [s, b, h, w]; columns beyond the width of the values are padding.
            part = part.permute(2, 0, 1, 3)[..., :value_width]
            merge_(out[r], lse[r], part, stats.permute(2, 0, 1))

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Sequence[_TileWork],
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        width, wide = self._widths(k, v)
        q, k = (_heads_first(x, width) for x in (rows.q, k))
        dout, v = (_heads_first(x, wide) for x in (rows.dout, v))
        if self.operator.takes_delta:
            out = rows.delta.permute(1, 2, 0)
        else:
            out = stand_in(rows.dout, rows.delta) if rows.out is None else rows.out
            out = _heads_first(out, wide)
        lse = rows.lse.permute(1, 2, 0)
        totals: tuple[torch.Tensor | None, ...] = (dq, dk, dv)
        for item in _items(work, len(q)):
            r, c = item.tile.rows, item.tile.columns
            stats = lse[:, :, r]
            # lse is that of the whole sequence: -inf stands only in rows that see nothing at all,
            # where exp(-inf - -inf) would be NaN. With 0, their probabilities are exp(-inf) = 0.
            if item.blind is not None:
                stats = stats.masked_fill(stats == float("-inf"), 0.0)
            given = dout[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], out[:, :, r], stats
            grads = self.operator.backward(*given, item.shown(q), scoring.scale)
            # In place and in the accumulation dtype: the operator's gradients have the dtype of q.
            for total, grad, part in zip(totals, grads, (r, c, c), strict=True):
                if total is not None:
                    # `total[part] +=` would also copy the sum onto itself.
                    total[part].add_(grad.permute(2, 0, 1, 3)[..., : total.shape[-1]])


class _TileWork(NamedTuple):
    """What one operator call needs: a tile and, of a table, what is hidden and which rows see
    nothing; of joined tiles what they lie in, their lengths, and what each would need.
    """

    tile: Tile
    hidden: torch.Tensor | None  # bool [rows, columns]
    blind: torch.Tensor | None  # bool [rows], None if every row sees something
    lengths: Lengths | None = None
    apart: tuple[_TileWork, ...] = ()

    def shown(self, q: torch.Tensor) -> Shown:
        """As the operator is told; q: of the dtype and device that it computes in."""
        return Shown(self.tile.triangle, self._bias(q), self._window(), self.lengths)

    def _window(self) -> Window | None:
        """(left, right) of the tile's band. `Tile.band` is aligned to the first row and column,
        windows of operators are aligned to the last row and column.
        """
        if self.tile.band is None:
            return None
        if self.lengths is not None:  # each sequence is a square
            return self.tile.band
        rows, columns = self.tile.shape
        left, right = self.tile.band
        return left + columns - rows, right + rows - columns

    def _bias(self, q: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] in the dtype of q: -inf where hidden; None where there is no table."""
        if self.hidden is None:
            return None
        # Made for every call: to keep the biases of all tiles in a plan would take two to eight
        # times the memory of the tables.
        zeros = torch.zeros(self.hidden.shape, dtype=q.dtype)
        return zeros.masked_fill_(self.hidden, float("-inf"))


def _items(work: Sequence[_TileWork], batch: int) -> Iterator[_TileWork]:
    """One for every call. Sequences of different lengths leave no room for a second batch entry:
    with more, every tile is computed alone.
    """
    for item in work:
        if item.lengths is None or batch == 1:
            yield item
        else:
            yield from item.apart


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An output O' with rowsum(dout * O') = delta, for operators whose backward wants an output.

    They use the output for that sum alone (FlashAttention-2, arXiv 2307.08691, Algorithm 2).
    dout [s, b, h, w], delta [s, b, h] -> [s, b, h, w] in the dtype of dout. With m the largest
    |dout| of a row and n = dout / m: O' = n * (delta / m / |n|^2), and 0 where dout is 0.
    Without the scaling by m rows of tiny gradients lose all accuracy. Where that is beyond
    float16, O' = sign(dout) * (delta / |dout|_1): never larger than the output was, but all
    elements are rounded alike, so that errors do not average out.
    """
    found = native.stand_in(dout, delta)
    if found is None:
        found = rowwise.stand_in(dout, delta)
    if found is not None:
        return found
    wide, delta = dout.to(delta.dtype), delta.unsqueeze(-1)
    m = wide.abs().amax(dim=-1, keepdim=True)
    m = torch.where(m == 0, torch.ones_like(m), m)  # a row of zeros stays one, without 0 / 0
    n = wide / m
    tiny = torch.finfo(wide.dtype).tiny
    most = delta / m / n.square().sum(dim=-1, keepdim=True).clamp_min(tiny)  # n is at most 1
    if dout.dtype != torch.float16:  # others reach as far as their sums
        return (n * most).to(dout.dtype)
    even = delta / n.abs().sum(dim=-1, keepdim=True).clamp_min(tiny) / m
    fits = most.abs() <= torch.finfo(dout.dtype).max
    return torch.where(fits, n * most, n.sign() * even).to(dout.dtype)


def _heads_first(x: torch.Tensor, width: int) -> torch.Tensor:
    """[s, b, h, d] -> [b, h, s, width], a view where d is the width; else padded with zeros, which
    change no score and no sum.
    """
    wide = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    return wide.permute(1, 2, 0, 3)
