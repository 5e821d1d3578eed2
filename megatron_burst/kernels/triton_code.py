# SPDX-License-Identifier: Apache-2.0
"""Attention over a grid of tiles as Triton kernels: forward, and backward by keys or by queries.

Every kernel works through `tile_grid.Worklist`s: wholly visible tiles without any mask code, partly
visible ones with a table of bits; one launch each, because one loop in two kinds spills registers.
A launch carries on where the one before stopped: forward loads (out, lse), which is the running
softmax in normal form, and stores it again; backward adds to the sums it is given. lse and delta
are those of the whole sequence, so there is one kernel for either side of the ring.

Imported only when a Triton kernel is made. Masks and block sizes come as lists and constants.
Tensors are [b, heads, rows, width], as descriptors of one block of rows
of one head; what lies behind their ends is zero.
"""

from __future__ import annotations

# Triton is not everywhere, and what its decorator makes is no function to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _logits(products, scale, CAP: tl.constexpr):
    """Scores in base 2, so that exp2 serves; CAP 0: no softcap."""
    if CAP == 0:
        return products * (scale * LOG2E)
    # tanh by exp2 alone, for the interpreter has no other; near 0, where that cancels, a series
    x = products * (scale / CAP)
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 - x2 * (17 / 315))))
    tanh = tl.where(x2 < 0.02, series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))
    return tanh * (CAP * LOG2E)


