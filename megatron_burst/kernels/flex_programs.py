# SPDX-License-Identifier: Apache-2.0
"""FlexAttention as two programs, forward and backward, compiled once per `ProgramShape`.

A program calls the operators below `torch.nn.attention.flex_attention`, because backward needs the
log-sum-exp of the whole sequence and delta. On CUDA, Inductor compiles the traced program; every
call with the same `ProgramShape` uses the same binary. The mask is data (`flex_tables`), so new
documents need no compilation. On the CPU the operators compute densely, without compilation.

The following facts come from the sources of torch 2.8 to 2.14 (`torch/_higher_order_ops/
flex_attention.py` and `torch/_inductor/kernel/flex`). The operators use log-sum-exp and maximum to
base 2. Backward computes rowsum(dout * out) - grad_logsumexp / ln 2. So out = 0 and
grad_logsumexp = -delta * ln 2 pass our delta, exact in float32.

Shape letters as in `kernels.base`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from .flex_tables import BLOCK, INTERVALS, Kind

LN2 = math.log(2)
WORD = 32  # columns in one entry of a bit table
Program = Callable[..., tuple[torch.Tensor, ...]]


class ProgramShape(NamedTuple):
    """Everything that a compiled program depends on.

    Attributes:
        device: Device of all tensors.
        dtype: Dtype of q, k, v and dout.
        batch: Batch size.
        heads: Number of query heads and of key heads.
        widths: Width of keys and of values.
        lengths: Rounded numbers of rows and columns.
        mask: Kind of the mask function.
        tables: Number of bit tables; 0 for intervals.
        scale: Scale of the scores.
        softcap: Softcap of the scores, or None.
        maximum: True if forward returns the largest score of each row.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    lengths: tuple[int, int]
    mask: Kind
    tables: int
    scale: float
    softcap: float | None
    maximum: bool


class ForwardProgram:
    """Program of the forward of a pair of shards.

    Inputs: q, k, v [b, h, s, d]; the `BlockLists` of rows (the lists of blocks are [1, 1, ...]);
    both arrays of `MaskArrays`. Results: out [b, h, s, w], the natural log-sum-exp [b, h, s] and,
    with `ProgramShape.maximum`, the largest score of each row [b, h, s].
    """

    def __init__(self, shape: ProgramShape):
        self.shape = shape

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, *lists, first, second = tensors
        blocks = _block_mask(self.shape, *lists, None, None, None, None)
        out, *statistics = flex_attention(
            q, k, v, _Score(self.shape.softcap), blocks, self.shape.scale, _options(self.shape),
            (), (first, second),
        )  # fmt: skip
        kept = statistics[: 1 + self.shape.maximum]
        return out, *(x * LN2 for x in kept)

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Return tensors with the shapes, strides and dtypes of the inputs."""
        shape = self.shape
        return (*_examples_of_shards(shape), *_examples_of_lists(shape, 0), *_mask_examples(shape))


class BackwardProgram:
    """Program of the backward of a pair of shards.

    Inputs: q, k, v, dout [b, h, s, d]; the log-sum-exp to base 2 and -delta * ln 2 [b, h, s],
    contiguous; the `BlockLists` of rows and of columns; both arrays of `MaskArrays`. Results: dq,
    dk, dv [b, h, s, d].
    """

    def __init__(self, shape: ProgramShape):
        self.shape = shape

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, dout, lse, grad_lse, *lists, first, second = tensors
        blocks = _block_mask(self.shape, *lists)
        score: Any = _Score(self.shape.softcap)
        dq, dk, dv, *_ = flex_attention_backward(
            q, k, v, torch.zeros_like(dout), lse, dout, grad_lse, score, score.joint, blocks,
            self.shape.scale, _options(self.shape), (), (first, second),
        )  # fmt: skip
        return dq, dk, dv

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Return tensors with the shapes, strides and dtypes of the inputs."""
        shape = self.shape
        h, w, s = shape.heads[0], shape.widths[1], shape.lengths[0]
        dout = torch.empty(s, shape.batch, h, w, dtype=shape.dtype, device=shape.device)
        lse, grad_lse = (
            torch.empty(shape.batch, h, s, dtype=torch.float32, device=shape.device)
            for _ in range(2)
        )
        lists = *_examples_of_lists(shape, 0), *_examples_of_lists(shape, 1)
        statistics = dout.permute(1, 2, 0, 3), lse, grad_lse
        return (*_examples_of_shards(shape), *statistics, *lists, *_mask_examples(shape))


