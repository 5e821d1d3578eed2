# SPDX-License-Identifier: Apache-2.0
"""Plans of the sparse operations: plans as in `mb.prepare`, with a placeholder for the kernel.

If a call has no plan argument, ranks make its plan in a collective, as in `mb.prepare`. Otherwise
the plan of the call is derived from the plan argument and cached. This needs no collective, because
the ranks compared the plan argument when it was made. If the plan argument was made with algorithm
"auto", each operation selects its own algorithm with the rates of the plan argument.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch

from ...comm.groups import Groups, check_groups
from ...comm.operation import derived, prepared
from ...execution.function import StoredResults
from ...layout import LayoutName, Replicated
from ...layout.layouts import Layout
from ...masks import Mask
from ...options import AttentionOptions
from ...planning.plan import Plan
from ...planning.prepare import RingOperation
from ...planning.validate import NeedsGrad, Request, check
from ...recompute.checkpoint import AttentionStore, current_store
from ...schedule.algorithms import ALGORITHMS

CACHED_PLANS = 16  # per rank; more than kinds of layers x operations


@dataclass(frozen=True)
class SparseSetting:
    """Groups, options and attention store of a call of a sparse operation.

    Attributes:
        groups: Groups of the rank.
        made: The plan argument, or None if the call has keywords instead.
        options: Options of the ring.
        attention_store: Attention store of the `mb.checkpoint` around the call, or None.
    """

    groups: Groups
    made: Plan | None
    options: AttentionOptions
    attention_store: AttentionStore | None

    @property
    def store(self) -> float | None:
        """Fraction of rows whose results the attention store keeps; None without a store."""
        if self.made is not None:
            return self.made.options.store
        return None if self.attention_store is None else self.attention_store.fraction

    def scale(self, q: object, requested: float | None) -> float | None:
        """Return the factor of the scores: `requested`, the plan's factor, or d ** -0.5.

        The factor of the plan applies if the plan was made for queries of width d.

        Args:
            q: Queries [s, b, h, d].
            requested: Requested factor, or None.
        """
        if requested is not None or not isinstance(q, torch.Tensor) or not q.dim():
            return requested
        if self.made is not None and self.made.signature[0][0][-1] == q.shape[-1]:
            return self.made.rank_plan.scoring.scale
        return q.shape[-1] ** -0.5

    def stored(self, key: object, label: object) -> StoredResults | None:
        """Return the entry of this call in the attention store, or None if there is no store.

        Args:
            key: Name of the operation, and the arguments that determine the result of the call.
            label: Label of the call.

        Raises:
            ValueError: The attention store and the plan have different fractions of rows.
        """
        if self.made is not None and self.made.store_entry(self.attention_store, label) is None:
            return None
        return (
            StoredResults(self.attention_store, (key, label))
            if self.attention_store and self.store
            else None
        )


def setting(
    plan: object,
    groups: Groups | None,
    layout: LayoutName | Layout | None,
    mask: Mask | None,
    algorithm: str | None,
) -> SparseSetting:
    """Return groups, options and attention store of a call with these arguments of `mb.select`.

    Raises:
        ValueError: The call has a plan and other keywords, or neither a plan nor groups; or the
            plan has a softcap.
    """
    if plan is None:
        check_groups(groups)
        assert groups is not None
        options = AttentionOptions(
            layout="zigzag" if layout is None else layout, mask=mask, side="kv",
            algorithm="burst" if algorithm is None else algorithm, kernel="reference",
        )  # fmt: skip
        return SparseSetting(groups, None, options, current_store())
    keywords = {"groups": groups, "layout": layout, "mask": mask, "algorithm": algorithm}
    present = sorted(name for name, value in keywords.items() if value is not None)
    if present:
        raise ValueError(
            f"plan cannot be combined with {present}; pass a plan, or the keywords that make one"
        )
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    if plan.options.softcap is not None:
        raise ValueError(
            "plan: sparse attention has no softcap, and this plan was made with "
            f"softcap={plan.options.softcap}; use a plan without softcap"
        )
    options = AttentionOptions(
        layout=plan.layout, key_layout=plan.options.key_layout, mask=plan.mask, side="kv",
        kernel="reference",
        algorithm=plan.algorithm if plan.choice is None else "auto",
    )  # fmt: skip
    return SparseSetting(plan.groups, plan, options, current_store())


@dataclass(frozen=True, kw_only=True)
class SelectedOperation(RingOperation):
    """One call of a sparse operation, such as `mb.sparse_attention`, on one rank.

    Ranks send keys. Queries and their selection stay on their rank.

    Attributes:
        groups: Groups of the rank.
        made: Plan argument, from which the plan of this call is derived; or None.
        options: Options of the ring.
        sink: Sink logits [h], or None.
        needs_grad: Three bools: whether q, k and v need gradients.
    """

    groups: Groups
    made: Plan | None
    options: AttentionOptions
    sink: torch.Tensor | None = None
    needs_grad: NeedsGrad = (False, False, False)

    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return q, k and v, or placeholders with the shapes of the rows that are sent.

        v is None if values are the keys.

        Raises:
            ValueError: The arguments of the call are invalid.
        """

    def ring_options(self) -> AttentionOptions:
        """Return the options of the ring, whose layout and mask apply to the rows that are sent."""
        return self.options

    @abstractmethod
    def adapted(self, request: Request) -> Request:
        """Return a copy of the checked arguments of the ring, with the kernel of this operation.

        The copy also adds this operation's own arguments to `facts`, the values that ranks compare
        before they communicate.
        """

    def check(self) -> Request:
        self.groups.check()
        tensors, options = self.tensors(), self.ring_options()
        request = check(tensors, self.groups, options, self.needs_grad, self.sink)
        if isinstance(request.key_layout, Replicated):
            raise ValueError(
                "key_layout: sparse attention needs keys that are split over ranks, got "
                f"{request.key_layout}; use a layout such as 'contiguous'"
            )
        _check_ring(options.algorithm, self.groups.topology.ulysses)
        request = self.adapted(request)
        if self.made is None:
            return request
        return replace(request, facts=request.facts | {"plan": self.made.identity})

    @property
    def measures(self) -> bool:
        return self.made is None and self.options.algorithm == "auto"

    def choose(self, request: Request) -> Request | ValueError:
        from .choice import chosen  # imports the simulator, which only this call needs

        return chosen(request, self.groups)

    def build(self, request: Request) -> Plan:
        if self.made is not None and self.made.choice is not None:
            from .choice import with_fastest

            request = with_fastest(request, self.groups, self.made.choice.rates)
        return super().build(request)


def plan_of(operation: SelectedOperation) -> Plan:
    """Return the plan of an operation.

    This is a collective if the call has no plan argument.

    Raises:
        ValueError: The call is not supported. Without a plan argument, every rank raises the error.
    """
    if operation.made is None:
        return prepared(operation)
    return derived(operation, operation.groups.recent("sparse", CACHED_PLANS))


def _check_ring(algorithm: str, ulysses: int) -> None:
    """Raise ValueError unless the algorithm sends keys and ranks do not share heads (ulysses)."""
    ring = ALGORITHMS.get(algorithm)
    if algorithm != "auto" and (ring is None or not ring.keeps):
        able = ", ".join(name for name, entry in ALGORITHMS.items() if entry.keeps)
        raise ValueError(
            "algorithm: sparse attention needs an algorithm that sends keys "
            f"({able}, or auto), got {algorithm!r}"
        )
    if ulysses > 1:
        raise ValueError(
            "groups: sparse attention does not share heads between ranks; make mb.Groups with "
            f"ulysses=1, got {ulysses}"
        )
