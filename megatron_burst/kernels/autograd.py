# SPDX-License-Identifier: Apache-2.0
"""Guards for operations with a handwritten backward: no second derivatives, no torch.func
transforms, and a graph break for torch.compile.

torch's `once_differentiable` objects only if the incoming gradient requires a gradient itself;
otherwise it drops the second-order terms silently. Here a backward that is called with
create_graph=True raises.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def first_order_only(
    operation: str | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorates the static `backward` of an autograd function.

    operation: its public name; None if the forward sets `ctx.operation`.

    The decorated backward raises RuntimeError where torch builds a graph of the backward pass
    (`create_graph=True`): torch's engine enables gradients in it then, and only then.
    """

    def decorate(backward: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor | None) -> Result:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{operation or ctx.operation} cannot be differentiated twice, and this "
                    "backward was called with create_graph=True: call it without, or write this "
                    "part of the model in torch's own operators where second derivatives are needed"
                )
            return backward(ctx, *gradients)

        return once

    return decorate


def refuse_transforms(operation: str) -> None:
    """ValueError inside torch.func (grad, vmap, jacrev, jvp, ...), which wraps tensors."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    if active is not None and active():
        raise ValueError(
            f"{operation} cannot run inside torch.func (grad, vmap, jacrev, jvp, ...): call it "
            "outside, on whole batches, and take gradients by torch.autograd.grad or backward()"
        )


def outside_graphs(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`function`, at which torch.compile breaks its graph once and whose inside it leaves alone.

    torch's own decorator would import its compiler with this package; here the compiler is asked
    only where it is loaded already.
    """
    eager = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Given.args, **named: Given.kwargs) -> Result:
        if "torch._dynamo" in sys.modules:
            return eager(*args, **named)
        return function(*args, **named)

    return call
