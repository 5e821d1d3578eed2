# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results by online softmax (BurstEngine Algorithm 1).

Accumulators are float32 (float64 for float64 inputs). A row that saw nothing has lse = -inf
and out = 0 and stays so until a partial result sees something.

Shape letters: s query rows, b batch, h query heads, d value width.
"""

from __future__ import annotations

import sys

import torch

from . import native, rowwise

Partial = tuple[torch.Tensor, torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where sums over ranks are kept: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_result(q: torch.Tensor, width: int) -> Partial:
    """(out [s, b, h, width] = 0, lse [s, b, h] = -inf) for queries q [s, b, h, d]."""
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros((*q.shape[:-1], width), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)
    return out, lse


def merge_(
    out: torch.Tensor, lse: torch.Tensor, out_new: torch.Tensor, lse_new: torch.Tensor
) -> None:
    """Merge (out_new, lse_new) into (out, lse), in place.

    out, out_new [s, b, h, d]; lse, lse_new [s, b, h], natural log. The new pair may have a
    lower precision than the accumulators.
    """
    given = out, lse, out_new, lse_new
    if native.merge_(*given):
        return
    # Triton runs on a GPU, and elsewhere if its interpreter was imported.
    if (out.device.type == "cuda" or "triton" in sys.modules) and rowwise.merge_(*given):
        return
    new = lse_new.to(lse.dtype)
    # The share of the new part in both: 0 where neither saw anything, as -inf minus a number.
    share = (new - lse.clamp_min(torch.finfo(lse.dtype).min)).sigmoid_()
    out.lerp_(out_new.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, new, out=lse)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """`lse` to subtract: 0 in rows that saw nothing, where -inf - -inf would be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def add_sink_(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Let every row of (out, lse) also see a logit `sink` [h] that has no value, in place."""
    total = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    out.mul_(torch.exp(lse - _finite(total)).unsqueeze(-1))
    lse.copy_(total)


def row_delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Delta = rowsum(dout * out) [s, b, h], added up in `dtype`; dout, out [s, b, h, d]."""
    delta = native.delta(dout, out, dtype)
    if delta is None and (out.device.type == "cuda" or "triton" in sys.modules):
        delta = rowwise.delta(dout, out, dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1) if delta is None else delta


def sink_gradient(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Gradient [h] of `sink` from the rows of this rank; lse (sink included), delta [s, b, h]."""
    return -(torch.exp(sink.to(lse.dtype) - _finite(lse)) * delta).sum(dim=(0, 1))
