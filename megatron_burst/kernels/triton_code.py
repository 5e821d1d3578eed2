# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of attention over a grid of tiles: forward, backward by keys, backward by queries.

Every kernel processes a `tile_grid.Worklist`. Fully visible tiles need no mask; partly visible
tiles have a bit table. Fully and partly visible tiles have separate launches, because one loop over
both kinds of tiles would spill registers. Launches accumulate: forward loads normalized out and
lse, updates them and stores them; backward adds to existing sums. In backward, lse and delta cover
the whole sequence, so the same kernels are used if backward sends queries (side "query") or keys
and values (side "kv").

The module is imported only when a Triton kernel is made. Masks are passed as worklists, and block
sizes as compile-time constants. Tensors are [b, heads, rows, width], passed as descriptors. A
descriptor's block is some rows of one head; elements beyond the end read as zero.
"""

from __future__ import annotations

# Triton is optional, and type checkers do not know functions with its decorator.
# pyright: reportMissingImports=false, reportIndexIssue=false
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _logits(products, scale, CAP: tl.constexpr):
    """Return the scores of products q.k, times log2(e) for exp2. CAP is the softcap; 0 for none."""
    if CAP == 0:
        return products * (scale * LOG2E)
    # tanh by exp2, because the interpreter has no tanh; a series near 0, where exp2 cancels.
    x = products * (scale / CAP)
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 - x2 * (17 / 315))))
    tanh = tl.where(x2 < 0.02, series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))
    return tanh * (CAP * LOG2E)


@triton.jit
def _visible(bits, table, M: tl.constexpr, N: tl.constexpr, BY_COLUMNS: tl.constexpr):
    """Return the visible pairs of a tile as bool [M, N], or as bool [N, M] if BY_COLUMNS.

    `table` is the index of the tile's bit table in `bits`. Each 32-bit word of the table is loaded
    once and broadcast to its 32 columns in registers.
    """
    rows, words, columns = tl.arange(0, M), tl.arange(0, N // 32), tl.arange(0, N)
    at = bits + table.to(tl.int64) * (M * N // 32)
    if BY_COLUMNS:
        word_bits = tl.load(at + rows[None, :] * (N // 32) + words[:, None])
        spread = tl.broadcast_to(word_bits[:, None, :], (N // 32, 32, M)).reshape(N, M)
        shift = (columns % 32)[:, None]
    else:
        word_bits = tl.load(at + rows[:, None] * (N // 32) + words[None, :])
        spread = tl.broadcast_to(word_bits[:, :, None], (M, N // 32, 32)).reshape(M, N)
        shift = (columns % 32)[None, :]
    return ((spread >> shift) & 1) != 0


@triton.jit
def _program(programs, heads, SIZE: tl.constexpr):
    """Return this program's batch entry, head, first row or column, and range of tiles."""
    entry, head = programs + 3 * tl.program_id(0), tl.program_id(1)
    start = tl.load(entry) * SIZE
    return head // heads, head % heads, start, tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _offset(batch, head, of_batch, of_head):
    """Return the 64-bit offset of one head of a batch entry, from their strides `of_...`.

    In tensors with more than 2^31 elements, 32-bit products of index and stride would overflow.
    """
    return tl.cast(batch, tl.int64) * of_batch + tl.cast(head, tl.int64) * of_head


