# SPDX-License-Identifier: Apache-2.0
"""Merging of partial attention results by online softmax (BurstEngine Algorithm 1).

Accumulators are float32 (float64 for float64 inputs). A row that attended to no key has lse = -inf
and out = 0.

Shape letters: s query rows, b batch, h query heads, d value width.
"""

from __future__ import annotations

import sys

import torch

from . import native, rowwise

Partial = tuple[torch.Tensor, torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over ranks: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_result(q: torch.Tensor, width: int) -> Partial:
    """Return out [s, b, h, width] = 0 and lse [s, b, h] = -inf for queries q [s, b, h, d]."""
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros((*q.shape[:-1], width), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)
    return out, lse


def merge_(
    out: torch.Tensor, lse: torch.Tensor, out_new: torch.Tensor, lse_new: torch.Tensor
) -> None:
    """Merge (out_new, lse_new) into (out, lse), in place.

    The new pair may have a lower precision than the accumulators.

    Args:
        out: [s, b, h, d].
        lse: [s, b, h], natural logarithm.
        out_new: [s, b, h, d].
        lse_new: [s, b, h].
    """
    tensors = out, lse, out_new, lse_new
    if native.merge_(*tensors):
        return
    # Triton kernels run on a GPU, or on the CPU in Triton's interpreter.
    if (out.device.type == "cuda" or "triton" in sys.modules) and rowwise.merge_(*tensors):
        return
    new = lse_new.to(lse.dtype)
    # Weight of the new part. The clamp avoids -inf - -inf, so the weight is 0 without visible keys.
    share = (new - lse.clamp_min(torch.finfo(lse.dtype).min)).sigmoid_()
    out.lerp_(out_new.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, new, out=lse)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Return `lse` with 0 for -inf, to avoid -inf - -inf = NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def add_sink_(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Add a logit `sink` [h] without a value to every row of (out, lse), in place."""
    total = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    out.mul_(torch.exp(lse - _finite(total)).unsqueeze(-1))
    lse.copy_(total)


def row_delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return delta = rowsum(dout * out) [s, b, h], summed in `dtype`; dout, out [s, b, h, d]."""
    delta = native.delta(dout, out, dtype)
    if delta is None and (out.device.type == "cuda" or "triton" in sys.modules):
        delta = rowwise.delta(dout, out, dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1) if delta is None else delta


def sink_gradient(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the gradient [h] of `sink` from the rows of this rank.

    Args:
        sink: [h].
        lse: [s, b, h], with the sink.
        delta: [s, b, h].
    """
    return -(torch.exp(sink.to(lse.dtype) - _finite(lse)) * delta).sum(dim=(0, 1))
