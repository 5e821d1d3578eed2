# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that process rows of an attention result: merge, delta and stand-in output.

A row belongs to one position, batch entry and head. Each program processes a few whole rows, so
every element is read once. The module is imported only if a kernel is launched. The formulas are
the same as in `online_softmax` and `aten.stand_in`.
"""

from __future__ import annotations

# Triton is optional, and type checkers do not know functions with its decorator.
# pyright: reportMissingImports=false, reportIndexIssue=false
import triton
import triton.language as tl


@triton.jit
def _rows(count, batch, heads, R: tl.constexpr):
    """Return position, batch entry, head and existence (bool) of this program's R rows."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    return row // heads // batch, row // heads % batch, row % heads, row < count


@triton.jit
def _block(x, position, entry, head, row, batch, heads, W: tl.constexpr):
    """Return the addresses [R, W] of R rows in a tensor with strides (row, batch, heads, 1)."""
    at = position * row + entry * batch + head * heads
    return x + at[:, None] + tl.arange(0, W)[None, :]


@triton.jit
def merge(
    out, lse, part, part_lse,
    out_row, out_batch, out_head, lse_row, lse_batch, lse_head,
    part_row, part_batch, part_head, new_row, new_batch, new_head,
    count, batch, heads, width, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Merge (part, part_lse) into (out, lse) in place; if both are empty, out is 0 and lse -inf."""
    position, entry, head, inside = _rows(count, batch, heads, R)
    lse_at = lse + position * lse_row + entry * lse_batch + head * lse_head
    part_at = part_lse + position * new_row + entry * new_batch + head * new_head
    a = tl.load(lse_at, mask=inside, other=0.0)
    b = tl.load(part_at, mask=inside, other=0.0)
    top = tl.maximum(a, b)
    ratio = tl.where(a == b, 1.0, tl.exp(-tl.abs(a - b)))  # inf - inf would be NaN
    larger = tl.where(top == float("-inf"), 0.0, 1 / (1 + ratio))
    keep = tl.where(a > b, larger, larger * ratio)
    take = tl.where(a > b, larger * ratio, larger)
    visible = inside[:, None] & (tl.arange(0, W) < width)[None, :]
    at = _block(out, position, entry, head, out_row, out_batch, out_head, W)
    old = tl.load(at, mask=visible, other=0.0)
    x = tl.load(
        _block(part, position, entry, head, part_row, part_batch, part_head, W),
        mask=visible,
        other=0.0,
    ).to(old.dtype)
    tl.store(at, old * keep[:, None] + x * take[:, None], mask=visible)
    tl.store(lse_at, top + tl.log(1 + ratio), mask=inside)


@triton.jit
def delta(
    dout, out, result,
    dout_row, dout_batch, dout_head, out_row, out_batch, out_head,
    count, batch, heads, width, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute rowsum(dout * out) into `result`, a contiguous array with one entry per row."""
    position, entry, head, inside = _rows(count, batch, heads, R)
    visible = inside[:, None] & (tl.arange(0, W) < width)[None, :]
    x = tl.load(
        _block(dout, position, entry, head, dout_row, dout_batch, dout_head, W),
        mask=visible,
        other=0.0,
    )
    y = tl.load(
        _block(out, position, entry, head, out_row, out_batch, out_head, W), mask=visible, other=0.0
    )
    kind = result.dtype.element_ty
    row = (position * batch + entry) * heads + head
    tl.store(result + row, tl.sum(x.to(kind) * y.to(kind), 1), mask=inside)


@triton.jit
def stand_in(
    dout, delta, target,
    dout_row, dout_batch, dout_head, delta_row, delta_batch, delta_head,
    count, batch, heads, width, LARGEST: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute `target` [rows, width], contiguous, so that rowsum(dout * target) = delta.

    LARGEST is the largest finite float16 if target is float16, otherwise 0.
    """
    position, entry, head, inside = _rows(count, batch, heads, R)
    visible = inside[:, None] & (tl.arange(0, W) < width)[None, :]
    row_delta = tl.load(
        delta + position * delta_row + entry * delta_batch + head * delta_head,
        mask=inside,
        other=0.0,
    )
    x = tl.load(
        _block(dout, position, entry, head, dout_row, dout_batch, dout_head, W),
        mask=visible,
        other=0.0,
    ).to(row_delta.dtype)
    m = tl.max(tl.abs(x), 1)
    m = tl.where(m == 0, 1.0, m)
    n = x / m[:, None]
    squares = tl.sum(n * n, 1)
    blank = squares == 0
    factor = tl.where(blank, 0.0, row_delta / m / tl.where(blank, 1.0, squares))
    result = n * factor[:, None]
    if LARGEST > 0:
        sizes = tl.sum(tl.abs(n), 1)
        sign_factor = tl.where(blank, 0.0, row_delta / tl.where(blank, 1.0, sizes) / m)[:, None]
        signed = tl.where(n > 0, sign_factor, tl.where(n < 0, -sign_factor, n))
        result = tl.where((tl.abs(factor) <= LARGEST)[:, None], result, signed)
    row = (position * batch + entry) * heads + head
    at = target + row[:, None] * width + tl.arange(0, W)[None, :]
    tl.store(at, result.to(target.dtype.element_ty), mask=visible)
