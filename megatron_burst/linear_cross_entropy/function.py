# SPDX-License-Identifier: Apache-2.0
"""The autograd function: what is computed in forward, what is kept, what backward does with it.

Single pass: the gradients of sum(weights * loss) are made in forward, where the logits are. Then
backward needs only a scalar, if the gradient that arrives is that scalar times the weights; that
is checked, and if it is not so the gradients are computed again for what did arrive. What is to be
launched depends on that, so the host reads one flag per backward; the device scales the gradients
meanwhile. Recompute: forward keeps one number per token and backward computes the logits once
more; the host reads nothing.
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
    """Where the weight's gradient goes instead of to autograd, in a backward that asks for it."""

    def target(self) -> torch.Tensor:
        """The tensor to add to, shaped like the weight."""
        ...

    def done(self) -> torch.Tensor | None:
        """After it was added to: what autograd shall be given for the weight."""
        ...


class LinearCrossEntropy(torch.autograd.Function):
    """hidden [n, d], weight [v, d], labels [p, n], weights [p, n] -> loss, argmax [p, n]."""

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
        found = tiled_loop.losses(head, tokens, weights, dh, dw)
        ctx.head, ctx.single_pass, ctx.sink = head, single_pass, sink
        ctx.save_for_backward(hidden, weight, labels, weights, found.lse, dh, dw)
        if found.argmax is not None:
            ctx.mark_non_differentiable(found.argmax)
        ctx.set_materialize_grads(False)
        return found.loss, found.argmax

    @staticmethod
    @first_order_only("linear_cross_entropy")
    def backward(ctx: Any, dloss: torch.Tensor | None, _: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if dloss is None:
            return (None,) * 7
        hidden, weight, labels, weights, lse, dh, dw = ctx.saved_tensors
        wants_dh, wants_dw = ctx.needs_input_grad[0], _weight_is_asked_for(ctx)
        dw = dw if wants_dw else None
        tokens, head = Tokens(hidden, weight, labels), ctx.head
        kept = labels != head.ignore_index
        dloss = torch.where(kept, dloss, 0)
        if ctx.single_pass:
            factor, fits = _factor(dloss, weights)
            answer = head.split.everywhere(fits)
            # Before the answer is read: the device has work while the host waits for it.
            dh, dw = _scaled(dh, dw, factor)
            if answer.read():
                return *_delivered(ctx.sink, weight.dtype, dh, dw), *(None,) * 5
            del dh, dw
            warnings.warn(
                "linear_cross_entropy: the gradient that arrived is not a multiple of loss_mask, "
                "so the logits are computed a second time; pass the weights of the tokens as "
                "loss_mask, or mode='recompute' if they are unknown in forward",
                stacklevel=1,  # the caller is torch's engine, whose warnings many leave out
            )
        return *_recomputed(ctx, tokens, dloss, lse, wants_dh, wants_dw), *(None,) * 5


def _weight_is_asked_for(ctx: Any) -> bool:
    """Does this backward lead to the weight? Not so in torch.autograd.grad(loss, hidden).

    `needs_input_grad` says only what could be asked for, and what goes into a sink could not be
    dropped by torch later. The engine does not tell of leaves: the weight arrives as a view.
    """
    if not ctx.needs_input_grad[1]:
        return False
    return torch._C._will_engine_execute_node(ctx.next_functions[1][0])  # pyright: ignore[reportAttributeAccessIssue]


def _factor(dloss: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(c, is dloss c times the weights?), both 0-d and on the device; up to a few roundings."""
    if not weights.numel():
        return dloss.new_zeros(()), torch.ones((), dtype=torch.bool, device=dloss.device)
    dloss, weights = dloss.reshape(-1), weights.reshape(-1)
    at = weights.abs().argmax()
    largest = weights.take(at)  # as an index, `at` would be read by the host
    factor = torch.where(largest == 0, 0, dloss.take(at) / largest)
    expected = factor * weights
    near = (dloss - expected).abs() <= 4 * torch.finfo(dloss.dtype).eps * expected.abs()
    return factor, near.all()


def _scaled(dh: torch.Tensor | None, dw: torch.Tensor | None, factor: torch.Tensor) -> Gradients:
    """What forward has made, times the factor; in its own place unless it is needed again."""
    if _needed_again():
        dh, dw = (g if g is None else g.mul(factor) for g in (dh, dw))
        return dh, dw
    dh, dw = (g if g is None else g.mul_(factor) for g in (dh, dw))
    return dh, dw


def _delivered(
    sink: Sink | None, dtype: torch.dtype, dh: torch.Tensor | None, dw: torch.Tensor | None
) -> Gradients:
    """What autograd is given: the weight's gradient goes into the sink where there is one."""
    if dw is None or sink is None:
        return dh, dw if dw is None else dw.to(dtype)
    sink.target().add_(dw)
    return dh, sink.done()


def _recomputed(
    ctx: Any,
    tokens: Tokens,
    weights: torch.Tensor,
    lse: torch.Tensor,
    wants_dh: bool,
    wants_dw: bool,
) -> Gradients:
    """The gradients for these weights; of the weight straight into the sink where dtypes agree."""
    sink: Sink | None = ctx.sink if wants_dw else None
    dh = torch.empty_like(tokens.hidden) if wants_dh else None
    dw = None if sink is None else sink.target()
    direct = dw is not None and dw.dtype == ctx.head.dtype
    if wants_dw and not direct:
        dw = torch.zeros_like(tokens.weight, dtype=ctx.head.dtype)
    tiled_loop.gradients(ctx.head, tokens, weights, lse, dh, dw)
    if dw is None or sink is None:
        return dh, dw if dw is None else dw.to(tokens.weight.dtype)
    if not direct:
        sink.target().add_(dw)
    return dh, sink.done()


def _needed_again() -> bool:
    """Will this graph be used for another backward (retain_graph)? True where torch cannot tell."""
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    tell = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return True if tell is None else tell()
