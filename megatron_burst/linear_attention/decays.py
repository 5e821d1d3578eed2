"""Decay within a chunk, in exponents that are never larger than those of the recurrence.

With G_t the sum of the decays (logarithms) of rows 0..t of a chunk, the state that a row j wrote is
worth exp(G_t - G_j) to a later row t, that of before the chunk exp(G_t), and what row j wrote is
worth exp(G_end - G_j) after the chunk. exp(-G_j) alone may overflow, and is never taken. A
decay that leaves nothing, as -inf does, counts as one of `FLOORS`: differences of sums are numbers.
Sums are in float64, because small differences of large sums are what is left over.

Shape letters: n chunks (leading), b batch, g query/key heads, r value heads of each, c rows of a
chunk, d width of keys, x any width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# By dtype: exp of the floor is 0, also after growth that exp can barely tell; and sums of a chunk
# of them, in float64, still have the digits of what exp can tell.
FLOORS = {torch.float32: -1e4, torch.float64: -1500.0}


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
    """decay [n, b, g, r, c]."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-1)
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
    """decay [n, b, g, r, c, d], c a power of two."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-2)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """As of `Scalar`. Single rows are joined to blocks, two by two: rows of two blocks meet in
        the state behind the earlier block, which lies between them."""
        total, dtype = self.total, self.dtype
        a, k = a.expand_as(total), k.expand_as(total)
        found = (a * k).sum(-1)[..., None, None]
        while found.shape[-3] > 1:  # [..., blocks, rows, rows]
            halves = (-1, 2, found.shape[-1])
            late, since = (x.unflatten(-2, halves)[..., 1, :, :] for x in (a, total))
            early, until = (x.unflatten(-2, halves)[..., 0, :, :] for x in (k, total))
            end = until[..., -1:, :]
            late = late * (since - end).to(dtype).exp()
            early = early * (end - until).to(dtype).exp()
            across = late @ early.transpose(-1, -2)
            first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
            above = torch.cat([first, torch.zeros_like(first)], -1)
            found = torch.cat([above, torch.cat([across, second], -1)], -2)
        return found.squeeze(-3)

    def keys(self, k: torch.Tensor) -> Keys:
        """As of `Scalar`."""
        end = self.total[..., -1:, :]
        written = k * (end - self.total).to(self.dtype).exp()
        kept = end.to(self.dtype).exp().transpose(-1, -2)
        return Keys(k * self._entering(), written, None, None, kept)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """As of `Scalar`."""
        return (q * self._entering()) @ states

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp()


def _later(size: int, device: torch.device) -> torch.Tensor:
    """[size, size]: is column j behind row t?"""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)
