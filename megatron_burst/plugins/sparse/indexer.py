# SPDX-License-Identifier: Apache-2.0
"""`mb.select`: the top_k best units of keys of every query, over ranks.

Index keys travel as keys of attention do, a row for each unit; each rank keeps the best units of
its own queries so far.

Shape letters: s local rows, r some of them, u units of a chunk, n means or keys of a unit, b batch,
i index heads, k index key heads, d width, H selections of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...comm.groups import Groups
from ...comm.packing import CallTag, Message
from ...execution import ring
from ...execution.rank_plan import KernelCall, RankPass, RankPlan, Tensors
from ...kernels.autograd import outside_graphs, refuse_transforms
from ...kernels.online_softmax import accumulation_dtype
from ...layout import LayoutName
from ...layout.layouts import Layout
from ...masks import Causal, Mask
from ...options import AttentionOptions
from ...planning.plan import Plan
from ...planning.validate import QKV, Request, check_shapes
from .pairs import PairKernel, SelectedPairs, tiles
from .plans import SelectedOperation, plan_of, setting
from .rules import SelectionRule, described, forced, parts, rule_of
from .selection import Selection, selected
from .top_k import add_units_, in_order, no_units
from .units import (
    UnitLayout,
    by_units,
    is_causal,
    keys_of_units,
    rows_of_units,
    stand_ins_of_units,
)

EVEN = 64  # keys of a product of matrices are a multiple of so many


@outside_graphs
@torch.no_grad()
def select(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor | None = None,
    *,
    rule: str | SelectionRule,
    top_k: int,
    plan: Plan | None = None,
    groups: Groups | None = None,
    layout: LayoutName | Layout | None = None,
    mask: Mask | None = None,
    algorithm: str | None = None,
    label: object = None,
) -> Selection:
    """Select the `top_k` units of keys with the best index scores, for every query.

    index_q [s, b, i, d], index_k [s, b, k, d], index_weights [s, b, i] (for rules that weigh index
    heads, else None): this rank's shard. Returns a `Selection`. Nothing of it has a gradient (see
    `mb.indexer_loss`).

    rule: "dsa", "qsa", "moba", "msa", "nsa", an object of their classes in
    `megatron_burst.plugins.sparse.rules` with another block, or one of your own class. Scores are
    float32, of float64 tensors float64. Of equal scores the lower unit is taken; a query that sees
    fewer units takes all of them; where the rule says so its own block is one of them. Infinities
    rank as the largest numbers, NaN last.

    plan: of `mb.prepare`, whose groups, layout, mask and algorithm are taken, without a collective
    (if it was "auto", the fastest for this call by the rates of the plan); else groups, layout
    (zigzag), mask (causal) and algorithm, one in which keys travel (burst) or "auto", of which all
    ranks agree at each call. label: as of `mb.attention`.

    Inside `mb.checkpoint` the store keeps the selection of all rows, and the recompute takes it.

    Rules with blocks need layouts that leave each block whole on a rank, and masks (`Causal`,
    `Full`, `Documents`, combined by &) that begin no document within one. Raises ValueError for
    other arguments, the same on every rank (with a plan: on the rank that has them).
    """
    refuse_transforms("mb.select")
    at = setting(plan, groups, layout, mask, algorithm)
    operation = SelectUnits(
        groups=at.groups, made=at.made, options=at.options, rule=rule, top_k=top_k,
        index_q=index_q, index_k=index_k, index_weights=index_weights,
    )  # fmt: skip
    made = plan_of(operation)
    known_rule = rule_of(rule)
    kept = at.kept(("selection", described(known_rule), top_k, made.call), label)
    stored = None if kept is None else kept.load()
    if stored is None:
        walks = ["scores"]
        if getattr(known_rule, "softmax", False):
            walks.insert(0, "log-sum-exp")
        tags = tags_of([(made, name) for name in walks], label)
        with at.groups.running(index_q.device.type):
            stored = (_select(operation, made, tags),)
        if kept is not None:
            kept.save(stored)
    layout, mask = made.layout, Causal() if at.options.mask is None else at.options.mask
    layout = layout.of if isinstance(layout, UnitLayout) else layout
    return selected(stored[0], layout, mask, known_rule.block)


@dataclass(frozen=True, kw_only=True)
class IndexOperation(SelectedOperation):
    """A call in whose ring index keys travel, a row for each unit, on one rank; its arguments."""

    rule: str | SelectionRule
    index_q: Any
    index_k: Any
    index_weights: Any

    def checked_rule(self) -> SelectionRule:
        """Return the rule of the call. ValueError if it does not serve this operation."""
        return rule_of(self.rule)

    def tensors(self) -> QKV:
        return index_stand_ins(self.checked_rule(), self.index_q, self.index_k, self.index_weights)

    def ring_options(self) -> AttentionOptions:
        return by_units(self.options, self.groups.size, self.index_q, self.checked_rule())


@dataclass(frozen=True, kw_only=True)
class SelectUnits(IndexOperation):
    """A call of `mb.select` on one rank; its arguments."""

    top_k: int

    def checked_rule(self) -> SelectionRule:
        if type(self.top_k) is not int or self.top_k < 1:
            raise ValueError(f"top_k must be a positive integer, got {self.top_k!r}")
        rule = super().checked_rule()
        if self.top_k < (least := forced(rule)):
            raise ValueError(
                f"top_k must be at least {least}, the blocks that rule {type(rule).__name__} "
                f"always selects, got {self.top_k}"
            )
        return rule

    def adapted(self, request: Request) -> Request:
        return over_units(request, self.checked_rule(), self.top_k)


def index_stand_ins(rule: SelectionRule, q: Any, k: Any, weights: Any) -> QKV:
    """Return stand-ins for q, k and v of a ring of units. ValueError for index tensors that do not
    fit the rule.
    """
    for name, tensor in (("index_q", q), ("index_k", k)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"{name} must be a tensor [s, b, heads, width], got {got!s:.100}")
    if rule.weighted != (weights is not None):
        words = "needs index_weights" if rule.weighted else "takes no index_weights"
        raise ValueError(f"index_weights: rule {type(rule).__name__} {words}, got {weights!r:.60}")
    if weights is not None:
        shape, dtypes = tuple(q.shape[:3]), {q.dtype, accumulation_dtype(q.dtype)}
        tensor = isinstance(weights, torch.Tensor)
        found = tensor and (tuple(weights.shape), weights.device)
        if found != (shape, q.device) or weights.dtype not in dtypes:
            got = f"{found} {weights.dtype}" if tensor else repr(weights)
            raise ValueError(
                f"index_weights must be {shape} on {q.device}, one of each index head, and "
                f"{' or '.join(map(str, sorted(dtypes, key=str)))}, got {got:.100}"
            )
    try:
        check_shapes(q, k, k)
    except ValueError as error:
        raise ValueError(f"index_q and index_k, checked as q and k: {error}") from error
    rule.selections(q.shape[2], k.shape[2])
    return stand_ins_of_units(q, k, rule)


def over_units(request: Request, rule: SelectionRule, top_k: int) -> Request:
    """Return the request of a ring of units: no values travel with the index keys."""
    q, k, v = request.tensors
    facts = {"rule": described(rule), "top_k": top_k} | request.facts  # first in messages
    heads = rule.selections(q.shape[2] // rule.block, k.shape[2])
    pairs = PairKernel(Selecting, rule, heads, top_k)
    return replace(request, kernel=pairs, tensors=(q, k, v[..., :0]), facts=facts)


def tags_of(walks: Sequence[tuple[Plan, str]], label: object) -> list[CallTag]:
    """What the messages of each walk bear, in their order. Without a label the first of them is
    told by the line that calls.
    """
    first = None if label is None else (label, walks[0][1])
    labels = [first, *((label, name) for _, name in walks[1:])]
    return [
        plan.groups.calls.forward(plan.identity, each, False)
        for (plan, _), each in zip(walks, labels, strict=True)
    ]


def _select(operation: SelectUnits, plan: Plan, tags: Sequence[CallTag]) -> torch.Tensor:
    """Return the ids of the selection of one rank."""
    rule, top_k = rule_of(operation.rule), operation.top_k
    q, k, weights = operation.index_q, operation.index_k, operation.index_weights
    rank_plan, dtype, rows = plan.rank_plan, accumulation_dtype(q.dtype), rows_of_units(k, rule)
    shape = (*q.shape[:2], rule.selections(q.shape[2], k.shape[2]), top_k)
    scores, units = no_units(shape, q.new_empty(0, dtype=dtype))
    if getattr(rule, "softmax", False):
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)
        walk(rank_plan, rank_plan.chunks[0].forward, tags[0], _MeansSeen(rule, q, lse), rows)
        compute = _SelectingBySoftmax(rule, q, None, scores, units, lse.to(dtype))
    else:
        compute = Selecting(rule, q, weights, scores, units)
    walk(rank_plan, rank_plan.chunks[0].forward, tags[-1], compute, rows)
    return in_order(units)


# Nothing is summed or sent back: what was found stays with what computes it.
NOTHING: dict[str, Any] = {"out": [torch.Size((0,))]}


def walk(
    rank_plan: RankPlan,
    run: RankPass,
    tag: CallTag,
    compute: Any,
    rows: torch.Tensor,
    sums: dict[str, Any] = NOTHING,
) -> ring.Ring:
    """Let the rows of units of all ranks come by. Queries stay with `compute`, in their own dtype;
    a row of each unit stands for them in the ring.
    """
    (part,) = ring.head_chunks(rank_plan, rank_plan.heads, rank_plan.kv_heads)
    own: dict[str, Tensors] = {"query": (rows[..., :1],), "kv": (rows,)}
    one = ring.Ring(rank_plan, run, tag, part, compute, own, sums)
    ring.run([one])
    return one


class Passing(NamedTuple):
    """Units that pass by, of some rows of the queries. units int64 [u], own [r]: the unit of each
    row; seen bool [r, u]; place [r]: of each row in its unit.
    """

    units: torch.Tensor
    own: torch.Tensor
    seen: torch.Tensor
    place: torch.Tensor
    causal: bool


def passing(work: SelectedPairs, rows: slice, block: int, device: torch.device) -> Passing:
    """What the queries of these rows see of a chunk of units."""
    mine, units, _ = work.on(device)
    row = torch.arange(rows.start, rows.stop, device=device)
    which = row // block
    seen = work.sees(which, units.expand(len(which), -1))
    return Passing(units, mine[which], seen, row % block, is_causal(work.mask))


def keys_of_chunk(rows: torch.Tensor, work: SelectedPairs, rule: SelectionRule) -> torch.Tensor:
    """Its keys, or means, in the order of their positions, as `SelectionRule.scores` takes them."""
    _, _, order = work.on(rows.device)
    rows = rows if work.order is None else rows.index_select(0, order)
    return wide(keys_of_units(rows, rule))


@dataclass(frozen=True)
class Selecting:
    """What a pair computes: the scores of its units, from which the best are kept."""

    rule: SelectionRule
    q: torch.Tensor
    weights: torch.Tensor | None
    scores: torch.Tensor
    units: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[Message]
    ) -> None:
        q, k, work = self.q, keys_of_chunk(keys[0], call.work, self.rule), call.work
        for rows in tiles(len(q), max(EVEN, len(k)) * q.shape[1] * q.shape[2]):
            at = passing(work, rows, self.rule.block, q.device)
            new = self._scores(rows, k, at)
            finite = torch.finfo(new.dtype)  # what is seen ranks between what is hidden and forced
            new = new.nan_to_num(finite.min, finite.max, finite.min)
            new = new.masked_fill(~at.seen[:, None, None], float("-inf"))
            if forced(self.rule):
                always = self._always(at, work, rows)[:, None, None]
                new = new.masked_fill(always, float("inf"))
            add_units_(self.scores[rows], self.units[rows], new, at.units.to(torch.int32))

    def _scores(self, rows: slice, k: torch.Tensor, at: Passing) -> torch.Tensor:
        weights = None if self.weights is None else self.weights[rows]
        return evenly(self.rule, self.q[rows], k, weights)[..., : len(at.units)]

    def _always(self, at: Passing, work: SelectedPairs, rows: slice) -> torch.Tensor:
        """Bool [r, u]: what is selected whatever its score."""
        rule, behind = self.rule, at.own[:, None] - at.units
        found = (behind == 0) if rule.own else torch.zeros_like(at.seen)
        if near := getattr(rule, "near", 0):
            found = found | ((behind > 0) & (behind <= near))
        if getattr(rule, "first", False):
            which = torch.arange(rows.start, rows.stop, device=at.units.device) // rule.block
            before = (at.units - 1).clamp(min=0).expand(len(which), -1)
            found = found | (at.units == 0) | ~work.sees(which, before)
        return found & at.seen


@dataclass(frozen=True)
class _MeansSeen:
    """lse float64 [s, b, i]: the log-sum-exp of the scores of all means that a query sees. In
    float64, because how many ranks there are must not show in what is rounded from it.
    """

    rule: SelectionRule
    q: torch.Tensor
    lse: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[Message]
    ) -> None:
        q, k, work = self.q, keys_of_chunk(keys[0], call.work, self.rule), call.work
        for rows in tiles(len(q), max(EVEN, len(k)) * q.shape[1] * q.shape[2]):
            at = passing(work, rows, self.rule.block, q.device)
            found = _of_means(self.rule, q[rows], k, at).double().logsumexp(dim=-1)
            torch.logaddexp(self.lse[rows], found, out=self.lse[rows])


@dataclass(frozen=True)
class _SelectingBySoftmax(Selecting):
    """By the softmax of the scores of means. lse [s, b, i]: of all that a query sees."""

    lse: torch.Tensor

    def _scores(self, rows: slice, k: torch.Tensor, at: Passing) -> torch.Tensor:
        found = _of_means(self.rule, self.q[rows], k, at)
        lse = self.lse[rows].masked_fill(self.lse[rows] == float("-inf"), 0.0)
        p = (found - lse.unsqueeze(-1)).exp().unflatten(2, (self.scores.shape[2], -1)).sum(3)
        return p.unflatten(-1, (len(at.units), -1)).sum(-1)


def _of_means(rule: SelectionRule, q: torch.Tensor, k: torch.Tensor, at: Passing) -> torch.Tensor:
    """Scores [r, b, i, u * n] of the means, -inf where a mean is not seen as a whole."""
    n = parts(rule)
    seen = at.seen.unsqueeze(-1).expand(-1, -1, n)
    if at.causal:
        ends = torch.arange(1, n + 1, device=q.device) * (rule.block // n) - 1
        mine = (at.own[:, None] == at.units).unsqueeze(-1)
        seen = seen & (~mine | (at.place[:, None, None] >= ends))
    found = evenly(rule, q, k, None)[..., : len(k)]
    return found.masked_fill(~seen.flatten(1)[:, None, None], float("-inf"))


def evenly(
    rule: SelectionRule, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """The scores of some rows, with more columns of no use behind them. Products of matrices round
    what lies in an incomplete tile otherwise, and how many rows a chunk has must not show.
    """
    rows, n = len(q), parts(rule)
    units = -(-len(k) // n) + -(len(k) // n) % (EVEN // math.gcd(EVEN, n))
    more = 16 // math.gcd(16, q.shape[2])  # rows of a product are those of all heads
    q, k = _longer(wide(q), more), _longer(wide(k), units * n)
    weights = None if weights is None else _longer(wide(weights), more)
    return rule.scores(q, k, weights)[:rows]


def _longer(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """X with zeros behind its rows, to a multiple of so many."""
    more = -len(x) % multiple
    return torch.cat([x, x.new_zeros(more, *x.shape[1:])]) if more else x


def wide(x: torch.Tensor) -> torch.Tensor:
    """X in the dtype in which scores are computed."""
    return x.to(accumulation_dtype(x.dtype))
