# SPDX-License-Identifier: Apache-2.0
"""Public operation `mb.select`: the top_k best units of keys for every query, across ranks.

A unit is a block of consecutive keys. Index keys are sent like keys of attention, one row per unit.
Each rank keeps the best units of its own queries.

Shape letters: s local rows, r rows of a tile, u units of a chunk, n means per unit (all keys of the
unit, if the rule has no means), b batch, i index heads, k index key heads, d width, H selections of
a query row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...comm.groups import Groups
from ...comm.packing import CallTag
from ...execution import ring
from ...execution.buffers import OpenSum
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
from .rules import SelectionRule, described, forced, parts_per_unit, rule_of
from .selection import Selection, selected
from .top_k import add_units_, in_order, no_units
from .units import (
    UnitLayout,
    by_units,
    is_causal,
    keys_of_units,
    rows_of_units,
    unit_placeholders,
)

EVEN = 64  # the keys of a matrix product are padded to a multiple of this number


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

    A unit is one key, or a block of consecutive keys if the rule has blocks. Scores are float32
    (float64 for float64 tensors). Among units with equal scores the first is selected. A query that
    sees fewer than `top_k` units selects all of them. Some rules always select the query's own
    block. Infinite scores rank like the largest finite numbers, and NaN ranks last. The result has
    no gradient (see `mb.indexer_loss`).

    Inside `mb.checkpoint` the attention store keeps the selection of all rows. Recomputation reads
    the selection from the store.

    Args:
        index_q: Index queries of this rank's shard [s, b, i, d].
        index_k: Index keys of this rank's shard [s, b, k, d].
        index_weights: Weights of the index heads [s, b, i] for rules that use them, otherwise None.
        rule: "dsa", "qsa", "moba", "msa", "nsa", an instance of a class in
            `megatron_burst.plugins.sparse.rules` (for another block size), or an instance of a
            user's class. Rules with blocks require a layout that keeps each block on one rank. They
            also require a mask that is `Causal`, `Full` or `Documents`, or combines these with &.
            Documents must then start at multiples of the block size.
        top_k: Number of units per query and selection.
        plan: Plan of `mb.prepare`, with the groups, layout, mask and algorithm of the call. A call
            with a plan needs no collective to make its own plan. If the plan was made with
            algorithm "auto", the rates of the plan determine the fastest algorithm for this call.
        groups: Groups of the ranks, if no plan is given.
        layout: Layout, if no plan is given; default zigzag.
        mask: Mask, if no plan is given; default causal.
        algorithm: Algorithm that sends keys, or "auto", if no plan is given; default burst. If no
            plan is given, ranks compare the arguments in each call.
        label: Same as in `mb.attention`.

    Returns:
        The `Selection` of this rank's queries.

    Raises:
        ValueError: An argument is not supported. Every rank raises the same error. With a plan,
            only the rank with the invalid argument raises it.
    """
    refuse_transforms("mb.select")
    at = setting(plan, groups, layout, mask, algorithm)
    operation = SelectOperation(
        groups=at.groups, made=at.made, options=at.options, rule=rule, top_k=top_k,
        index_q=index_q, index_k=index_k, index_weights=index_weights,
    )  # fmt: skip
    made = plan_of(operation)
    checked_rule = rule_of(rule)
    entry = at.stored(("selection", described(checked_rule), top_k, made.call), label)
    stored = None if entry is None else entry.load()
    if stored is None:
        passes = ["scores"]
        if getattr(checked_rule, "softmax", False):
            passes.insert(0, "log-sum-exp")
        tags = tags_of([(made, name) for name in passes], label)
        with at.groups.running(index_q.device.type):
            stored = (_select(operation, made, tags),)
        if entry is not None:
            entry.save(stored)
    layout, mask = made.layout, Causal() if at.options.mask is None else at.options.mask
    layout = layout.of if isinstance(layout, UnitLayout) else layout
    key_layout = made.options.key_layout
    assert not isinstance(key_layout, str)  # options of plans are resolved
    return selected(stored[0], layout, mask, checked_rule.block, key_layout)


@dataclass(frozen=True, kw_only=True)
class IndexOperation(SelectedOperation):
    """One call, on one rank, of an operation that sends index keys, such as `mb.select`.

    Each row that is sent contains the index keys of one unit, a block of consecutive positions. The
    fields are arguments of `mb.select`.
    """

    rule: str | SelectionRule
    index_q: Any
    index_k: Any
    index_weights: Any

    def checked_rule(self) -> SelectionRule:
        """Return the selection rule as an object.

        Raises:
            ValueError: The operation does not support the rule.
        """
        return rule_of(self.rule)

    def tensors(self) -> QKV:
        return index_placeholders(
            self.checked_rule(), self.index_q, self.index_k, self.index_weights,
            other_keys=self.options.key_layout is not None,
        )  # fmt: skip

    def ring_options(self) -> AttentionOptions:
        return by_units(self.options, self.groups.size, self.index_q, self.checked_rule())


