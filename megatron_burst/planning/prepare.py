"""From a user's arguments to a plan that every rank agrees on.

Makes the ranks agree and resolves every "auto". What is refused is `arguments`'s; how the ring
runs is `ring`'s, what moves when is `schedule`'s, what it costs is `cost`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..autotune import measure
from ..autotune.candidates import Call, Fixed, shared_sizes
from ..autotune.known import known
from ..autotune.rates import Rates
from ..autotune.select import Choice, best
from ..comm.calls import CALLS
from ..comm.consensus import agree, attempt, identity
from ..comm.groups import Groups
from ..execution.executor import Pass
from ..layout import Layout, Span
from ..masks import Causal, Mask, shards_visible
from ..recompute import partial_ring
from ..schedule import cost
from ..schedule.cost import Sizes
from ..schedule.rings import Schedule
from ..schedule.tables import Grid, Pair
from .plan import Plan
from .validate import Choices, Draft, NeedsGrad, Shards, check, per_rank, signature

# The ring that head-parallel algorithms run inside their ulysses groups.
RINGS = {"ulysses": "ring", "hybrid": "burst"}


def prepare(
    q: Shards,
    k: Shards,
    v: Shards,
    *,
    groups: Groups,
    layout: str | Layout = "zigzag",
    mask: Mask | None = None,
    algorithm: str = "burst",
    side: str = "auto",
    kernel: str = "auto",
    softmax_scale: float | None = None,
    softcap: float | None = None,
    grad_wire_dtype: torch.dtype | None = None,
    kv_cache: float = 0.0,
    store: float | None = None,
    head_chunks: int | None = None,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
    rates: Rates | None = None,
) -> Plan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    Collective: every rank of `groups` must call it (one all-gather of 1.2 KB per rank on the
    host; two with algorithm "auto", which measures, once per `groups` and kernel, what `rates`
    does not state). Make one plan per micro-batch and use it in every layer of the same shapes.

    Of q, k, v only shapes, dtypes, device and `requires_grad` are read; `needs_grad` states the
    latter where the tensors do not (a plan may foresee gradients that a call does not need).
    `sink` is checked with the rest, and not kept: it is given to each call. The other arguments are
    those of `attention`. Raises the same ValueError on every rank.
    """
    if not isinstance(groups, Groups):
        raise ValueError(f"groups: make them with mb.Groups, got {groups!r:.100}")
    choices = Choices(
        layout, Causal() if mask is None else mask, algorithm, side, kernel, softmax_scale,
        softcap, grad_wire_dtype, kv_cache, store, head_chunks, needs_grad, sink, rates,
    )  # fmt: skip
    shards = attempt(lambda: groups.check() or per_rank(groups, q, k, v))
    if isinstance(shards, ValueError):
        drafts: list[Draft | ValueError] = [shards] * len(groups.local_ranks)
    else:
        drafts = [attempt(partial(check, tensors, groups, choices)) for tensors in shards]
    choice: Choice | ValueError | None = None
    if algorithm == "auto":
        # Before anything is measured: who has bad arguments, or others, must not be waited for.
        _agree(drafts, groups)
        draft = drafts[0]
        assert isinstance(draft, Draft)
        found = _measured(draft, groups, rates)
        choice = attempt(partial(_choice, draft, groups, found))
        drafts = [_resolved(d, choice) for d in drafts]
    first = drafts[0]
    plan = first
    if isinstance(first, Draft) and not isinstance(choice, ValueError):
        plan = attempt(partial(_plan, first, groups, choice))
    if isinstance(plan, ValueError):
        drafts[0] = plan
    _agree(drafts, groups)
    assert isinstance(plan, Plan)
    groups.expect(plan.longest_message)
    return plan


def _agree(drafts: Sequence[Draft | ValueError], groups: Groups) -> None:
    """Raise the same ValueError on every rank if any has one, or arguments or past calls differ."""
    so_far = {CALLS: groups.calls}
    agree([d if isinstance(d, ValueError) else d.facts | so_far for d in drafts], groups.gather)


def _measured(draft: Draft, groups: Groups, rates: Rates | None) -> Rates:
    """All rates: those given, else those known of these groups, else measured now. Collective."""
    try:
        found = rates or known(groups.cache).rates or measure.links(groups)
        if found.compute is None:
            kernel = measure.kernel_speed(groups, draft.kernel, draft.scoring, *draft.tensors)
            found = replace(found, compute=kernel[0], launch=kernel[1])
        return found
    except BaseException as error:
        groups.fail(error)
        raise


