# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for attention of query rows to their selected keys.

`find` lists, for each query row and selection, the rows of a chunk of keys that are selected and
visible. `forward` and `backward_*` gather these keys, N at a time, for a block of query heads that
share the selection and the key head. Each launch processes one chunk: forward updates (out, lse),
the normalized result over the chunks so far, and backward adds to the gradients. Gradients of keys
use atomic additions, because several query rows may select a key.

The module is imported only if one of these kernels runs. D is the width of k and W the width of v;
DP and WP are the next powers of two. With LATENT a whole key is the columns of v followed by the
columns of k.
"""

from __future__ import annotations

# Triton may not be installed, and type checkers do not recognize its kernels as functions.
# pyright: reportMissingImports=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def find(
    ids, low, high, seen, spans, table, counts,
    per_row, places, width, pieces, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """List the rows of a chunk that a query row has selected and sees.

    One program handles one selection of one query row. n is the number of selections of all query
    rows; each query row has per_row consecutive selections.

    Args:
        ids: Selected units [n, places / BLOCK].
        low: First visible position of each query row, or None if `seen` is given.
        high: End of the visible positions of each query row, or None if `seen` is given.
        seen: Visibility of each selected position [n, places], or None.
        spans: Start, stride, length and first row of each span (regularly spaced positions) of
            keys [pieces, 4].
        table: Result: rows of the chunk that are selected and visible [n, width].
        counts: Result: number of valid entries in each row of `table` [n].
        per_row: Number of selections of a query row.
        places: Number of positions of a selection: units x BLOCK.
        width: Number of columns of `table`.
        pieces: Number of spans.
        BLOCK: Number of positions of a unit.
        T: Number of positions that are processed at once.
    """
    at = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, T)
    listed = 0
    for start in range(0, places, T):
        place = start + lanes
        inside = place < places
        unit = tl.load(ids + at * (places // BLOCK) + place // BLOCK, mask=inside, other=-1)
        position = unit * BLOCK + place % BLOCK
        good = unit >= 0
        if seen is not None:
            good &= tl.load(seen + at * places + place, mask=inside, other=0) != 0
        else:
            row = at // per_row
            good &= (position >= tl.load(low + row)) & (position < tl.load(high + row))
        key_row = tl.full((T,), -1, tl.int32)
        for piece in range(0, pieces):
            span = spans + 4 * piece
            stride, length = tl.load(span + 1), tl.load(span + 2)
            ahead = position - tl.load(span)
            step = ahead // stride
            hit = (ahead >= 0) & (step * stride == ahead) & (step < length)
            key_row = tl.where(hit, tl.load(span + 3) + step, key_row)
        good &= key_row >= 0
        taken = good.to(tl.int32)
        into = listed + tl.cumsum(taken, 0) - taken
        tl.store(table + at * width + into, key_row, mask=good)
        listed += tl.sum(taken, 0)
    tl.store(counts + at, listed)


@triton.jit
def _at(row, batch, head, of_row, of_batch, of_head):
    """Return the offset of element (row, batch, head), given the strides of the three dimensions.

    The offset is int64, because tensors may have more than 2^31 elements.
    """
    return (
        row * tl.cast(of_row, tl.int64)
        + tl.cast(batch, tl.int64) * of_batch
        + tl.cast(head, tl.int64) * of_head
    )


@triton.jit
def _columns(at, present, SHIFT: tl.constexpr, first, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return the offsets [rows, PADDED] of columns from `first` on, and a mask of valid elements.

    Each row has WIDTH columns. `at` has the offsets of rows; column 0 is SHIFT elements later.
    `present` is True for valid rows.
    """
    columns = first + tl.arange(0, PADDED)
    shown = present[:, None]
    if WIDTH % PADDED != 0:
        shown = shown & (columns < WIDTH)[None, :]
    return at[:, None] + (SHIFT + columns)[None, :], shown


