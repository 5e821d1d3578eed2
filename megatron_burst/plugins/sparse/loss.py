# SPDX-License-Identifier: Apache-2.0
"""`mb.indexer_loss`: how far the indexer is from what attention looks at, over the selection.

Walks over the ring: the log-sum-exp of attention where it is not given, its probabilities, the
index scores, and backward the gradients of the index keys. What a rank keeps is as large as its
selection.

Shape letters: s local rows, b batch, i index heads, k index key heads, h query heads, d width,
H selections of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...comm.groups import Groups
from ...comm.packing import CallTag, Message
from ...execution import ring
from ...execution.function import StoredResults
from ...execution.rank_plan import KernelCall, Tensors
from ...kernels.autograd import first_order_only, outside_graphs, refuse_transforms
from ...kernels.online_softmax import accumulation_dtype
from ...planning.plan import Plan
from ...planning.validate import QKV, NeedsGrad, Request, check_shapes
from .attention import check_selection, over_selection, selected_setting
from .indexer import (
    NOTHING,
    IndexOperation,
    keys_of_chunk,
    over_units,
    passing,
    tags_of,
    walk,
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
    """KL(attention ; softmax of the index scores) of every query over what was selected for it.

    index_q, index_k, index_weights, rule: as of the `mb.select` that made `selection`. q [s, b, h,
    d], k [s, b, key heads, d]: of the attention over it; its probabilities are summed over the
    heads that share a selection, and over tp_group (whose ranks hold other heads of the same rows),
    and normalised; of a unit of several positions they are summed too.

    lse: [s, b, h], as `mb.sparse_attention(..., return_lse=True)` returns it for the same tensors;
    without it keys travel once more to find it. A sink that is in it takes its share of each head.

    Returns [s, b, H] of this rank's rows, in float32 (float64 for float64 tensors), with gradients
    of index_q, index_k and index_weights, and none of q and k. A query that sees nothing has 0.

    scale: as of `mb.sparse_attention`. plan, groups, algorithm, label: as of `mb.select`.
    Keys travel once, index keys too, and again in backward, with their gradients. Inside
    `mb.checkpoint` the store keeps the loss and its slopes, as large as the selection. Cannot be
    differentiated twice. Raises ValueError for unsupported arguments, as `mb.select` does.
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
    part = _Part(
        rule=rule_of(rule),
        selection=selection,
        attention=attention,
        index=index,
        calls=_calls(attention, index, label, lse is None),
        tp_group=tp_group,
        main=(q, k, lse),
    )
    what = "indexer loss", described(part.rule), options.softmax_scale, attention.call
    loss: Any = _IndexerLoss.apply(part, at.kept(what, label), index_q, index_k, index_weights)
    return loss


@dataclass(frozen=True, kw_only=True)
class SelectedProbabilities(SelectedOperation):
    """The walk of `mb.indexer_loss` over the keys of attention, on one rank; its arguments.

    grouped: whether the call has a tp_group.
    """

    q: Any
    k: Any
    lse: Any
    selection: Any
    grouped: bool

    def tensors(self) -> QKV:
        check_shapes(self.q, self.k, self.k)
        check_selection(self.selection)
        q, k, lse = self.q.detach(), self.k.detach(), self.lse
        wanted = tuple(q.shape[:3]), accumulation_dtype(q.dtype), q.device
        tensor = isinstance(lse, torch.Tensor)
        found = (tuple(lse.shape), lse.dtype, lse.device) if tensor else lse
        if lse is not None and found != wanted:
            raise ValueError(
                f"lse must be {wanted}, as mb.sparse_attention(..., return_lse=True) returns it, "
                f"got {found!r:.100}"
            )
        return q, k, k[..., :1]

    def adapted(self, request: Request) -> Request:
        request = over_selection(request, self.selection, "aten", latent=False)
        q, k, v = request.tensors
        facts = {"lse": self.lse is not None, "tp_group": self.grouped}
        return replace(request, tensors=(q, k, v[..., :0]), facts=request.facts | facts)


