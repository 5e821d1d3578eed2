"""The kernel "torch": the chunkwise form in torch operators, for any dtype and device.

Between forward and backward it holds q, k, v, decay, beta and the states that enter the pieces, and
nothing per token besides: backward computes the chunks again (see `recomputed`). It computes in
the accumulation dtype, float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.online_softmax import accumulation_dtype
from .. import chunks
from ..form import Form
from ..grid import Grid
from ..inputs import Cut, Inputs, Maps
from ..recomputed import recomputed
from .base import no_maps


class ChunkwiseKernel:
    """The kernel "torch"."""

    name = "torch"

    def refusal(self, form: Form, inputs: Inputs) -> str | None:
        return None

    def run(self, form: Form, inputs: Inputs, cut: Cut) -> ChunkwiseRun:
        return ChunkwiseRun(form, inputs, cut)


class ChunkwiseRun:
    """An `inputs.Run`. The increments and transitions of pieces that need no map are zero."""

    def __init__(self, form: Form, inputs: Inputs, cut: Cut):
        self.inputs = inputs
        self.work = _Work(form, cut, inputs.scale, accumulation_dtype(inputs.v.dtype))
        _, k, v, decay, beta, _ = inputs
        if any(cut.mapped):
            *transition, increment = recomputed(self.work.maps, k, v, decay, beta)
            self.maps = Maps(transition[0] if transition else None, increment)
        else:
            self.maps = no_maps(form, inputs, len(cut.lengths), self.work.dtype)

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        q, k, v, decay, beta, _ = self.inputs
        (out,) = recomputed(self.work.outputs, q, k, v, decay, beta, entering)
        return out


class _Work(NamedTuple):
    """What is computed, without a tensor: backward holds it, and what it held besides the saved
    tensors would never be freed."""

    form: Form
    cut: Cut
    scale: float
    dtype: torch.dtype

    def maps(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Transitions, if the form has them, and increments."""
        chosen = [i for i, mapped in enumerate(self.cut.mapped) if mapped]
        grid = self._grid(chosen, v)
        rows = chunks.rows(grid, None, k, v, decay, beta, self.dtype)
        found = chunks.piece_maps(self.form, grid, rows)
        if len(chosen) == len(self.cut.mapped):
            return found
        spread = iter(range(len(chosen)))
        at = [next(spread) if mapped else None for mapped in self.cut.mapped]
        return tuple(
            torch.stack([torch.zeros_like(x[0]) if i is None else x[i] for i in at]) for x in found
        )

    def outputs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        entering: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """[s, b, h, w] in the dtype of v, alone in a tuple."""
        grid = self._grid(range(len(self.cut.lengths)), v)
        rows = chunks.rows(grid, q, k, v, decay, beta, self.dtype)
        out = chunks.outputs(self.form, grid, rows, entering.to(self.dtype), self.scale)
        return (out.to(v.dtype),)

    def _grid(self, chosen: Sequence[int], v: torch.Tensor) -> Grid:
        lengths = self.cut.lengths
        spans = [(sum(lengths[:i]), lengths[i]) for i in chosen]
        return Grid(spans, v.shape[0], chunks.SIZE, v.device)
