# SPDX-License-Identifier: Apache-2.0
"""Statistics of rows of logits, and gradients that overwrite the rows.

The torch implementation supports every device and dtype. On CUDA `triton_rows` replaces this
implementation if Triton is installed, and `csrc` computes the gradient if `csrc` was built. A tile
is processed in blocks of rows that fit into a cache, so no temporary tensor has the size of a tile.

z or h.w are the products of hidden states h and rows w of the weight. Logits are these products
after the scale and the cap.

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
    """Vocabulary rows of this rank.

    Attributes:
        first: Index of the first row in the complete vocabulary.
        real: Number of rows without padding.
    """

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
    """Return the statistics of n rows of logits over the columns of this rank.

    Args:
        z: Products h.w [n, v] of hidden states and weight. If `consume` is True, they may be
            overwritten by exp(x - peak), with the logits x and the peak [n] of the result.
            `softmax_gradient_` accepts these exponentials.
        labels: Vocabulary row of each label [n], counted over all ranks. Labels outside this rank's
            rows are ignored.
        columns: Vocabulary rows of this rank.
        formula: Constants of the loss.
        dtype: Dtype of the statistics.
        argmax: Also return the largest logit and its vocabulary row.
        consume: Allow overwriting z, which saves time.
        entropy: Also return the entropy of the softmax over this rank's columns; it is 0 without
            columns. Cannot be combined with `consume` or label smoothing.
    """
    assert not entropy or not (consume or formula.smoothing)
    index = labels - columns.first
    consume = consume and not _has_triton(z) and formula.softcap is None and z.dtype == dtype
    if _has_triton(z):
        from . import triton_rows

        logit = formula.scale, formula.softcap, dtype
        stats = triton_rows.row_stats(z, index, *columns, *logit, entropy)
    else:
        stats = _row_stats(z, index, columns, formula, dtype, argmax, consume, entropy)
    lse, target, third, best, winner = stats
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
    """Replace z [n, v] by weights [n] times the derivative of the loss with respect to h.w.

    Rows of weight 0 become 0 even if they contain NaN.

    Args:
        z: Products h.w, or with `peak` the exponentials exp(x - peak) from `row_stats`.
        labels: Vocabulary row of each label [n], counted over all ranks.
        lse: Log-sum-exp [n] over the whole vocabulary, in the accumulation dtype.
        weights: Weights [n], in the accumulation dtype.
        columns: Vocabulary rows of this rank.
        formula: Constants of the loss.
        peak: Offset [n] of the exponentials, or None.
    """
    index = labels - columns.first
    unused = weights == 0
    weights = weights * formula.scale
    of_softmax = weights * formula.softmax_factor(lse)
    of_label = -(1 - formula.smoothing) * weights
    of_all = weights * (formula.smoothing / formula.vocab_size)
    if peak is not None:
        of_softmax = of_softmax * (peak - lse).exp_()
    of_softmax = of_softmax.masked_fill(unused, 0)  # lse may be NaN in unused rows
    logits_lse = None if peak is not None else lse
    gradient = native.LogitGradient(index, logits_lse, of_softmax, of_label, of_all)
    if native.softmax_gradient_(z, gradient, columns.real, formula.scale, formula.softcap):
        return
    if _has_triton(z):
        from . import triton_rows

        triton_rows.softmax_gradient_(z, gradient, columns.real, formula.scale, formula.softcap)
    else:
        _softmax_gradient_(z, gradient, columns.real, formula)


def largest(
    z: torch.Tensor, count: int, columns: Columns, formula: Formula, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of this rank's columns, and their vocabulary rows, [n, count] each.

    Vocabulary rows are floats, exact up to 2^24. If this rank has fewer than `count` columns, the
    last logits are -inf.
    """
    values = z.new_full((len(z), count), -torch.inf, dtype=dtype)
    winners, available = torch.zeros_like(values), min(count, columns.real)
    for block in _blocks(z):
        x = _logits(z[block, : columns.real], formula, dtype)
        values[block, :available], index = x.topk(available, 1)
        winners[block, :available] = (index + columns.first).to(dtype)
    return values, winners


class LabelLogits(NamedTuple):
    """Logits of m labels in a tile, and their derivatives; all tensors are [m].

    Attributes:
        place: Column of each label; an arbitrary column for labels of other ranks.
        logits: Logit of each label; 0 for labels of other ranks.
        slope: Derivative of the logit with respect to h.w; 0 for labels of other ranks.
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
    """Return the logits of some labels of a tile.

    Args:
        z: Products h.w [n, v].
        rows: Row of z for each label [m].
        labels: Vocabulary row of each label [m], counted over all ranks.
        columns: Vocabulary rows of this rank.
        formula: Constants of the loss.
        dtype: Dtype of the logits.
    """
    if not columns.real:
        zeros = torch.zeros_like(labels, dtype=dtype)
        return LabelLogits(torch.zeros_like(labels), zeros, zeros)
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
    """Replace the products z = h.w [n, v] by a gradient with respect to z.

    The gradient of a row is of_entropy [n] times the derivative of the entropy, minus of_softmax
    [n] times the derivative of the log-sum-exp. Rows with both factors 0 become 0 even if they
    contain NaN.

    Args:
        z: Products h.w [n, v], which are overwritten.
        lse: Log-sum-exp [n] over the whole vocabulary.
        entropy: Entropy [n] over the whole vocabulary.
        of_softmax: Factor [n], see above.
        of_entropy: Factor [n], see above.
        columns: Vocabulary rows of this rank.
        formula: Constants that convert products to logits.
    """
    if _has_triton(z):
        from . import triton_rows

        factors = lse, entropy, of_softmax, of_entropy
        triton_rows.entropy_gradient_(z, *factors, columns.real, formula.scale, formula.softcap)
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


class LogitRows(NamedTuple):
    """Products of hidden states and weight, with the constants that convert them to logits.

    Attributes:
        z: Products [n, v].
        columns: Vocabulary rows of this rank.
        formula: Constants of the loss.
    """

    z: torch.Tensor
    columns: Columns
    formula: Formula

    def block(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the logits of some rows and all real columns as a new tensor in `dtype`."""
        return _logits(self.z[rows, : self.columns.real], self.formula, dtype)


