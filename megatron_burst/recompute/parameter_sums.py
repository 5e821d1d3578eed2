"""Gradients of parameters from a function that backward runs in pieces.

A parameter must reach autograd once per backward, whatever the number of pieces: Megatron's
data-parallel hook counts arrivals to start its reduction. The pieces are therefore differentiated
by `torch.autograd.grad`, which runs no such hook, and their gradients added here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradient = torch.Tensor | None


class ParameterSums:
    """Sums of the gradients of some parameters: fp32 for bf16 and fp16, else in their own dtype.

    A layer with Megatron's fused weight gradient adds to ``parameter.main_grad`` itself, says so
    by ``parameter.grad_added_to_main_grad`` and hands autograd a tensor of arbitrary content. That
    tensor is never summed: one of them is handed on, for the hooks that wait for it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self.parameters = tuple(parameters)
        self._sums: list[Gradient] = [None] * len(self.parameters)
        self._ours = [False] * len(self.parameters)  # nobody else holds this sum

    def add(self, grads: Sequence[Gradient]) -> None:
        """Add the gradients of one piece, one per parameter, None where it has no part in it."""
        for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            total = self._sums[index]
            if grad is None:
                continue
            if total is None or getattr(parameter, "grad_added_to_main_grad", False):
                self._sums[index] = grad
            elif self._ours[index]:
                total.add_(grad)
            else:  # the first gradient may be a tensor that others read
                self._sums[index] = torch.add(total.to(_accumulated(total.dtype)), grad)
                self._ours[index] = True

    def backward(
        self,
        outputs: Sequence[torch.Tensor] | Sequence[torch.autograd.graph.GradientEdge],
        inputs: Sequence[torch.Tensor] | Sequence[torch.autograd.graph.GradientEdge],
        grad_outputs: Sequence[torch.Tensor],
    ) -> tuple[Gradient, ...]:
        """Differentiate one piece: adds the parameters' gradients, returns those of `inputs`.

        The graph of the piece is used up. Both may be `torch.autograd.graph.GradientEdge`s.
        """
        wanted = [*inputs, *self.parameters]
        grads = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True)
        self.add(grads[len(inputs) :])
        return grads[: len(inputs)]

    def result(self) -> tuple[Gradient, ...]:
        """What autograd is handed, one per parameter, rounded once to the parameter's dtype."""
        return tuple(
            None if total is None else total.to(parameter.dtype)
            for parameter, total in zip(self.parameters, self._sums, strict=True)
        )


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