@dataclass(frozen=True, kw_only=True)
class SelectedScores(IndexOperation):
    """The walk of `mb.indexer_loss` over the index keys, on one rank; its arguments."""

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
                f"rule {type(rule).__name__} has no loss of its own: its queries and keys learn in "
                "the attention over compressed keys"
            )
        return rule

    def adapted(self, request: Request) -> Request:
        rule, ids = self.checked_rule(), self.selection.ids
        q, k, _ = request.tensors
        heads = rule.selections(q.shape[2] // rule.block, k.shape[2])
        found = tuple(ids.shape[:3]), self.selection.block
        wanted = len(q) * rule.block, q.shape[1], heads
        if found != (wanted, rule.block):
            raise ValueError(
                f"selection: rule {type(rule).__name__} makes {wanted} selections of "
                f"blocks of {rule.block}, got {found[0]} of {found[1]}"
            )
        return over_units(request, rule, ids.shape[3])


def _calls(attention: Plan, index: Plan, label: object, lse: bool) -> list[CallTag]:
    """One for each walk of forward; the last also for that of backward."""
    walks = [(attention, "log-sum-exp")] if lse else []
    return tags_of([*walks, (attention, "probabilities"), (index, "index scores")], label)


# --- one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One rank's part of a call. main: q and k of attention, and its lse or None."""

    rule: SelectionRule
    selection: Selection
    attention: Plan
    index: Plan
    calls: list[CallTag]
    tp_group: dist.ProcessGroup | None
    main: tuple[Any, ...]


@dataclass
class _LogSumExp:
    kernel: SelectedAten
    scale: float
    lse: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[Message]
    ) -> None:
        (q,), (k,) = queries, keys
        self.kernel.add_lse_(q, k, call.work, self.scale, self.lse)


@dataclass
class _Probabilities(_LogSumExp):
    total: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[Message]
    ) -> None:
        (q,), (k,) = queries, keys
        self.kernel.add_probabilities_(q, k, call.work, self.scale, self.lse, self.total)


@dataclass
class _IndexScores:
    """scores [s, b, H, top_k]: of every selected unit, as its keys pass by."""

    part: _Part
    q: torch.Tensor
    weights: torch.Tensor | None
    scores: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[Message]
    ) -> None:
        q, rule, ids, work = self.q, self.part.rule, self.part.selection.ids, call.work
        _, units, _ = work.on(q.device)
        k = keys_of_chunk(keys[0], work, rule)
        for rows in tiles(len(q), len(k) * q.shape[1] * q.shape[2]):
            weights = None if self.weights is None else wide(self.weights[rows])
            found = rule.scores(wide(q[rows]), k, weights)
            at, there = _where(ids[rows], units)
            if not self.part.selection.checked:  # what the mask hides takes no part
                seen = passing(work, rows, rule.block, q.device).seen
                of_units = seen[:, None, None].expand(*there.shape[:3], -1)
                there &= of_units.gather(-1, at)
            self.scores[rows] = torch.where(there, found.gather(-1, at), self.scores[rows])


