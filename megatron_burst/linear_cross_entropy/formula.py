# SPDX-License-Identifier: Apache-2.0
"""The loss of a token as a function of statistics of its row of logits.

Decides the formula, and how the statistics of tensor-parallel ranks are merged.

A logit is x = scale * h.w, or cap * tanh(scale * h.w / cap). With y the label, over v vocabulary
rows, and e the label smoothing, the loss is

    lse(x) - (1 - e) x_y - e mean(x) + z_loss lse(x)^2

and its derivative by x_j is p_j (1 + 2 z_loss lse) - (1 - e) [j = y] - e / v, p the softmax. This
is label smoothing as torch has it (the target keeps 1 - e + e / v), and z-loss as PaLM has it
(arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Formula:
    """Constants of the loss; `vocab_size` counts the rows that take part in the softmax."""

    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    smoothing: float = 0.0

    def loss(self, stats: Stats) -> torch.Tensor:
        """[n], from the statistics of whole rows."""
        lse = stats.lse
        loss = lse - (1 - self.smoothing) * stats.target
        if self.smoothing:
            assert stats.total is not None
            loss -= self.smoothing / self.vocab_size * stats.total
        if self.z_loss:
            loss += self.z_loss * lse.square()
        return loss

    def weight_of_softmax(self, lse: torch.Tensor) -> torch.Tensor | float:
        """What the softmax is multiplied by in the derivative."""
        return 1 + 2 * self.z_loss * lse if self.z_loss else 1.0


class Stats(NamedTuple):
    """What is known of n rows of logits, over some vocabulary rows; each [n].

    lse: log-sum-exp, -inf over none. target: the label's logit where the label is among them,
    else 0. total: sum of the logits. best, winner: the largest logit and its vocabulary row (as
    a float: exact up to 2^24), the lowest such row. total, and best and winner, only where asked.
    peak: the rows hold exp(logit - peak) by now instead of the logits; concerns one rank only.
    entropy: of the softmax over these rows, where it was asked for.
    """

    lse: torch.Tensor
    target: torch.Tensor
    total: torch.Tensor | None = None
    best: torch.Tensor | None = None
    winner: torch.Tensor | None = None
    peak: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def merge(parts: list[Stats]) -> Stats:
    """Statistics over all vocabulary rows from those of the ranks, the same bits on every rank."""
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
        less = lse - torch.stack([part.lse for part in parts])  # inf where a rank has no column
        shares = less.neg().exp_()
        entropy = (shares * (own + less.where(shares > 0, 0))).sum(0)
    return Stats(lse, target, total, best, winner, entropy=entropy)
