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
    """Return the dtype in which partial results are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_result(q: torch.Tensor, width: int) -> Partial:
    """Return an accumulator for queries [s, b, h, d]: out = 0 and lse = -inf.

    Args:
        q: Queries.
        width: Width of the values.

    Returns:
        out [s, b, h, width] and lse [s, b, h], in the accumulation dtype.
    """
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros((*q.shape[:-1], width), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)
    return out, lse


def clear_(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Set accumulators out [s, b, h, d] and lse [s, b, h] to the result without keys, in place."""
    out.zero_()
    lse.fill_(float("-inf"))


def merge_(
    out: torch.Tensor, lse: torch.Tensor, out_new: torch.Tensor, lse_new: torch.Tensor
) -> None:
    """Merge a partial result (out_new, lse_new) into the accumulators (out, lse), in place.

    The partial result may have a lower precision than the accumulators.

    Args:
        out: [s, b, h, d].
        lse: [s, b, h], log-sum-exp in natural logarithm.
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
    """Return `lse` with 0 for -inf, because -inf - (-inf) is NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def add_sink_(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Add a sink logit, which has no value, to the softmax of every row, in place.

    Args:
        out: [s, b, h, d].
        lse: [s, b, h].
        sink: [h], logit of each head.
    """
    total = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    out.mul_(torch.exp(lse - _finite(total)).unsqueeze(-1))
    lse.copy_(total)


def row_delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return delta = rowsum(dout * out) [s, b, h].

    Args:
        dout: [s, b, h, d].
        out: [s, b, h, d].
        dtype: Dtype of the sum and of the result.
    """
    delta = native.delta(dout, out, dtype)
    if delta is None and (out.device.type == "cuda" or "triton" in sys.modules):
        delta = rowwise.delta(dout, out, dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1) if delta is None else delta


def sink_gradient(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the gradient [h] of `sink` from the rows of this rank.

    Args:
        sink: [h].
        lse: [s, b, h], including the sink.
        delta: [s, b, h].
    """
    return -(torch.exp(sink.to(lse.dtype) - _finite(lse)) * delta).sum(dim=(0, 1))
