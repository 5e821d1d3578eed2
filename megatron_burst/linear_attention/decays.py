"""Decay within a chunk, in exponents that are never larger than those of the recurrence.

With G_t the sum of the decays (logarithms) of rows 0..t of a chunk, the state that a row j wrote is
worth exp(G_t - G_j) to a later row t, that of before the chunk exp(G_t), and what row j wrote is
worth exp(G_end - G_j) after the chunk. exp(-G_j) alone may overflow, and is never taken.

Shape letters: n chunks (leading), b batch, g query/key heads, r value heads of each, c rows of a
chunk, d width of keys, x any width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..kernels.autograd import first_order_only

BLOCK = 16  # rows among which vectors of decays are compared pair by pair


class Keys(NamedTuple):
    """Keys as the state meets them: read [n, b, g, r | 1, c, d], with what was there before the
    chunk; written, what is left of them after it. Where a decay is one number per head the keys
    stay as they are, shared by the heads, and the factors [n, b, g, r, c, 1] go to the side of the
    values. kept [n, b, g, r, 1 | d, 1]: of the state, over the chunk."""

    read: torch.Tensor
    written: torch.Tensor
    read_factor: torch.Tensor | None
    written_factor: torch.Tensor | None
    kept: torch.Tensor


class Scalar:
    """decay [n, b, g, r, c]; sums in float64, of which small differences are left over."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.double().cumsum(-1)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """a_t^T D k_j [n, b, g, r, c, c] where j <= t, else 0; a, k [n, b, g, 1, c, d]."""
        away = self.total.unsqueeze(-1) - self.total.unsqueeze(-2)
        return (a @ k.transpose(-1, -2)) * away.to(self.dtype).masked_fill(
            _later(away.shape[-1], away.device), float("-inf")
        ).exp()

    def keys(self, k: torch.Tensor) -> Keys:
        """Of k [n, b, g, 1, c, d]."""
        end = self.total[..., -1:]
        left = (end - self.total).to(self.dtype).exp().unsqueeze(-1)
        kept = end.to(self.dtype).exp().unsqueeze(-1)
        return Keys(k, k, self._entering(), left, kept)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What q [n, b, g, 1, c, d] finds of states [n, b, g, r, d, x] from before the chunk."""
        return (q @ states) * self._entering()

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp().unsqueeze(-1)


class Vector:
    """decay [n, b, g, r, c, d], c a multiple of `BLOCK`."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.to(dtype).cumsum(-2)

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """As of `Scalar`. Between blocks through the state before the later one, which lies between
        the two rows; within a block pair by pair."""
        total = self.total
        a, k = a.expand_as(total), k.expand_as(total)
        size = total.shape[-2]
        within = _Near.apply(*(x.unflatten(-2, (-1, BLOCK)) for x in (a, k, total)))
        rows = []
        for index, first in enumerate(range(0, size, BLOCK)):
            there = slice(first, first + BLOCK)
            parts = [within[..., index, :, :]]
            if first:
                before = total[..., first - 1 : first, :]
                late = a[..., there, :] * (total[..., there, :] - before).exp()
                early = k[..., :first, :] * (before - total[..., :first, :]).exp()
                parts.insert(0, late @ early.transpose(-1, -2))
            rows.append(torch.nn.functional.pad(torch.cat(parts, -1), (0, size - first - BLOCK)))
        return torch.cat(rows, -2)

    def keys(self, k: torch.Tensor) -> Keys:
        """As of `Scalar`."""
        end = self.total[..., -1:, :]
        written = k * (end - self.total).exp()
        return Keys(k * self.total.exp(), written, None, None, end.exp().transpose(-1, -2))

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """As of `Scalar`."""
        return (q * self.total.exp()) @ states


class _Near(torch.autograd.Function):
    """sum_d a_t exp(total_t - total_j) k_j of all rows j <= t of a block; a, k, total [..., c, d].

    The tile [c, c, d] of factors is made anew in backward: it is the largest tensor of a chunk.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, k, total)
        return torch.einsum("...td,...tjd,...jd->...tj", a, _factors(total), k)

    @staticmethod
    @first_order_only("linear attention")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, k, total = ctx.saved_tensors
        weighted = _factors(total).mul_(gradient.unsqueeze(-1))
        da = (weighted * k.unsqueeze(-3)).sum(-2)
        dk = (weighted * a.unsqueeze(-2)).sum(-3)
        return da, dk, a * da - k * dk


def _factors(total: torch.Tensor) -> torch.Tensor:
    """exp(total_t - total_j) [..., c, c, d] where j <= t, else 0."""
    away = total.unsqueeze(-2) - total.unsqueeze(-3)
    later = _later(total.shape[-2], total.device).unsqueeze(-1)
    return away.masked_fill_(later, float("-inf")).exp_()


def _later(size: int, device: torch.device) -> torch.Tensor:
    """[size, size]: is column j behind row t?"""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)
