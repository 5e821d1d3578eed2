# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of tokens without materializing the full logits.

The module is for reinforcement learning and distillation. The incoming gradient depends on
probability ratios and advantages that are unknown in forward. Therefore forward saves two numbers
per row, and backward recomputes the logits tile by tile. With the logits x of a row and their
softmax p,

    log p_y = x_y - lse(x),    H = -sum(p log p),
    d log p_y / d x_j = [j = y] - p_j,    d H / d x_j = -p_j (log p_j + H).

The logits of a row are computed once, even if it has several labels: a row of a prefix tree before
a branch has one label per child. Rows without labels are not computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...comm.operation import prepared
from ...kernels.autograd import first_order_only, outside_graphs, refuse_transforms
from ...linear_cross_entropy import checks
from ...linear_cross_entropy.checks import HeadOperation, LossOptions, LossRequest, described
from ...linear_cross_entropy.rows import (
    entropy_gradient_,
    label_logits,
    largest,
    row_stats,
    softmax_gradient_,
)
from ...linear_cross_entropy.split import Split
from ...linear_cross_entropy.tiled_loop import GradientSum, Head, Tokens, tiles
from ...linear_cross_entropy.validate import head_of

COLDEST, HOTTEST = 1e-6, 1e6  # limits of `temperature`; beyond them float32 may overflow


