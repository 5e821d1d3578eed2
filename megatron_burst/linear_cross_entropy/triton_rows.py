# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `rows`: one pass for the statistics, one pass for the gradient.

The module is imported only if tensors are on a GPU and Triton is installed. Between the matrix
products, a tile is read twice and written once, without a temporary tensor of the size of the tile.
"""

from __future__ import annotations

# Triton may not be installed, and type checkers do not recognize its kernels as functions.
# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl

from ..kernels.native import LogitGradient

BLOCK = 4096  # columns of a block
# 16 columns per thread: a multiprocessor has room for two thread blocks, and nothing spills
# (`python -m benchmarks.triton_compile_rows`).
WARPS = 8


@triton.jit
def _logits(raw, scale: tl.constexpr, cap: tl.constexpr):
    x = raw * scale
    if cap is not None:
        # tanh from exp, because Triton's interpreter has no tanh
        decay = tl.exp(-2 * tl.abs(x / cap))
        tanh = (1 - decay) / (1 + decay)
        x = tl.where(x < 0, -cap * tanh, cap * tanh)
    return x


@triton.jit
def _stats(
    z, index, out, stride, n, first, real,
    scale: tl.constexpr, cap: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row of logits, and store them in out [5, n].

    The rows of `out` are the same as in `row_stats`. With ENTROPY, the entropy replaces the sum of
    logits, and the vocabulary row is 0, to save registers. Each lane keeps its own sums.
    """
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), ACC)
    winner = tl.full((BLOCK,), 0, tl.int32)
    sums = tl.full((BLOCK,), 0.0, ACC)
    total = tl.full((BLOCK,), 0.0, ACC)  # sum of x; with ENTROPY of exp(x - top) (x - top)
    for start in range(0, real, BLOCK):
        columns = start + lanes
        inside = columns < real
        raw = tl.load(z + columns, mask=inside, other=0.0).to(ACC)
        x = _logits(raw, scale, cap)
        if not ENTROPY:
            total += tl.where(inside, x, 0.0)
        x = tl.where(inside, x, float("-inf"))
        if not ENTROPY:
            winner = tl.where(x > top, columns, winner)
        highest = tl.maximum(top, x)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        decay, e = tl.exp(top - base), tl.exp(x - base)
        if ENTROPY:
            lower = tl.where(top == float("-inf"), 0.0, top - base)
            total = (total + sums * lower) * decay + e * tl.where(inside, x - base, 0.0)
        sums = sums * decay + e
        top = highest
    best = tl.max(top, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    decay = tl.exp(top - base)
    mass = tl.sum(sums * decay, axis=0)
    lse = base + tl.log(mass)
    at = tl.load(index + row)
    has = (at >= 0) & (at < real)
    hit = _logits(tl.load(z + at, mask=has, other=0.0).to(ACC), scale, cap)
    tl.store(out + row, lse)
    tl.store(out + n + row, tl.where(has, hit, 0.0))
    if ENTROPY:
        lower = tl.where(top == float("-inf"), 0.0, top - base)
        mass = tl.where(mass > 0, mass, 1.0)  # no column
        third = tl.log(mass) - tl.sum((total + sums * lower) * decay, axis=0) / mass
        place = tl.full((), 0, tl.int32)
    else:
        third = tl.sum(total, axis=0)
        place = first + tl.min(tl.where(top == best, winner, 2147483647), axis=0)
    tl.store(out + 2 * n + row, third)
    tl.store(out + 3 * n + row, best)
    tl.store(out + 4 * n + row, place.to(ACC))


@triton.jit
def _gradient(
    z, index, lse, of_softmax, of_label, of_all, stride, width, real,
    scale: tl.constexpr, cap: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a block of products z of one row by its gradient; see `softmax_gradient_`."""
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(z + columns, mask=columns < real, other=0.0).to(ACC)
    x = _logits(raw, scale, cap)
    softmax, hit, all = tl.load(of_softmax + row), tl.load(of_label + row), tl.load(of_all + row)
    used = (softmax != 0) | (hit != 0) | (all != 0)  # otherwise x may be NaN
    g = tl.exp(x - tl.load(lse + row)) * softmax - all
    g += tl.where(columns == tl.load(index + row), hit, 0.0)
    if cap is not None:
        g *= 1 - (x / cap) * (x / cap)
    g = tl.where(columns < real, tl.where(used, g, 0.0), 0.0)
    tl.store(z + columns, g.to(z.dtype.element_ty), mask=columns < width)


@triton.jit
def _entropy_gradient(
    z, lse, entropy, of_softmax, of_entropy, stride, width, real,
    scale: tl.constexpr, cap: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a block of products z of one row by its gradient; see `entropy_gradient_`."""
    row = tl.program_id(0).to(tl.int64)
    z += row * stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(z + columns, mask=columns < real, other=0.0).to(ACC)
    x = _logits(raw, scale, cap)
    log_p = x - tl.load(lse + row)
    softmax, spread = tl.load(of_softmax + row), tl.load(of_entropy + row)
    used = (softmax != 0) | (spread != 0)  # otherwise x may be NaN
    g = softmax + (log_p + tl.load(entropy + row)) * spread
    g *= -scale * tl.exp(log_p)
    if cap is not None:
        g *= 1 - (x / cap) * (x / cap)
    g = tl.where(columns < real, tl.where(used, g, 0.0), 0.0)
    tl.store(z + columns, g.to(z.dtype.element_ty), mask=columns < width)


def row_stats(
    z: torch.Tensor,
    index: torch.Tensor,
    first: int,
    real: int,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
    entropy: bool = False,
) -> torch.Tensor:
    """Return statistics of n rows of logits over the first `real` columns, as a tensor [5, n].

    The rows of the result are lse, logit of the label, sum of logits, largest logit, and vocabulary
    row of the largest logit.

    Args:
        z: Products h.w [n, v].
        index: Column of each label [n]; labels of other ranks are outside the range 0 to real - 1.
        first: Index of the first vocabulary row of this rank.
        real: Number of columns without padding.
        scale: Factor of the logits.
        softcap: Cap of the logits, or None.
        dtype: Dtype of the statistics.
        entropy: True to return the entropy in place of the sum, and 0 in place of the vocabulary
            row.
    """
    out = torch.empty((5, len(z)), dtype=dtype, device=z.device)
    if len(z):
        _stats[(len(z),)](
            z, index, out, z.stride(0), len(z), first, real,
            scale, softcap, _kind(dtype), _block(z), entropy, num_warps=WARPS,
        )  # fmt: skip
    return out


def softmax_gradient_(
    z: torch.Tensor, gradient: LogitGradient, real: int, scale: float, softcap: float | None
) -> None:
    """Replace products z [n, v] by the gradient that `LogitGradient` describes.

    Columns from `real` on become 0.
    """
    if z.numel():
        block = _block(z)
        _gradient[(len(z), triton.cdiv(z.shape[1], block))](
            z, *gradient, z.stride(0), z.shape[1], real,
            scale, softcap, _kind(gradient.of_softmax.dtype), block, num_warps=WARPS,
        )  # fmt: skip


def entropy_gradient_(
    z: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    of_softmax: torch.Tensor,
    of_entropy: torch.Tensor,
    real: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Replace products z [n, v] by their gradient; see `rows.entropy_gradient_`.

    Tensors [n] must be contiguous. Columns from `real` on become 0.
    """
    if z.numel():
        block = _block(z)
        _entropy_gradient[(len(z), triton.cdiv(z.shape[1], block))](
            z, lse, entropy, of_softmax, of_entropy, z.stride(0), z.shape[1], real,
            scale, softcap, _kind(lse.dtype), block, num_warps=WARPS,
        )  # fmt: skip


def _block(z: torch.Tensor) -> int:
    return min(BLOCK, triton.next_power_of_2(z.shape[1]))


def _kind(dtype: torch.dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32
