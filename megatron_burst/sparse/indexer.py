# SPDX-License-Identifier: Apache-2.0
"""`mb.select`: the top_k best units of keys of every query, over ranks.

Index keys travel as keys of attention do; each rank keeps the best units of its own queries so far.

Shape letters: s local rows, b batch, i index heads, k index key heads, d width, H selections of a
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..comm.consensus import attempt
from ..comm.groups import Groups, InProcessGroups
from ..comm.packing import CallTag, Message
from ..execution import ring
from ..execution.job import Call, Tensors
from ..kernels.autograd import outside_graphs, refuse_transforms
from ..kernels.online_softmax import accumulation_dtype
from ..layout import LayoutName, Span
from ..layout.layouts import Layout
from ..masks import Causal, Full, Mask
from ..masks.base import Combined
from ..planning.in_process import InProcessPlan, Shard
from ..planning.plan import Plan
from ..planning.validate import Request, check_shapes
from .pairs import PairKernel, tiles
from .plans import plan_ranks, setting
from .rules import SelectionRule, described, rule_of
from .selection import selected
from .top_k import add_units_, in_order, no_units


@outside_graphs
@torch.no_grad()
def select(
    index_q: Shard,
    index_k: Shard,
    index_weights: Shard | None = None,
    *,
    rule: str | SelectionRule,
    top_k: int,
    plan: Plan | InProcessPlan | None = None,
    groups: Groups | InProcessGroups | None = None,
    layout: LayoutName | Layout | None = None,
    mask: Mask | None = None,
    algorithm: str | None = None,
    label: object = None,
) -> Any:
    """Select the `top_k` units of keys with the best index scores, for every query.

    index_q [s, b, i, d], index_k [s, b, k, d], index_weights [s, b, i] (for rules that weigh index
    heads, else None): this rank's shard. Returns a `Selection`. With `Groups.in_process` tensors
    are lists, one per rank, and so is the result. Nothing of it has a gradient (see
    `mb.indexer_loss`).

    rule: "dsa", "qsa", "moba", "msa", an object of their classes in `megatron_burst.sparse.rules`
    with another block, or one of your own class. Scores are float32, of float64 tensors float64. Of
    equal scores the lower unit is taken; a query that sees fewer units takes all of them; where
    the rule says so its own block is one of them.

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
    shards = at.per_rank(q=index_q, k=index_k, w=index_weights)
    asked = attempt(partial(_asked, rule, top_k))
    stand_ins = [attempt(partial(index_stand_ins, shard, asked)) for shard in shards]
    adapts = [partial(_adapted, asked=asked, top_k=top_k)] * len(shards)
    plans = plan_ranks(at, stand_ins, adapts)
    kept = at.kept(("selection", described(ready(asked)), top_k, plans[0].call), label)
    ids = None if kept is None else kept.found()
    if ids is None:
        calls = [one.groups.calls.forward(one.identity, label, False) for one in plans]
        tensors = [tuple(shard.values()) for shard in shards]
        run = partial(_select, rule=ready(asked), top_k=top_k)
        with at.groups.running(tensors[0][0].device.type):
            ids = tuple(at.groups.run(run, plans, calls, tensors))
        if kept is not None:
            kept.leave(lambda: ids)
    block = ready(asked).block
    found = [
        selected(each, one.layout, one.mask, block) for each, one in zip(ids, plans, strict=True)
    ]
    return found if isinstance(at.groups, InProcessGroups) else found[0]


def _asked(rule: str | SelectionRule, top_k: int) -> SelectionRule:
    if type(top_k) is not int or top_k < 1:
        raise ValueError(f"top_k must be a positive integer, got {top_k!r}")
    return rule_of(rule)


def ready(asked: SelectionRule | ValueError) -> SelectionRule:
    """The rule, or what it raises, which all ranks have to hear of."""
    if isinstance(asked, ValueError):
        raise asked
    return asked


def index_stand_ins(shard: dict[str, Any], asked: SelectionRule | ValueError) -> Any:
    """q, k and v of a plan for index tensors; ValueError for those that do not fit the rule."""
    rule = ready(asked)
    q, k, weights = shard["q"], shard["k"], shard["w"]
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
    return q.detach(), k.detach(), k.detach()[..., :1]