@dataclass(frozen=True, kw_only=True)
class SelectOperation(IndexOperation):
    """One call of `mb.select` on one rank, with its arguments as fields."""

    top_k: int

    def checked_rule(self) -> SelectionRule:
        if type(self.top_k) is not int or self.top_k < 1:
            raise ValueError(f"top_k must be a positive integer, got {self.top_k!r}")
        rule = super().checked_rule()
        if self.top_k < (least := forced(rule)):
            raise ValueError(
                f"top_k must be at least {least} (the number of blocks that rule "
                f"{type(rule).__name__} always selects), got {self.top_k}"
            )
        return rule

    def adapted(self, request: Request) -> Request:
        return over_units(request, self.checked_rule(), self.top_k)


def index_placeholders(rule: SelectionRule, q: Any, k: Any, weights: Any, other_keys: bool) -> QKV:
    """Check index tensors; return placeholders (q, k, v) for a ring that sends one row per unit.

    Args:
        rule: Selection rule, which sets the length of a unit (block of consecutive positions).
        q: Index queries [s, b, i, d].
        k: Index keys [s, b, k, d].
        weights: Weights of the index heads [s, b, i], or None.
        other_keys: True if keys and queries may have different numbers of rows.

    Raises:
        ValueError: The index tensors do not fit the rule.
    """
    for name, tensor in (("index_q", q), ("index_k", k)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"{name} must be a tensor [s, b, heads, width], got {got!s:.100}")
    if rule.weighted != (weights is not None):
        words = "requires a tensor" if rule.weighted else "requires None"
        raise ValueError(f"index_weights: rule {type(rule).__name__} {words}, got {weights!r:.60}")
    if weights is not None:
        shape, dtypes = tuple(q.shape[:3]), {q.dtype, accumulation_dtype(q.dtype)}
        tensor = isinstance(weights, torch.Tensor)
        actual = tensor and (tuple(weights.shape), weights.device)
        if actual != (shape, q.device) or weights.dtype not in dtypes:
            got = f"{actual} {weights.dtype}" if tensor else repr(weights)
            raise ValueError(
                f"index_weights must have shape {shape} (one weight per index head), device "
                f"{q.device} and dtype {' or '.join(map(str, sorted(dtypes, key=str)))}, got "
                f"{got:.100}"
            )
    try:
        check_shapes(q, k, k, other_keys)
    except ValueError as error:
        raise ValueError(f"index_q and index_k (here named q and k): {error}") from error
    rule.selections(q.shape[2], k.shape[2])
    return unit_placeholders(q, k, rule)


def over_units(request: Request, rule: SelectionRule, top_k: int) -> Request:
    """Return the checked arguments for a ring that sends index keys, one row per unit.

    A unit is a block of consecutive positions, which are selected together. Values are not sent.
    """
    q, k, v = request.tensors
    facts = {"rule": described(rule), "top_k": top_k} | request.facts  # first in messages
    heads = rule.selections(q.shape[2] // rule.block, k.shape[2])
    pairs = PairKernel(UnitSelector, rule, heads, top_k)
    return replace(request, kernel=pairs, tensors=(q, k, v[..., :0]), facts=facts)


def tags_of(passes: Sequence[tuple[Plan, str]], label: object) -> list[CallTag]:
    """Return one tag for each pass over the ring. The tag identifies the messages of the pass.

    Without a label, the first tag contains the source line of the caller.

    Args:
        passes: Plan and name of each pass.
        label: Label of the call, or None.
    """
    first = None if label is None else (label, passes[0][1])
    labels = [first, *((label, name) for _, name in passes[1:])]
    return [
        plan.groups.calls.forward(plan.identity, pass_label, False)
        for (plan, _), pass_label in zip(passes, labels, strict=True)
    ]


def _select(operation: SelectOperation, plan: Plan, tags: Sequence[CallTag]) -> torch.Tensor:
    """Return the selected units (blocks of consecutive positions) of this rank's queries.

    Args:
        operation: Arguments of the call.
        plan: Plan of the ring.
        tags: Message tag of each pass over the ring.

    Returns:
        Indices of units, int32 [s, b, H, top_k], as in `Selection.ids`.
    """
    rule, top_k = rule_of(operation.rule), operation.top_k
    q, k, weights = operation.index_q, operation.index_k, operation.index_weights
    rank_plan, dtype, rows = plan.rank_plan, accumulation_dtype(q.dtype), rows_of_units(k, rule)
    shape = (*q.shape[:2], rule.selections(q.shape[2], k.shape[2]), top_k)
    scores, units = no_units(shape, q.new_empty(0, dtype=dtype))
    if getattr(rule, "softmax", False):
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)
        run_pass(
            rank_plan, rank_plan.chunks[0].forward, tags[0], _MeanLogSumExp(rule, q, lse), rows
        )
        compute = _SoftmaxSelector(rule, q, None, scores, units, lse.to(dtype))
    else:
        compute = UnitSelector(rule, q, weights, scores, units)
    run_pass(rank_plan, rank_plan.chunks[0].forward, tags[-1], compute, rows)
    return in_order(units)


