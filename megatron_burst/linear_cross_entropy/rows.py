# SPDX-License-Identifier: Apache-2.0
"""Rows of logits: their statistics, and their softmax gradient in their own place.

Torch operators on any device and dtype; on CUDA `triton_rows` does the same where Triton is
installed, and `csrc` the gradient wherever it was built. A tile is worked on in blocks of rows
small enough to stay in a cache, so that nothing of a tile's size is ever allocated here.

Shape letters: n rows, v vocabulary rows of this rank.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..kernels import native
from .formula import Formula, Stats

BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 25}


class Columns(NamedTuple):
    """The vocabulary rows of this rank: the number of the first, and how many are no padding."""

    first: int
    real: int


def row_stats(
    z: torch.Tensor,
    labels: torch.Tensor,
    columns: Columns,
    formula: Formula,
    dtype: torch.dtype,
    argmax: bool = False,
    consume: bool = False,
    entropy: bool = False,
) -> Stats:
    """Statistics in `dtype` of z [n, v], which holds h.w.

    z is left as it is, or, where `consume` allows it and something is gained, it becomes
    exp(x - peak), x the logits and peak [n] in the result: `softmax_gradient_` goes on from there.

    labels [n]: vocabulary rows counted over all ranks; labels outside this rank's are ignored.
    entropy: also of the softmax over this rank's columns, 0 where it has none; not with `consume`
    or label smoothing.
    """
    assert not entropy or not (consume or formula.smoothing)
    index = labels - columns.first
    consume = consume and not _has_triton(z) and formula.softcap is None and z.dtype == dtype
    if _has_triton(z):
        from . import triton_rows

        given = formula.scale, formula.softcap, dtype
        found = triton_rows.row_stats(z, index, *columns, *given, entropy)
    else:
        found = _row_stats(z, index, columns, formula, dtype, argmax, consume, entropy)
    lse, target, third, best, winner = found
    return Stats(
        lse,
        target,
        third if formula.smoothing else None,
        best if argmax else None,
        winner if argmax else None,
        best if consume and columns.real else None,
        third if entropy else None,
    )


def softmax_gradient_(
    z: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    columns: Columns,
    formula: Formula,
    peak: torch.Tensor | None = None,
) -> None:
    """Replace z [n, v] by weights [n] times the loss's derivative by h.w.

    z holds h.w, or, with peak [n], what `row_stats` has left. lse [n] is that of whole rows, in
    the accumulation dtype, like `weights`. Rows of weight 0 become 0 even if they hold NaN.
    """
    index = labels - columns.first
    unused = weights == 0
    weights = weights * formula.scale
    of_softmax = weights * formula.weight_of_softmax(lse)
    of_label = -(1 - formula.smoothing) * weights
    of_all = weights * (formula.smoothing / formula.vocab_size)
    if peak is not None:
        of_softmax = of_softmax * (peak - lse).exp_()
    of_softmax = of_softmax.masked_fill(unused, 0)  # lse may be NaN there
    logits_lse = None if peak is not None else lse
    given = native.LogitGradient(index, logits_lse, of_softmax, of_label, of_all)
    if native.softmax_gradient_(z, given, columns.real, formula.scale, formula.softcap):
        return
    if _has_triton(z):
        from . import triton_rows

        triton_rows.softmax_gradient_(z, given, columns.real, formula.scale, formula.softcap)
    else:
        _softmax_gradient_(z, given, columns.real, formula)


def largest(
    z: torch.Tensor, count: int, columns: Columns, formula: Formula, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, count]: the largest logits of this rank's columns and their vocabulary rows, as floats
    (exact up to 2^24); -inf where there are fewer.
    """
    values = z.new_full((len(z), count), -torch.inf, dtype=dtype)
    winners, some = torch.zeros_like(values), min(count, columns.real)
    for block in _blocks(z):
        x = _logits(z[block, : columns.real], formula, dtype)
        values[block, :some], index = x.topk(some, 1)
        winners[block, :some] = (index + columns.first).to(dtype)
    return values, winners


class LabelLogits(NamedTuple):
    """Logits of some places of a tile, and what leads their gradients back to h.w; each [m].

    place: the columns; logits: 0 in columns of other ranks; slope: derivative of a logit by h.w, 0
    there too.
    """

    place: torch.Tensor
    logits: torch.Tensor
    slope: torch.Tensor