class LogProbs(NamedTuple):
    """Results for each label, in float32 (float64 for float64 tensors).

    Attributes:
        logprobs: Log-probabilities, shaped like labels; 0 for ignored labels.
        entropy: Entropy in nats of the distribution that predicts the label, shaped like labels; 0
            for ignored labels. None if not requested. In float32, the gradient of the entropy has
            an error of up to 1 % in rows with an entropy below 1e-3.
        top: The k largest log-probabilities of the distribution that predicts the label [..., k],
            largest first, without a gradient. They are also computed for ignored labels. None if
            not requested.
        top_ids: Vocabulary row of each entry of `top`, int64 [..., k]; None if not requested.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    top: torch.Tensor | None
    top_ids: torch.Tensor | None


@outside_graphs
def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    rows: torch.Tensor | np.ndarray | None = None,
    temperature: float = 1.0,
    entropy: bool = True,
    top_k: int | None = None,
    ignore_index: int = -100,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    tile: int | None = None,
) -> LogProbs:
    """Return the log-probabilities of labels under softmax(hidden @ weight.T / temperature).

    The full logits are never materialized. Log-probabilities and entropies are differentiable in
    hidden and weight. The result cannot be differentiated twice.

    Args:
        hidden: Hidden states [..., d] in float64, float32 or bfloat16.
        weight: Weight [v, d] in the dtype of hidden.
        labels: Labels of any integer type, shaped like hidden without d, or [E] with `rows`. With
            `sequence_parallel` they must cover the rows of all ranks. A label must be in the
            vocabulary or be ignore_index.
        rows: Row of hidden that predicts each label [E], as an index into the flattened leading
            dimensions. A row may have several labels or none, as in a prefix tree
            (`PrefixTree.edges`). Pass `rows` on the host; logits are computed only for these rows.
            None means one label per row.
        temperature: Divisor of the logits, after `logit_softcap`.
        entropy: Return entropies too; False saves time.
        top_k: Number of largest log-probabilities to return per label, or None.
        ignore_index: Same as in `linear_cross_entropy`.
        tp_group: Same as in `linear_cross_entropy`.
        sequence_parallel: Same as in `linear_cross_entropy`; cannot be combined with `rows`.
        logit_scale: Same as in `linear_cross_entropy`.
        logit_softcap: Same as in `linear_cross_entropy`.
        vocab_size: Same as in `linear_cross_entropy`.
        tile: Same as in `linear_cross_entropy`.

    Raises:
        ValueError: Arguments are invalid or differ between ranks. The message lists all problems,
            and all ranks raise the error. A label outside the vocabulary raises the error on CPU
            and fails a device-side assertion on CUDA.
    """
    refuse_transforms("linear_logprobs")
    split = checks.split_of(tp_group, sequence_parallel)
    options = LossOptions(
        ignore_index, logit_scale, logit_softcap, vocab_size=vocab_size, tile=tile
    )
    operation = LogProbsOperation(
        split=split,
        inputs=checks.LossInputs(hidden, weight, labels, None),
        options=options,
        sequence_parallel=sequence_parallel,
        settings=_LogProbsOptions(rows, temperature, entropy, top_k),
    )
    plan = prepared(operation)
    (hidden, weight, labels, *_), options, settings = plan.inputs, plan.options, plan.settings

    shape, labels = labels.shape, labels.reshape(-1)
    hidden, back = hidden.reshape(-1, hidden.shape[-1]), None
    places = _LabelRows(split.parts, len(hidden), labels)
    if settings.rows is not None:  # sort labels by row, and drop the rows without labels
        used, row = np.unique(settings.rows, return_inverse=True)
        order = np.argsort(row, kind="stable")
        back = _on(np.argsort(order), labels)
        if len(used) < len(hidden):
            hidden = hidden[_on(used, labels)]
        places = _LabelRows(1, len(used), labels[_on(order, labels)], row[order])
    labelled = places.labels != options.ignore_index
    head = at_temperature(head_of(hidden, weight, split, options), settings.temperature)
    logprobs, entropies, top, ids = _LinearLogProbs.apply(
        hidden.contiguous(), weight.contiguous(), places, labelled, head, settings
    )

    def of_labels(x: torch.Tensor) -> torch.Tensor:
        return (x if back is None else x[back]).view(*shape, *x.shape[1:])

    if entropies is not None:
        entropies = of_labels(torch.where(labelled, entropies[places.row], 0))
    if top is not None:
        top, ids = of_labels(top[places.row]), of_labels(ids[places.row])
    return LogProbs(of_labels(logprobs), entropies, top, ids)


class _LogProbsOptions(NamedTuple):
    """Arguments of `linear_logprobs` that `linear_cross_entropy` does not have.

    `rows` is int64 [E] after `LogProbsOperation.check`.
    """

    rows: Any
    temperature: Any
    entropy: Any
    top_k: Any


@dataclass(frozen=True)
class LogProbsRequest(LossRequest):
    """Checked arguments of `linear_logprobs`."""

    settings: _LogProbsOptions


@dataclass(frozen=True, kw_only=True)
class LogProbsOperation(HeadOperation[LogProbsRequest]):
    """Call of `linear_logprobs` on one rank, with its arguments."""

    split: Split
    inputs: checks.LossInputs
    options: LossOptions
    sequence_parallel: Any
    settings: _LogProbsOptions

    def check(self) -> LogProbsRequest:
        settings, inputs = self.settings, self.inputs
        rows, reasons = _rows(settings.rows, inputs.hidden, self.sequence_parallel)
        reasons += [
            *temperature_reasons(settings.temperature),
            *checks.flag("entropy", settings.entropy),
        ]
        top_k = settings.top_k
        if top_k is not None and not (checks.is_number(top_k, Integral) and top_k >= 1):
            reasons.append(f"top_k must be a positive integer or None, got {described(top_k)}")
        labelled = None if rows is None else len(rows)
        if rows is None and settings.rows is not None and isinstance(inputs.labels, torch.Tensor):
            labelled = (
                inputs.labels.numel()
            )  # `rows` is refused already, so any number of labels is accepted
        request = checks.checked(
            inputs,
            self.options,
            self.sequence_parallel,
            self.split,
            labelled=labelled,
            extra=reasons,
        )
        inputs, options, facts = request.inputs, request.options, request.facts
        count = options.vocab_size or len(inputs.weight) * self.split.size
        if top_k is not None and top_k > count:
            raise ValueError(f"top_k must be at most the vocabulary's {count} rows, got {top_k}")
        settings = _LogProbsOptions(
            rows,
            float(settings.temperature),
            settings.entropy,
            None if top_k is None else int(top_k),
        )
        facts["temperature, entropy, top_k"] = settings[1:]
        if rows is not None:
            facts["rows"] = hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        return LogProbsRequest(inputs, options, facts, settings)


def _rows(
    argument: Any, hidden: Any, sequence_parallel: Any
) -> tuple[np.ndarray | None, list[str]]:
    """Return the argument `rows` as int64 [E] on the host, and a list of error messages.

    The array is None if the argument is None or cannot be converted.
    """
    if argument is None:
        return None, []
    try:
        rows = np.asarray(argument.cpu() if isinstance(argument, torch.Tensor) else argument)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # ragged, bf16, a gradient
        rows = np.array(None)
    if rows.shape == (0,):
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        words = (
            described(argument) if rows.dtype.kind == "O" else f"{rows.dtype} {list(rows.shape)}"
        )
        return None, [f"rows must be integers [E] or None, got {words}"]
    problems = []
    count = hidden.shape[:-1].numel() if isinstance(hidden, torch.Tensor) else np.inf
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        problems.append(
            f"rows must be in [0, {count}), the rows of hidden, got {rows.min()} to {rows.max()}"
        )
    if sequence_parallel:
        problems.append(
            "rows cannot be combined with sequence_parallel: gather hidden, or label every row"
        )
    return rows.astype(np.int64), problems


def temperature_reasons(temperature: Any) -> Iterator[str]:
    """Yield an error message if `temperature` is invalid."""
    if not (checks.is_number(temperature, Real) and COLDEST <= temperature <= HOTTEST):
        yield f"temperature must be from {COLDEST} to {HOTTEST}, got {described(temperature)}"


def at_temperature(head: Head, temperature: float) -> Head:
    """Return `head` with logits divided by `temperature`.

    A cap is divided too: cap tanh(s / cap) / T = (cap / T) tanh((s / T) / (cap / T)).
    """
    formula, cap = head.formula, head.formula.softcap
    cap = None if cap is None else cap / temperature
    return replace(head, formula=replace(formula, scale=formula.scale / temperature, softcap=cap))


def _on(index: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(index).to(like.device)


class _LabelRows:
    """Mapping between labels, rows of hidden and tiles.

    Args:
        parts: Number of slices into which sequence parallelism splits the tokens.
        rows: Number of rows of hidden in a slice.
        labels: Labels int64 [E], sorted by row if `row` is given.
        row: Row of hidden of each label, int64 [E]; None for one label per row.

    Attributes:
        labels: The argument `labels`.
        row: Row of hidden of each label, int64 [E]. Row indices count the rows of all slices.
    """

    def __init__(
        self, parts: int, rows: int, labels: torch.Tensor, row: np.ndarray | None = None
    ) -> None:
        self.parts, self.count, self.labels = parts, parts * rows, labels
        self.all_rows = torch.arange(self.count, device=labels.device)
        self.row = self.all_rows if row is None else _on(row, labels)
        self._first = None if row is None else np.searchsorted(row, np.arange(rows + 1)).tolist()

    def rows(self, tile: slice) -> torch.Tensor:
        """Return the row indices of a tile, from all slices, in the order of the tile."""
        return self.all_rows.view(self.parts, -1)[:, tile].reshape(-1)

    def within(self, tile: slice) -> tuple[torch.Tensor | slice, torch.Tensor]:
        """Return the indices of the labels in a tile, and the row of each label in the tile."""
        if self._first is None:
            rows = self.rows(tile)
            return rows, self.all_rows[: len(rows)]
        selected = slice(self._first[tile.start], self._first[tile.stop])
        return selected, self.row[selected] - tile.start


class _LinearLogProbs(torch.autograd.Function):
    """Autograd function that returns log-probabilities and entropies.

    Inputs are hidden [n, d] and weight [v, d]. Outputs are logprobs [E], entropy [p * n], top and
    ids [p * n, k], for p slices of the sequence (see `tiled_loop`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        places: _LabelRows,
        labelled: torch.Tensor,
        head: Head,
        settings: _LogProbsOptions,
    ) -> tuple[torch.Tensor | None, ...]:
        columns, formula, count = head.columns, head.formula, places.count
        logprobs = hidden.new_zeros(len(labelled), dtype=head.dtype)
        lse = hidden.new_empty(count, dtype=head.dtype)
        entropy = torch.empty_like(lse) if settings.entropy else None
        top = ids = None
        if settings.top_k is not None:
            top = lse.new_empty((count, settings.top_k))
            ids = torch.empty_like(top, dtype=torch.int64)
        for tile, _, z in tiles(head, Tokens(hidden, weight, places.labels)):
            rows, (selected, local) = places.rows(tile), places.within(tile)
            stats = row_stats(
                z, no_labels(z), columns, formula, head.dtype, entropy=settings.entropy
            )
            stats = head.split.merge(stats)
            lse[rows] = stats.lse
            if entropy is not None and stats.entropy is not None:
                entropy[rows] = stats.entropy
            labels = places.labels[selected]
            logprobs[selected] = label_logits(z, local, labels, columns, formula, head.dtype).logits
            if top is not None and ids is not None:
                values, winners = _largest(z, top.shape[1], head)
                top[rows], ids[rows] = values - stats.lse[:, None], winners.to(torch.int64)
        logprobs = torch.where(labelled, head.split.total(logprobs) - lse[places.row], 0)
        ctx.places, ctx.head = places, head
        ctx.save_for_backward(hidden, weight, labelled, lse, entropy)
        ctx.mark_non_differentiable(*(x for x in (top, ids) if x is not None))
        ctx.set_materialize_grads(False)
        return logprobs, entropy, top, ids

    @staticmethod
    @first_order_only("linear_logprobs")
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_logprobs, of_entropy, *_ = upstream
        hidden, weight, labelled, lse, entropy = ctx.saved_tensors
        places, head = ctx.places, ctx.head
        needs_dh, needs_dw = ctx.needs_input_grad[:2]
        if of_logprobs is None and of_entropy is None:
            return (None,) * 6
        if of_logprobs is None:
            of_logprobs = lse.new_zeros(len(labelled))
        of_logprobs = torch.where(labelled, of_logprobs, 0)
        dh = torch.empty_like(hidden) if needs_dh else None
        dw = torch.zeros_like(weight, dtype=head.dtype) if needs_dw else None
        tokens = Tokens(hidden, weight, places.labels)
        sums, columns, formula = GradientSum(head, tokens, dh, dw), head.columns, head.formula
        for tile, h, z in tiles(head, tokens):
            rows, (selected, local) = places.rows(tile), places.within(tile)
            own, labels = of_logprobs[selected], places.labels[selected]
            at = label_logits(z, local, labels, columns, formula, head.dtype)  # before z changes
            of_softmax = lse.new_zeros(len(z)).index_add_(0, local, own)
            if of_entropy is None:
                softmax_gradient_(z, no_labels(z), lse[rows], -of_softmax, columns, formula)
            else:
                factors = lse[rows], entropy[rows], of_softmax, of_entropy[rows]
                entropy_gradient_(z, *factors, columns, formula)
            by_label = (own * at.slope).masked_fill(own == 0, 0)  # the slope may be NaN
            z.index_put_((local, at.place), by_label.to(z.dtype), accumulate=True)
            used = lse.new_zeros(len(z)).index_add_(0, local, (own != 0).to(lse.dtype)) != 0
            if of_entropy is not None:
                used |= of_entropy[rows] != 0
            sums.put(tile, h, z, ~used)
        sums.finish()
        return dh, None if dw is None else dw.to(weight.dtype), *(None,) * 4


def no_labels(z: torch.Tensor) -> torch.Tensor:
    """Return placeholder labels, int64 [n], that are no columns of any rank, for the n rows of z.

    `_LabelRows` has the real labels.
    """
    return torch.full((len(z),), -1, dtype=torch.int64, device=z.device)


def _largest(z: torch.Tensor, count: int, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits over the vocabulary of all ranks, and their vocabulary rows.

    Args:
        z: Products h.w [n, v] of a tile on this rank.
        count: Number of logits to return.
        head: Options and sizes of the call.

    Returns:
        Logits [n, count], largest first, and vocabulary rows [n, count] as floats.
    """
    own = torch.stack(largest(z, count, head.columns, head.formula, head.dtype))
    values, winners = head.split.all_gather(own).permute(1, 2, 0, 3).flatten(2)
    best, index = values.topk(count, 1)
    return best, winners.gather(1, index)