@dataclass
class _IndexGradients:
    """slope [s, b, H, top_k]: the gradient of every score. Adds to dq, dweights and the sums."""

    part: _Part
    q: torch.Tensor
    weights: torch.Tensor | None
    slope: torch.Tensor
    dq: torch.Tensor
    dweights: torch.Tensor | None

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[Message]
    ) -> None:
        q, rule, ids, (dk, *_) = self.q, self.part.rule, self.part.selection.ids, sums[1].tensors
        _, units, order = call.work.on(q.device)
        k = keys_of_chunk(keys[0], call.work, rule)
        dkeys = torch.zeros_like(k)
        for rows in tiles(len(q), len(k) * q.shape[1] * q.shape[2]):
            at, there = _where(ids[rows], units)
            slope = self.slope[rows].masked_fill(~there, 0.0)
            leaves = [wide(q[rows]), k]
            leaves += [] if self.weights is None else [wide(self.weights[rows])]
            leaves = [t.detach().requires_grad_() for t in leaves]
            with torch.enable_grad():
                found = rule.scores(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
                chosen = (found.gather(-1, at) * slope).sum()
            if not chosen.requires_grad:  # a rule that scores without any of them
                continue
            grads = torch.autograd.grad(chosen, leaves, materialize_grads=True)
            self.dq[rows] += grads[0]
            dkeys += grads[1]
            if self.dweights is not None:
                self.dweights[rows] += grads[2]
        dk.index_add_(0, order, rows_of_parts(dkeys, rule))


def _where(ids: torch.Tensor, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where selected units are among those of a chunk, and whether they are."""
    wanted = ids.long()
    at = torch.searchsorted(units, wanted).clamp_(max=len(units) - 1)
    return at, units[at] == wanted


def _walk(plan: Plan, tag: CallTag, compute: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Let the keys of attention of all ranks come by."""
    (part,) = ring.head_chunks(plan.rank_plan, q.shape[2], k.shape[2])
    own: dict[str, Tensors] = {"query": (q,), "kv": (k,)}
    run = plan.rank_plan.chunks[0].forward
    ring.run([ring.Ring(plan.rank_plan, run, tag, part, compute, own, NOTHING)])


def _forward(part: _Part, shard: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss [s, b, H], its gradient by every index score [s, b, H, top_k])."""
    index_q, index_k, weights = shard
    q, k = (t.detach().contiguous() for t in part.main[:2])
    lse = part.main[2]
    ids, plan = part.selection.ids, part.attention
    kernel, scale = SelectedAten(part.selection, latent=False), plan.rank_plan.scoring.scale
    if lse is None:
        lse = wide(q).new_full(q.shape[:3], float("-inf"))
        _walk(plan, part.calls[0], _LogSumExp(kernel, scale, lse), q, k)
    else:
        lse = lse.detach()
    total = lse.new_zeros(ids.shape)
    compute = _Probabilities(kernel, scale, lse, total)
    _walk(plan, part.calls[-2], compute, q, k)
    if part.tp_group is not None:
        dist.all_reduce(total, group=part.tp_group)
    scores = total.new_full(ids.shape, float("-inf"))
    compute, rank_plan = _IndexScores(part, index_q, weights, scores), part.index.rank_plan
    rows = rows_of_units(index_k, part.rule)
    walk(rank_plan, rank_plan.chunks[0].forward, part.calls[-1], compute, rows)
    p = total / total.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    # Places that are not taken; and padding attends to nothing, also where it has selected some.
    none = (scores == float("-inf")) | (total.sum(dim=-1, keepdim=True) == 0)
    log = (scores - lse).masked_fill(none, 0.0)
    loss = (torch.xlogy(p, p) - p * log).sum(dim=-1)
    return loss, log.exp().masked_fill(none, 0.0) - p


def _backward(
    part: _Part, dloss: torch.Tensor, shard: Tensors, slope: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    q, k, weights = shard
    dweights = None if weights is None else torch.zeros_like(wide(weights))
    dq, slope = torch.zeros_like(wide(q)), slope * dloss.unsqueeze(-1)
    compute = _IndexGradients(part, q, weights, slope, dq, dweights)
    rows, rank_plan = rows_of_units(k, part.rule), part.index.rank_plan
    sums = {"dquery": [], "dkv": [rows.shape[1:]]}
    run = rank_plan.chunks[0].backward
    done = walk(rank_plan, run, part.calls[-1], compute, rows, sums)
    (dk,) = done.partials.whole(run.totals["dkv", rank_plan.ring.rank])
    dk = gradient_of_keys(dk, part.rule)
    if dweights is not None:
        dweights = dweights.to(weights.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dweights


class _IndexerLoss(torch.autograd.Function):
    """The loss of this rank as one autograd function; shard: index_q, index_k, index_weights."""

    @staticmethod
    def forward(
        ctx: Any, part: _Part, kept: StoredResults | None, *shard: torch.Tensor | None
    ) -> torch.Tensor:
        own: Any = tuple(None if t is None else t.contiguous() for t in shard)
        groups = part.index.groups
        stored = None if kept is None else kept.load()
        if stored is None:
            with groups.running(own[0].device.type):
                loss, slope = _forward(part, own)
            if kept is not None:
                kept.save((loss.detach(), slope.detach()))
        else:
            loss, slope = (t.detach() for t in stored)
        # What only forward needs would live as long as the loss.
        ctx.part = replace(part, main=())
        ctx.save_for_backward(*own, slope)
        return loss

    @staticmethod
    @first_order_only("mb.indexer_loss")
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = ctx.part.index.groups
        groups.check()
        groups.calls.backward(ctx.part.calls[-1])
        *shard, slope = ctx.saved_tensors  # once: a checkpoint gives them no second time
        with groups.running(dloss.device.type):
            return None, None, *_backward(ctx.part, dloss, tuple(shard), slope)
