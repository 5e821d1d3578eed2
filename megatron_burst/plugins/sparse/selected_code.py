# SPDX-License-Identifier: Apache-2.0
"""Attention of rows to the keys that each has selected, as Triton kernels.

`find` lists, for a selection of a row, which rows of a chunk of keys it has and sees; `forward` and
`backward` gather these, some at a time, for a block of the query heads that share the selection and
the key head. A launch carries on where the one before stopped: forward loads (out, lse), which is
the running softmax in normal form, and stores it again; backward adds to the sums it is given, to
those of keys atomically, as other rows have selected them too.

Imported only when a kernel of these runs. D: width of the keys as they travel, W: of the values;
DP, WP: the next powers of two. LATENT: a whole key is its value and then what travels as the key.
"""

from __future__ import annotations

# Triton is not everywhere, and what its decorator makes is no function to a type checker.
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
    """One selection of one row: table [., width] gets the rows of the chunk that it has and sees,
    counts how many.

    ids [., places / BLOCK] units, spans [pieces, 4]: start, stride, length and first row of each.
    low, high: what each row of queries sees, per_row selections each; or None, and seen
    [., places] says it.
    """
    at = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, T)
    found = 0
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
        where = tl.full((T,), -1, tl.int32)
        for piece in range(0, pieces):
            span = spans + 4 * piece
            stride, length = tl.load(span + 1), tl.load(span + 2)
            ahead = position - tl.load(span)
            step = ahead // stride
            hit = (ahead >= 0) & (step * stride == ahead) & (step < length)
            where = tl.where(hit, tl.load(span + 3) + step, where)
        good &= where >= 0
        taken = good.to(tl.int32)
        into = found + tl.cumsum(taken, 0) - taken
        tl.store(table + at * width + into, where, mask=good)
        found += tl.sum(taken, 0)
    tl.store(counts + at, found)


@triton.jit
def _at(row, batch, head, of_row, of_batch, of_head):
    """Where a row begins, in 64 bits: tensors may have more than 2^31 elements."""
    return (
        row * tl.cast(of_row, tl.int64)
        + tl.cast(batch, tl.int64) * of_batch
        + tl.cast(head, tl.int64) * of_head
    )


