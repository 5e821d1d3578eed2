# SPDX-License-Identifier: Apache-2.0
"""From a user's arguments to a plan that every rank agrees on.

Makes the ranks agree and resolves every "auto". What is refused is `validate`'s, what moves when is
the schedule's, what it costs is `cost`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from ..comm.consensus import agree, attempt, identity
from ..comm.groups import CALLS, Groups, InProcessGroups, check_groups
from ..comm.recent import Recent
from ..execution.job import Job
from ..options import AttentionKeywords, AttentionOptions
from ..schedule.cost import ring_spans
from ..schedule.head_shares import deferred_chunks
from .in_process import InProcessPlan, Shard
from .pipeline import passes
from .plan import Plan
from .validate import NeedsGrad, Request, check, signature

if TYPE_CHECKING:
    from ..autotune.rates import Rates
    from ..autotune.select import Choice

WORKS_KEPT = 8  # of each grid, what plans of masks that stay have of the ring: kinds of layers


def prepare(
    q: Shard | None = None,
    k: Shard | None = None,
    v: Shard | None = None,
    *,
    groups: Groups | InProcessGroups | None,
    shape: Sequence[int] | None = None,
    kv_heads: int | None = None,
    value_width: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    rates: Rates | None = None,
    **options: Unpack[AttentionKeywords],
) -> Plan | InProcessPlan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    With `Groups.in_process` the plan is that of all ranks. Collective: every rank of `groups` must
    call it (one all-gather of 1.3 KB per rank on the host; two with algorithm "auto", which
    measures once what `rates` does not state; the first plan on a ring makes its process groups).
    Make one plan per micro-batch and use it in every layer of the same shapes.

    q [s, b, h, d], k [s, b, k, d], v [s, b, k, w]: only shapes, dtypes, device and `requires_grad`
    are read. In their place `shape`, that of q on this rank, with kv_heads (as many as query heads,
    if not given), value_width (that of q), dtype and device (torch's defaults); q, k and v then
    need gradients unless needs_grad says otherwise. options: the fields of `AttentionOptions`.
    needs_grad: which of q, k, v need a gradient, where the tensors do not say so (a plan may
    foresee gradients that a call does not need). sink, max_logits: checked with the rest, and not
    kept: they are given to each call; with max_logits, kernel "auto" is one that can tell the
    largest scores. rates: of links and device, for algorithm "auto". Raises the same ValueError on
    every rank.
    """
    check_groups(groups)
    assert groups is not None
    beside = {"kv_heads": kv_heads, "value_width": value_width, "dtype": dtype, "device": device}
    if q is k is v is None or any(x is not None for x in (shape, *beside.values())):
        from .stand_ins import of_shape  # which calls with tensors do not need

        made: Any = attempt(partial(of_shape, (q, k, v), shape, **beside))
        shards = [made] * len(groups.ranks)
        needs_grad = (True, True, True) if needs_grad is None else needs_grad
    else:
        shards = [tuple(shard.values()) for shard in groups.per_rank(q=q, k=k, v=v)]
    chosen = AttentionOptions(**options)
    given = {"needs_grad": needs_grad, "sink": sink, "max_logits": max_logits, "rates": rates}
    each = groups.run(partial(prepare_rank, options=chosen, given=given), shards, groups.ranks)
    return InProcessPlan(groups, each) if isinstance(groups, InProcessGroups) else each[0]


def prepare_rank(
    tensors: tuple[Any, Any, Any] | ValueError,
    groups: Groups,
    options: AttentionOptions,
    given: dict[str, Any],
    adapt: Callable[[Request], Request] = lambda request: request,
) -> Plan:
    """One rank's plan. Every rank takes part in every exchange, whatever it found. given: the
    further arguments of `check`; adapt: makes its request that of another operation."""

    def checked() -> Request:
        groups.check()
        if isinstance(tensors, ValueError):
            raise tensors
        return adapt(check(tensors, groups, options, **given))

    request, choice = attempt(checked), None
    if options.algorithm == "auto":
        # Before anything is measured, because that waits for all ranks: do all have a valid
        # request, and the same?
        _agree(request, groups)
        assert isinstance(request, Request)
        from .automatic import resolve  # with the simulator, which no other call needs

        resolved = resolve(request, groups, given["rates"])
        request, choice = (resolved, None) if isinstance(resolved, ValueError) else resolved
    bad = isinstance(request, ValueError)
    plan = request if bad else attempt(partial(plan_of, request, groups, choice))
    _agree(plan, groups)
    assert isinstance(plan, Plan)
    groups.connect(plan.channels, plan.device)
    groups.expect(plan.longest_message)
    return plan


def _agree(request: Request | Plan | ValueError, groups: Groups) -> None:
    """Raise the same ValueError on every rank if any has one, or arguments or past calls differ."""
    so_far = {CALLS: groups.calls}
    agree(request if isinstance(request, ValueError) else request.facts | so_far, groups.gather)


def plan_of(request: Request, groups: Groups, choice: Choice | None = None) -> Plan:
    """One rank's plan of a checked request, without any exchange."""
    options, (q, k, _) = request.options, request.tensors
    sizes = request.sizes.shared(groups.topology.ulysses)
    spans = ring_spans(request.layout, groups.topology, q.shape[0] * groups.size)
    make = partial(passes, request, groups, sizes, spans)
    if request.mask.cacheable:  # every micro-batch asks for the same
        key = (request.kernel.name, q.device, request.mask, request.layout,
               tuple(map(tuple, spans)), sizes,
               options.algorithm, options.side, options.store,
               options.sequence_chunks, options.row_blocks,
               deferred_chunks(options.head_chunks or 1) > 0)  # fmt: skip
        made = groups.cache.setdefault("works", Recent(WORKS_KEPT)).of(key, make)
    else:
        made = make()
    job = Job(
        ring=groups.ring, ulysses=groups.ulysses, ulysses_links=groups.ulysses_links,
        kernel=request.kernel, scoring=request.scoring, wire_dtype=request.wire_dtype,
        needs_grad=request.needs_grad, heads=q.shape[2], kv_heads=k.shape[2],
        head_chunks=options.head_chunks or 1, chunks=made.chunks, order=made.order,
    )  # fmt: skip
    # Nothing else would tell ranks whose tables differ where messages bear no envelope.
    facts = request.facts | {"schedule": made.digest}
    return Plan(
        groups=groups, options=options, layout=request.layout, mask=request.mask,
        signature=signature(*request.tensors), sizes=sizes, passes=made.schedules, facts=facts,
        identity=identity(facts), digest=made.digest, job=job, again=made.again, choice=choice,
        host_forward=made.host_forward,
    )  # fmt: skip