@triton.jit
def forward(
    q, k, v, out, lse, programs, other_blocks, tables, bits,
    n, heads, group, lse_row, lse_batch, lse_head, scale, max_logits,
    CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Update (out, lse), float32, in place, with one list of tiles.

    Each program computes one block of rows of one head. `max_logits` is None or float32 [heads];
    each entry is raised to the largest score of its head.
    """
    batch, head, start, first, stop = _program(programs, heads, M)
    lanes = tl.arange(0, M)
    rows = (start + lanes).to(tl.int64)
    at = lse + rows * lse_row + _offset(batch, head, lse_batch, lse_head)
    best = tl.load(at, mask=rows < n, other=NOTHING) * LOG2E
    total = tl.where(best == NOTHING, 0.0, 1.0)
    acc = out.load([batch, head, start, 0]).reshape(M, W)
    query = q.load([batch, head, start, 0]).reshape(M, D)
    row_max = tl.full((M,), NOTHING, tl.float32)  # `best` includes the lse of earlier pairs
    for i in range(first, stop):
        column = tl.load(other_blocks + i) * N
        key = k.load([batch, head // group, column, 0]).reshape(N, D)
        x = _logits(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, CAP)
        if MASKED:
            visible = _visible(bits, tl.load(tables + i), M, N, False)
            x = tl.where(visible, x, NOTHING)
        tile_max = tl.max(x, 1)
        if max_logits is not None:
            row_max = tl.maximum(row_max, tile_max)
        highest = tl.maximum(best, tile_max)
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
        row_max = tl.where(rows < n, row_max, NOTHING)
        tl.atomic_max(max_logits + head, tl.max(row_max, 0) / LOG2E, sem="relaxed")


@triton.jit
def _weights(products, stats, scale, visible, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Return the probabilities, and d score / d (scale * product); `stats` is lse in base 2."""
    x = _logits(products, scale, CAP)
    p = tl.exp2(x - stats)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    slope = 1.0
    if CAP != 0:
        tanh = x / (CAP * LOG2E)
        slope = 1 - tanh * tanh
    return p, slope


@triton.jit
def _statistics(lse, delta, batch, head, start, M: tl.constexpr):
    """Return lse in base 2 and delta of the M rows from row `start` on.

    Rows without visible keys get lse = inf, so their probabilities are 0. Rows beyond the end read
    as 0; they add nothing, because their queries and gradients are 0 too.
    """
    stats = lse.load([batch, head, start]).reshape(M) * LOG2E
    mean = delta.load([batch, head, start]).reshape(M)
    return tl.where(stats == NOTHING, float("inf"), stats), mean


@triton.jit
def backward_keys(
    q, dout, k, v, dq, dk, dv, lse, delta, programs, other_blocks, tables, bits,
    n, heads, group, dq_row, dq_batch, dq_head, width, scale,
    CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    DQ: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of one block of keys of one key head, from all queries that see it.

    If DQ is true, the kernel also adds to dq atomically. `heads` is the number of key heads. lse
    and delta are [b, h, rows].
    """
    batch, head, start, first, stop = _program(programs, heads, N)
    lanes, widths = tl.arange(0, M), tl.arange(0, D)
    key = k.load([batch, head, start, 0]).reshape(N, D)
    value = v.load([batch, head, start, 0]).reshape(N, W)
    dkey = tl.zeros((N, D), tl.float32)
    dvalue = tl.zeros((N, W), tl.float32)
    for own in range(head * group, head * group + group):
        for i in range(first, stop):
            row = tl.load(other_blocks + i) * M
            query = q.load([batch, own, row, 0]).reshape(M, D)
            gradient = dout.load([batch, own, row, 0]).reshape(M, W)
            stats, mean = _statistics(lse, delta, batch, own, row, M)
            visible = True
            if MASKED:
                visible = _visible(bits, tl.load(tables + i), M, N, True)
            products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            p, slope = _weights(products, stats[None, :], scale, visible, CAP, MASKED)
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
    q, dout, k, v, dq, lse, delta, programs, other_blocks, tables, bits,
    n, heads, group, scale,
    CAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Add to dq of one block of query rows of one head, in a deterministic order."""
    batch, head, start, first, stop = _program(programs, heads, M)
    query = q.load([batch, head, start, 0]).reshape(M, D)
    gradient = dout.load([batch, head, start, 0]).reshape(M, W)
    stats, mean = _statistics(lse, delta, batch, head, start, M)
    acc = tl.zeros((M, D), tl.float32)
    for i in range(first, stop):
        column = tl.load(other_blocks + i) * N
        key = k.load([batch, head // group, column, 0]).reshape(N, D)
        value = v.load([batch, head // group, column, 0]).reshape(N, W)
        visible = True
        if MASKED:
            visible = _visible(bits, tl.load(tables + i), M, N, False)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        p, slope = _weights(products, stats[:, None], scale, visible, CAP, MASKED)
        dp = tl.dot(gradient, tl.trans(value), input_precision=PRECISION)
        ds = (p * (dp - mean[:, None]) * slope).to(key.dtype)
        acc = tl.dot(ds, key, acc, input_precision=PRECISION)
    total = dq.load([batch, head, start, 0]) + (acc * scale).reshape(1, 1, M, D)
    dq.store([batch, head, start, 0], total)