def _adapted(request: Request, asked: SelectionRule | ValueError, top_k: int) -> Request:
    """The request of a selection: no values travel with the index keys."""
    rule = ready(asked)
    q, k, v = request.tensors
    check_blocks(request, rule.block)
    facts = request.facts | {"rule": described(rule), "top_k": top_k}
    pairs = PairKernel(Selecting, rule, rule.selections(q.shape[2], k.shape[2]), top_k)
    return replace(request, kernel=pairs, tensors=(q, k, v[..., :0]), facts=facts)


def check_blocks(request: Request, block: int) -> None:
    """Raise ValueError where a layout or a mask cuts a block of so many positions."""
    if block == 1:
        return
    seq_len = request.tensors[0].shape[0] * request.layout.cp_size
    for rank in range(request.layout.cp_size):
        for span in request.layout.spans(rank, seq_len):
            if not _whole(span, block):
                raise ValueError(
                    f"layout {request.layout.name} cuts the blocks of {block} positions of the "
                    f"rule: rank {rank} holds {span.length} positions from {span.start} on, "
                    f"{span.stride} apart; each block must lie on one rank (contiguous or zigzag, "
                    f"with shards of a multiple of {2 * block} rows)"
                )
    odd = [bound for bound in request.mask.breaks.tolist() if bound % block]
    if not _by_blocks(request.mask) or odd:
        raise ValueError(
            f"mask: a rule with blocks of {block} positions takes Causal, Full and Documents whose "
            f"documents begin at multiples of {block}, combined by &, got {request.mask!r:.200}"
        )


def _whole(span: Span, block: int) -> bool:
    start, stride, length = span
    return length == 0 or (stride == 1 and start % block == 0 and length % block == 0)


def _by_blocks(mask: Mask) -> bool:
    from ..masks.tables import Documents  # not needed by rules of tokens

    if isinstance(mask, Combined) and mask.symbol == "&":
        return _by_blocks(mask.a) and _by_blocks(mask.b)
    return type(mask) in (Causal, Full, Documents)


def _select(
    plan: Plan, tag: CallTag, tensors: Tensors, rule: SelectionRule, top_k: int
) -> torch.Tensor:
    """The ids of the selection of one rank."""
    q, k, weights = (None if t is None else t.contiguous() for t in tensors)
    assert q is not None
    assert k is not None
    job, wide = plan.job, accumulation_dtype(q.dtype)
    (part,) = ring.head_chunks(job, q.shape[2], k.shape[2])
    shape = (*q.shape[:2], rule.selections(q.shape[2], k.shape[2]), top_k)
    scores, units = no_units(shape, q.new_empty(0, dtype=wide))
    compute = Selecting(rule, weights, scores, units)
    own: dict[str, Tensors] = {"query": (q,), "kv": (k,)}
    # Nothing is summed or sent back: what was found stays with `compute`.
    sums = {"out": [torch.Size((0,))]}
    ring.run([ring.Ring(job, job.chunks[0].forward, tag, part, compute, own, sums)])
    return in_order(units)


@dataclass(frozen=True)
class Selecting:
    """What a pair computes: the scores of its units, from which the best are kept."""

    rule: SelectionRule
    weights: torch.Tensor | None
    scores: torch.Tensor
    units: torch.Tensor

    def pair(self, call: Call, queries: Tensors, keys: Tensors, sums: Sequence[Message]) -> None:
        (q,), (k,), work, block = queries, keys, call.work, self.rule.block
        _, positions, order = work.on(q.device)
        first = positions[::block]
        assert np.all(work.keys.reshape(-1, block)[:, 0] % block == 0)
        k = wide(k if work.order is None else k.index_select(0, order))
        units = (first // block).to(torch.int32)
        for rows in tiles(len(q), k.shape[0] * q.shape[1] * q.shape[2]):
            weights = None if self.weights is None else wide(self.weights[rows])
            new = self.rule.scores(wide(q[rows]), k, weights)
            seen = work.sees(rows, first.expand(new.shape[0], -1))[:, None, None]
            new = new.masked_fill(~seen, float("-inf"))
            if self.rule.own:
                mine = work.on(q.device)[0][rows] // block
                own = (mine[:, None] == units)[:, None, None] & seen
                new = new.masked_fill(own, float("inf"))
            add_units_(self.scores[rows], self.units[rows], new, units)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype in which scores are computed."""
    return x.to(accumulation_dtype(x.dtype))
