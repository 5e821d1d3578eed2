# SPDX-License-Identifier: Apache-2.0
"""Autograd function of the LM head loss, with the modes "single_pass" and "recompute".

Single pass: forward computes the gradients of sum(weights * loss) while it has the logits. If the
incoming gradient is a scalar times the weights, backward only multiplies the gradients by this
scalar. Otherwise backward computes the logits again. The host reads one flag per backward to choose
between these two methods. Meanwhile the device scales the gradients.

Recompute: forward saves one number per token, and backward computes the logits again, without
synchronizing the host.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch

from ..kernels.autograd import first_order_only
from . import tiled_loop
from .tiled_loop import Head, Tokens

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]  # of hidden and of weight


class Sink(Protocol):
    """Buffer to which the weight gradient is added, such as Megatron's `main_grad`.

    Autograd gets the result of `done` instead of the weight gradient.
    """

    def target(self) -> torch.Tensor:
        """Return the tensor, shaped like the weight, to which the gradient is added."""
        ...

    def done(self) -> torch.Tensor | None:
        """Return the tensor that autograd gets as the gradient of the weight, or None.

        Backward calls this method after it added the gradient to `target()`.
        """
        ...


class LinearCrossEntropy(torch.autograd.Function):
    """Autograd function that returns the loss of each token.

    Inputs are hidden [n, d], weight [v, d], labels [p, n] and weights [p, n]. Outputs are loss [p,
    n] and argmax [p, n] or None. Shape letters are the same as in `tiled_loop`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        head: Head,
        single_pass: bool,
        sink: Sink | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = Tokens(hidden, weight, labels)
        dh = dw = None
        if single_pass and ctx.needs_input_grad[0]:
            dh = torch.empty_like(hidden)
        if single_pass and ctx.needs_input_grad[1]:
            dw = torch.zeros_like(weight, dtype=head.dtype)
        results = tiled_loop.losses(head, tokens, weights, dh, dw)
        ctx.head, ctx.single_pass, ctx.sink = head, single_pass, sink
        ctx.save_for_backward(hidden, weight, labels, weights, results.lse, dh, dw)
        if results.argmax is not None:
            ctx.mark_non_differentiable(results.argmax)
        ctx.set_materialize_grads(False)
        return results.loss, results.argmax

    @staticmethod
    @first_order_only("linear_cross_entropy")
    def backward(ctx: Any, dloss: torch.Tensor | None, _: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if dloss is None:
            return (None,) * 7
        hidden, weight, labels, weights, lse, dh, dw = ctx.saved_tensors
        needs_dh, needs_dw = ctx.needs_input_grad[0], _needs_weight_gradient(ctx)
        dw = dw if needs_dw else None
        tokens, head = Tokens(hidden, weight, labels), ctx.head
        counted = labels != head.ignore_index
        dloss = torch.where(counted, dloss, 0)
        if ctx.single_pass:
            factor, fits = _factor(dloss, weights)
            flag = head.split.all_true(fits)
            # Scale before reading the flag, so that the device has work while the host waits.
            dh, dw = _scaled(dh, dw, factor)
            if flag.read():
                return *_grads_for_autograd(ctx.sink, weight.dtype, dh, dw), *(None,) * 5
            del dh, dw
            warnings.warn(
                "linear_cross_entropy: the incoming gradient is not a multiple of loss_mask, so "
                "backward computes the logits again; pass the weights of the tokens as "
                "loss_mask, or mode='recompute' if they are unknown in forward",
                stacklevel=1,  # 2 would name torch's engine, whose warnings are often filtered
            )
        return *_recomputed(ctx, tokens, dloss, lse, needs_dh, needs_dw), *(None,) * 5


def _needs_weight_gradient(ctx: Any) -> bool:
    """Return whether this backward must compute the weight gradient.

    `needs_input_grad` is True even for torch.autograd.grad(loss, hidden), which does not need the
    weight gradient. An addition to a sink cannot be undone, so this function queries the autograd
    engine. The engine has this information only for nodes, not for leaf tensors. Therefore the
    public function passes a view of the weight.
    """
    if not ctx.needs_input_grad[1]:
        return False
    return torch._C._will_engine_execute_node(ctx.next_functions[1][0])  # pyright: ignore[reportAttributeAccessIssue]


def _factor(dloss: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a scalar c and a bool, True if dloss = c * weights up to rounding errors.

    Both results are 0-d tensors on the device.
    """
    if not weights.numel():
        return dloss.new_zeros(()), torch.ones((), dtype=torch.bool, device=dloss.device)
    dloss, weights = dloss.reshape(-1), weights.reshape(-1)
    at = weights.abs().argmax()
    largest = weights.take(at)  # weights[at] would synchronize the host
    factor = torch.where(largest == 0, 0, dloss.take(at) / largest)
    expected = factor * weights
    near = (dloss - expected).abs() <= 4 * torch.finfo(dloss.dtype).eps * expected.abs()
    return factor, near.all()


def _scaled(dh: torch.Tensor | None, dw: torch.Tensor | None, factor: torch.Tensor) -> Gradients:
    """Multiply the gradients from forward by `factor`, in place unless the graph is retained."""
    if _keeps_graph():
        dh, dw = (g if g is None else g.mul(factor) for g in (dh, dw))
        return dh, dw
    dh, dw = (g if g is None else g.mul_(factor) for g in (dh, dw))
    return dh, dw


def _grads_for_autograd(
    sink: Sink | None, dtype: torch.dtype, dh: torch.Tensor | None, dw: torch.Tensor | None
) -> Gradients:
    """Return the gradients for autograd. With a sink, add the weight gradient to the sink."""
    if dw is None or sink is None:
        return dh, dw if dw is None else dw.to(dtype)
    sink.target().add_(dw)
    return dh, sink.done()


def _recomputed(
    ctx: Any,
    tokens: Tokens,
    weights: torch.Tensor,
    lse: torch.Tensor,
    needs_dh: bool,
    needs_dw: bool,
) -> Gradients:
    """Return the gradients of sum(weights * loss) for autograd.

    With a sink of the accumulation dtype, the weight gradient is accumulated directly in the sink.
    """
    sink: Sink | None = ctx.sink if needs_dw else None
    dh = torch.empty_like(tokens.hidden) if needs_dh else None
    dw = None if sink is None else sink.target()
    direct = dw is not None and dw.dtype == ctx.head.dtype
    if needs_dw and not direct:
        dw = torch.zeros_like(tokens.weight, dtype=ctx.head.dtype)
    tiled_loop.gradients(ctx.head, tokens, weights, lse, dh, dw)
    if dw is None or sink is None:
        return dh, dw if dw is None else dw.to(tokens.weight.dtype)
    if not direct:
        sink.target().add_(dw)
    return dh, sink.done()


def _keeps_graph() -> bool:
    """Return True if backward keeps this graph (retain_graph), or if torch lacks the API."""
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    keeps_graph = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps_graph is None else keeps_graph()
