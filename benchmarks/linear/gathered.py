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


def _gather(chain: Chains, mine: torch.Tensor) -> torch.Tensor:
    """Gather [pieces, ...] of all ranks, in the order of the chain."""
    count = slots(chain)
    filled = mine.new_zeros(count, *mine.shape[1:])
    filled[: len(mine)] = mine
    found = mine.new_empty(chain.ranks * count, *mine.shape[1:])
    dist.all_gather_into_tensor(found, filled)
    where = torch.empty(len(chain), dtype=torch.long)
    for rank in range(chain.ranks):
        pieces = torch.as_tensor(chain.of(rank).copy())
        where[pieces] = rank * count + torch.arange(len(pieces))
    return found[where]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chains, transition: Any, increment: Any) -> torch.Tensor:
        maps, steps = _gather(chain, transition), _gather(chain, increment)
        mine = chain.of(dist.get_rank())
        entering = torch.zeros_like(increment)
        state = torch.zeros_like(increment[0])
        for i in range(1, int(mine.max()) + 1):
            state = torch.zeros_like(state) if chain.begins[i] else (
                apply(maps[i - 1], state) + steps[i - 1]
            )  # fmt: skip
            for place in (mine == i).nonzero()[0]:
                entering[place] = state
        ctx.chain, ctx.mine = chain, mine
        ctx.save_for_backward(maps, transition, entering)
        return entering

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # pyright: ignore
        maps, transition, entering = ctx.saved_tensors
        chain, mine = ctx.chain, ctx.mine
        all_upstream = _gather(chain, upstream.contiguous())
        after, grad = torch.zeros_like(entering), torch.zeros_like(transition)
        state = torch.zeros_like(entering[0])
        for i in reversed(range(int(mine.min()), len(chain) - 1)):
            state = torch.zeros_like(state) if chain.ends[i] else (
                all_upstream[i + 1] + apply(maps[i + 1], state, back=True)
            )  # fmt: skip
            for place in (mine == i).nonzero()[0]:
                after[place] = state
                grad[place] = reduced(transition[place], entering[place], state)
        return None, grad, after
