"""Rivals that compute the same pair: torch's flash, cuDNN, FlexAttention, FlashAttention 3 and 4.

Each runs in its fastest form, and the FlashAttention packages only if installed. For a case a rival
returns its calls, or raises `Cannot` with the reason. Stock operators get one call per pair if one
call can compute it: no merging, no stand-in, results in 16 bits.

Tensors are [s, b, h, d] with b = 1; operators with other orders get views, FlexAttention copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_burst.kernels.flash import Flash
from megatron_burst.kernels.flash_packages import PACKAGES, load
from megatron_burst.kernels.operators import CpuFlash, Lengths, Operator, TileVisibility
from megatron_burst.kernels.operators_cuda import CudaCudnn, CudaFlash
from megatron_burst.kernels.packages import NotInstalled

from .cases import Case

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rival = Callable[["Inputs", Case], "Calls"]


class Cannot(Exception):
    """Error of a rival that cannot compute a case."""


class Inputs(NamedTuple):
    """q [s, b, h, d], k [t, b, k, d], v [t, b, k, w], dout [s, b, h, w], and the scale."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float


class Calls(NamedTuple):
    """Timed calls of a rival, and its results for the rows and columns that it computed.

    forward() -> state; backward(state) -> gradients; read(state) -> out [rows, b, h, w].
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Grads]
    read: Callable[[Any], torch.Tensor]
    rows: slice = slice(None)
    columns: slice = slice(None)


def of(device: torch.device) -> dict[str, Rival]:
    """Return the rivals of this device that need no compilation per case."""
    if device.type == "cpu":
        return {"torch flash": partial(stock, CpuFlash())}
    theirs = {"torch FA2": partial(stock, CudaFlash()), "cuDNN": partial(stock, CudaCudnn())}
    return theirs | _installed("flash3")


def compiled(device: torch.device) -> dict[str, Rival]:
    """Return the rivals that compile for every case and have their own cells, later."""
    return {} if device.type == "cpu" else {"FlexAttention": flex} | _installed("flash4")


def _installed(name: str) -> dict[str, Rival]:
    """Return a FlashAttention package if it is installed with the expected functions."""
    package = PACKAGES[name]
    try:
        operator = Flash(name, package, load(name))
    except NotInstalled:
        return {}
    return {package.title: partial(stock, operator)}


def stock(operator: Operator, inputs: Inputs, case: Case) -> Calls:
    """Return one call on a rectangle, a lower triangle, a window or documents."""
    how = case.one_call
    if how is None or (how.window and not operator.windows) or (how.bounds and not operator.joins):
        raise Cannot("no single call of this operator computes it")
    shown = TileVisibility(how.triangle)
    if how.window is not None:
        shown = TileVisibility(window=(how.window - 1, 0))
    if how.bounds is not None:
        sizes = np.diff(how.bounds)
        shown = TileVisibility(causal=True, lengths=Lengths(np.stack([sizes, sizes], axis=1)))
    parts = (how.rows, how.columns, how.columns, how.rows)
    q, k, v, dout = (x[part].permute(1, 2, 0, 3) for x, part in zip(inputs[:4], parts, strict=True))

    def forward() -> Any:
        return operator.forward(q, k, v, shown, inputs.scale)

    def backward(state: Any) -> Grads:
        out, lse = state
        grads = operator.backward(dout, q, k, v, out, lse, shown, inputs.scale)
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
        return dq, dk, dv

    return Calls(forward, backward, lambda state: state[0].permute(2, 0, 1, 3), *parts[:2])


def flex(inputs: Inputs, case: Case) -> Calls:
    """Return FlexAttention, compiled for this case and shape, on copies in its own order."""
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
    torch.compiler.reset()  # torch limits the number of compiled cases
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"scale": inputs.scale, "enable_gqa": q.shape[1] != k.shape[1]}

    def forward() -> Any:
        return compiled(q, k, v, block_mask=block_mask, **options)

    def backward(state: Any) -> Grads:
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in torch.autograd.grad(state, (q, k, v), dout))
        return dq, dk, dv

    return Calls(forward, backward, lambda state: state.detach().permute(2, 0, 1, 3))
