# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of tokens from hidden states, without holding all logits.

What reinforcement learning and distillation want of the LM head. Which gradient arrives depends on
ratios and advantages that nobody knows in forward, so backward computes the logits again, a tile
at a time, and forward keeps two numbers per row. With x the logits of a row and p their softmax,

    log p_y = x_y - lse(x),    H = -sum(p log p),
    d log p_y / d x_j = [j = y] - p_j,    d H / d x_j = -p_j (log p_j + H).

The logits of a row are multiplied out once, however many labels it has (a row of a prefix tree
before a branch has one per child), and only those of rows that have any.
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
from ...linear_cross_entropy.checks import HeadOperation, LossOptions, LossRequest, told
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

COLDEST, HOTTEST = 1e-6, 1e6  # temperatures; others leave the range of float32


class LogProbs(NamedTuple):
    """What there is of each label, in the accumulation dtype (float64 for float64, else float32).

    logprobs: shaped like labels, 0 where the label is ignored. entropy: of the distribution that
    the label is taken from, in nats, shaped likewise and 0 there too; None where not asked for. In
    float32 its gradient is off by up to 1 % in rows with an entropy below 1e-3.
    top, top_ids: [..., k], the k largest log-probabilities of that distribution, largest first, and
    their vocabulary rows, int64, also where the label is ignored; no gradient; None where not asked
    for.
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
    """Log-probabilities of labels under softmax(hidden @ weight.T / temperature), their entropies
    and the most likely tokens, without ever holding all logits.

    hidden [..., d] and weight [v, d] in one of float64, float32, bfloat16; labels [...] of any
    integer type. Gradients reach hidden and weight from logprobs and from entropy.

    rows: labels are [E] and label e is predicted by row rows[e] of hidden, its leading dimensions
        flattened; a row may have many labels or none. Edges of a prefix tree are such pairs
        (`PrefixTree.edges`), and so are the candidates of a teacher. Best on the host, since where
        rows lie decides what is computed: rows that are not named are not. None: one label per
        row, labels shaped like hidden without d.
    temperature: logits are divided by it, after `logit_softcap`.
    entropy: False saves time. top_k: also return the k largest.
    tp_group, sequence_parallel, logit_scale, logit_softcap, vocab_size, tile, ignore_index: as of
        `linear_cross_entropy`. sequence_parallel goes without `rows`.

    Labels must be in the vocabulary or be ignore_index: a ValueError on CPU, a failed device-side
    assertion on CUDA. Raises ValueError, with all reasons, on all ranks alike. Cannot be
    differentiated twice.
    """
    refuse_transforms("linear_logprobs")
    split = checks.group(tp_group, sequence_parallel)
    options = LossOptions(
        ignore_index, logit_scale, logit_softcap, vocab_size=vocab_size, tile=tile
    )
    operation = LogProbsOperation(
        split=split,
        inputs=checks.LossInputs(hidden, weight, labels, None),
        options=options,
        sequence_parallel=sequence_parallel,
        asked=_Asked(rows, temperature, entropy, top_k),
    )
    plan = prepared(operation)
    (hidden, weight, labels, *_), options, asked = plan.inputs, plan.options, plan.asked

    shape, labels = labels.shape, labels.reshape(-1)
    hidden, back = hidden.reshape(-1, hidden.shape[-1]), None
    places = _Places(split.parts, len(hidden), labels)
    if asked.rows is not None:  # by row, and without the rows that predict nothing
        used, row = np.unique(asked.rows, return_inverse=True)
        order = np.argsort(row, kind="stable")
        back = _on(np.argsort(order), labels)
        if len(used) < len(hidden):
            hidden = hidden[_on(used, labels)]
        places = _Places(1, len(used), labels[_on(order, labels)], row[order])
    kept = places.labels != options.ignore_index
    head = at_temperature(head_of(hidden, weight, split, options), asked.temperature)
    logprobs, entropies, top, ids = _LinearLogProbs.apply(
        hidden.contiguous(), weight.contiguous(), places, kept, head, asked
    )

    def of_labels(x: torch.Tensor) -> torch.Tensor:
        return (x if back is None else x[back]).view(*shape, *x.shape[1:])

    if entropies is not None:
        entropies = of_labels(torch.where(kept, entropies[places.row], 0))
    if top is not None:
        top, ids = of_labels(top[places.row]), of_labels(ids[places.row])
    return LogProbs(of_labels(logprobs), entropies, top, ids)


class _Asked(NamedTuple):
    """What `linear_cross_entropy` does not take; rows is int64 [E] once it was checked."""

    rows: Any
    temperature: Any
    entropy: Any
    top_k: Any


@dataclass(frozen=True)
class LogProbsRequest(LossRequest):
    """A checked call of `linear_logprobs`."""

    asked: _Asked


@dataclass(frozen=True, kw_only=True)
class LogProbsOperation(HeadOperation[LogProbsRequest]):
    """A call of `linear_logprobs` on one rank; its arguments."""

    split: Split
    inputs: checks.LossInputs
    options: LossOptions
    sequence_parallel: Any
    asked: _Asked

    def check(self) -> LogProbsRequest:
        asked, inputs = self.asked, self.inputs
        rows, reasons = _rows(asked.rows, inputs.hidden, self.sequence_parallel)
        reasons += [*temperature_reasons(asked.temperature), *checks.flag("entropy", asked.entropy)]
        top_k = asked.top_k
        if top_k is not None and not (checks.is_number(top_k, Integral) and top_k >= 1):
            reasons.append(f"top_k must be a positive integer or None, got {told(top_k)}")
        labelled = None if rows is None else len(rows)
        if rows is None and asked.rows is not None and isinstance(inputs.labels, torch.Tensor):
            labelled = inputs.labels.numel()  # rows are refused already, not the labels for them
        request = checks.checked(
            inputs,
            self.options,
            self.sequence_parallel,
            self.split,
            labelled=labelled,
            more=reasons,
        )
        inputs, options, facts = request.inputs, request.options, request.facts
        count = options.vocab_size or len(inputs.weight) * self.split.size
        if top_k is not None and top_k > count:
            raise ValueError(f"top_k must be at most the vocabulary's {count} rows, got {top_k}")
        asked = _Asked(
            rows, float(asked.temperature), asked.entropy, None if top_k is None else int(top_k)
        )
        facts["temperature, entropy, top_k"] = asked[1:]
        if rows is not None:
            facts["rows"] = hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        return LogProbsRequest(inputs, options, facts, asked)


def _rows(given: Any, hidden: Any, sequence_parallel: Any) -> tuple[np.ndarray | None, list[str]]:
    """`rows` as int64 on the host, and what is wrong with it."""
    if given is None:
        return None, []
    try:
        rows = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # ragged, bf16, a gradient
        rows = np.array(None)
    if rows.shape == (0,):
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        words = told(given) if rows.dtype.kind == "O" else f"{rows.dtype} {list(rows.shape)}"
        return None, [f"rows must be integers [E] or None, got {words}"]
    found = []
    count = hidden.shape[:-1].numel() if isinstance(hidden, torch.Tensor) else np.inf
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        found.append(
            f"rows must lie in [0, {count}), the rows of hidden, got {rows.min()} to {rows.max()}"
        )
    if sequence_parallel:
        found.append("rows goes without sequence_parallel: gather hidden, or label every row")
    return rows.astype(np.int64), found


def temperature_reasons(temperature: Any) -> Iterator[str]:
    """Why `temperature` is refused, if it is."""
    if not (checks.is_number(temperature, Real) and COLDEST <= temperature <= HOTTEST):
        yield f"temperature must be from {COLDEST} to {HOTTEST}, got {told(temperature)}"


def at_temperature(head: Head, temperature: float) -> Head:
    """Cap tanh(s / cap) / T is (cap / T) tanh((s / T) / (cap / T))."""
    formula, cap = head.formula, head.formula.softcap
    cap = None if cap is None else cap / temperature
    return replace(head, formula=replace(formula, scale=formula.scale / temperature, softcap=cap))


def _on(index: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(index).to(like.device)


class _Places:
    """Which labels belong to which rows, and which of both lie in a tile.

    labels: int64 [E], by row where rows are given. row: int64 [E], each label's row of hidden, all
    slices after one another.
    """

    def __init__(
        self, parts: int, rows: int, labels: torch.Tensor, row: np.ndarray | None = None
    ) -> None:
        self.parts, self.count, self.labels = parts, parts * rows, labels
        self.every = torch.arange(self.count, device=labels.device)
        self.row = self.every if row is None else _on(row, labels)
        self._first = None if row is None else np.searchsorted(row, np.arange(rows + 1)).tolist()

    def rows(self, tile: slice) -> torch.Tensor:
        """Rows of hidden, in the order of a tile's rows: those of every slice."""
        return self.every.view(self.parts, -1)[:, tile].reshape(-1)

    def within(self, tile: slice) -> tuple[torch.Tensor | slice, torch.Tensor]:
        """The indices of the labels of a tile, and the rows of the tile that they belong to."""
        if self._first is None:
            rows = self.rows(tile)
            return rows, self.every[: len(rows)]
        found = slice(self._first[tile.start], self._first[tile.stop])
        return found, self.row[found] - tile.start


