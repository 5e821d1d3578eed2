"""A pair of shards by stock operators, a call for every tile.

Stock backward operators want the attention output. Where queries are visiting it did not
travel, and a stand-in is rebuilt from what did, so no operator needs a patch (see `stand_in`);
none is built for an operator that takes delta.
Decides how a tile becomes one operator call; knows nothing of ranks or communication, nor what
an operator is called (`operators`).

Shape letters as in `kernels`. The operators want [b, h, s, d]: views, not copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..layout import Span
from ..masks import Mask
from ..masks.tiling import Cutter, Tile
from . import native
from .base import Rows, Scoring
from .online_softmax import merge_
from .operators import Operator, Window


class AtenKernel:
    softcaps = False

    def __init__(self, name: str, operator: Operator):
        self.name = name
        self.operator = operator
        self.deterministic = operator.deterministic
        self.cutter = Cutter(*operator.limits, windows=operator.windows)
        self._tables: dict[int, _Call] = {}

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        operator = self.operator
        if q.device.type != operator.device:
            return f"runs on {operator.device} tensors, got {q.device.type}"
        if q.dtype not in operator.dtypes:
            return f"takes {', '.join(map(str, operator.dtypes))}, got {q.dtype}"
        if q.shape[-1] % operator.multiple or v.shape[-1] % operator.multiple:
            widths = (q.shape[-1], v.shape[-1])
            return f"needs widths that {operator.multiple} divides, got {widths}"
        return operator.unfit(q.device, max(q.shape[-1], v.shape[-1]))

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> tuple[_Call, ...] | None:
        tiles = self.cutter.tiles(mask, q_spans, k_spans)
        return tuple(self._call(tile) for tile in tiles) or None

    def _call(self, tile: Tile) -> _Call:
        if tile.table is None:
            return _Call(tile, None, None)
        key = id(tile.table)  # the edges of a window share one table
        if key not in self._tables:
            hidden = torch.from_numpy(~tile.table)
            blind = hidden.all(dim=1)
            call = _Call(tile, hidden, blind if blind.any() else None)
            self._tables[key] = call  # holds the table, so that its id stays taken
        return self._tables[key]._replace(tile=tile)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Sequence[_Call],
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        width, value_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        q, k, v = (_heads_first(_widen(x, width)) for x in (q, k, v))
        for call in work:
            r, c = call.tile.rows, call.tile.columns
            part, stats = self.operator.forward(
                q[:, :, r], k[:, :, c], v[:, :, c],
                call.tile.triangle, call.bias(q), call.window, scoring.scale,
            )  # fmt: skip
            if call.blind is not None:  # the operator answers 0 for rows that see nothing
                stats = stats.masked_fill(call.blind, float("-inf"))
            part = part.permute(2, 0, 1, 3)[..., :value_width]
            merge_(out[r], lse[r], part, stats.permute(2, 0, 1))

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Sequence[_Call],
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        width = max(k.shape[-1], v.shape[-1])
        dout, q, k, v = (_heads_first(_widen(x, width)) for x in (rows.dout, rows.q, k, v))
        if self.operator.takes_delta:
            out = rows.delta.permute(1, 2, 0)
        else:
            out = stand_in(rows.dout, rows.delta) if rows.out is None else rows.out
            out = _heads_first(_widen(out, width))
        lse = rows.lse.permute(1, 2, 0)
        totals: tuple[torch.Tensor | None, ...] = (dq, dk, dv)
        for call in work:
            r, c = call.tile.rows, call.tile.columns
            stats = lse[:, :, r]
            if call.blind is not None:  # rows blind everywhere: exp(-inf - -inf) would be NaN
                stats = stats.masked_fill(stats == float("-inf"), 0.0)
            grads = self.operator.backward(
                dout[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], out[:, :, r], stats,
                call.tile.triangle, call.bias(q), call.window, scoring.scale,
            )  # fmt: skip
            for total, grad, part in zip(totals, grads, (r, c, c), strict=True):
                if total is not None:
                    total[part] += grad.permute(2, 0, 1, 3)[..., : total.shape[-1]]


class _Call(NamedTuple):
    """One operator call: a tile, and of a table what is hidden and which rows see nothing."""

    tile: Tile
    hidden: torch.Tensor | None  # bool [rows, columns]
    blind: torch.Tensor | None  # bool [rows], None if every row sees something

    @property
    def window(self) -> Window | None:
        """A band counts columns from the first row, operators from the last row and column."""
        if self.tile.band is None:
            return None
        rows, columns = self.tile.shape
        left, right = self.tile.band
        return left + columns - rows, right + rows - columns

    def bias(self, q: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] in the dtype of q: -inf where hidden; None where there is no table."""
        if self.hidden is None:
            return None
        zeros = torch.zeros(self.hidden.shape, dtype=q.dtype)
        return zeros.masked_fill_(self.hidden, float("-inf"))


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """An O' with rowsum(dout * O') = delta, for operators that insist on an output.

    dout [s, b, h, w], delta [s, b, h] -> [s, b, h, w] in the dtype of dout. With m the largest
    |dout| of a row and n = dout / m: O' = n * (delta / m / |n|^2), and 0 where dout is 0.
    Without the scaling by m rows of tiny gradients lose all accuracy. Where that is beyond
    float16, O' = sign(dout) * (delta / |dout|_1): never larger than the output was, but all
    elements are rounded alike, so that errors do not average out.
    """
    found = native.stand_in(dout, delta)
    if found is not None:
        return found
    wide, delta = dout.to(delta.dtype), delta.unsqueeze(-1)
    m = wide.abs().amax(dim=-1, keepdim=True)
    m = torch.where(m == 0, torch.ones_like(m), m)
    n = wide / m
    tiny = torch.finfo(wide.dtype).tiny
    most = delta / m / n.square().sum(dim=-1, keepdim=True).clamp_min(tiny)  # n is at most 1
    if dout.dtype != torch.float16:  # others reach as far as their sums
        return (n * most).to(dout.dtype)
    even = delta / n.abs().sum(dim=-1, keepdim=True).clamp_min(tiny) / m
    fits = most.abs() <= torch.finfo(dout.dtype).max
    return torch.where(fits, n * most, n.sign() * even).to(dout.dtype)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[s, b, h, d] -> [b, h, s, d], a view."""
    return x.permute(1, 2, 0, 3)


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last dimension with zeros: they change no score and no sum."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
