# SPDX-License-Identifier: Apache-2.0
"""One pass over the tokens, tile by tile: logits, loss, and gradients where they are needed.

Decides the order of the work: the next tile's rows travel while this one is computed, and a tile's
input gradient is summed over the ranks while its weight gradient and the next logits are computed.
A tile has as many tokens as a budget for logits allows.

Also decides the dtype of logits: on CUDA that of the operands, as tensor cores want it, with sums
in fp32. On CPU low-precision operands are widened, the weight by panels, and multiplied in fp32:
without AMX a bf16 product of torch runs at a fifth (or a hundredth) of the speed of an fp32 one.
The gradient of the weight always adds up in the accumulation dtype; on CUDA by one product that
adds to it, or, where torch is too old for that, by panels of a product that comes out in fp32.

Shape letters: n tokens of this rank's slice, p slices (1, or all ranks with sequence parallelism),
d width, v vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..kernels.online_softmax import accumulation_dtype
from ..kernels.torch_features import adds_wide
from ..units import LOGITS_TILE, byte_size
from .formula import Formula
from .rows import Columns, row_stats, softmax_gradient_
from .split import InFlight, Split

PANEL_BYTES = 1 << 23  # of widened weight
SUMMAND_BYTES = 1 << 28  # of a product that is added afterwards: enough rows to fill a GPU


def logits_dtype(operand: torch.Tensor) -> torch.dtype:
    """The dtype of a tile of logits, and of its gradient."""
    return operand.dtype if operand.is_cuda else accumulation_dtype(operand.dtype)


def logits_(z: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Z [n, v] = hidden [n, d] weight [v, d]^T; hidden in the dtype of z."""
    for rows, panel in _panels(weight, z.dtype):
        torch.mm(hidden, panel.t(), out=z[:, rows])


