"""Ring that adds in 16 bits, for `accuracy.py`: an emulation, no run of another library.

The result of our CPU kernel for each pair of shards is rounded once to 16 bits, like the result of
a kernel call. The results are added with 16-bit additions in the order of Transformer Engine's p2p
context parallelism (class AttnFuncWithCPAndKVP2P, without fp8): out and dq on their rank, dk and dv
along the ring, ending at their owner.
"""

from __future__ import annotations

import torch

import megatron_burst as mb
from megatron_burst.kernels.base import Kernel, Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.registry import make

Tensors = tuple[torch.Tensor, ...]  # q, k, v, dout or out, dq, dk, dv: [s, b, h, d]


def emulated(
    ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Tensors:
    """Return out, dq, dk, dv of causal attention by the ring that adds in the inputs' dtype."""
    layout = mb.layout.make("zigzag", cp_size=ranks)
    split = [[mb.shard(x, layout, rank) for rank in range(ranks)] for x in (q, k, v, dout)]
    shards = list(zip(*split, strict=True))
    kernel = make("aten", q, k, v)
    steps = _Steps(kernel, layout, len(q), Scoring(q.shape[-1] ** -0.5), shards)
    results = [steps.forward(rank) for rank in range(ranks)]
    dq: list[torch.Tensor | None] = [None] * ranks
    dkv: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * ranks
    for step in range(ranks):  # a rank computes with its own keys last
        for rank in range(ranks):
            owner = (rank + step + 1) % ranks
            one_q, one_k, one_v = steps.gradients(rank, owner, *results[rank])
            held_q, held = dq[rank], dkv[owner]
            dq[rank] = one_q if held_q is None else held_q.add_(one_q)
            dkv[owner] = (one_k, one_v) if held is None else (
                held[0].add_(one_k), held[1].add_(one_v))  # fmt: skip
    parts = [[out for out, _ in results], dq, *zip(*(x for x in dkv if x), strict=True)]
    return tuple(mb.unshard(list(part), layout) for part in parts)


class _Steps:
    """Results of one kernel call per pair of shards: 16-bit results, fp32 lse."""

    def __init__(
        self,
        kernel: Kernel,
        layout: mb.layout.Layout,
        seq_len: int,
        scoring: Scoring,
        shards: list[Tensors],
    ):
        self.kernel, self.scoring, self.shards = kernel, scoring, shards
        spans = [layout.spans(rank, seq_len) for rank in range(layout.cp_size)]
        self.works = [
            [kernel.works_for(mb.masks.Causal(), [(a, b)])[0] for b in spans] for a in spans
        ]

    def forward(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse): rounded partial outputs, weighted and added with 16-bit additions."""
        q, size = self.shards[rank][0], len(self.shards)
        partials = [self._partial(rank, (rank - step) % size) for step in range(size)]
        lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in partials]), dim=0)
        total = torch.zeros_like(q)
        for out, part_lse in partials:
            total.add_(out * torch.exp(part_lse - lse).unsqueeze(-1))
        return total, lse

    def _partial(self, rank: int, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, (_, k, v, _) = self.shards[rank][0], self.shards[owner]
        out, lse = empty_result(q, v.shape[-1])
        self.kernel.forward(q, k, v, self.works[rank][owner], self.scoring, out, lse)
        return out.to(q.dtype), lse

    def gradients(
        self, rank: int, owner: int, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return dq, dk, dv of one pair of shards."""
        (q, _, _, dout), (_, k, v, _) = self.shards[rank], self.shards[owner]
        totals = [torch.zeros(x.shape) for x in (q, k, v)]
        delta = (dout.float() * out.float()).sum(-1)
        rows = Rows(q, dout, lse, delta, out)
        self.kernel.backward(rows, k, v, self.works[rank][owner], self.scoring, *totals)
        return tuple(total.to(q.dtype) for total in totals)
