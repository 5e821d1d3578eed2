# SPDX-License-Identifier: Apache-2.0
"""Public operation `mb.indexer_loss`: KL divergence between attention and index scores.

Both distributions are over the selected units. Forward makes one pass over the ring for the
log-sum-exp of attention (unless the caller passes it), one for the probabilities of attention and
one for the index scores. Backward makes one pass for the gradients of the index keys. A rank keeps
tensors with the shape of its selection.

Shape letters: s local rows, b batch, i index heads, k index key heads, h query heads, d width, H
selections of a query row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...comm.groups import Groups
from ...comm.packing import CallTag
from ...execution import ring
from ...execution.buffers import OpenSum
from ...execution.function import StoredResults
from ...execution.rank_plan import KernelCall, Tensors
from ...kernels.autograd import first_order_only, outside_graphs, refuse_transforms
from ...kernels.online_softmax import accumulation_dtype
from ...planning.plan import Plan
from ...planning.validate import QKV, NeedsGrad, Request, check_shapes
from .attention import check_selection, over_selection, selected_setting
from .indexer import (
    NO_SUMS,
    IndexOperation,
    keys_of_chunk,
    over_units,
    run_pass,
    tags_of,
    visible_units,
    wide,
)
from .kernels import SelectedAten
from .pairs import tiles
from .plans import SelectedOperation, plan_of
from .rules import SelectionRule, described, rule_of
from .selection import Selection
from .units import gradient_of_keys, rows_of_parts, rows_of_units


@outside_graphs
def indexer_loss(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    selection: Selection,
    *,
    rule: str | SelectionRule,
    scale: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    plan: Plan | None = None,
    groups: Groups | None = None,
    algorithm: str | None = None,
    label: object = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return KL(attention ; softmax of the index scores) of every query over its selected units.

    The probabilities of attention are summed over the positions of a unit, over the heads that
    share a selection and over `tp_group`, and then normalized. Forward sends keys and index keys
    once. Backward sends index keys and their gradients.

    Inside `mb.checkpoint` the attention store keeps the loss and the gradient of each index score;
    the gradients have the shape of the selection. The result cannot be differentiated twice. It has
    gradients for index_q, index_k and index_weights, but not for q and k.

    Args:
        index_q: Same as in the `mb.select` call that made `selection`.
        index_k: Same as in the `mb.select` call that made `selection`.
        index_weights: Same as in the `mb.select` call that made `selection`.
        q: Queries of the attention over the selection [s, b, h, d].
        k: Keys of the attention over the selection [s, b, key heads, d].
        selection: Selection of the queries.
        rule: Same as in the `mb.select` call that made `selection`.
        scale: Same as in `mb.sparse_attention`.
        tp_group: Tensor-parallel group whose ranks have different attention heads of the same rows.
            None if this rank has all heads.
        plan: Same as in `mb.select`.
        groups: Same as in `mb.select`.
        algorithm: Same as in `mb.select`.
        label: Same as in `mb.select`.
        lse: Log-sum-exp [s, b, h] from `mb.sparse_attention(..., return_lse=True)` for the same
            tensors. If None, forward sends keys once more to compute it. If `lse` includes a sink,
            the probabilities of a head sum to less than 1 before they are normalized.

    Returns:
        The loss [s, b, H] of this rank's rows in float32 (float64 for float64 tensors). It is 0 for
        a query that sees no keys.

    Raises:
        ValueError: An argument is not supported; see `mb.select`.
    """
    refuse_transforms("mb.indexer_loss")
    at = selected_setting(selection, plan, groups, algorithm)
    options = replace(at.options, softmax_scale=at.scale(q, scale))
    attention = plan_of(
        SelectedProbabilities(
            groups=at.groups, made=at.made, options=options, selection=selection,
            grouped=tp_group is not None, q=q, k=k, lse=lse,
        )
    )  # fmt: skip
    index = plan_of(
        SelectedScores(
            groups=at.groups, made=at.made, options=at.options, rule=rule, selection=selection,
            tp_group=tp_group, index_q=index_q, index_k=index_k, index_weights=index_weights,
        )
    )  # fmt: skip
    loss_call = _LossCall(
        rule=rule_of(rule),
        selection=selection,
        attention=attention,
        index=index,
        calls=_calls(attention, index, label, lse is None),
        tp_group=tp_group,
        main=(q, k, lse),
    )
    key = "indexer loss", described(loss_call.rule), options.softmax_scale, attention.call
    loss: Any = _IndexerLoss.apply(
        loss_call, at.stored(key, label), index_q, index_k, index_weights
    )
    return loss


