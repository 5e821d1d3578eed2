"""torch's own attention on the same pair: flash, cuDNN and FlexAttention, each at its best.

A rival is asked for a case and answers with what it runs, or with the reason why it cannot
(`Cannot`). Stock operators get one call per pair where one call can do it: no merging, no stand-in,
results in 16 bits. Decides how a rival is called; times nothing.

Tensors are [s, b, h, d] with b = 1; operators want other orders: views, but for FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from megatron_burst.kernels.operators import CpuFlash, Operator, Shown
from megatron_burst.kernels.operators_cuda import CudaCudnn, CudaFlash

from .cases import Case, OneCall

aten = torch.ops.aten
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rival = Callable[["Inputs", Case], "Calls"]


class Cannot(Exception):
    """A rival has no way to compute a case."""


class Inputs(NamedTuple):
    """q [s, b, h, d], k [t, b, k, d], v [t, b, k, w], dout [s, b, h, w], and the scale."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float


class Calls(NamedTuple):
    """What is timed, and what it computed for the rows and columns that it looked at.

    forward() -> state; backward(state) -> gradients; read(state) -> out [rows, b, h, w]."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Grads]
    read: Callable[[Any], torch.Tensor]
    rows: slice = slice(None)
    columns: slice = slice(None)


def of(device: torch.device) -> dict[str, Rival]:
    """The rivals that this kind of device has at once."""
    if device.type == "cpu":
        return {"torch flash": lambda inputs, case: stock(CpuFlash(), inputs, case)}
    return {"torch FA2": flash, "cuDNN": cudnn}


def compiled(device: torch.device) -> dict[str, Rival]:
    """Those that compile for every case, and so have cells of their own, later."""
    return {} if device.type == "cpu" else {"FlexAttention": flex}


def flash(inputs: Inputs, case: Case) -> Calls:
    how = case.one_call
    if how is not None and (how.window or how.bounds):
        return packed(inputs, how)
    return stock(CudaFlash(), inputs, case)


def cudnn(inputs: Inputs, case: Case) -> Calls:
    return stock(CudaCudnn(), inputs, case)


def stock(operator: Operator, inputs: Inputs, case: Case) -> Calls:
    """One call on a rectangle or a lower triangle."""
    how = case.one_call
    if how is None or how.window or how.bounds:
        raise Cannot("no single call of this operator computes it")
    parts = (how.rows, how.columns, how.columns, how.rows)
    q, k, v, dout = (x[part].permute(1, 2, 0, 3) for x, part in zip(inputs[:4], parts, strict=True))

    def forward() -> Any:
        return operator.forward(q, k, v, Shown(how.triangle), inputs.scale)

    def backward(state: Any) -> Grads:
        out, lse = state
        grads = operator.backward(dout, q, k, v, out, lse, Shown(how.triangle), inputs.scale)
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
        return dq, dk, dv

    return Calls(forward, backward, lambda state: state[0].permute(2, 0, 1, 3), *parts[:2])


def packed(inputs: Inputs, how: OneCall) -> Calls:
    """torch's flash operator on packed documents, or on one with a window."""
    bounds = how.bounds or (0, len(inputs.q))
    longest = max(b - a for a, b in pairwise(bounds))
    ends = torch.tensor(bounds, dtype=torch.int32, device=inputs.q.device)
    sizes = (ends, ends, longest, longest)
    causal, reach = how.window is None, {}
    if how.window is not None:
        reach = {"window_size_left": how.window - 1, "window_size_right": 0}
    q, k, v, dout = (x.squeeze(1) for x in inputs[:4])
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: never read
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)

    def forward() -> Any:
        return aten._flash_attention_forward(
            q, k, v, *sizes, 0.0, causal, False, scale=inputs.scale, **reach
        )[:2]

    def backward(state: Any) -> Grads:
        out, lse = state
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse, *sizes, 0.0, causal, seed, offset, scale=inputs.scale, **reach
        )
        dq, dk, dv = (x.unsqueeze(1) for x in grads)
        return dq, dk, dv

    return Calls(forward, backward, lambda state: state[0].unsqueeze(1))


def flex(inputs: Inputs, case: Case) -> Calls:
    """FlexAttention, compiled for this case and this shape alone, on copies in its own order."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.permute(1, 2, 0, 3).contiguous().requires_grad_() for x in inputs[:3])
    dout = inputs.dout.permute(1, 2, 0, 3).contiguous()
    block_mask = None
    if case.seen is not None:
        seen = case.seen(q.device)
        block_mask = create_block_mask(
            lambda batch, head, row, column: seen(row, column),
            None, None, q.shape[2], k.shape[2], device=str(q.device),
        )  # fmt: skip
    torch.compiler.reset()  # what was compiled for other cases counts against a limit
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"scale": inputs.scale, "enable_gqa": q.shape[1] != k.shape[1]}

    def forward() -> Any:
        return compiled(q, k, v, block_mask=block_mask, **options)

    def backward(state: Any) -> Grads:
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in torch.autograd.grad(state, (q, k, v), dout))
        return dq, dk, dv

    return Calls(forward, backward, lambda state: state.detach().permute(2, 0, 1, 3))