@functools.cache
def program(kind: type[ForwardProgram] | type[BackwardProgram], shape: ProgramShape) -> Program:
    """Return a program for tensors of this shape; on CUDA, compile it at the first call."""
    made = kind(shape)
    return made if shape.device.type == "cpu" else compiled(made)


def compiled(made: ForwardProgram | BackwardProgram) -> Program:
    """Trace a program with fake tensors, and compile it with Inductor."""
    from torch._inductor import compile as inductor

    with FakeTensorMode():
        examples: list[Any] = list(made.examples())
    with torch.no_grad():
        result: Any = inductor(make_fx(made.__call__)(*examples), examples)
    return result


class _Score:
    """Score function of FlexAttention (`score_mod`), which applies the softcap."""

    def __init__(self, softcap: float | None):
        self.softcap = softcap

    def __call__(self, score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        if self.softcap is None:
            return score
        return self.softcap * torch.tanh(score / self.softcap)

    def joint(self, score: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradient of `score`. The last argument is the gradient of the result."""
        *place, gradient = rest
        if self.softcap is not None:
            gradient = gradient * (1 - torch.tanh(score / self.softcap) ** 2)
        return [gradient, *(None for _ in place)]


def _in_interval_of_row(
    b: torch.Tensor,
    h: torch.Tensor,
    m: torch.Tensor,
    n: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
) -> torch.Tensor:
    return (first[m] <= n) & (n < end[m])


def _in_interval_of_column(
    b: torch.Tensor,
    h: torch.Tensor,
    m: torch.Tensor,
    n: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
) -> torch.Tensor:
    return (first[n] <= m) & (m < end[n])


def _in_table(
    b: torch.Tensor,
    h: torch.Tensor,
    m: torch.Tensor,
    n: torch.Tensor,
    number: torch.Tensor,
    bits: torch.Tensor,
) -> torch.Tensor:
    table = number[m // BLOCK, n // BLOCK]
    word = bits[table, m % BLOCK, n % BLOCK // WORD]
    return ((word >> (n % WORD)) & 1) == 1


MASK_FUNCTIONS = {
    "rows": _in_interval_of_row,
    "columns": _in_interval_of_column,
    "tables": _in_table,
}


def _options(shape: ProgramShape) -> dict[str, Any]:
    """Return the options that `torch.nn.attention.flex_attention` passes to the operators."""
    return {
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": shape.maximum,
    }


def _block_mask(shape: ProgramShape, *lists: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the operators' block mask: counts and lists of blocks, block sizes, mask function."""
    function = MASK_FUNCTIONS[shape.mask]
    mask = BlockMask(shape.lengths, *lists, (BLOCK, BLOCK), function)  # pyright: ignore
    return *mask.as_tuple()[:-1], function  # newer releases wrap the function


def _examples_of_shards(shape: ProgramShape) -> tuple[torch.Tensor, ...]:
    (h, k), (d, w), (s, t) = shape.heads, shape.widths, shape.lengths
    sizes = (s, shape.batch, h, d), (t, shape.batch, k, d), (t, shape.batch, k, w)
    shards = (torch.empty(*size, dtype=shape.dtype, device=shape.device) for size in sizes)
    return tuple(x.permute(1, 2, 0, 3) for x in shards)


def _examples_of_lists(shape: ProgramShape, side: int) -> tuple[torch.Tensor, ...]:
    blocks = shape.lengths[side] // BLOCK, shape.lengths[1 - side] // BLOCK
    sizes = (blocks[:1], blocks) * 2
    return tuple(_int32(1, 1, *size, device=shape.device) for size in sizes)


def _mask_examples(shape: ProgramShape) -> tuple[torch.Tensor, torch.Tensor]:
    device = shape.device
    if shape.mask != "tables":
        length = shape.lengths[INTERVALS.index(shape.mask)]
        return _int32(length, device=device), _int32(length, device=device)
    number = _int32(*(n // BLOCK for n in shape.lengths), device=device)
    return number, _int32(shape.tables, BLOCK, BLOCK // WORD, device=device)


def _int32(*size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)
