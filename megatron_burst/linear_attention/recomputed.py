"""Functions whose intermediate results are not kept: backward runs them once more.

Decides what a call of linear attention holds between forward and backward: its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.autograd import first_order_only

Tensors = tuple[torch.Tensor, ...]


def recomputed(function: Callable[..., Tensors], *tensors: torch.Tensor | None) -> Tensors:
    """function(*tensors), a tuple of tensors; differentiable once."""
    return _Recomputed.apply(function, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensors], *tensors: torch.Tensor | None
    ) -> Tensors:
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with _full_precision(tensors):
            return function(*tensors)

    @staticmethod
    @first_order_only("linear attention")
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        leaves = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad(), _full_precision(leaves):
            results = ctx.function(*leaves)
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            found: Any = [None] * len(asked)
            if pairs and asked:
                ends, arrived = zip(*pairs, strict=True)
                found = torch.autograd.grad(ends, asked, arrived, allow_unused=True)
        each = iter(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(asked, found, strict=True)
        )
        return None, *(next(each) if need else None for need in wanted)


def _full_precision(tensors: Any) -> torch.autocast:
    """Without autocast, which would round states to bf16, and gradients where backward is called
    under it."""
    kind = next(x.device.type for x in tensors if x is not None)
    return torch.autocast(kind, enabled=False)
