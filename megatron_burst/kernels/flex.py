# SPDX-License-Identifier: Apache-2.0
"""The attention kernel "flex", for any mask: torch's FlexAttention, compiled by Inductor.

`flex_tables` makes block lists and mask arrays from tile grids, and `flex_programs` calls the
operators. Numbers of rows and columns are rounded up to a few values, so that programs are reused.
A shard that is shorter than its rounded length is copied, and padded with zeros.

Shape letters as in `kernels.base`. The kernel has not been tested on a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch.nn.attention import flex_attention

from ..layout.layouts import ShardPairs
from ..masks import Mask
from .base import Rows, Scoring
from .flex_programs import LN2, BackwardProgram, ForwardProgram, ProgramShape, program
from .flex_tables import BLOCK, MaskArrays, block_lists, mask_arrays, rounded
from .masked_pairs import MaskedPairs, any_visible, copy_pairs
from .online_softmax import merge_

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NARROWEST, WIDEST = 16, 256  # widths on CUDA

Tensors = tuple[torch.Tensor, ...]


class FlexPairs(MaskedPairs):
    """Pairs of shards with their block lists and mask arrays."""

    def __init__(self, mask: Mask):
        super().__init__(mask)
        self._lists: dict[tuple[int, torch.device], list[Tensors]] = {}
        self._masks: dict[torch.device, list[Tensors]] = {}
        self._arrays: list[MaskArrays] = []

    def lengths(self, pair: int) -> tuple[int, int]:
        """Return the rounded numbers of rows and columns of a pair."""
        rows, columns = self.shape(pair)
        return rounded(rows), rounded(columns)

    def arrays(self, pair: int) -> MaskArrays:
        """Return the mask arrays of a pair, in host memory."""
        grids = self.tiles(BLOCK, BLOCK)
        for n in range(len(self._arrays), len(grids)):
            self._arrays.append(mask_arrays(grids[n], self.lengths(n)))
        return self._arrays[pair]

    def lists(self, pair: int, side: int, device: torch.device) -> Tensors:
        """Return a pair's four `BlockLists` tensors: per row block (`side` 0) or column block."""
        lists = self._lists.setdefault((side, device), [])
        if pair >= len(lists):
            missing = list(enumerate(self.tiles(BLOCK, BLOCK)))[len(lists) :]
            made = [block_lists(grid, self.lengths(n), side) for n, grid in missing]
            lists += [tuple(x[None, None] for x in pair) for pair in copy_pairs(made, device)]
        return lists[pair]

    def masks(self, pair: int, device: torch.device) -> Tensors:
        """Return the two mask arrays of a pair as tensors on `device`."""
        masks = self._masks.setdefault(device, [])
        if pair >= len(masks):
            self.arrays(pair)
            masks += copy_pairs([x[1:] for x in self._arrays[len(masks) :]], device)
        return masks[pair]


class FlexWork(NamedTuple):
    """Kernel plan of one pair of shards. `number` is the index of the pair of shards in `pairs`."""

    pairs: FlexPairs
    number: int


class FlexKernel:
    """Attention kernel "flex": torch's FlexAttention."""

    name = "flex"
    softcaps = True
    deterministic = True  # no atomics: dq and (dk, dv) are summed by different programs
    passed_over: tuple[str, ...] = ()

    def __init__(self):
        self.maximum = hasattr(flex_attention, "AuxRequest")  # the operators return maxima
        self._pairs: FlexPairs | None = None  # pairs of the latest mask

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        if q.device.type == "cpu":
            dtypes = *DTYPES, torch.float64
        elif q.device.type == "cuda":
            dtypes = DTYPES
            if importlib.util.find_spec("triton") is None:
                return "needs the package triton on cuda tensors"
            widths = (q.shape[-1], v.shape[-1])
            if min(widths) < NARROWEST or max(widths) > WIDEST:
                return f"requires widths from {NARROWEST} to {WIDEST}, got {widths}"
        else:
            return f"runs on cuda and cpu tensors, got {q.device.type}"
        if q.dtype not in dtypes:
            return f"supports {', '.join(map(str, dtypes))}, got {q.dtype}"
        return None

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[FlexWork | None]:
        if self._pairs is None or self._pairs.mask is not mask:
            self._pairs = FlexPairs(mask)
        planned = self._pairs
        return [
            FlexWork(planned, planned.add(*pair)) if any_visible(mask, *pair) else None
            for pair in pairs
        ]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: FlexWork,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        (pairs, pair), (s, t) = work, work.pairs.lengths(work.number)
        shape = _shape(q, k, v, work, scoring, max_logits is not None)
        inputs = _heads_first(q, s), _heads_first(k, t), _heads_first(v, t)
        tables = *pairs.lists(pair, 0, q.device), *pairs.masks(pair, q.device)
        with torch.amp.autocast(q.device.type, enabled=False):
            part, part_lse, *highest = program(ForwardProgram, shape)(*inputs, *tables)
        if max_logits is not None:
            torch.maximum(max_logits, highest[0].amax(dim=(0, 2)), out=max_logits)
        # Back to [s, b, h, w]; rows beyond the end are padding.
        part, part_lse = part.permute(2, 0, 1, 3)[: len(q)], part_lse.permute(2, 0, 1)[: len(q)]
        merge_(out, lse, part, part_lse)

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: FlexWork,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        (pairs, pair), (s, t), device = work, work.pairs.lengths(work.number), k.device
        shards = _heads_first(rows.q, s), _heads_first(k, t), _heads_first(v, t)
        lse, grad_lse = rows.lse / LN2, rows.delta * -LN2
        lists = *pairs.lists(pair, 0, device), *pairs.lists(pair, 1, device)
        inputs = _heads_first(rows.dout, s), _statistics(lse, s), _statistics(grad_lse, s)
        compute = program(BackwardProgram, _shape(rows.q, k, v, work, scoring, False))
        grads = compute(*shards, *inputs, *lists, *pairs.masks(pair, device))
        # Add in the accumulation dtype; the gradients of the operator have the dtype of q.
        for total, grad in zip((dq, dk, dv), grads, strict=True):
            if total is not None:
                total.add_(grad.permute(2, 0, 1, 3)[: len(total)])


def _shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    work: FlexWork,
    scoring: Scoring,
    maximum: bool,
) -> ProgramShape:
    (pairs, pair), (_, batch, heads, width) = work, q.shape
    arrays = pairs.arrays(pair)
    return ProgramShape(
        q.device,
        q.dtype,
        batch,
        (heads, k.shape[2]),
        (width, v.shape[-1]),
        pairs.lengths(pair),
        arrays.kind,
        arrays.tables,
        scoring.scale,
        scoring.softcap,
        maximum,
    )


def _heads_first(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return x [n, b, h, d] as a view [b, h, length, d] of a contiguous tensor, padded with zeros.

    Programs have fixed strides, so x is copied unless it is contiguous and has this length.
    """
    if len(x) < length:
        padded = x.new_zeros(length, *x.shape[1:])
        padded[: len(x)] = x
        x = padded
    return x.contiguous().permute(1, 2, 0, 3)


def _statistics(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return x [n, b, h] as a contiguous tensor [b, h, length], padded with zeros."""
    n, batch, heads = x.shape
    padded = x.new_empty(batch, heads, length)
    padded[..., :n] = x.permute(1, 2, 0)
    padded[..., n:] = 0
    return padded
