# SPDX-License-Identifier: Apache-2.0
"""Loop over tiles of tokens: logits, loss, and the gradients if needed.

The rows of the next tile are gathered while the current tile is computed. The input gradient of a
tile is reduced over the ranks while the weight gradient of the tile and the next logits are
computed. A byte budget for logits limits the number of tokens per tile.

On CUDA logits have the dtype of the operands, for tensor cores, and sums are in fp32. On CPU,
operands of low precision are converted to fp32, the weight one panel at a time. Without AMX, torch
computes a bf16 product 5 to 100 times slower than an fp32 product.

The weight gradient is summed in the accumulation dtype. On CUDA, one matrix product adds to it. If
torch is too old for this, panels (some rows) of the product are computed in fp32 and then added.

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

PANEL_BYTES = 1 << 23  # size of a panel of widened weight
SUMMAND_BYTES = 1 << 28  # size of a panel in `_add_by_panels`, large enough to fill a GPU


def logits_dtype(operand: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tile of logits and of its gradient."""
    return operand.dtype if operand.is_cuda else accumulation_dtype(operand.dtype)


def logits_(z: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute z [n, v] = hidden [n, d] weight [v, d]^T; hidden must have the dtype of z."""
    for rows, panel in _panels(weight, z.dtype):
        torch.mm(hidden, panel.t(), out=z[:, rows])


def input_gradient_(dh: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute dh [n, d] = z [n, v] weight [v, d]; dh must have the dtype of z."""
    for rows, panel in _panels(weight, z.dtype):
        dh.addmm_(z[:, rows], panel, beta=0 if rows.start == 0 else 1)


def weight_gradient_(dw: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add z [n, v]^T hidden [n, d] to dw [v, d], which has the accumulation dtype."""
    if dw.dtype == z.dtype:
        dw.addmm_(z.t(), hidden)
    elif adds_wide(dw.device):  # CUDA: the product has an fp32 output
        torch.addmm(dw, z.t(), hidden, out_dtype=dw.dtype, out=dw)  # pyright: ignore[reportCallIssue]
    else:
        _add_by_panels(dw, z, hidden)


def _add_by_panels(dw: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """Compute the product z^T hidden one panel at a time, and add each panel to dw."""
    count = min(len(dw), max(1, SUMMAND_BYTES // (dw.shape[1] * dw.itemsize)))
    buffer = torch.empty_like(dw[:count])
    for start in range(0, len(dw), count):
        rows = slice(start, start + count)
        part = buffer[: len(dw[rows])]
        torch.mm(z[:, rows].t(), hidden, out_dtype=dw.dtype, out=part)  # pyright: ignore[reportCallIssue]
        dw[rows] += part


def _panels(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield panels (consecutive rows) of the weight in `dtype`, each with its slice of rows.

    If no conversion is needed, the only panel is the whole weight.
    """
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
    """Sizes of the tiles into which tokens are divided.

    Attributes:
        rows: Number of rows of this rank's slice per tile.
        tiles: Number of tiles.
        row_bytes: Bytes of logits for each row of this rank's slice.
    """

    rows: int
    tiles: int
    row_bytes: int


def tiling(hidden: torch.Tensor, weight: torch.Tensor, split: Split, tile: int | None) -> Tiling:
    """Return the `Tiling` with tiles of about equal size and at most `tile` bytes of logits each.

    Args:
        hidden: Hidden states [..., d].
        weight: Weight [v, d].
        split: Distribution of vocabulary and tokens.
        tile: Limit of the bytes of logits per tile; None means the default of the device.
    """
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
    """Return a one-line description of a call of `linear_cross_entropy` with these arguments.

    Args:
        hidden: Hidden states [..., d].
        weight: Weight [v, d].
        tp_group: Same as in `linear_cross_entropy`.
        sequence_parallel: Same as in `linear_cross_entropy`.
        tile: Same as in `linear_cross_entropy`.
        mode: Same as in `linear_cross_entropy`.
    """
    split = Split(tp_group, sequence_parallel and tp_group is not None)
    rows, tiles, row_bytes = tiling(hidden, weight, split, tile)
    count = hidden.shape[:-1].numel()
    gradients = hidden.nbytes + weight.numel() * accumulation_dtype(weight.dtype).itemsize
    saved = byte_size(gradients) if mode == "single_pass" else "one number per token"
    return " | ".join(
        [
            f"LM head loss: {mode}",
            f"{count * split.parts} tokens in {tiles} tiles of {rows * split.parts}",
            f"{byte_size(rows * row_bytes)} of logits at a time instead of "
            f"{byte_size(count * row_bytes)}",
            f"{saved} kept for backward",
        ]
    )


@dataclass(frozen=True)
class Head:
    """Options and sizes of a call on this rank.

    Attributes:
        formula: Constants of the loss.
        split: Distribution of vocabulary and tokens.
        columns: Vocabulary rows of this rank.
        ignore_index: Label of tokens without a loss.
        tile_rows: Rows of this rank's slice per tile; a tile has rows of all p slices.
        dtype: Accumulation dtype of the loss and of the weight gradient.
        argmax: True if the most likely vocabulary row is returned.
    """

    formula: Formula
    split: Split
    columns: Columns
    ignore_index: int
    tile_rows: int
    dtype: torch.dtype
    argmax: bool = False


class Tokens(NamedTuple):
    """Operands of the loss: hidden [n, d], weight [v, d] and labels [p, n]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor


class Losses(NamedTuple):
    """Results of the loss: loss and lse [p, n], and argmax int64 [p, n] or None."""

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
    """Return the losses, and compute the gradients of sum(weights * loss) in the same pass.

    Args:
        head: Options and sizes of the call.
        tokens: Hidden states, weight and labels.
        weights: Weight of each token [p, n].
        dh: Buffer for the gradient of hidden [n, d], which is overwritten; None if the gradient is
            not needed.
        dw: Buffer to which the gradient of the weight [v, d] is added; None if the gradient is not
            needed.
    """
    loss, lse = (weights.new_empty(weights.shape, dtype=head.dtype) for _ in range(2))
    argmax = torch.empty_like(tokens.labels) if head.argmax else None
    gradients = GradientSum(head, tokens, dh, dw)
    for tile, h, z in tiles(head, tokens):
        labels = tokens.labels[:, tile].reshape(-1)
        own = row_stats(
            z, labels, head.columns, head.formula, head.dtype, head.argmax, gradients.needed
        )
        stats = head.split.merge(own)
        labelled = labels != head.ignore_index
        parts = (len(tokens.labels), -1)
        value, rows_weights = head.formula.loss(stats), weights[:, tile].reshape(-1)
        # Tokens of weight 0 get a finite loss: users multiply by the weights, and 0 * NaN is NaN.
        counted = labelled & ((rows_weights != 0) | value.isfinite())
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
    """Compute the gradients of sum(weights * loss) from the lse that `losses` returned.

    The arguments are the same as in `losses`.
    """
    sums = GradientSum(head, tokens, dh, dw)
    for tile, h, z in tiles(head, tokens):
        labels, rows_lse, rows_weights = (
            x[:, tile].reshape(-1) for x in (tokens.labels, lse, weights)
        )
        sums.add(tile, h, z, labels, rows_lse, rows_weights)
    sums.finish()


def tiles(head: Head, tokens: Tokens) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield (rows of this rank's slice, hidden states h, products h.w) for each tile.

    For m rows of this rank's slice, hidden states are [p * m, d] and products [p * m, v], in the
    dtype of logits. All tiles share one buffer for products.
    """
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
    """Gradients of hidden and weight, summed over tiles.

    At most one reduction of an input gradient over ranks is in progress.

    Args:
        head: Options and sizes of the call.
        tokens: Hidden states, weight and labels.
        dh: Buffer for the gradient of hidden [n, d], which is overwritten; None if the gradient is
            not needed.
        dw: Buffer to which the gradient of the weight [v, d] is added; None if the gradient is not
            needed.
    """

    def __init__(
        self, head: Head, tokens: Tokens, dh: torch.Tensor | None, dw: torch.Tensor | None
    ) -> None:
        self.head, self.weight, self.dh, self.dw = head, tokens.weight, dh, dw
        self.needed = dh is not None or dw is not None
        # True if the hidden rows of a tile are a copy that may be overwritten.
        self._copied = head.split.parts > 1 or logits_dtype(tokens.hidden) != tokens.hidden.dtype
        self._reducing: tuple[slice, InFlight] | None = None

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
        """Overwrite the products z of a tile by their gradient, and add the gradients of the tile.

        Args:
            tile: Rows of this rank's slice.
            h: Hidden rows of the tile [m, d], from all slices.
            z: Products h.w [m, v]; if `peak` is given, the exponentials from `row_stats`.
            labels: Labels [m].
            lse: Log-sum-exp [m] over the whole vocabulary.
            weights: Weights of the losses [m].
            peak: Offset [m] of the exponentials, or None.
        """
        if not self.needed:
            return
        softmax_gradient_(z, labels, lse, weights, self.head.columns, self.head.formula, peak)
        self.put(tile, h, z, weights == 0)

    def put(self, tile: slice, h: torch.Tensor, z: torch.Tensor, unused: torch.Tensor) -> None:
        """Add the gradients of a tile, given the gradient of its logits.

        Args:
            tile: Rows of this rank's slice.
            h: Hidden rows of the tile [m, d], from all slices; overwritten if they are a copy.
            z: Gradient of the products h.w [m, v].
            unused: Mask [m] of rows without a gradient. z is 0 in these rows, and h may contain
                NaN.
        """
        if self.dh is not None:
            self.finish()
            direct = self.head.split.size == 1 and self.dh.dtype == z.dtype
            part = self.dh[tile] if direct else torch.empty_like(h)
            input_gradient_(part, z, self.weight)
            if not direct:
                self._reducing = tile, self.head.split.reduce(part.to(self.dh.dtype))
        if self.dw is not None:
            # The product of a 0 in z with a NaN in h would be a NaN in every row of dw.
            fill = h.masked_fill_ if self._copied else h.masked_fill
            weight_gradient_(self.dw, z, fill(unused[:, None], 0))

    def finish(self) -> None:
        """Wait for the reduction in progress, if any, and store its input gradient in dh."""
        if self._reducing is not None and self.dh is not None:
            tile, arriving = self._reducing
            self.dh[tile] = arriving.wait()
        self._reducing = None