@triton.jit
def _shown(bits, table, M: tl.constexpr, N: tl.constexpr, BY_COLUMNS: tl.constexpr):
    """What a tile shows: bool [M, N], or [N, M] BY_COLUMNS. A word is loaded once for its 32
    columns and spread over them in registers.
    """
    rows, words, columns = tl.arange(0, M), tl.arange(0, N // 32), tl.arange(0, N)
    at = bits + table.to(tl.int64) * (M * N // 32)
    if BY_COLUMNS:
        found = tl.load(at + rows[None, :] * (N // 32) + words[:, None])
        spread = tl.broadcast_to(found[:, None, :], (N // 32, 32, M)).reshape(N, M)
        shift = (columns % 32)[:, None]
    else:
        found = tl.load(at + rows[:, None] * (N // 32) + words[None, :])
        spread = tl.broadcast_to(found[:, :, None], (M, N // 32, 32)).reshape(M, N)
        shift = (columns % 32)[None, :]
    return ((spread >> shift) & 1) != 0


@triton.jit
def _program(programs, heads, SIZE: tl.constexpr):
    """Batch entry, head, first row (or column) of this program's block, and where its tiles are."""
    entry, head = programs + 3 * tl.program_id(0), tl.program_id(1)
    start = tl.load(entry) * SIZE
    return head // heads, head % heads, start, tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _offset(batch, head, of_batch, of_head):
    """Where one head of a batch entry begins, in 64 bits: the product of two 32-bit numbers may
    need them, in tensors of more than 2^31 elements.
    """
    return tl.cast(batch, tl.int64) * of_batch + tl.cast(head, tl.int64) * of_head


@triton.jit
def forward(
    q, k, v, out, lse, programs, others, tables, bits,
    n, heads, group, lse_row, lse_batch, lse_head, scale, max_logits,
    CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head; (out, lse) in float32, in place. max_logits: float32 [heads],
    raised to the largest score, or None.
    """
    batch, head, start, first, stop = _program(programs, heads, M)
    lanes = tl.arange(0, M)
    rows = (start + lanes).to(tl.int64)
    at = lse + rows * lse_row + _offset(batch, head, lse_batch, lse_head)
    best = tl.load(at, mask=rows < n, other=NOTHING) * LOG2E
    total = tl.where(best == NOTHING, 0.0, 1.0)
    acc = out.load([batch, head, start, 0]).reshape(M, W)
    query = q.load([batch, head, start, 0]).reshape(M, D)
    largest = tl.full((M,), NOTHING, tl.float32)  # `best` begins with the lse of earlier pairs
    for i in range(first, stop):
        column = tl.load(others + i) * N
        key = k.load([batch, head // group, column, 0]).reshape(N, D)
        x = _logits(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, CAP)
        if MASKED:
            shown = _shown(bits, tl.load(tables + i), M, N, False)
            x = tl.where(shown, x, NOTHING)
        found = tl.max(x, 1)
        if max_logits is not None:
            largest = tl.maximum(largest, found)
        highest = tl.maximum(best, found)
        base = tl.where(highest == NOTHING, 0.0, highest)
        p = tl.exp2(x - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(p, 1)
        value = v.load([batch, head // group, column, 0]).reshape(N, W)
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
        best = highest
    norm = tl.where(total == 0, 1.0, total)
    out.store([batch, head, start, 0], (acc / norm[:, None]).reshape(1, 1, M, W))
    result = tl.where(total == 0, NOTHING, (best + tl.log2(norm)) / LOG2E)
    tl.store(at, result, mask=rows < n)
    if max_logits is not None:
        largest = tl.where(rows < n, largest, NOTHING)
        tl.atomic_max(max_logits + head, tl.max(largest, 0) / LOG2E, sem="relaxed")


@triton.jit
def _weights(products, stats, scale, shown, CAP: tl.constexpr, MASKED: tl.constexpr):
    """(probabilities, d score / d (scale * product)); `stats` is lse in base 2."""
    x = _logits(products, scale, CAP)
    p = tl.exp2(x - stats)
    if MASKED:
        p = tl.where(shown, p, 0.0)
    slope = 1.0
    if CAP != 0:
        tanh = x / (CAP * LOG2E)
        slope = 1 - tanh * tanh
    return p, slope


@triton.jit
def _statistics(lse, delta, batch, head, start, M: tl.constexpr):
    """Lse in base 2 and delta of a block of rows; rows that saw nothing get inf, and those behind
    the end 0 in both: their queries and gradients are 0 too.
    """
    stats = lse.load([batch, head, start]).reshape(M) * LOG2E
    mean = delta.load([batch, head, start]).reshape(M)
    return tl.where(stats == NOTHING, float("inf"), stats), mean


@triton.jit
def backward_keys(
    q, dout, k, v, dq, dk, dv, lse, delta, programs, others, tables, bits,
    n, heads, group, dq_row, dq_batch, dq_head, width, scale,
    CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    DQ: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key head: dk and dv of all the queries that see it; dq, if asked,
    added atomically where it is. `heads` counts key heads; lse, delta [b, h, rows].
    """
    batch, head, start, first, stop = _program(programs, heads, N)
    lanes, widths = tl.arange(0, M), tl.arange(0, D)
    key = k.load([batch, head, start, 0]).reshape(N, D)
    value = v.load([batch, head, start, 0]).reshape(N, W)
    dkey = tl.zeros((N, D), tl.float32)
    dvalue = tl.zeros((N, W), tl.float32)
    for own in range(head * group, head * group + group):
        for i in range(first, stop):
            row = tl.load(others + i) * M
            query = q.load([batch, own, row, 0]).reshape(M, D)
            gradient = dout.load([batch, own, row, 0]).reshape(M, W)
            stats, mean = _statistics(lse, delta, batch, own, row, M)
            shown = True
            if MASKED:
                shown = _shown(bits, tl.load(tables + i), M, N, True)
            products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            p, slope = _weights(products, stats[None, :], scale, shown, CAP, MASKED)
            if DV:
                dvalue = tl.dot(p.to(gradient.dtype), gradient, dvalue, input_precision=PRECISION)
            dp = tl.dot(value, tl.trans(gradient), input_precision=PRECISION)
            ds = (p * (dp - mean[None, :]) * slope).to(query.dtype)
            if DK:
                dkey = tl.dot(ds, query, dkey, input_precision=PRECISION)
            if DQ:
                part = tl.dot(tl.trans(ds), key, input_precision=PRECISION) * scale
                rows = (row + lanes).to(tl.int64)
                at = rows * dq_row + _offset(batch, own, dq_batch, dq_head)
                at = dq + at[:, None] + widths[None]
                inside = (rows < n)[:, None] & (widths < width)[None, :]
                tl.atomic_add(at, part, mask=inside, sem="relaxed")
    if DK:
        total = dk.load([batch, head, start, 0]) + (dkey * scale).reshape(1, 1, N, D)
        dk.store([batch, head, start, 0], total)
    if DV:
        total = dv.load([batch, head, start, 0]) + dvalue.reshape(1, 1, N, W)
        dv.store([batch, head, start, 0], total)


@triton.jit
def backward_queries(
    q, dout, k, v, dq, lse, delta, programs, others, tables, bits,
    n, heads, group, scale,
    CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head: dq, in an order that is always the same."""
    batch, head, start, first, stop = _program(programs, heads, M)
    query = q.load([batch, head, start, 0]).reshape(M, D)
    gradient = dout.load([batch, head, start, 0]).reshape(M, W)
    stats, mean = _statistics(lse, delta, batch, head, start, M)
    acc = tl.zeros((M, D), tl.float32)
    for i in range(first, stop):
        column = tl.load(others + i) * N
        key = k.load([batch, head // group, column, 0]).reshape(N, D)
        value = v.load([batch, head // group, column, 0]).reshape(N, W)
        shown = True
        if MASKED:
            shown = _shown(bits, tl.load(tables + i), M, N, False)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        p, slope = _weights(products, stats[:, None], scale, shown, CAP, MASKED)
        dp = tl.dot(gradient, tl.trans(value), input_precision=PRECISION)
        ds = (p * (dp - mean[:, None]) * slope).to(key.dtype)
        acc = tl.dot(ds, key, acc, input_precision=PRECISION)
    total = dq.load([batch, head, start, 0]) + (acc * scale).reshape(1, 1, M, D)
    dq.store([batch, head, start, 0], total)
