"""One pass over the tokens, tile by tile: logits, loss, and gradients where they are needed.

Decides the order of the work: the next tile's rows travel while this one is computed, and a tile's
input gradient is summed over the ranks while its weight gradient and the next logits are computed.

Shape letters: n tokens of this rank's slice, p slices (1, or all ranks with sequence parallelism),
d width, v vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import products
from .formula import Formula
from .rows import Columns, row_stats, softmax_gradient_
from .split import InFlight, Split


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
    gradients = _Gradients(head, tokens, dh, dw)
    for tile, h, z in _tiles(head, tokens):
        labels = tokens.labels[:, tile].reshape(-1)
        mine = row_stats(
            z, labels, head.columns, head.formula, head.dtype, head.argmax, gradients.wanted
        )
        stats = head.split.merge(mine)
        kept = labels != head.ignore_index
        parts = (len(tokens.labels), -1)
        loss[:, tile] = torch.where(kept, head.formula.loss(stats), 0).view(parts)
        lse[:, tile] = stats.lse.view(parts)
        if argmax is not None and stats.winner is not None:
            argmax[:, tile] = stats.winner.to(argmax.dtype).view(parts)
        gradients.add(tile, h, z, labels, stats.lse, weights[:, tile].reshape(-1), mine.peak)
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
    found = _Gradients(head, tokens, dh, dw)
    for tile, h, z in _tiles(head, tokens):
        labels, rows_lse, rows_weights = (
            x[:, tile].reshape(-1) for x in (tokens.labels, lse, weights)
        )
        found.add(tile, h, z, labels, rows_lse, rows_weights)
    found.finish()


def _tiles(head: Head, tokens: Tokens) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows of the slice, hidden of the tile, its logits); the latter two in the logits' dtype."""
    hidden, weight, _ = tokens
    dtype = products.logits_dtype(hidden)
    starts = range(0, len(hidden), head.tile_rows)
    tiles = [slice(start, min(start + head.tile_rows, len(hidden))) for start in starts]
    if not tiles:
        return
    buffer = hidden.new_empty((head.split.parts * head.tile_rows, len(weight)), dtype=dtype)
    arriving = head.split.gather(hidden[tiles[0]])
    for tile, following in zip(tiles, [*tiles[1:], None], strict=True):
        h = arriving.wait()
        if following is not None:
            arriving = head.split.gather(hidden[following])
        h = h.to(dtype)
        z = buffer[: len(h)]
        products.logits_(z, h, weight)
        yield tile, h, z


class _Gradients:
    """Adds up what the tiles contribute; one input gradient may be on its way at a time."""

    def __init__(
        self, head: Head, tokens: Tokens, dh: torch.Tensor | None, dw: torch.Tensor | None
    ) -> None:
        self.head, self.weight, self.dh, self.dw = head, tokens.weight, dh, dw
        self.wanted = dh is not None or dw is not None
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
        if self.dh is not None:
            self.finish()
            whole = self.head.split.size == 1 and self.dh.dtype == z.dtype
            part = self.dh[tile] if whole else torch.empty_like(h)
            products.input_gradient_(part, z, self.weight)
            if not whole:
                self._travelling = tile, self.head.split.reduce(part.to(self.dh.dtype))
        if self.dw is not None:
            products.weight_gradient_(self.dw, z, h)

    def finish(self) -> None:
        """Wait for the input gradient that is on its way, and put it where it belongs."""
        if self._travelling is not None and self.dh is not None:
            tile, arriving = self._travelling
            self.dh[tile] = arriving.wait()
        self._travelling = None
