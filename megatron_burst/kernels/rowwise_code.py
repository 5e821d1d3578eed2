# SPDX-License-Identifier: Apache-2.0
"""What is done to every row of an attention result, as Triton kernels: merge, delta, stand-in.

A row is one position, batch entry and head; a program takes some rows at their whole width, so
every number is read once. Imported only where one of them runs. The formulas are those of
`online_softmax` and of `aten.stand_in`.
"""

from __future__ import annotations

# Triton is not everywhere, and what its decorator makes is no function to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
import triton
import triton.language as tl


@triton.jit
def _rows(count, batch, heads, R: tl.constexpr):
    """This program's rows: position, batch entry, head; which of them there are."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    return row // heads // batch, row // heads % batch, row % heads, row < count


@triton.jit
def _block(x, position, entry, head, row, batch, heads, W: tl.constexpr):
    """Addresses [R, W] of rows in a tensor with these strides."""
    at = position * row + entry * batch + head * heads
    return x + at[:, None] + tl.arange(0, W)[None, :]


@triton.jit
def merge(
    out, lse, part, part_lse,
    out_row, out_batch, out_head, lse_row, lse_batch, lse_head,
    part_row, part_batch, part_head, new_row, new_batch, new_head,
    count, batch, heads, width, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """(part, part_lse) into (out, lse), in place; nothing into nothing stays 0 and -inf."""
    position, entry, head, inside = _rows(count, batch, heads, R)
    seen = lse + position * lse_row + entry * lse_batch + head * lse_head
    new = part_lse + position * new_row + entry * new_batch + head * new_head
    a = tl.load(seen, mask=inside, other=0.0)
    b = tl.load(new, mask=inside, other=0.0)
    top = tl.maximum(a, b)
    ratio = tl.where(a == b, 1.0, tl.exp(-tl.abs(a - b)))  # infinities have no difference
    more = tl.where(top == float("-inf"), 0.0, 1 / (1 + ratio))
    keep = tl.where(a > b, more, more * ratio)
    take = tl.where(a > b, more * ratio, more)
    shown = inside[:, None] & (tl.arange(0, W) < width)[None, :]
    at = _block(out, position, entry, head, out_row, out_batch, out_head, W)
    old = tl.load(at, mask=shown, other=0.0)
    x = tl.load(
        _block(part, position, entry, head, part_row, part_batch, part_head, W),
        mask=shown,
        other=0.0,
    ).to(old.dtype)
    tl.store(at, old * keep[:, None] + x * take[:, None], mask=shown)
    tl.store(seen, top + tl.log(1 + ratio), mask=inside)


@triton.jit
def delta(
    dout, out, found,
    dout_row, dout_batch, dout_head, out_row, out_batch, out_head,
    count, batch, heads, width, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Found [rows, contiguous] = rowsum(dout * out)."""
    position, entry, head, inside = _rows(count, batch, heads, R)
    shown = inside[:, None] & (tl.arange(0, W) < width)[None, :]
    x = tl.load(
        _block(dout, position, entry, head, dout_row, dout_batch, dout_head, W),
        mask=shown,
        other=0.0,
    )
    y = tl.load(
        _block(out, position, entry, head, out_row, out_batch, out_head, W), mask=shown, other=0.0
    )
    kind = found.dtype.element_ty
    row = (position * batch + entry) * heads + head
    tl.store(found + row, tl.sum(x.to(kind) * y.to(kind), 1), mask=inside)


@triton.jit
def stand_in(
    dout, delta, found,
    dout_row, dout_batch, dout_head, delta_row, delta_batch, delta_head,
    count, batch, heads, width, LARGEST: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Found [rows, width, contiguous] with rowsum(dout * found) = delta; LARGEST: a number of its
    dtype must not be larger, 0: no such limit.
    """
    position, entry, head, inside = _rows(count, batch, heads, R)
    shown = inside[:, None] & (tl.arange(0, W) < width)[None, :]
    wanted = tl.load(
        delta + position * delta_row + entry * delta_batch + head * delta_head,
        mask=inside,
        other=0.0,
    )
    x = tl.load(
        _block(dout, position, entry, head, dout_row, dout_batch, dout_head, W),
        mask=shown,
        other=0.0,
    ).to(wanted.dtype)
    m = tl.max(tl.abs(x), 1)
    m = tl.where(m == 0, 1.0, m)
    n = x / m[:, None]
    squares = tl.sum(n * n, 1)
    blank = squares == 0
    most = tl.where(blank, 0.0, wanted / m / tl.where(blank, 1.0, squares))
    result = n * most[:, None]
    if LARGEST > 0:
        sizes = tl.sum(tl.abs(n), 1)
        even = tl.where(blank, 0.0, wanted / tl.where(blank, 1.0, sizes) / m)[:, None]
        signed = tl.where(n > 0, even, tl.where(n < 0, -even, n))
        result = tl.where((tl.abs(most) <= LARGEST)[:, None], result, signed)
    row = (position * batch + entry) * heads + head
    at = found + row[:, None] * width + tl.arange(0, W)[None, :]
    tl.store(at, result.to(found.dtype.element_ty), mask=shown)