def label_logits(
    z: torch.Tensor,
    rows: torch.Tensor,
    labels: torch.Tensor,
    columns: Columns,
    formula: Formula,
    dtype: torch.dtype,
) -> LabelLogits:
    """The logits of labels [m] in rows [m] of z [n, v], which holds h.w."""
    if not columns.real:
        none = torch.zeros_like(labels, dtype=dtype)
        return LabelLogits(torch.zeros_like(labels), none, none)
    place, inside = _locate(labels - columns.first, columns.real)
    x = z[rows, place].to(dtype) * formula.scale
    slope = inside.to(dtype) * formula.scale
    if formula.softcap is not None:
        x = (x / formula.softcap).tanh_()
        slope = slope * (1 - x.square())
        x = x * formula.softcap
    return LabelLogits(place, x * inside, slope)


def entropy_gradient_(
    z: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    of_softmax: torch.Tensor,
    of_entropy: torch.Tensor,
    columns: Columns,
    formula: Formula,
) -> None:
    """Replace z [n, v], which holds h.w, by of_entropy [n] times the derivative of the row's
    entropy by h.w, less of_softmax [n] times that of its log-sum-exp.

    Rows become 0 if both factors are 0, even if they hold NaN.
    """
    if _has_triton(z):
        from . import triton_rows

        given = lse, entropy, of_softmax, of_entropy
        triton_rows.entropy_gradient_(z, *given, columns.real, formula.scale, formula.softcap)
        return
    z[:, columns.real :] = 0
    # -scale p (of_softmax + of_entropy (log p + H)) = p (a + b log p)
    a = (of_softmax + of_entropy * entropy).mul_(-formula.scale)
    b = of_entropy * -formula.scale
    unused = ((of_softmax == 0) & (of_entropy == 0))[:, None]
    for block in _blocks(z):
        place = z[block, : columns.real]
        x = _logits(place, formula, lse.dtype)
        slope = None if formula.softcap is None else 1 - (x / formula.softcap).square_()
        log_p = x.sub_(lse[block, None])
        gradient = torch.addcmul(a[block, None], log_p, b[block, None]).mul_(log_p.exp_())
        gradient = gradient if slope is None else gradient.mul_(slope)
        place.copy_(gradient.masked_fill_(unused[block], 0))


