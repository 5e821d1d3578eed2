"""Attention and its gradients as a dense matrix, by formula, in float64: what judges results.

It shares no code with what it judges.
"""

from __future__ import annotations

import math

import torch


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, seen: torch.Tensor
) -> list[torch.Tensor]:
    """out, dq, dk, dv in float64, a head at a time.

    q, dout [s, 1, h, d]; k, v [t, 1, heads, d], where heads divides h; seen, bool [s, t]: which
    pairs attend, in each row at least one. Scores are divided by sqrt(d).
    """
    results = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, q, k, v)]
    out, dq, dk, dv = results
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        other = head // group
        mine, upper = q[:, 0, head].double(), dout[:, 0, head].double()
        keys, values = k[:, 0, other].double(), v[:, 0, other].double()
        p = (mine @ keys.T * scale).masked_fill(~seen, -math.inf).softmax(dim=1)
        out[:, 0, head] = p @ values
        delta = (upper * out[:, 0, head]).sum(1, keepdim=True)
        ds = p * (upper @ values.T - delta) * scale
        dq[:, 0, head] = ds @ keys
        dk[:, 0, other] += ds.T @ mine
        dv[:, 0, other] += p.T @ upper
    return results
