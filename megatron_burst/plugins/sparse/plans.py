# SPDX-License-Identifier: Apache-2.0
"""Plans of the sparse operations: those of `mb.prepare`, with a kernel that knows a selection.

With keywords a plan is a collective, as `mb.prepare` is; from a plan of `mb.attention`, on which
all ranks agreed, it is derived without one and kept, so that layers wait for no host. Where that
plan's algorithm was chosen, each operation has its own chosen, by the same rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...comm.consensus import Facts, identity
from ...comm.groups import Groups, InProcessGroups, check_groups
from ...comm.recent import Recent
from ...execution.function import KeptResults
from ...layout import LayoutName
from ...layout.layouts import Layout
from ...masks import Mask
from ...options import AttentionOptions
from ...planning.in_process import InProcessPlan
from ...planning.plan import Plan
from ...planning.prepare import plan_of, prepare_rank
from ...planning.validate import Request, check
from ...recompute.checkpoint import Frame, current
from ...schedule.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from ...autotune.select import Choice

PLANS_KEPT = 16  # of each rank: kinds of layers times operations
Adapt = Callable[[Request], Request]


@dataclass(frozen=True)
class Setting:
    """Where an operation runs: a plan of attention, or the keywords that one is made from. frame:
    of the checkpoint around it."""

    groups: Groups | InProcessGroups
    plans: Sequence[Plan] | None
    options: AttentionOptions
    frame: Frame | None

    @property
    def store(self) -> float | None:
        """The fraction of rows whose results a checkpoint keeps."""
        if self.plans is not None:
            return self.plans[0].options.store
        return None if self.frame is None else self.frame.keep

    def scale(self, q: object, asked: float | None) -> float | None:
        """The scale of the scores of queries q [s, b, h, d]: as asked for, the plan's, or
        d ** -0.5."""
        if asked is not None or not isinstance(q, torch.Tensor) or not q.dim():
            return asked
        planned = None if self.plans is None else self.plans[0]
        if planned is not None and planned.signature[0][0][-1] == q.shape[-1]:
            return planned.job.scoring.scale
        return q.shape[-1] ** -0.5

    def kept(self, what: object, label: object) -> KeptResults | None:
        """Where the call with this label leaves or finds `what`. ValueError if the checkpoint wants
        what the plan does not."""
        if self.plans is not None and self.plans[0].keeps(self.frame, label) is None:
            return None
        return KeptResults(self.frame, (what, label)) if self.frame and self.store else None

    def per_rank(self, **named: Any) -> list[dict[str, Any]]:
        """What `named` has of each rank of this process."""
        return self.groups.per_rank(**named)


def setting(
    plan: object,
    groups: Groups | InProcessGroups | None,
    layout: LayoutName | Layout | None,
    mask: Mask | None,
    algorithm: str | None,
) -> Setting:
    """Where a call with these arguments runs. ValueError for both of them, or for neither."""
    if plan is None:
        check_groups(groups)
        assert groups is not None
        options = AttentionOptions(
            layout="zigzag" if layout is None else layout, mask=mask, side="kv",
            algorithm="burst" if algorithm is None else algorithm, kernel="reference",
        )  # fmt: skip
        return Setting(groups, None, options, current())
    keywords = {"groups": groups, "layout": layout, "mask": mask, "algorithm": algorithm}
    given = sorted(name for name, value in keywords.items() if value is not None)
    if given:
        raise ValueError(f"plan: give a plan or its keywords, not both; got {given}")
    if not isinstance(plan, (Plan, InProcessPlan)):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    plans: Any = plan.ranks if isinstance(plan, InProcessPlan) else (plan,)
    if plans[0].options.softcap is not None:
        raise ValueError(
            "plan: sparse attention has no softcap, and this plan was made with "
            f"softcap={plans[0].options.softcap}; make one without"
        )
    options = AttentionOptions(
        layout=plans[0].layout, mask=plans[0].mask, side="kv", kernel="reference",
        algorithm=plans[0].algorithm if plans[0].choice is None else "auto",
    )  # fmt: skip
    return Setting(plan.groups, plans, options, current())


def plan_ranks(
    setting: Setting,
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | ValueError],
    adapts: Sequence[Adapt],
    needs_grad: Sequence[bool] = (False, False, False),
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    store: float | None = None,
) -> list[Plan]:
    """The plan of each rank of this process. tensors: q, k and v of each, or what stands for them;
    adapts: what each asks of its request. Raises the same ValueError on every rank."""
    options = replace(setting.options, softmax_scale=scale, store=store)
    given = {"needs_grad": tuple(needs_grad), "sink": sink, "max_logits": None, "rates": None}
    ranks = setting.groups.ranks
    if setting.plans is None:
        one = partial(_agreed, options=options, given=given)
        return setting.groups.run(one, tensors, ranks, adapts)
    one = partial(_derived, options=options, given=given)
    return setting.groups.run(one, tensors, ranks, adapts, setting.plans)


def _agreed(
    tensors: Any, groups: Groups, adapt: Adapt, options: AttentionOptions, given: dict[str, Any]
) -> Plan:
    adapt, choice = partial(_paired, adapt=adapt), None
    if options.algorithm == "auto":
        from .choice import chosen  # with the simulator, which no other call needs

        choice = chosen(partial(_checked, tensors, groups, adapt, options, given), groups)
        options = replace(options, algorithm=choice.taken.algorithm)
    return replace(prepare_rank(tensors, groups, options, given, adapt), choice=choice)


def _derived(
    tensors: Any,
    groups: Groups,
    adapt: Adapt,
    made: Plan,
    options: AttentionOptions,
    given: dict[str, Any],
) -> Plan:
    request = _checked(tensors, groups, partial(_paired, adapt=adapt), options, given)
    facts: Facts = request.facts | {"plan": made.identity}
    kept = groups.cache.setdefault("sparse", Recent(PLANS_KEPT))
    make = partial(_plan, replace(request, facts=facts), groups, made.choice)
    plan = kept.of(identity(facts), make)
    groups.connect(plan.channels, plan.device)
    groups.expect(plan.longest_message)
    return plan


def _plan(request: Request, groups: Groups, made: Choice | None) -> Plan:
    """A plan of its own; made: why the plan of attention has its algorithm."""
    if made is None:
        return plan_of(request, groups)
    from .choice import fastest

    choice = fastest(request, groups, made.rates)
    taken = {"algorithm": choice.taken.algorithm}
    options, facts = replace(request.options, **taken), request.facts | taken
    return plan_of(replace(request, options=options, facts=facts), groups, choice)


def _checked(
    tensors: Any, groups: Groups, adapt: Adapt, options: AttentionOptions, given: dict[str, Any]
) -> Request:
    groups.check()
    if isinstance(tensors, ValueError):
        raise tensors
    return adapt(check(tensors, groups, options, **given))


def _paired(request: Request, adapt: Adapt) -> Request:
    """A request whose keys travel; adapt makes it one of an operation, whose kernel only notes the
    pairs."""
    algorithm, topology = request.options.algorithm, request.facts["groups"]
    ring = ALGORITHMS.get(algorithm)
    if algorithm != "auto" and (ring is None or not ring.keeps):
        able = ", ".join(name for name, each in ALGORITHMS.items() if each.keeps)
        raise ValueError(
            f"algorithm: a selection stays with its queries, so keys must travel ({able}, or auto),"
            f" got {algorithm!r}"
        )
    if getattr(topology, "ulysses", 1) > 1:
        raise ValueError(
            "groups: sparse attention does not share heads between ranks; make mb.Groups with "
            f"ulysses=1, got {getattr(topology, 'ulysses', 1)}"
        )
    return adapt(request)
