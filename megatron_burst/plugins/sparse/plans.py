# SPDX-License-Identifier: Apache-2.0
"""Plans of the sparse operations: those of `mb.prepare`, with a kernel that knows a selection.

With keywords a plan is a collective, as `mb.prepare` is; from a plan of `mb.attention`, on which
all ranks agreed, it is derived without one and cached. If that plan's algorithm was "auto", each
operation chooses its own, by the same rates.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch

from ...comm.groups import Groups, check_groups
from ...comm.operation import derived, prepared
from ...execution.function import StoredResults
from ...layout import LayoutName
from ...layout.layouts import Layout
from ...masks import Mask
from ...options import AttentionOptions
from ...planning.plan import Plan
from ...planning.prepare import RingOperation
from ...planning.validate import QKV, NeedsGrad, Request, check
from ...recompute.checkpoint import AttentionStore, current_store
from ...schedule.algorithms import ALGORITHMS

PLANS_KEPT = 16  # of each rank: kinds of layers times operations


@dataclass(frozen=True)
class Setting:
    """Where an operation runs: a plan of attention, or the keywords that one is made from.

    made: the plan of attention, or None. attention_store: the store of the checkpoint around the
    operation, or None.
    """

    groups: Groups
    made: Plan | None
    options: AttentionOptions
    attention_store: AttentionStore | None

    @property
    def store(self) -> float | None:
        """The fraction of rows whose results a checkpoint keeps."""
        if self.made is not None:
            return self.made.options.store
        return None if self.attention_store is None else self.attention_store.fraction

    def scale(self, q: object, asked: float | None) -> float | None:
        """The scale of the scores of queries q [s, b, h, d]: as asked for, the plan's, or
        d ** -0.5.
        """
        if asked is not None or not isinstance(q, torch.Tensor) or not q.dim():
            return asked
        if self.made is not None and self.made.signature[0][0][-1] == q.shape[-1]:
            return self.made.rank_plan.scoring.scale
        return q.shape[-1] ** -0.5

    def kept(self, what: object, label: object) -> StoredResults | None:
        """Where the call with this label leaves or finds `what`. ValueError if the checkpoint wants
        what the plan does not.
        """
        if self.made is not None and self.made.store_entry(self.attention_store, label) is None:
            return None
        return (
            StoredResults(self.attention_store, (what, label))
            if self.attention_store and self.store
            else None
        )


def setting(
    plan: object,
    groups: Groups | None,
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
        return Setting(groups, None, options, current_store())
    keywords = {"groups": groups, "layout": layout, "mask": mask, "algorithm": algorithm}
    given = sorted(name for name, value in keywords.items() if value is not None)
    if given:
        raise ValueError(f"plan: give a plan or its keywords, not both; got {given}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    if plan.options.softcap is not None:
        raise ValueError(
            "plan: sparse attention has no softcap, and this plan was made with "
            f"softcap={plan.options.softcap}; make one without"
        )
    options = AttentionOptions(
        layout=plan.layout, mask=plan.mask, side="kv", kernel="reference",
        algorithm=plan.algorithm if plan.choice is None else "auto",
    )  # fmt: skip
    return Setting(plan.groups, plan, options, current_store())


@dataclass(frozen=True, kw_only=True)
class SelectedOperation(RingOperation):
    """A call of a sparse operation on one rank: keys travel, and what was selected stays with its
    queries.

    made: the plan of attention that the plan follows from, or None. options: of the ring.
    needs_grad: which of q, k, v need a gradient.
    """

    groups: Groups
    made: Plan | None
    options: AttentionOptions
    sink: torch.Tensor | None = None
    needs_grad: NeedsGrad = (False, False, False)

    @abstractmethod
    def tensors(self) -> QKV:
        """Return q, k and v as they travel, or stand-ins. ValueError if they do not fit."""

    def ring_options(self) -> AttentionOptions:
        """Return the options of the ring, whose layout and mask are those of what travels."""
        return self.options

    @abstractmethod
    def adapted(self, request: Request) -> Request:
        """Return the request with the kernel and facts of this operation."""

    def check(self) -> Request:
        self.groups.check()
        tensors, options = self.tensors(), self.ring_options()
        request = check(tensors, self.groups, options, self.needs_grad, self.sink)
        _check_ring(options.algorithm, self.groups.topology.ulysses)
        request = self.adapted(request)
        if self.made is None:
            return request
        return replace(request, facts=request.facts | {"plan": self.made.identity})

    @property
    def measures(self) -> bool:
        return self.made is None and self.options.algorithm == "auto"

    def choose(self, request: Request) -> Request | ValueError:
        from .choice import chosen  # with the simulator, which no other call needs

        return chosen(request, self.groups)

    def build(self, request: Request) -> Plan:
        if self.made is not None and self.made.choice is not None:
            from .choice import with_fastest

            request = with_fastest(request, self.groups, self.made.choice.rates)
        return super().build(request)


def plan_of(operation: SelectedOperation) -> Plan:
    """Return the plan of an operation. Raises the same ValueError on every rank."""
    if operation.made is None:
        return prepared(operation)
    return derived(operation, operation.groups.recent("sparse", PLANS_KEPT))


def _check_ring(algorithm: str, ulysses: int) -> None:
    """Raise ValueError unless keys travel, and whole."""
    ring = ALGORITHMS.get(algorithm)
    if algorithm != "auto" and (ring is None or not ring.keeps):
        able = ", ".join(name for name, each in ALGORITHMS.items() if each.keeps)
        raise ValueError(
            f"algorithm: a selection stays with its queries, so keys must travel ({able}, or auto),"
            f" got {algorithm!r}"
        )
    if ulysses > 1:
        raise ValueError(
            "groups: sparse attention does not share heads between ranks; make mb.Groups with "
            f"ulysses=1, got {ulysses}"
        )