@triton.jit
def _load(x, at, present, SHIFT: tl.constexpr, first, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    offsets, shown = _columns(at, present, SHIFT, first, WIDTH, PADDED)
    return tl.load(x + offsets, mask=shown, other=0.0)


@triton.jit
def _store(x, at, present, value, SHIFT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    offsets, shown = _columns(at, present, SHIFT, 0, WIDTH, PADDED)
    tl.store(x + offsets, value, mask=shown)


@triton.jit
def _add(x, at, present, value, first, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    offsets, shown = _columns(at, present, 0, first, WIDTH, PADDED)
    tl.atomic_add(x + offsets, value, mask=shown, sem="relaxed")


@triton.jit
def _program(groups, group, M: tl.constexpr):
    """Return (row, batch entry, head group, heads [M], mask of valid heads [M]) for this program.

    There are `groups` head groups of `group` query heads each. A program computes at most M heads
    of a group.
    """
    blocks = (group + M - 1) // M
    number = tl.program_id(1)
    of_group = number // blocks
    lanes = (number % blocks) * M + tl.arange(0, M)
    index = of_group % groups
    row = tl.program_id(0).to(tl.int64)
    return row, of_group // groups, index, index * group + lanes, lanes < group


@triton.jit
def forward(
    q, k, v, out, lse, table, counts,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    out_row, out_batch, out_head, lse_row, lse_batch, lse_head,
    batches, groups, group, selections, key_heads, width,
    SCALE: tl.constexpr, LATENT: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Compute attention of one query row, for a block of its heads, to the keys in `table`.

    The result is merged into (out, lse) in place.
    """
    row, batch, of, heads, present = _program(groups, group, M)
    chosen = (row * batches + batch) * selections + of * selections // groups
    count = tl.load(counts + chosen)
    if count == 0:
        return
    head = of * key_heads // groups
    q_at = _at(row, batch, heads, q_row, q_batch, q_head)
    lse_at = lse + _at(row, batch, heads, lse_row, lse_batch, lse_head)
    out_at = _at(row, batch, heads, out_row, out_batch, out_head)
    keys = _at(0, batch, head, k_row, k_batch, k_head)
    values = _at(0, batch, head, v_row, v_batch, v_head)
    best = tl.load(lse_at, mask=present, other=NOTHING) * LOG2E
    total = tl.where(best == NOTHING, 0.0, 1.0).to(best.dtype)
    acc = _load(out, out_at, present, 0, 0, W, WP)
    if LATENT:
        front = _load(q, q_at, present, 0, 0, W, WP)
        query = _load(q, q_at, present, W, 0, D, DP)
    else:
        query = _load(q, q_at, present, 0, 0, D, DP)
    lanes = tl.arange(0, N)
    for start in range(0, count, N):
        inside = start + lanes < count
        at = tl.load(table + chosen * width + start + lanes, mask=inside, other=0).to(tl.int64)
        value = _load(v, at * v_row + values, inside, 0, 0, W, WP)
        key = _load(k, at * k_row + keys, inside, 0, 0, D, DP)
        x = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if LATENT:
            x = tl.dot(front, tl.trans(value), x, input_precision=PRECISION)
        x = tl.where(inside[None, :], x * (SCALE * LOG2E), NOTHING)
        highest = tl.maximum(best, tl.max(x, 1))  # finite, because a tile has at least one key
        p = tl.exp2(x - highest[:, None])
        decay = tl.exp2(best - highest)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
        best = highest
    _store(out, out_at, present, acc / total[:, None], 0, W, WP)
    tl.store(lse_at, (best + tl.log2(total)) / LOG2E, mask=present)


@triton.jit
def backward_queries(
    q, dout, k, v, dq, lse, delta, table, counts,
    q_row, q_batch, q_head, dout_row, dout_batch, dout_head,
    k_row, k_batch, k_head, v_row, v_batch, v_head, dq_row, dq_batch, dq_head,
    batches, groups, group, selections, key_heads, width,
    SCALE: tl.constexpr, LATENT: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Compute gradients of one query row, for a block of its heads, from the keys in `table`.

    They are added to dq in place. lse and delta [rows, b, h] must be contiguous.
    """
    row, batch, of, heads, present = _program(groups, group, M)
    chosen = (row * batches + batch) * selections + of * selections // groups
    count = tl.load(counts + chosen)
    if count == 0:
        return
    head = of * key_heads // groups
    q_at = _at(row, batch, heads, q_row, q_batch, q_head)
    dq_at = _at(row, batch, heads, dq_row, dq_batch, dq_head)
    dout_at = _at(row, batch, heads, dout_row, dout_batch, dout_head)
    keys = _at(0, batch, head, k_row, k_batch, k_head)
    values = _at(0, batch, head, v_row, v_batch, v_head)
    own = (row * batches + batch) * (groups * group) + heads
    stats = tl.load(lse + own, mask=present, other=float("inf")) * LOG2E
    mean = tl.load(delta + own, mask=present, other=0.0)
    gradient = _load(dout, dout_at, present, 0, 0, W, WP)
    if LATENT:
        front = _load(q, q_at, present, 0, 0, W, WP)
        query = _load(q, q_at, present, W, 0, D, DP)
        dfront = tl.zeros((M, WP), stats.dtype)
    else:
        query = _load(q, q_at, present, 0, 0, D, DP)
    dquery = tl.zeros((M, DP), stats.dtype)
    lanes = tl.arange(0, N)
    for start in range(0, count, N):
        inside = start + lanes < count
        at = tl.load(table + chosen * width + start + lanes, mask=inside, other=0).to(tl.int64)
        value = _load(v, at * v_row + values, inside, 0, 0, W, WP)
        key = _load(k, at * k_row + keys, inside, 0, 0, D, DP)
        x = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if LATENT:
            x = tl.dot(front, tl.trans(value), x, input_precision=PRECISION)
        p = tl.exp2(x * (SCALE * LOG2E) - stats[:, None])
        p = tl.where(inside[None, :], p, 0.0)
        dp = tl.dot(gradient, tl.trans(value), input_precision=PRECISION)
        ds = (p * (dp - mean[:, None]) * SCALE).to(key.dtype)
        dquery = tl.dot(ds, key, dquery, input_precision=PRECISION)
        if LATENT:
            dfront = tl.dot(ds, value, dfront, input_precision=PRECISION)
    if LATENT:
        dfront += _load(dq, dq_at, present, 0, 0, W, WP)
        _store(dq, dq_at, present, dfront, 0, W, WP)
        dquery += _load(dq, dq_at, present, W, 0, D, DP)
        _store(dq, dq_at, present, dquery, W, D, DP)
    else:
        dquery += _load(dq, dq_at, present, 0, 0, D, DP)
        _store(dq, dq_at, present, dquery, 0, D, DP)


@triton.jit
def backward_keys(
    q, dout, k, v, dk, dv, lse, delta, table, counts,
    q_row, q_batch, q_head, dout_row, dout_batch, dout_head,
    k_row, k_batch, k_head, v_row, v_batch, v_head,
    dk_row, dk_batch, dk_head, dv_row, dv_batch, dv_head,
    batches, groups, group, selections, key_heads, width,
    SCALE: tl.constexpr, LATENT: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the keys in `table` for one query row and a block of its heads.

    They are added atomically to dk and dv; either may be None. Columns are processed in parts, so
    that a block can contain all query heads that share a latent; each query row then makes one
    atomic addition per element of a key. lse and delta [rows, b, h] must be contiguous.
    """
    PIECE: tl.constexpr = 128
    DC: tl.constexpr = DP if DP < PIECE else PIECE
    WC: tl.constexpr = WP if WP < PIECE else PIECE
    row, batch, of, heads, present = _program(groups, group, M)
    chosen = (row * batches + batch) * selections + of * selections // groups
    count = tl.load(counts + chosen)
    if count == 0:
        return
    head = of * key_heads // groups
    q_at = _at(row, batch, heads, q_row, q_batch, q_head)
    dout_at = _at(row, batch, heads, dout_row, dout_batch, dout_head)
    keys = _at(0, batch, head, k_row, k_batch, k_head)
    values = _at(0, batch, head, v_row, v_batch, v_head)
    own = (row * batches + batch) * (groups * group) + heads
    stats = tl.load(lse + own, mask=present, other=float("inf")) * LOG2E
    mean = tl.load(delta + own, mask=present, other=0.0)
    SHIFT: tl.constexpr = W if LATENT else 0
    lanes = tl.arange(0, N)
    for start in range(0, count, N):
        inside = start + lanes < count
        at = tl.load(table + chosen * width + start + lanes, mask=inside, other=0).to(tl.int64)
        x = tl.zeros((N, M), stats.dtype)
        dp = tl.zeros((N, M), stats.dtype)
        for c in range(0, D, DC):
            key = _load(k, at * k_row + keys, inside, 0, c, D, DC)
            query = _load(q, q_at, present, SHIFT, c, D, DC)
            x = tl.dot(key, tl.trans(query), x, input_precision=PRECISION)
        for c in range(0, W, WC):
            value = _load(v, at * v_row + values, inside, 0, c, W, WC)
            gradient = _load(dout, dout_at, present, 0, c, W, WC)
            dp = tl.dot(value, tl.trans(gradient), dp, input_precision=PRECISION)
            if LATENT:
                front = _load(q, q_at, present, 0, c, W, WC)
                x = tl.dot(value, tl.trans(front), x, input_precision=PRECISION)
        p = tl.exp2(x * (SCALE * LOG2E) - stats[None, :])
        p = tl.where(inside[:, None], p, 0.0)
        ds = (p * (dp - mean[None, :]) * SCALE).to(k.dtype.element_ty)
        p = p.to(k.dtype.element_ty)
        if dk is not None:
            to = at * dk_row + _at(0, batch, head, dk_row, dk_batch, dk_head)
            for c in range(0, D, DC):
                query = _load(q, q_at, present, SHIFT, c, D, DC)
                dkey = tl.dot(ds, query, input_precision=PRECISION)
                _add(dk, to, inside, dkey, c, D, DC)
        if dv is not None:
            to = at * dv_row + _at(0, batch, head, dv_row, dv_batch, dv_head)
            for c in range(0, W, WC):
                gradient = _load(dout, dout_at, present, 0, c, W, WC)
                dvalue = tl.dot(p, gradient, input_precision=PRECISION)
                if LATENT:
                    front = _load(q, q_at, present, 0, c, W, WC)
                    dvalue = tl.dot(ds, front, dvalue, input_precision=PRECISION)
                _add(dv, to, inside, dvalue, c, W, WC)