def input_gradient_(dh: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> None:
    """Dh [n, d] = z [n, v] weight [v, d]; dh in the dtype of z."""
    for rows, panel in _panels(weight, z.dtype):
        dh.addmm_(z[:, rows], panel, beta=0 if rows.start == 0 else 1)


def weight_gradient_(dw: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """Dw [v, d] += z [n, v]^T hidden [n, d]; dw in the accumulation dtype."""
    if dw.dtype == z.dtype:
        dw.addmm_(z.t(), hidden)
    elif adds_wide(dw.device):  # CUDA: the product comes out of the multiplier in fp32
        torch.addmm(dw, z.t(), hidden, out_dtype=dw.dtype, out=dw)  # pyright: ignore[reportCallIssue]
    else:
        _add_by_panels(dw, z, hidden)


def _add_by_panels(dw: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add the product to dw in a second step, panel by panel."""
    count = min(len(dw), max(1, SUMMAND_BYTES // (dw.shape[1] * dw.itemsize)))
    buffer = torch.empty_like(dw[:count])
    for start in range(0, len(dw), count):
        rows = slice(start, start + count)
        part = buffer[: len(dw[rows])]
        torch.mm(z[:, rows].t(), hidden, out_dtype=dw.dtype, out=part)  # pyright: ignore[reportCallIssue]
        dw[rows] += part


def _panels(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The weight in `dtype`: whole if it is, else by panels of rows in one buffer."""
    if weight.dtype == dtype:
        yield slice(0, len(weight)), weight
        return
    count = min(len(weight), max(1, PANEL_BYTES // (weight.shape[1] * dtype.itemsize)))
    buffer = weight.new_empty((count, weight.shape[1]), dtype=dtype)
    for start in range(0, len(weight), count):
        rows = slice(start, min(start + count, len(weight)))
        panel = buffer[: rows.stop - rows.start]
        panel.copy_(weight[rows])
        yield rows, panel


class Tiling(NamedTuple):
    """rows: of this rank's slice in a tile; tiles; row_bytes: a tile's logits per such row."""

    rows: int
    tiles: int
    row_bytes: int


def tiling(hidden: torch.Tensor, weight: torch.Tensor, split: Split, tile: int | None) -> Tiling:
    """Tiles of hidden [..., d] that are as even as they get within `tile` bytes of logits."""
    count = hidden.shape[:-1].numel()
    budget = tile if tile is not None else LOGITS_TILE.get(hidden.device.type, LOGITS_TILE["cuda"])
    row_bytes = split.parts * len(weight) * logits_dtype(hidden).itemsize
    tiles = max(1, -(-count // max(1, budget // row_bytes)))
    return Tiling(max(1, -(-count // tiles)), tiles, row_bytes)


def describe(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    tile: int | None = None,
    mode: str = "single_pass",
) -> str:
    """What `linear_cross_entropy` will do with these arguments, on one line."""
    split = Split(tp_group, sequence_parallel and tp_group is not None)
    rows, tiles, row_bytes = tiling(hidden, weight, split, tile)
    count = hidden.shape[:-1].numel()
    gradients = hidden.nbytes + weight.numel() * accumulation_dtype(weight.dtype).itemsize
    kept = byte_size(gradients) if mode == "single_pass" else "a number per token"
    return " | ".join(
        [
            f"LM head loss: {mode}",
            f"{count * split.parts} tokens in {tiles} tiles of {rows * split.parts}",
            f"{byte_size(rows * row_bytes)} of logits at a time instead of "
            f"{byte_size(count * row_bytes)}",
            f"kept for backward {kept}",
        ]
    )


@dataclass(frozen=True)
class Head:
    """The options of a call, and its sizes on this rank."""

    formula: Formula
    split: Split
    columns: Columns
    ignore_index: int
    tile_rows: int  # of this rank's slice; a tile has p times as many
    dtype: torch.dtype  # in which loss and weight gradient accumulate
    argmax: bool = False


class Tokens(NamedTuple):
    """hidden [n, d], weight [v, d], labels [p, n]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor


class Losses(NamedTuple):
    """loss, lse [p, n]; argmax int64 [p, n] where it was asked for."""

    loss: torch.Tensor
    lse: torch.Tensor
    argmax: torch.Tensor | None


def losses(
    head: Head,
    tokens: Tokens,
    weights: torch.Tensor,
    dh: torch.Tensor | None = None,
    dw: torch.Tensor | None = None,
) -> Losses:
    """The losses; of sum(weights * loss) the gradients too, weights [p, n], in the same pass.

    dh [n, d] is overwritten, dw [v, d] is added to; None is a gradient that is not needed.
    """
    loss, lse = (weights.new_empty(weights.shape, dtype=head.dtype) for _ in range(2))
    argmax = torch.empty_like(tokens.labels) if head.argmax else None
    gradients = GradientSum(head, tokens, dh, dw)
    for tile, h, z in tiles(head, tokens):
        labels = tokens.labels[:, tile].reshape(-1)
        own = row_stats(
            z, labels, head.columns, head.formula, head.dtype, head.argmax, gradients.wanted
        )
        stats = head.split.merge(own)
        kept = labels != head.ignore_index
        parts = (len(tokens.labels), -1)
        value, rows_weights = head.formula.loss(stats), weights[:, tile].reshape(-1)
        # Users multiply the loss by the weights, and 0 * NaN is NaN.
        counted = kept & ((rows_weights != 0) | value.isfinite())
        loss[:, tile] = torch.where(counted, value, 0).view(parts)
        lse[:, tile] = stats.lse.view(parts)
        if argmax is not None and stats.winner is not None:
            argmax[:, tile] = stats.winner.to(argmax.dtype).view(parts)
        gradients.add(tile, h, z, labels, stats.lse, rows_weights, own.peak)
    gradients.finish()
    return Losses(loss, lse, argmax)


def gradients(
    head: Head,
    tokens: Tokens,
    weights: torch.Tensor,
    lse: torch.Tensor,
    dh: torch.Tensor | None,
    dw: torch.Tensor | None,
) -> None:
    """The gradients of sum(weights * loss) from what `losses` returned as lse."""
    found = GradientSum(head, tokens, dh, dw)
    for tile, h, z in tiles(head, tokens):
        labels, rows_lse, rows_weights = (
            x[:, tile].reshape(-1) for x in (tokens.labels, lse, weights)
        )
        found.add(tile, h, z, labels, rows_lse, rows_weights)
    found.finish()


def tiles(head: Head, tokens: Tokens) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows of the slice, hidden of the tile, its logits); the latter two in the logits' dtype."""
    hidden, weight, _ = tokens
    dtype = logits_dtype(hidden)
    starts = range(0, len(hidden), head.tile_rows)
    slices = [slice(start, min(start + head.tile_rows, len(hidden))) for start in starts]
    if not slices:
        return
    buffer = hidden.new_empty((head.split.parts * head.tile_rows, len(weight)), dtype=dtype)
    arriving = head.split.gather(hidden[slices[0]])
    for tile, following in zip(slices, [*slices[1:], None], strict=True):
        h = arriving.wait()
        if following is not None:
            arriving = head.split.gather(hidden[following])
        h = h.to(dtype)
        z = buffer[: len(h)]
        logits_(z, h, weight)
        yield tile, h, z


class GradientSum:
    """Adds up what the tiles contribute; one input gradient may be on its way at a time."""

    def __init__(
        self, head: Head, tokens: Tokens, dh: torch.Tensor | None, dw: torch.Tensor | None
    ) -> None:
        self.head, self.weight, self.dh, self.dw = head, tokens.weight, dh, dw
        self.wanted = dh is not None or dw is not None
        # Are the hidden rows of a tile a copy, which nobody else reads?
        self._copied = head.split.parts > 1 or logits_dtype(tokens.hidden) != tokens.hidden.dtype
        self._travelling: tuple[slice, InFlight] | None = None

    def add(
        self,
        tile: slice,
        h: torch.Tensor,
        z: torch.Tensor,
        labels: torch.Tensor,
        lse: torch.Tensor,
        weights: torch.Tensor,
        peak: torch.Tensor | None = None,
    ) -> None:
        if not self.wanted:
            return
        softmax_gradient_(z, labels, lse, weights, self.head.columns, self.head.formula, peak)
        self.put(tile, h, z, weights == 0)

    def put(self, tile: slice, h: torch.Tensor, z: torch.Tensor, unused: torch.Tensor) -> None:
        """Add the gradients of a tile.

        Args:
            tile: the rows of this rank's slice.
            h: hidden rows of the tile [n, d]; overwritten if they are a copy.
            z: gradient of the logits [n, v].
            unused: bool [n], rows without a gradient: z is 0 there, and h may hold NaN.
        """
        if self.dh is not None:
            self.finish()
            whole = self.head.split.size == 1 and self.dh.dtype == z.dtype
            part = self.dh[tile] if whole else torch.empty_like(h)
            input_gradient_(part, z, self.weight)
            if not whole:
                self._travelling = tile, self.head.split.reduce(part.to(self.dh.dtype))
        if self.dw is not None:
            # The product of a 0 in z with a NaN in h would be a NaN in every row of dw.
            fill = h.masked_fill_ if self._copied else h.masked_fill
            weight_gradient_(self.dw, z, fill(unused[:, None], 0))

    def finish(self) -> None:
        """Wait for the input gradient that is on its way, and put it where it belongs."""
        if self._travelling is not None and self.dh is not None:
            tile, arriving = self._travelling
            self.dh[tile] = arriving.wait()
        self._travelling = None
