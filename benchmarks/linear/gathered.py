"""Rival that gathers states: torch's all-gather of all maps, which each rank then applies in order.

It follows LASP-2: one all-gather of the increments and one of the transitions in forward, one of
the gradients in backward. Ranks with fewer pieces send padding, because all ranks must send the
same number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.layout.pieces import Chains

from .maps import apply, reduced


def scan(chain: Chains, transition: torch.Tensor, increment: torch.Tensor) -> torch.Tensor:
    """Return the states that enter this rank's pieces, [p, b, h, d, w]."""
    return _Scan.apply(chain, transition, increment)  # pyright: ignore


def slots(chain: Chains) -> int:
    """Return the number of pieces that each rank sends, the maximum over ranks."""
    return max(len(chain.of(rank)) for rank in range(chain.ranks))


def _gather(chain: Chains, own_values: torch.Tensor) -> torch.Tensor:
    """Gather [pieces, ...] of all ranks, in the order of the chain."""
    count = slots(chain)
    filled = own_values.new_zeros(count, *own_values.shape[1:])
    filled[: len(own_values)] = own_values
    gathered = own_values.new_empty(chain.ranks * count, *own_values.shape[1:])
    dist.all_gather_into_tensor(gathered, filled)
    row_of_piece = torch.empty(len(chain), dtype=torch.long)
    for rank in range(chain.ranks):
        pieces = torch.as_tensor(chain.of(rank).copy())
        row_of_piece[pieces] = rank * count + torch.arange(len(pieces))
    return gathered[row_of_piece]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chains, transition: Any, increment: Any) -> torch.Tensor:
        maps, steps = _gather(chain, transition), _gather(chain, increment)
        own_pieces = chain.of(dist.get_rank())
        entering = torch.zeros_like(increment)
        state = torch.zeros_like(increment[0])
        for i in range(1, int(own_pieces.max()) + 1):
            state = torch.zeros_like(state) if chain.begins[i] else (
                apply(maps[i - 1], state) + steps[i - 1]
            )  # fmt: skip
            for place in (own_pieces == i).nonzero()[0]:
                entering[place] = state
        ctx.chain, ctx.own_pieces = chain, own_pieces
        ctx.save_for_backward(maps, transition, entering)
        return entering

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # pyright: ignore
        maps, transition, entering = ctx.saved_tensors
        chain, own_pieces = ctx.chain, ctx.own_pieces
        all_upstream = _gather(chain, upstream.contiguous())
        increment_grad, grad = torch.zeros_like(entering), torch.zeros_like(transition)
        state = torch.zeros_like(entering[0])
        for i in reversed(range(int(own_pieces.min()), len(chain) - 1)):
            state = torch.zeros_like(state) if chain.ends[i] else (
                all_upstream[i + 1] + apply(maps[i + 1], state, adjoint=True)
            )  # fmt: skip
            for place in (own_pieces == i).nonzero()[0]:
                increment_grad[place] = state
                grad[place] = reduced(transition[place], entering[place], state)
        return None, grad, increment_grad
