"""Maps of all pieces of a setting, and the correct states and gradients.

Every rank makes all maps from one seed, so that it can check its own results. The truth is the
recurrence in float64, computed here; it shares only the chains with the measured code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron_burst.layout import chains, make
from megatron_burst.layout.pieces import Chains

from .settings import Setting

Tensors = tuple[torch.Tensor, ...]


class Share(NamedTuple):
    """Pieces of one rank in the order of its rows, and the truth.

    Pieces are transition, increment, and the gradient of the entering states; the truth is the
    entering states and the gradients of transition and increment.
    """

    transition: torch.Tensor
    increment: torch.Tensor
    upstream: torch.Tensor
    truth: Tensors


def chains_of(setting: Setting, size: int) -> Chains:
    return chains(make(setting.layout, cp_size=size), setting.tokens * size)


def rows_of(setting: Setting, size: int, rank: int) -> torch.Tensor:
    """Return the positions of the rows of `rank`, in their order."""
    chain = chains_of(setting, size)
    pieces = chain.table[chain.of(rank)]
    return torch.cat([torch.arange(int(p), int(p + n)) for _, _, n, _, p in pieces])


def share(setting: Setting, size: int, rank: int) -> Share:
    """Return the share of `rank` of `size` ranks."""
    chain = chains_of(setting, size)
    h, d = setting.heads, setting.width
    shape = {"scalar": (), "vector": (d,), "matrix": (d, d)}[setting.form]
    generator = torch.Generator().manual_seed(5)
    states = (len(chain), 1, h, d, d)
    transition = torch.rand(len(chain), 1, h, *shape, generator=generator)
    if setting.form == "matrix":
        transition = (2 * transition - 1) * (2 / d**0.5)
    increment, upstream = (torch.randn(states, generator=generator) for _ in range(2))
    truth = _truth(chain, transition.double(), increment.double(), upstream.double())
    own_pieces = torch.from_numpy(np.ascontiguousarray(chain.of(rank)))
    return Share(
        *(x[own_pieces].clone() for x in (transition, increment, upstream)),
        tuple(x[own_pieces].clone() for x in truth),
    )


def apply(transition: torch.Tensor, state: torch.Tensor, *, adjoint: bool = False) -> torch.Tensor:
    """Return A S, or A^T S, of one piece."""
    missing_dims = state.dim() - transition.dim()
    if missing_dims == 0:
        return (transition.mT if adjoint else transition) @ state
    return transition[(..., *[None] * missing_dims)] * state


def reduced(transition: torch.Tensor, state: torch.Tensor, out_grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of A for a gradient `out_grad` of A S."""
    missing_dims = state.dim() - transition.dim()
    if missing_dims == 0:
        return out_grad @ state.mT
    return (out_grad * state).sum(dim=tuple(range(-missing_dims, 0)))


def _truth(
    chain: Chains, transition: torch.Tensor, increment: torch.Tensor, upstream: torch.Tensor
) -> Tensors:
    entering, increment_grad = torch.zeros_like(increment), torch.zeros_like(increment)
    grad = torch.zeros_like(transition)
    for i in range(1, len(chain)):
        if not chain.begins[i]:
            entering[i] = apply(transition[i - 1], entering[i - 1]) + increment[i - 1]
    for i in reversed(range(len(chain) - 1)):
        if not chain.ends[i]:
            increment_grad[i] = upstream[i + 1] + apply(
                transition[i + 1], increment_grad[i + 1], adjoint=True
            )
            grad[i] = reduced(transition[i], entering[i], increment_grad[i])
    return entering, grad, increment_grad