@dataclass(frozen=True, kw_only=True)
class SelectedProbabilities(SelectedOperation):
    """The part of a call of `mb.indexer_loss` that sends the keys of attention around the ring.

    The fields are arguments of `mb.indexer_loss`.

    Attributes:
        grouped: True if the call has a tp_group.
    """

    q: Any
    k: Any
    lse: Any
    selection: Any
    grouped: bool

    def tensors(self) -> QKV:
        check_selection(self.selection)
        check_shapes(self.q, self.k, self.k, self.selection.key_layout is not None)
        q, k, lse = self.q.detach(), self.k.detach(), self.lse
        expected = tuple(q.shape[:3]), accumulation_dtype(q.dtype), q.device
        tensor = isinstance(lse, torch.Tensor)
        actual = (tuple(lse.shape), lse.dtype, lse.device) if tensor else lse
        if lse is not None and actual != expected:
            raise ValueError(
                f"lse must be {expected}, as mb.sparse_attention(..., return_lse=True) returns it, "
                f"got {actual!r:.100}"
            )
        return q, k, k[..., :1]

    def adapted(self, request: Request) -> Request:
        request = over_selection(request, self.selection, "aten", latent=False)
        q, k, v = request.tensors
        facts = {"lse": self.lse is not None, "tp_group": self.grouped}
        return replace(request, tensors=(q, k, v[..., :0]), facts=request.facts | facts)


