# SPDX-License-Identifier: Apache-2.0
"""Guards for operations with a handwritten backward.

The guards refuse second derivatives and torch.func transforms, and break torch.compile's graph.
torch's `once_differentiable` raises an error only if the incoming gradient requires a gradient;
otherwise it drops second-order terms silently. Here, every backward with create_graph=True raises
an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def first_order_only(
    operation: str | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator for the static `backward` of an autograd function.

    The decorated backward raises RuntimeError if torch builds a graph of the backward pass
    (`create_graph=True`). This is detected by grad mode, which the engine enables only then.

    Args:
        operation: Public name of the operation; None if the forward sets `ctx.operation`.
    """

    def decorate(backward: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor | None) -> Result:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{operation or ctx.operation} cannot be differentiated twice, and this "
                    "backward was called with create_graph=True; omit create_graph, or use torch "
                    "operators in parts of the model that need second derivatives"
                )
            return backward(ctx, *gradients)

        return once

    return decorate


def refuse_transforms(operation: str) -> None:
    """Check that no torch.func transform is active, because transforms wrap tensors.

    Raises:
        ValueError: grad, vmap, jacrev, jvp, ... of torch.func is active.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    if active is not None and active():
        raise ValueError(
            f"{operation} cannot run inside torch.func (grad, vmap, jacrev, jvp, ...): call it "
            "outside, on whole batches, and take gradients by torch.autograd.grad or backward()"
        )


def outside_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate `function` so that torch.compile breaks the graph at calls and does not compile it.

    torch's own decorator would import the compiler when this package is imported. This decorator
    uses the compiler only if it was already imported.
    """
    eager = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        if "torch._dynamo" in sys.modules:
            return eager(*args, **named)
        return function(*args, **named)

    return call