# For passes without sums over ranks: `compute` keeps its results on this rank.
NO_SUMS: dict[str, Any] = {"out": [torch.Size((0,))]}


def run_pass(
    rank_plan: RankPlan,
    run: RankPass,
    tag: CallTag,
    compute: Any,
    rows: torch.Tensor,
    sums: dict[str, Any] = NO_SUMS,
) -> ring.Ring:
    """Send the index keys of all ranks around the ring, and compute with each received chunk.

    A row has the index keys of one unit (block of consecutive positions). `compute` has the
    queries. The ring gets one placeholder row per unit in place of the queries.

    Args:
        rank_plan: Plan of the rank.
        run: Pass of the plan.
        tag: Tag of the messages.
        compute: Object whose method `pair` is called for each received chunk.
        rows: Index keys of this rank [u, b, k, n * d], one row per unit.
        sums: Tensors that are summed over ranks in this pass: for each kind of partial result (such
            as "dkv"), the shapes of one row of the tensors.

    Returns:
        The ring after the pass; its `partials` has the sums.
    """
    (part,) = ring.head_chunks(rank_plan, rank_plan.heads, rank_plan.kv_heads)
    own: dict[str, Tensors] = {"query": (rows[..., :1],), "kv": (rows,)}
    unit_ring = ring.Ring(rank_plan, run, tag, part, compute, own, sums)
    ring.run([unit_ring])
    return unit_ring


class VisibleUnits(NamedTuple):
    """Units (blocks of positions) of a chunk of keys, and their visibility to some query rows.

    Attributes:
        units: Indices of all units of the chunk, int64 [units].
        own: Index of the unit that contains each query row, int64 [rows].
        seen: Bool [rows, units], True for units that the query row sees.
        place: Offset of each query row in its own unit, int64 [rows].
        causal: True if the mask is causal.
    """

    units: torch.Tensor
    own: torch.Tensor
    seen: torch.Tensor
    place: torch.Tensor
    causal: bool


def visible_units(
    work: SelectedPairs, rows: slice, block: int, device: torch.device
) -> VisibleUnits:
    """Compute which units of a chunk of keys some query rows see.

    Args:
        work: Unit indices of the queries and of the chunk, in place of positions.
        rows: Query rows.
        block: Number of positions of a unit.
        device: Device of the result.
    """
    query_units, units, _ = work.on(device)
    row = torch.arange(rows.start, rows.stop, device=device)
    unit_row = row // block
    seen = work.sees(unit_row, units.expand(len(unit_row), -1))
    return VisibleUnits(units, query_units[unit_row], seen, row % block, is_causal(work.mask))


def keys_of_chunk(rows: torch.Tensor, work: SelectedPairs, rule: SelectionRule) -> torch.Tensor:
    """Return the index keys of a chunk, or means of them, in order of position.

    Args:
        rows: Received rows of the chunk [units, batch, key heads, n * width], one row per unit
            (block of consecutive positions).
        work: Positions of the units of the chunk.
        rule: Selection rule.

    Returns:
        Keys or means [units * n, batch, key heads, width] in the dtype of scores, for
        `SelectionRule.scores`; a unit has n keys or means.
    """
    _, _, order = work.on(rows.device)
    rows = rows if work.order is None else rows.index_select(0, order)
    return wide(keys_of_units(rows, rule))


