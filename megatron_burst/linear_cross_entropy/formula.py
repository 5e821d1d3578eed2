# SPDX-License-Identifier: Apache-2.0
"""Loss of a token as a function of statistics of its row of logits.

This module defines the formula, and merges the statistics of tensor-parallel ranks.

A logit is x = scale * h.w, or cap * tanh(scale * h.w / cap). Let y be the label, v the number of
vocabulary rows and e the label smoothing. The loss is

    lse(x) - (1 - e) x_y - e mean(x) + z_loss lse(x)^2

and its derivative with respect to x_j is p_j (1 + 2 z_loss lse) - (1 - e) [j = y] - e / v, where p
is the softmax. Label smoothing is defined as in torch: the target probability of the label is 1 - e
+ e / v. z-loss is defined as in PaLM (arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Formula:
    """Constants of the loss.

    Attributes:
        vocab_size: Number of vocabulary rows that take part in the softmax.
        scale: Factor of the logits.
        softcap: Cap of the logits, or None.
        z_loss: Coefficient of lse ** 2.
        smoothing: Label smoothing, from 0 to 1.
    """

    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    smoothing: float = 0.0

    def loss(self, stats: Stats) -> torch.Tensor:
        """Return the losses [n] of rows, given their statistics over the whole vocabulary."""
        lse = stats.lse
        loss = lse - (1 - self.smoothing) * stats.target
        if self.smoothing:
            assert stats.total is not None
            loss -= self.smoothing / self.vocab_size * stats.total
        if self.z_loss:
            loss += self.z_loss * lse.square()
        return loss

    def softmax_factor(self, lse: torch.Tensor) -> torch.Tensor | float:
        """Return 1 + 2 z_loss lse, the factor of the softmax p in the derivative of the loss."""
        return 1 + 2 * self.z_loss * lse if self.z_loss else 1.0


class Stats(NamedTuple):
    """Statistics of n rows of logits over a subset of the vocabulary rows; all tensors are [n].

    Attributes:
        lse: Log-sum-exp; -inf if the subset is empty.
        target: Logit of the label; 0 if the label is not in the subset.
        total: Sum of the logits, or None if not requested.
        best: Largest logit, or None if not requested.
        winner: Lowest vocabulary row with the largest logit, as a float (exact up to 2^24), or None
            if not requested.
        peak: If not None, `row_stats` replaced the logits by exp(logit - peak). The peak belongs to
            the columns of one rank, and `merge` ignores it.
        entropy: Entropy of the softmax over the subset, or None if not requested.
    """

    lse: torch.Tensor
    target: torch.Tensor
    total: torch.Tensor | None = None
    best: torch.Tensor | None = None
    winner: torch.Tensor | None = None
    peak: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def merge(parts: list[Stats]) -> Stats:
    """Merge the statistics of each rank's vocabulary rows into statistics over all vocabulary rows.

    The result has the same bits on every rank.
    """
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    target = torch.stack([part.target for part in parts]).sum(0)
    total = best = winner = entropy = None
    if parts[0].total is not None:
        total = torch.stack([part.total for part in parts if part.total is not None]).sum(0)
    if parts[0].best is not None:
        bests = torch.stack([part.best for part in parts if part.best is not None])
        winners = torch.stack([part.winner for part in parts if part.winner is not None])
        best = bests.amax(0)
        winner = winners.where(bests == best, torch.inf).amin(0)
    if parts[0].entropy is not None:
        own = torch.stack([part.entropy for part in parts if part.entropy is not None])
        gap = lse - torch.stack([part.lse for part in parts])  # inf if a rank has no columns
        shares = gap.neg().exp_()
        entropy = (shares * (own + gap.where(shares > 0, 0))).sum(0)
    return Stats(lse, target, total, best, winner, entropy=entropy)