def _choice(draft: Draft, groups: Groups, rates: Rates) -> Choice:
    """What is predicted to be fastest on these groups; remembered."""
    side = None if draft.config.side == "auto" else draft.config.side
    fixed = Fixed(side=side, head_chunks=draft.head_chunks)
    call = Call(draft.sizes, draft.mask, draft.layout, draft.kv_cache)
    return known(groups.cache).choice(
        (call, fixed, rates), lambda: best(call, [groups.topology], rates, fixed)
    )


def _resolved(draft: Draft | ValueError, choice: Choice | ValueError) -> Draft | ValueError:
    """A draft that says what was chosen, in its facts too."""
    if isinstance(choice, ValueError) or isinstance(draft, ValueError):
        return choice if isinstance(choice, ValueError) else draft
    config = replace(draft.config, algorithm=choice.taken.algorithm, side=choice.taken.side)
    facts = draft.facts | {"chosen": choice.call}
    return replace(draft, config=config, head_chunks=choice.taken.head_chunks, facts=facts)


def _plan(draft: Draft, groups: Groups, choice: Choice | None) -> Plan:
    topology = groups.topology
    sizes = shared_sizes(draft.sizes, topology.ulysses)
    grid = Grid(topology.inter_size, topology.intra_size)
    spans = cost.ring_spans(draft.layout, topology, draft.tensors[0].shape[0] * groups.size)
    algorithm = RINGS.get(draft.config.algorithm, draft.config.algorithm)
    work = partial(_work, draft, algorithm, grid, spans, sizes, groups)
    if draft.mask.lasting:  # every micro-batch asks for the same
        q, config, places = draft.tensors[0], draft.config, tuple(map(tuple, spans))
        key = (draft.kernel.name, q.device, draft.mask, places, algorithm, config.side, sizes,
               draft.kv_cache, draft.store)  # fmt: skip
        work = partial(known(groups.cache).work, key, work)
    there, back, passes, again = work()
    return Plan(
        groups=groups,
        algorithm=draft.config.algorithm,
        layout=draft.layout,
        mask=draft.mask,
        kernel=draft.kernel,
        scoring=draft.scoring,
        wire_dtype=draft.wire_dtype,
        needs_grad=draft.needs_grad,
        signature=signature(*draft.tensors),
        sizes=sizes,
        schedules=(there, back),
        head_chunks=draft.head_chunks or 1,
        identity=identity(draft.facts),
        forwards=tuple(forward for forward, _ in passes),
        backwards=tuple(backward for _, backward in passes),
        recompute=again,
        choice=choice,
    )


class _Work(NamedTuple):
    """Schedules of forward and backward, both passes of every local rank, and what it computes
    again."""

    there: Schedule
    back: Schedule
    passes: Sequence[tuple[Pass, Pass]]
    again: partial_ring.Recompute | None


def _work(
    draft: Draft,
    algorithm: str,
    grid: Grid,
    spans: Sequence[Sequence[Span]],
    sizes: Sizes,
    groups: Groups,
) -> _Work:
    visible, side = shards_visible(draft.mask, spans, spans), draft.config.side
    there = cost.forward_schedule(algorithm, grid, visible, sizes)
    kept = round(draft.kv_cache * (grid.size - 1))
    back = cost.backward_schedule(algorithm, grid, visible, sizes, side=side, kept=kept)
    ranks = [member.ring.rank for member in groups.members]
    again = None
    if draft.store is not None:
        again = partial_ring.plan(
            draft.mask, draft.kernel, algorithm, grid, spans, ranks, draft.store, groups.size,
            sizes, draft.tensors[0].device,
        )  # fmt: skip
    passes = [_passes(there, back, rank, draft, spans) for rank in ranks]
    return _Work(there, back, passes, again)


def _passes(
    there: Schedule, back: Schedule, rank: int, draft: Draft, spans: Sequence[Sequence[Span]]
) -> tuple[Pass, Pass]:
    """Forward and backward of one rank of the ring; a pair that is wholly masked gets no work."""
    works: dict[Pair, Any] = {}
    programs = there.program(rank), back.program(rank)
    for boundary in (*programs[0], *programs[1]):
        pair = boundary.pair
        if pair is not None and pair not in works and there.visible[pair]:
            work = draft.kernel.plan(draft.mask, spans[pair.query], spans[pair.key])
            if work is not None:
                works[pair] = work
    kept = back.kept_chunks(rank)
    names = "attention forward", f"attention backward, side {back.side}"
    forward, backward = (
        Pass(name, program, works, kept, own_last=plan.program(rank, own_last=True))
        for name, program, plan in zip(names, programs, (there, back), strict=True)
    )
    return forward, backward
