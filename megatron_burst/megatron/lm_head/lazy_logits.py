"""Logits that are computed only on use, and Megatron's contract for the gradient of a weight.

`LazyLogits` travel from Megatron's output layer to its loss, which is computed without
materializing the full logits. Any other use computes them.

Shape letters: s tokens of this context-parallel rank, b batch, v vocabulary rows of this
tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LazyLogits:
    """scale * hidden weight^T [s, b, v], computed only on use.

    forward(hidden, weight) computes the logits; loss(self, labels [b, s]) computes their loss
    without them. argmax [s, b]: the most likely vocabulary row of each token, None until known.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        loss: Callable[[LazyLogits, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        self.forward, self.loss = forward, loss
        self.hidden, self.weight, self.scale = hidden, weight, scale
        self.argmax: torch.Tensor | None = None

    def __mul__(self, factor: float) -> Any:
        if isinstance(factor, (int, float)):
            scale = self.scale * factor
            return LazyLogits(self.forward, self.loss, self.hidden, self.weight, scale)
        return self.materialise() * factor

    def materialise(self) -> torch.Tensor:
        """The logits, computed by the output layer's own forward."""
        logits = self.forward(self.hidden, self.weight)
        return logits if self.scale == 1.0 else logits * self.scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        def real(x: Any) -> Any:
            return x.materialise() if isinstance(x, LazyLogits) else x

        named = {name: real(x) for name, x in (kwargs or {}).items()}
        return function(*map(real, args), **named)


class MainGrad:
    """A weight whose gradient Megatron's data parallelism keeps in ``main_grad``.

    With gradient-accumulation fusion a flag tells Megatron that the gradient is already there, as
    its own layers do it. Autograd's gradient is then ignored, or has to be zeros if the weight has
    other uses (``zero_out_wgrad``). Without fusion Megatron adds autograd's gradient to
    ``main_grad``, so autograd gets zeros.
    """

    def __init__(self, weight: Any, fused: bool) -> None:
        self.weight, self.fused = weight, fused and hasattr(weight, "grad_added_to_main_grad")

    def target(self) -> torch.Tensor:
        return self.weight.main_grad

    def done(self) -> torch.Tensor:
        """The gradient for autograd; not None, which overlapped reduction would refuse."""
        weight = self.weight
        if not self.fused:
            return torch.zeros_like(weight)
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