def divergence(
    student: LogitRows,
    teacher: LogitRows,
    lse: torch.Tensor,
    teacher_lse: torch.Tensor,
    reverse: bool,
) -> torch.Tensor:
    """Return the part [n] of KL(teacher || student) from the vocabulary rows of this rank.

    Args:
        student: Products h.w of the student.
        teacher: Products h.w of the teacher.
        lse: Log-sum-exp [n] of the student's logits over the whole vocabulary.
        teacher_lse: Log-sum-exp [n] of the teacher's logits over the whole vocabulary.
        reverse: True for KL(student || teacher).
    """
    parts = torch.zeros_like(lse)
    for block in _blocks(student.z):
        log_p = student.block(block, lse.dtype).sub_(lse[block, None])
        log_q = teacher.block(block, lse.dtype).sub_(teacher_lse[block, None])
        first, second = (log_p, log_q) if reverse else (log_q, log_p)
        parts[block] = (first - second).mul_(first.exp()).sum(1)
    return parts


def divergence_gradient_(
    student: LogitRows,
    teacher: LogitRows,
    lse: torch.Tensor,
    teacher_lse: torch.Tensor,
    kl: torch.Tensor,
    weights: torch.Tensor,
    reverse: bool,
) -> None:
    """Replace the student's products h.w by the gradient of the divergence, row by row.

    Each row of the gradient is multiplied by its weight. Rows of weight 0 become 0 even if they
    contain NaN.

    Args:
        student: Products h.w of the student; `student.z` [n, v] is overwritten by the gradient.
        teacher: Products h.w of the teacher.
        lse: Log-sum-exp [n] of the student's logits over the whole vocabulary.
        teacher_lse: Log-sum-exp [n] of the teacher's logits over the whole vocabulary.
        kl: Divergence [n] over the whole vocabulary.
        weights: Factor of each row's gradient [n].
        reverse: True for KL(student || teacher).
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
    """Return the logits of the products z as a new tensor."""
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
    """Return the statistics of n rows of logits as a tensor [5, n].

    The rows of the result are lse, logit of the label, sum of logits (entropy if `entropy` is
    True), largest logit, and vocabulary row of the largest logit. The last three rows are 0 unless
    they are requested.
    """
    lse, target, third, best, winner = out = z.new_zeros((5, len(z)), dtype=dtype)
    if not columns.real:  # all columns are padding
        lse.fill_(-torch.inf)
        best.fill_(-torch.inf)
        return out
    place, inside = _locate(index, columns.real)
    for block in _blocks(z):
        x = z[block, : columns.real].to(dtype)
        if formula.scale != 1.0:
            x = x.mul_(formula.scale) if consume else x * formula.scale
        if formula.softcap is not None:
            x = (x / formula.softcap).tanh_().mul_(formula.softcap)
        target[block] = x.gather(1, place[block, None])[:, 0] * inside[block]
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
            # With logits relative to the largest logit, both terms are positive. lse(x) - sum(p x)
            # would cancel.
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
    z: torch.Tensor, gradient: native.LogitGradient, real: int, formula: Formula
) -> None:
    index, lse, of_softmax, of_label, of_all = gradient
    z[:, real:] = 0
    if not real:
        return
    place, inside = _locate(index, real)
    unused = ((of_softmax == 0) & (of_label == 0) & (of_all == 0))[:, None]
    of_label = of_label * inside
    for block in _blocks(z):
        target = z[block, :real]
        x = target.to(of_softmax.dtype)  # z itself unless its precision is lower
        slope = None
        if lse is not None:  # otherwise z holds the exponentials
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
        x.scatter_add_(1, place[block, None], of_label[block, None])
        if slope is not None:
            x.mul_(slope)
        x.masked_fill_(unused[block], 0)
        if x.dtype != target.dtype:
            target.copy_(x)


def _locate(index: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each label on this rank, and a mask of the labels that have one.

    A label without a column on this rank gets an arbitrary valid column.

    Args:
        index: Vocabulary row of each label, relative to the first row of this rank.
        real: Number of columns without padding.
    """
    return index.clamp(0, real - 1), (index >= 0) & (index < real)


def _first_equal(x: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return the lowest column of each row of x [n, v] whose value equals best [n].

    Rows with a NaN get the first column.
    """
    return (x == best[:, None]).to(torch.uint8).argmax(1)


def _blocks(z: torch.Tensor) -> Iterator[slice]:
    size = BLOCK_BYTES.get(z.device.type, 1 << 25)
    rows = max(1, size // max(1, z.shape[1] * z.element_size()))
    return (slice(i, i + rows) for i in range(0, len(z), rows))


def _has_triton(z: torch.Tensor) -> bool:
    return z.is_cuda and importlib.util.find_spec("triton") is not None