@dataclass(frozen=True)
class UnitSelector:
    """Kernel that keeps the best units (blocks of positions) of each query, chunk by chunk.

    Attributes:
        rule: Selection rule.
        q: Index queries of this rank [s, b, i, d].
        weights: Weights of the index heads [s, b, i], or None.
        scores: Scores of the best units so far [s, b, H, top_k]; each received chunk updates them.
        units: Indices of the best units so far [s, b, H, top_k]; each received chunk updates them.
    """

    rule: SelectionRule
    q: torch.Tensor
    weights: torch.Tensor | None
    scores: torch.Tensor
    units: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        q, k, work = self.q, keys_of_chunk(keys[0], call.work, self.rule), call.work
        for rows in tiles(len(q), max(EVEN, len(k)) * q.shape[1] * q.shape[2]):
            at = visible_units(work, rows, self.rule.block, q.device)
            new = self._scores(rows, k, at)
            finite = torch.finfo(new.dtype)  # visible units rank between hidden and forced ones
            new = new.nan_to_num(finite.min, finite.max, finite.min)
            new = new.masked_fill(~at.seen[:, None, None], float("-inf"))
            if forced(self.rule):
                always = self._forced(at, work, rows)[:, None, None]
                new = new.masked_fill(always, float("inf"))
            add_units_(self.scores[rows], self.units[rows], new, at.units.to(torch.int32))

    def _scores(self, rows: slice, k: torch.Tensor, at: VisibleUnits) -> torch.Tensor:
        weights = None if self.weights is None else self.weights[rows]
        return padded_scores(self.rule, self.q[rows], k, weights)[..., : len(at.units)]

    def _forced(self, at: VisibleUnits, work: SelectedPairs, rows: slice) -> torch.Tensor:
        """Return a bool tensor [rows, units], True for units that the rule always selects."""
        rule, distance = self.rule, at.own[:, None] - at.units
        selected_units = (distance == 0) if rule.own else torch.zeros_like(at.seen)
        if near := getattr(rule, "near", 0):
            selected_units = selected_units | ((distance > 0) & (distance <= near))
        if getattr(rule, "first", False):
            unit_row = torch.arange(rows.start, rows.stop, device=at.units.device) // rule.block
            before = (at.units - 1).clamp(min=0).expand(len(unit_row), -1)
            selected_units = selected_units | (at.units == 0) | ~work.sees(unit_row, before)
        return selected_units & at.seen


@dataclass(frozen=True)
class _MeanLogSumExp:
    """Log-sum-exp of the scores of all mean keys that a query sees; each received chunk updates it.

    lse is float64 [s, b, i], so that the rounded result does not depend on the number of ranks.
    """

    rule: SelectionRule
    q: torch.Tensor
    lse: torch.Tensor

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        q, k, work = self.q, keys_of_chunk(keys[0], call.work, self.rule), call.work
        for rows in tiles(len(q), max(EVEN, len(k)) * q.shape[1] * q.shape[2]):
            at = visible_units(work, rows, self.rule.block, q.device)
            chunk_lse = _mean_scores(self.rule, q[rows], k, at).double().logsumexp(dim=-1)
            torch.logaddexp(self.lse[rows], chunk_lse, out=self.lse[rows])


@dataclass(frozen=True)
class _SoftmaxSelector(UnitSelector):
    """`UnitSelector` for rules that compare units by the softmax of the scores of their means.

    lse [s, b, i] is the log-sum-exp of the scores of all means that a query sees.
    """

    lse: torch.Tensor

    def _scores(self, rows: slice, k: torch.Tensor, at: VisibleUnits) -> torch.Tensor:
        mean_scores = _mean_scores(self.rule, self.q[rows], k, at)
        lse = self.lse[rows].masked_fill(self.lse[rows] == float("-inf"), 0.0)
        p = (mean_scores - lse.unsqueeze(-1)).exp().unflatten(2, (self.scores.shape[2], -1)).sum(3)
        return p.unflatten(-1, (len(at.units), -1)).sum(-1)


def _mean_scores(
    rule: SelectionRule, q: torch.Tensor, k: torch.Tensor, at: VisibleUnits
) -> torch.Tensor:
    """Return the scores of some query rows for the mean keys of a chunk.

    The shape is [rows, batch, index heads, means]. The score is -inf if the query does not see all
    positions that the mean covers.
    """
    n = parts_per_unit(rule)
    seen = at.seen.unsqueeze(-1).expand(-1, -1, n)
    if at.causal:
        ends = torch.arange(1, n + 1, device=q.device) * (rule.block // n) - 1
        own_unit = (at.own[:, None] == at.units).unsqueeze(-1)
        seen = seen & (~own_unit | (at.place[:, None, None] >= ends))
    scores = padded_scores(rule, q, k, None)[..., : len(k)]
    return scores.masked_fill(~seen.flatten(1)[:, None, None], float("-inf"))


def padded_scores(
    rule: SelectionRule, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return `rule.scores` of the query rows q, followed by columns of padding.

    Matrix products round differently in incomplete tiles. Rows and keys are padded, so that the
    result does not depend on the size of a chunk. The caller removes the columns of padding.
    """
    rows, n = len(q), parts_per_unit(rule)
    units = -(-len(k) // n) + -(len(k) // n) % (EVEN // math.gcd(EVEN, n))
    row_multiple = 16 // math.gcd(16, q.shape[2])  # a matrix product has rows x heads rows
    q, k = _padded(wide(q), row_multiple), _padded(wide(k), units * n)
    weights = None if weights is None else _padded(wide(weights), row_multiple)
    return rule.scores(q, k, weights)[:rows]


def _padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(x) % multiple
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype of scores: float32, or float64 for float64 tensors."""
    return x.to(accumulation_dtype(x.dtype))