@dataclass(frozen=True, kw_only=True)
class SelectedScores(IndexOperation):
    """The part of a call of `mb.indexer_loss` that sends the index keys around the ring.

    The fields are arguments of `mb.indexer_loss`.
    """

    selection: Any
    tp_group: Any
    needs_grad: NeedsGrad = (False, True, False)

    def checked_rule(self) -> SelectionRule:
        group = self.tp_group
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"tp_group must be a process group or None, got {group!r:.100}")
        rule = super().checked_rule()
        if getattr(rule, "softmax", False):
            raise ValueError(
                f"rule {type(rule).__name__} has no indexer loss: its queries and keys are trained "
                "by the attention over compressed keys"
            )
        return rule

    def adapted(self, request: Request) -> Request:
        rule, ids = self.checked_rule(), self.selection.ids
        q, k, _ = request.tensors
        heads = rule.selections(q.shape[2] // rule.block, k.shape[2])
        actual = tuple(ids.shape[:3]), self.selection.block
        expected = len(q) * rule.block, q.shape[1], heads
        if actual != (expected, rule.block):
            raise ValueError(
                f"selection: rule {type(rule).__name__} requires ids with (rows, batch, heads) "
                f"{expected} and blocks of {rule.block}, got {actual[0]} and blocks of {actual[1]}"
                "; pass the selection of mb.select with this rule"
            )
        return over_units(request, rule, ids.shape[3])


def _calls(attention: Plan, index: Plan, label: object, lse: bool) -> list[CallTag]:
    """Return one message tag for each forward pass. Backward uses the last tag again.

    If `lse` is True, the first pass computes the log-sum-exp of attention.
    """
    passes = [(attention, "log-sum-exp")] if lse else []
    return tags_of([*passes, (attention, "probabilities"), (index, "index scores")], label)


# --- one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LossCall:
    """Arguments and plans of a call of `mb.indexer_loss` on one rank.

    Attributes:
        attention: Plan of the passes over the keys of attention.
        index: Plan of the passes over the index keys.
        calls: Tags of the forward passes.
        main: (q, k, lse or None) of attention; empty in backward.
    """

    rule: SelectionRule
    selection: Selection
    attention: Plan
    index: Plan
    calls: list[CallTag]
    tp_group: dist.ProcessGroup | None
    main: tuple[Any, ...]


@dataclass
class _AttentionLogSumExp:
    """Log-sum-exp of attention scores, lse [s, b, h]; each received chunk updates it."""

    kernel: SelectedAten
    scale: float
    lse: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        (q,), (k,) = queries, keys
        self.kernel.add_lse_(q, k, call.work, self.scale, self.lse)


@dataclass
class _AttentionProbabilities(_AttentionLogSumExp):
    """Sums of attention probabilities, total [s, b, H, top_k]; each received chunk adds to them."""

    total: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        (q,), (k,) = queries, keys
        self.kernel.add_probabilities_(q, k, call.work, self.scale, self.lse, self.total)


@dataclass
class _IndexScores:
    """Index scores of the selected units; each received chunk adds the scores of its units.

    `scores` is [s, b, H, top_k].
    """

    part: _LossCall
    q: torch.Tensor
    weights: torch.Tensor | None
    scores: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        q, rule, ids, work = self.q, self.part.rule, self.part.selection.ids, call.work
        _, units, _ = work.on(q.device)
        k = keys_of_chunk(keys[0], work, rule)
        for rows in tiles(len(q), len(k) * q.shape[1] * q.shape[2]):
            weights = None if self.weights is None else wide(self.weights[rows])
            scores = rule.scores(wide(q[rows]), k, weights)
            at, present = _find_units(ids[rows], units)
            if not self.part.selection.checked:  # skip units that the mask hides
                seen = visible_units(work, rows, rule.block, q.device).seen
                of_units = seen[:, None, None].expand(*present.shape[:3], -1)
                present &= of_units.gather(-1, at)
            self.scores[rows] = torch.where(present, scores.gather(-1, at), self.scores[rows])


@dataclass
class _IndexGradients:
    """Gradients of index queries, keys and weights; each received chunk adds to them.

    dq and dweights are complete on this rank, and the ring sums dk over ranks. slope [s, b, H,
    top_k] is the gradient of the loss with respect to each index score.
    """

    part: _LossCall
    q: torch.Tensor
    weights: torch.Tensor | None
    slope: torch.Tensor
    dq: torch.Tensor
    dweights: torch.Tensor | None

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        q, rule, ids, (dk, *_) = self.q, self.part.rule, self.part.selection.ids, sums[1].tensors
        _, units, order = call.work.on(q.device)
        k = keys_of_chunk(keys[0], call.work, rule)
        dkeys = torch.zeros_like(k)
        for rows in tiles(len(q), len(k) * q.shape[1] * q.shape[2]):
            at, present = _find_units(ids[rows], units)
            slope = self.slope[rows].masked_fill(~present, 0.0)
            leaves = [wide(q[rows]), k]
            leaves += [] if self.weights is None else [wide(self.weights[rows])]
            leaves = [t.detach().requires_grad_() for t in leaves]
            with torch.enable_grad():
                scores = rule.scores(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
                chosen = (scores.gather(-1, at) * slope).sum()
            if not chosen.requires_grad:  # the rule's scores do not depend on these tensors
                continue
            grads = torch.autograd.grad(chosen, leaves, materialize_grads=True)
            self.dq[rows] += grads[0]
            dkeys += grads[1]
            if self.dweights is not None:
                self.dweights[rows] += grads[2]
        dk.index_add_(0, order, rows_of_parts(dkeys, rule))


def _find_units(ids: torch.Tensor, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up selected units among the units of a chunk.

    Args:
        ids: Unit indices of the whole sequence [...]; -1 in unused entries.
        units: Unit indices of the chunk, ascending.

    Returns:
        Index of each id in `units`; and a bool tensor [...], False if `units` lacks the id.
    """
    selected_ids = ids.long()
    at = torch.searchsorted(units, selected_ids).clamp_(max=len(units) - 1)
    return at, units[at] == selected_ids


def _run_attention_pass(
    plan: Plan, tag: CallTag, compute: Any, q: torch.Tensor, k: torch.Tensor
) -> None:
    """Send the keys of attention around the ring; `compute` processes each received chunk."""
    (part,) = ring.head_chunks(plan.rank_plan, q.shape[2], k.shape[2])
    own: dict[str, Tensors] = {"query": (q,), "kv": (k,)}
    run = plan.rank_plan.chunks[0].forward
    ring.run([ring.Ring(plan.rank_plan, run, tag, part, compute, own, NO_SUMS)])


def _forward(part: _LossCall, shard: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss [s, b, H], and its gradient with respect to index scores [s, b, H, top_k]."""
    index_q, index_k, weights = shard
    q, k = (t.detach().contiguous() for t in part.main[:2])
    lse = part.main[2]
    ids, plan = part.selection.ids, part.attention
    kernel, scale = SelectedAten(part.selection, latent=False), plan.rank_plan.scoring.scale
    if lse is None:
        lse = wide(q).new_full(q.shape[:3], float("-inf"))
        _run_attention_pass(plan, part.calls[0], _AttentionLogSumExp(kernel, scale, lse), q, k)
    else:
        lse = lse.detach()
    total = lse.new_zeros(ids.shape)
    compute = _AttentionProbabilities(kernel, scale, lse, total)
    _run_attention_pass(plan, part.calls[-2], compute, q, k)
    if part.tp_group is not None:
        dist.all_reduce(total, group=part.tp_group)
    scores = total.new_full(ids.shape, float("-inf"))
    compute, rank_plan = _IndexScores(part, index_q, weights, scores), part.index.rank_plan
    rows = rows_of_units(index_k, part.rule)
    run_pass(rank_plan, rank_plan.chunks[0].forward, part.calls[-1], compute, rows)
    p = total / total.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    # Empty entries of the selection, and rows without attention: padding may have selected units.
    unused = (scores == float("-inf")) | (total.sum(dim=-1, keepdim=True) == 0)
    log = (scores - lse).masked_fill(unused, 0.0)
    loss = (torch.xlogy(p, p) - p * log).sum(dim=-1)
    return loss, log.exp().masked_fill(unused, 0.0) - p


def _backward(
    part: _LossCall, dloss: torch.Tensor, shard: Tensors, slope: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    q, k, weights = shard
    dweights = None if weights is None else torch.zeros_like(wide(weights))
    dq, slope = torch.zeros_like(wide(q)), slope * dloss.unsqueeze(-1)
    compute = _IndexGradients(part, q, weights, slope, dq, dweights)
    rows, rank_plan = rows_of_units(k, part.rule), part.index.rank_plan
    sums = {"dquery": [], "dkv": [rows.shape[1:]]}
    run = rank_plan.chunks[0].backward
    done = run_pass(rank_plan, run, part.calls[-1], compute, rows, sums)
    (dk,) = done.partials.total_rows(run.totals["dkv", rank_plan.ring.rank])
    dk = gradient_of_keys(dk, part.rule)
    if dweights is not None:
        dweights = dweights.to(weights.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dweights


class _IndexerLoss(torch.autograd.Function):
    """Autograd function of index_q, index_k and index_weights; returns this rank's loss."""

    @staticmethod
    def forward(
        ctx: Any, part: _LossCall, entry: StoredResults | None, *shard: torch.Tensor | None
    ) -> torch.Tensor:
        own: Any = tuple(None if t is None else t.contiguous() for t in shard)
        groups = part.index.groups
        stored = None if entry is None else entry.load()
        if stored is None:
            with groups.running(own[0].device.type):
                loss, slope = _forward(part, own)
            if entry is not None:
                entry.save((loss.detach(), slope.detach()))
        else:
            loss, slope = (t.detach() for t in stored)
        # Drop tensors that only forward needs; ctx would keep them as long as the loss.
        ctx.part = replace(part, main=())
        ctx.save_for_backward(*own, slope)
        return loss

    @staticmethod
    @first_order_only("mb.indexer_loss")
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = ctx.part.index.groups
        groups.check()
        groups.calls.backward(ctx.part.calls[-1])
        *shard, slope = ctx.saved_tensors  # read once: a checkpoint provides them only once
        with groups.running(dloss.device.type):
            return None, None, *_backward(ctx.part, dloss, tuple(shard), slope)