class _LinearLogProbs(torch.autograd.Function):
    """hidden [n, d], weight [v, d] -> logprobs [E], entropy [p n], top and ids [p n, k]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        places: _Places,
        kept: torch.Tensor,
        head: Head,
        asked: _Asked,
    ) -> tuple[torch.Tensor | None, ...]:
        columns, formula, count = head.columns, head.formula, places.count
        logprobs = hidden.new_zeros(len(kept), dtype=head.dtype)
        lse = hidden.new_empty(count, dtype=head.dtype)
        entropy = torch.empty_like(lse) if asked.entropy else None
        top = ids = None
        if asked.top_k is not None:
            top = lse.new_empty((count, asked.top_k))
            ids = torch.empty_like(top, dtype=torch.int64)
        for tile, _, z in tiles(head, Tokens(hidden, weight, places.labels)):
            rows, (some, local) = places.rows(tile), places.within(tile)
            stats = row_stats(z, no_labels(z), columns, formula, head.dtype, entropy=asked.entropy)
            stats = head.split.merge(stats)
            lse[rows] = stats.lse
            if entropy is not None and stats.entropy is not None:
                entropy[rows] = stats.entropy
            labels = places.labels[some]
            logprobs[some] = label_logits(z, local, labels, columns, formula, head.dtype).logits
            if top is not None and ids is not None:
                values, winners = _largest(z, top.shape[1], head)
                top[rows], ids[rows] = values - stats.lse[:, None], winners.to(torch.int64)
        logprobs = torch.where(kept, head.split.total(logprobs) - lse[places.row], 0)
        ctx.places, ctx.head = places, head
        ctx.save_for_backward(hidden, weight, kept, lse, entropy)
        ctx.mark_non_differentiable(*(x for x in (top, ids) if x is not None))
        ctx.set_materialize_grads(False)
        return logprobs, entropy, top, ids

    @staticmethod
    @first_order_only("linear_logprobs")
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_logprobs, of_entropy, *_ = arrived
        hidden, weight, kept, lse, entropy = ctx.saved_tensors
        places, head = ctx.places, ctx.head
        wants_dh, wants_dw = ctx.needs_input_grad[:2]
        if of_logprobs is None and of_entropy is None:
            return (None,) * 6
        if of_logprobs is None:
            of_logprobs = lse.new_zeros(len(kept))
        of_logprobs = torch.where(kept, of_logprobs, 0)
        dh = torch.empty_like(hidden) if wants_dh else None
        dw = torch.zeros_like(weight, dtype=head.dtype) if wants_dw else None
        tokens = Tokens(hidden, weight, places.labels)
        found, columns, formula = GradientSum(head, tokens, dh, dw), head.columns, head.formula
        for tile, h, z in tiles(head, tokens):
            rows, (some, local) = places.rows(tile), places.within(tile)
            mine, labels = of_logprobs[some], places.labels[some]
            at = label_logits(z, local, labels, columns, formula, head.dtype)  # before z changes
            of_softmax = lse.new_zeros(len(z)).index_add_(0, local, mine)
            if of_entropy is None:
                softmax_gradient_(z, no_labels(z), lse[rows], -of_softmax, columns, formula)
            else:
                given = lse[rows], entropy[rows], of_softmax, of_entropy[rows]
                entropy_gradient_(z, *given, columns, formula)
            by_label = (mine * at.slope).masked_fill(mine == 0, 0)  # the slope may be NaN
            z.index_put_((local, at.place), by_label.to(z.dtype), accumulate=True)
            used = lse.new_zeros(len(z)).index_add_(0, local, (mine != 0).to(lse.dtype)) != 0
            if of_entropy is not None:
                used |= of_entropy[rows] != 0
            found.put(tile, h, z, ~used)
        found.finish()
        return dh, None if dw is None else dw.to(weight.dtype), *(None,) * 4


def no_labels(z: torch.Tensor) -> torch.Tensor:
    """Labels outside every rank's columns: what belongs to labels is added by `_Places`."""
    return torch.full((len(z),), -1, dtype=torch.int64, device=z.device)


def _largest(z: torch.Tensor, count: int, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, count]: the largest logits over the vocabulary of all ranks, and their rows."""
    own = torch.stack(largest(z, count, head.columns, head.formula, head.dtype))
    values, winners = head.split.every(own).permute(1, 2, 0, 3).flatten(2)
    best, index = values.topk(count, 1)
    return best, winners.gather(1, index)
