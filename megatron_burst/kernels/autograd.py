# SPDX-License-Identifier: Apache-2.0
"""Guards for operations with a handwritten backward.

The guards raise an error for second derivatives and torch.func transforms. They exclude the
operations from graphs of torch.compile. torch's `once_differentiable` does not suffice: it raises
an error only if the incoming gradient requires a gradient, and otherwise drops second-order terms
silently. These guards raise an error for every backward with create_graph=True.
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
    (`create_graph=True`). The decorator detects this by grad mode: the engine enables it in
    backward only with `create_graph=True`.

    Args:
        operation: Public name of the operation, for the message. None: the name is `ctx.operation`,
            which the forward sets.
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
    """Raise ValueError if a transform of torch.func is active: the operation does not support it.

    Args:
        operation: Public name of the operation, for the message.

    Raises:
        ValueError: grad, vmap, jacrev, jvp or another transform of torch.func is active.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    if active is not None and active():
        raise ValueError(
            f"{operation} cannot run inside torch.func (grad, vmap, jacrev, jvp, ...): call it "
            "outside, on whole batches, and take gradients by torch.autograd.grad or backward()"
        )


def outside_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function`, excluded from torch.compile: a call breaks the graph and runs eagerly.

    torch's own decorator would import the compiler whenever this package is imported. This
    decorator uses the compiler only if it is already imported.
    """
    eager = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        if "torch._dynamo" in sys.modules:
            return eager(*args, **named)
        return function(*args, **named)

    return call