@triton.jit
def _columns(at, there, SHIFT: tl.constexpr, first, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Offsets [., PADDED] of columns `first` and on, of WIDTH that begin SHIFT behind `at`, and
    which of them there are.
    """
    columns = first + tl.arange(0, PADDED)
    shown = there[:, None]
    if WIDTH % PADDED != 0:
        shown = shown & (columns < WIDTH)[None, :]
    return at[:, None] + (SHIFT + columns)[None, :], shown


@triton.jit
def _load(x, at, there, SHIFT: tl.constexpr, first, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    offsets, shown = _columns(at, there, SHIFT, first, WIDTH, PADDED)
    return tl.load(x + offsets, mask=shown, other=0.0)


@triton.jit
def _store(x, at, there, value, SHIFT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    offsets, shown = _columns(at, there, SHIFT, 0, WIDTH, PADDED)
    tl.store(x + offsets, value, mask=shown)


@triton.jit
def _add(x, at, there, value, first, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    offsets, shown = _columns(at, there, 0, first, WIDTH, PADDED)
    tl.atomic_add(x + offsets, value, mask=shown, sem="relaxed")


@triton.jit
def _program(groups, group, M: tl.constexpr):
    """Row, batch entry, group of heads, heads [M] of this program, and which of these there are.
    groups: groups of `group` query heads, of which a program takes M at most.
    """
    blocks = (group + M - 1) // M
    number = tl.program_id(1)
    of_group = number // blocks
    lanes = (number % blocks) * M + tl.arange(0, M)
    here = of_group % groups
    row = tl.program_id(0).to(tl.int64)
    return row, of_group // groups, here, here * group + lanes, lanes < group


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
    """A block of heads of one row; (out, lse) in place."""
    row, batch, of, heads, there = _program(groups, group, M)
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
    best = tl.load(lse_at, mask=there, other=NOTHING) * LOG2E
    total = tl.where(best == NOTHING, 0.0, 1.0).to(best.dtype)
    acc = _load(out, out_at, there, 0, 0, W, WP)
    if LATENT:
        front = _load(q, q_at, there, 0, 0, W, WP)
        query = _load(q, q_at, there, W, 0, D, DP)
    else:
        query = _load(q, q_at, there, 0, 0, D, DP)
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
        highest = tl.maximum(best, tl.max(x, 1))  # a number: a tile has at least one key
        p = tl.exp2(x - highest[:, None])
        decay = tl.exp2(best - highest)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
        best = highest
    _store(out, out_at, there, acc / total[:, None], 0, W, WP)
    tl.store(lse_at, (best + tl.log2(total)) / LOG2E, mask=there)


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
    """A block of heads of one row: adds to dq. lse, delta [rows, b, h] contiguous."""
    row, batch, of, heads, there = _program(groups, group, M)
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
    stats = tl.load(lse + own, mask=there, other=float("inf")) * LOG2E
    mean = tl.load(delta + own, mask=there, other=0.0)
    gradient = _load(dout, dout_at, there, 0, 0, W, WP)
    if LATENT:
        front = _load(q, q_at, there, 0, 0, W, WP)
        query = _load(q, q_at, there, W, 0, D, DP)
        dfront = tl.zeros((M, WP), stats.dtype)
    else:
        query = _load(q, q_at, there, 0, 0, D, DP)
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
        dfront += _load(dq, dq_at, there, 0, 0, W, WP)
        _store(dq, dq_at, there, dfront, 0, W, WP)
        dquery += _load(dq, dq_at, there, W, 0, D, DP)
        _store(dq, dq_at, there, dquery, W, D, DP)
    else:
        dquery += _load(dq, dq_at, there, 0, 0, D, DP)
        _store(dq, dq_at, there, dquery, 0, D, DP)


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
    """A block of heads of one row: adds atomically to dk and dv, either of which may be None.

    Goes over columns in pieces, so that a block has room for all heads of a latent, whose rows of
    keys then get one sum for each row of queries. lse, delta [rows, b, h] contiguous.
    """
    PIECE: tl.constexpr = 128
    DC: tl.constexpr = DP if DP < PIECE else PIECE
    WC: tl.constexpr = WP if WP < PIECE else PIECE
    row, batch, of, heads, there = _program(groups, group, M)
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
    stats = tl.load(lse + own, mask=there, other=float("inf")) * LOG2E
    mean = tl.load(delta + own, mask=there, other=0.0)
    SHIFT: tl.constexpr = W if LATENT else 0
    lanes = tl.arange(0, N)
    for start in range(0, count, N):
        inside = start + lanes < count
        at = tl.load(table + chosen * width + start + lanes, mask=inside, other=0).to(tl.int64)
        x = tl.zeros((N, M), stats.dtype)
        dp = tl.zeros((N, M), stats.dtype)
        for c in range(0, D, DC):
            key = _load(k, at * k_row + keys, inside, 0, c, D, DC)
            query = _load(q, q_at, there, SHIFT, c, D, DC)
            x = tl.dot(key, tl.trans(query), x, input_precision=PRECISION)
        for c in range(0, W, WC):
            value = _load(v, at * v_row + values, inside, 0, c, W, WC)
            gradient = _load(dout, dout_at, there, 0, c, W, WC)
            dp = tl.dot(value, tl.trans(gradient), dp, input_precision=PRECISION)
            if LATENT:
                front = _load(q, q_at, there, 0, c, W, WC)
                x = tl.dot(value, tl.trans(front), x, input_precision=PRECISION)
        p = tl.exp2(x * (SCALE * LOG2E) - stats[None, :])
        p = tl.where(inside[:, None], p, 0.0)
        ds = (p * (dp - mean[None, :]) * SCALE).to(k.dtype.element_ty)
        p = p.to(k.dtype.element_ty)
        if dk is not None:
            to = at * dk_row + _at(0, batch, head, dk_row, dk_batch, dk_head)
            for c in range(0, D, DC):
                query = _load(q, q_at, there, SHIFT, c, D, DC)
                dkey = tl.dot(ds, query, input_precision=PRECISION)
                _add(dk, to, inside, dkey, c, D, DC)
        if dv is not None:
            to = at * dv_row + _at(0, batch, head, dv_row, dv_batch, dv_head)
            for c in range(0, W, WC):
                gradient = _load(dout, dout_at, there, 0, c, W, WC)
                dvalue = tl.dot(p, gradient, input_precision=PRECISION)
                if LATENT:
                    front = _load(q, q_at, there, 0, c, W, WC)
                    dvalue = tl.dot(ds, front, dvalue, input_precision=PRECISION)
                _add(dv, to, inside, dvalue, c, W, WC)
