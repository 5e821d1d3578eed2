"""From a user's arguments to a plan that every rank agrees on.

Makes the ranks agree and resolves every "auto". What is refused is `validate`'s, what moves when is
the schedule's, what it costs is `cost`'s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from typing_extensions import Unpack

from ..autotune import measure
from ..autotune.candidates import Fixed, Workload, shared_sizes
from ..autotune.known import known
from ..autotune.rates import Rates
from ..autotune.select import Choice, best
from ..comm.calls import CALLS
from ..comm.consensus import agree, attempt, identity
from ..comm.groups import Groups, InProcessGroups
from ..execution.job import Job
from ..options import AttentionKeywords, AttentionOptions
from ..schedule import cost
from . import passes
from .in_process import InProcessPlan, Shard, per_rank
from .plan import Plan
from .tensors import signature
from .validate import NeedsGrad, Request, check


def prepare(
    q: Shard,
    k: Shard,
    v: Shard,
    *,
    groups: Groups | InProcessGroups | None,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    rates: Rates | None = None,
    **options: Unpack[AttentionKeywords],
) -> Plan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    With `Groups.in_process` the plan is that of all ranks. Collective: every rank of `groups` must
    call it (one all-gather of 1.2 KB per rank on the host; two with algorithm "auto", which
    measures, once per `groups` and kernel, what `rates` does not state; the first on a ring makes
    its groups). Make one plan per micro-batch and use it in every layer of the same shapes.

    q [s, b, h, d], k [s, b, k, d], v [s, b, k, w]: only shapes, dtypes, device and `requires_grad`
    are read. options: the fields of `AttentionOptions`. needs_grad: which of q, k, v need a
    gradient, where the tensors do not say so (a plan may foresee gradients that a call does not
    need). sink, max_logits: checked with the rest, and not kept: they are given to each call; with
    max_logits, kernel "auto" is one that can tell the largest scores. rates: of links and
    device, for algorithm "auto". Raises the same ValueError on every rank.
    """
    if not isinstance(groups, (Groups, InProcessGroups)):
        raise ValueError(f"groups: make them with mb.Groups, got {groups!r:.100}")
    chosen = AttentionOptions(**options)
    given = {"needs_grad": needs_grad, "sink": sink, "max_logits": max_logits, "rates": rates}
    plan = partial(_prepare, options=chosen, given=given)
    if isinstance(groups, InProcessGroups):
        each = groups.run(plan, per_rank(groups, q, k, v), groups.ranks)
        return cast(Plan, InProcessPlan(groups, each))  # it answers as a plan does
    return plan((q, k, v), groups)


def _prepare(
    tensors: tuple[Any, Any, Any],
    groups: Groups,
    options: AttentionOptions,
    given: dict[str, Any],
) -> Plan:
    """One rank's plan. Every rank takes part in every exchange, whatever it found. given: the
    further arguments of `check`."""

    def checked() -> Request:
        groups.check()
        return check(tensors, groups, options, **given)

    request, choice = attempt(checked), None
    if options.algorithm == "auto":
        # Before anything is measured: who has bad arguments, or others, must not be waited for.
        _agree(request, groups)
        assert isinstance(request, Request)
        with groups.running():
            stated = _measured(request, groups, given["rates"])
        choice = attempt(partial(_choice, request, groups, stated))
        request = _resolved(request, choice)
    plan, found = None, request
    if isinstance(request, Request) and not isinstance(choice, ValueError):
        plan = attempt(partial(_plan, request, groups, choice))
        # Nothing else would tell ranks whose tables differ where messages bear no envelope.
        if isinstance(plan, ValueError):
            found = plan
        else:
            found = replace(request, facts=_facts(request, plan.digest))
    _agree(found, groups)
    assert isinstance(plan, Plan)
    groups.connect(plan.channels, torch.device(plan.signature[0][2]))
    groups.expect(plan.longest_message)
    return plan


def _agree(request: Request | ValueError, groups: Groups) -> None:
    """Raise the same ValueError on every rank if any has one, or arguments or past calls differ."""
    so_far = {CALLS: groups.calls}
    agree(request if isinstance(request, ValueError) else request.facts | so_far, groups.gather)


def _measured(request: Request, groups: Groups, rates: Rates | None) -> Rates:
    """All rates: those given, else those known of these groups, else measured now. Collective."""
    here = request.tensors[0].device
    found = rates or known(groups.cache).rates or measure.links(groups, here)
    if found.compute is None:
        scoring = request.scoring
        speed = measure.kernel_speed(groups, request.kernel, scoring, *request.tensors)
        found = replace(found, compute=speed[0], launch=speed[1])
    return found


def _choice(request: Request, groups: Groups, rates: Rates) -> Choice:
    """What is predicted to be fastest on these groups; remembered."""
    options = request.options
    side = None if options.side == "auto" else options.side
    fixed = Fixed(side=side, head_chunks=options.head_chunks)
    workload = Workload(
        request.sizes, request.mask, request.layout, options.kv_cache, options.sequence_chunks,
        options.row_blocks,
    )  # fmt: skip
    return known(groups.cache).choice(
        (workload, fixed, rates), lambda: best(workload, [groups.topology], rates, fixed)
    )


def _resolved(request: Request, choice: Choice | ValueError) -> Request | ValueError:
    """The request with what was chosen, in its facts too."""
    if isinstance(choice, ValueError):
        return choice
    options = replace(request.options, **choice.call)
    return replace(request, options=options, facts=request.facts | {"chosen": choice.call})


def _plan(request: Request, groups: Groups, choice: Choice | None) -> Plan:
    options, (q, k, _) = request.options, request.tensors
    sizes = shared_sizes(request.sizes, groups.topology.ulysses)
    spans = cost.ring_spans(request.layout, groups.topology, q.shape[0] * groups.size)
    make = partial(passes.make, request, sizes, groups, spans)
    if request.mask.cacheable:  # every micro-batch asks for the same
        key = (request.kernel.name, q.device, request.mask, request.layout,
               tuple(map(tuple, spans)), sizes,
               options.algorithm, options.side, options.kv_cache, options.store,
               options.sequence_chunks, options.row_blocks, options.visiting)  # fmt: skip
        make = partial(known(groups.cache).work, key, make)
    made = make()
    job = Job(
        ring=groups.ring,
        ulysses=groups.ulysses,
        ulysses_links=groups.ulysses_links,
        kernel=request.kernel,
        scoring=request.scoring,
        wire_dtype=request.wire_dtype,
        needs_grad=request.needs_grad,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_chunks=options.head_chunks or 1,
        chunks=made.chunks,
    )
    return Plan(
        groups=groups,
        options=options,
        layout=request.layout,
        mask=request.mask,
        signature=signature(*request.tensors),
        sizes=sizes,
        passes=made.schedules,
        identity=identity(_facts(request, made.digest)),
        digest=made.digest,
        job=job,
        again=made.again,
        choice=choice,
    )


def _facts(request: Request, digest: int) -> dict[str, object]:
    """What ranks agree on: the arguments, and the schedules made of them."""
    return request.facts | {"schedule": digest}