class RowsOfLogits(NamedTuple):
    """z [n, v], which holds h.w, and what makes logits of it."""

    z: torch.Tensor
    columns: Columns
    formula: Formula

    def block(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """The logits of some rows, as another tensor."""
        return _logits(self.z[rows, : self.columns.real], self.formula, dtype)


def divergence(
    student: RowsOfLogits,
    teacher: RowsOfLogits,
    lse: torch.Tensor,
    teacher_lse: torch.Tensor,
    reverse: bool,
) -> torch.Tensor:
    """[n]: this rank's part of KL(teacher || student), or of the reverse; lse [n] are those of
    whole rows.
    """
    found = torch.zeros_like(lse)
    for block in _blocks(student.z):
        log_p = student.block(block, lse.dtype).sub_(lse[block, None])
        log_q = teacher.block(block, lse.dtype).sub_(teacher_lse[block, None])
        first, second = (log_p, log_q) if reverse else (log_q, log_p)
        found[block] = (first - second).mul_(first.exp()).sum(1)
    return found


def divergence_gradient_(
    student: RowsOfLogits,
    teacher: RowsOfLogits,
    lse: torch.Tensor,
    teacher_lse: torch.Tensor,
    kl: torch.Tensor,
    weights: torch.Tensor,
    reverse: bool,
) -> None:
    """Replace the student's z by weights [n] times the derivative of its divergence kl [n].

    Rows of weight 0 become 0 even if they hold NaN.
    """
    z, columns, formula = student
    z[:, columns.real :] = 0
    unused = (weights == 0)[:, None]
    for block in _blocks(z):
        x = student.block(block, lse.dtype)
        log_p = x - lse[block, None]
        log_q = teacher.block(block, lse.dtype).sub_(teacher_lse[block, None])
        if reverse:
            gradient = (log_p - log_q).sub_(kl[block, None]).mul_(log_p.exp_())
        else:
            gradient = log_p.exp_().sub_(log_q.exp_())
        gradient.mul_(weights[block, None] * formula.scale)
        if formula.softcap is not None:
            gradient.mul_(1 - (x / formula.softcap).square_())
        z[block, : columns.real] = gradient.masked_fill_(unused[block], 0)


def _logits(z: torch.Tensor, formula: Formula, dtype: torch.dtype) -> torch.Tensor:
    """The logits of z, which holds h.w, as another tensor."""
    x = z.to(dtype) * formula.scale
    return x if formula.softcap is None else (x / formula.softcap).tanh_().mul_(formula.softcap)


def _row_stats(
    z: torch.Tensor,
    index: torch.Tensor,
    columns: Columns,
    formula: Formula,
    dtype: torch.dtype,
    argmax: bool,
    consume: bool = False,
    entropy: bool = False,
) -> torch.Tensor:
    """[5, n]: lse, target, total or entropy, best, winner; the last three only where they are
    wanted.
    """
    lse, target, third, best, winner = out = z.new_zeros((5, len(z)), dtype=dtype)
    if not columns.real:  # all padding
        lse.fill_(-torch.inf)
        best.fill_(-torch.inf)
        return out
    where, inside = _locate(index, columns.real)
    for block in _blocks(z):
        x = z[block, : columns.real].to(dtype)
        if formula.scale != 1.0:
            x = x.mul_(formula.scale) if consume else x * formula.scale
        if formula.softcap is not None:
            x = (x / formula.softcap).tanh_().mul_(formula.softcap)
        target[block] = x.gather(1, where[block, None])[:, 0] * inside[block]
        if formula.smoothing:
            torch.sum(x, 1, out=third[block])
        if argmax or consume:
            torch.amax(x, 1, out=best[block])
        if argmax:
            winner[block] = columns.first + _first_equal(x, best[block])
        if consume:
            x.sub_(best[block, None]).exp_()
            torch.sum(x, 1, out=lse[block])
        elif entropy:
            # With the largest logit at 0 both terms are positive: lse(x) - sum(p x) would cancel.
            peak = x.amax(1, keepdim=True)
            x = x - peak
            e = x.exp()
            mass = e.sum(1)
            third[block] = mass.log() - e.mul_(x).sum(1) / mass
            lse[block] = mass.log_() + peak[:, 0]
        else:
            torch.logsumexp(x, 1, out=lse[block])
    if consume:
        lse.log_().add_(best)
    return out


def _softmax_gradient_(
    z: torch.Tensor, given: native.LogitGradient, real: int, formula: Formula
) -> None:
    index, lse, of_softmax, of_label, of_all = given
    z[:, real:] = 0
    if not real:
        return
    where, inside = _locate(index, real)
    unused = ((of_softmax == 0) & (of_label == 0) & (of_all == 0))[:, None]
    of_label = of_label * inside
    for block in _blocks(z):
        place = z[block, :real]
        x = place.to(of_softmax.dtype)  # z itself, unless its dtype is a low one
        slope = None
        if lse is not None:  # else the exponentials are there
            if formula.scale != 1.0:
                x.mul_(formula.scale)
            if formula.softcap is not None:
                x.div_(formula.softcap).tanh_()
                slope = 1 - x.square()
                x.mul_(formula.softcap)
            x.sub_(lse[block, None]).exp_()
        x.mul_(of_softmax[block, None])
        if formula.smoothing:
            x.sub_(of_all[block, None])
        x.scatter_add_(1, where[block, None], of_label[block, None])
        if slope is not None:
            x.mul_(slope)
        x.masked_fill_(unused[block], 0)
        if x.dtype != place.dtype:
            place.copy_(x)


def _locate(index: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label, some valid column where it has none, and whether it has one."""
    return index.clamp(0, real - 1), (index >= 0) & (index < real)


def _first_equal(x: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """[n], the lowest column that equals best [n]; the first column of rows that hold a NaN."""
    return (x == best[:, None]).to(torch.uint8).argmax(1)


def _blocks(z: torch.Tensor) -> Iterator[slice]:
    size = BLOCK_BYTES.get(z.device.type, 1 << 25)
    rows = max(1, size // max(1, z.shape[1] * z.element_size()))
    return (slice(i, i + rows) for i in range(0, len(z), rows))


def _has_triton(z: torch.Tensor) -> bool:
    return z.is_cuda and importlib.util.find_spec("triton") is not None
