"""What stands in for logits between Megatron's output layer and its loss, and for their gradient.

Owns: that whoever looks at lazy logits gets real ones, and Megatron's contract for the gradient
of a weight. Must not know: which models use it.

Shape letters: s tokens of this context-parallel rank, b batch, v vocabulary rows of this
tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LazyLogits:
    """scale * hidden weight^T [s, b, v], made only if somebody looks.

    forward(hidden, weight) makes them; loss(self, labels [b, s]) is the loss they stand for.
    argmax [s, b]: each token's most likely vocabulary row, where it has become known.
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
        """The real logits, by the output layer's own forward."""
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
    """A weight whose gradient Megatron's data parallelism keeps in `main_grad`.

    With gradient-accumulation fusion Megatron is told that the gradient is there, as its own
    layers do; then what autograd gets is ignored, or must be zeros if the weight has other uses
    (`zero_out_wgrad`). Without it autograd's gradient is added to `main_grad`: zeros from here.
    """

    def __init__(self, weight: Any, fused: bool) -> None:
        self.weight, self.fused = weight, fused and hasattr(weight, "grad_added_to_main_grad")

    def target(self) -> torch.Tensor:
        return self.weight.main_grad

    def done(self) -> torch.Tensor:
        """Not None: with overlapped reduction Megatron insists on a gradient."""
        weight = self.weight
        if not self.fused:
            return torch.zeros_like(weight)
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
