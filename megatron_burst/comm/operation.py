# SPDX-License-Identifier: Apache-2.0
"""The steps that make the plan of a call: check, build, agree, connect.

Attention, linear attention, sparse attention and the LM head loss describe the call of one rank as
an `Operation`. `prepared` makes the plan and compares it between ranks; callers cache it. With
"auto", ranks also agree before the choice, which may measure. `derived` makes and caches a plan
without communication, if the call depends only on a plan on which ranks agreed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .consensus import Facts, attempt, identity
from .recent import RecentCache

# Requests and plans have an attribute `facts`, a dict that must be equal on all ranks.
Request = TypeVar("Request", bound=Any)
Plan = TypeVar("Plan", bound=Any)


class Operation(ABC, Generic[Request, Plan]):
    """A call on one rank, with the steps that make its plan."""

    @abstractmethod
    def check(self) -> Request:
        """Check the arguments; return them as a request. Does not communicate.

        Raises:
            ValueError: An argument is not supported.
        """

    @abstractmethod
    def agree(self, facts: Facts | ValueError) -> None:
        """Raise the same ValueError on every rank if facts differ or a rank has an error."""

    @property
    def measures(self) -> bool:
        """Return True if `choose` must be called before `build`, because it runs measurements."""
        return False

    def choose(self, request: Request) -> Request | ValueError:
        """Resolve "auto" values; return the request, or this rank's error. A collective call."""
        return request

    @abstractmethod
    def build(self, request: Request) -> Plan:
        """Return the plan of this rank for a checked request. Does not communicate."""

    def connect(self, plan: Plan) -> None:
        """Make the process groups and buffers that the plan needs. A collective call."""


def prepared(
    operation: Operation[Request, Plan], build: Callable[[Request], Plan] | None = None
) -> Plan:
    """Make the plan of an operation, and return it if all ranks agree. A collective call.

    Each rank checks the call and builds its plan. Then ranks compare the facts of their plans. A
    rank with an error sends the error in `agree`, so that all ranks raise it and no rank hangs.

    Args:
        operation: The operation.
        build: Function that is called in place of `operation.build`, if given.

    Raises:
        ValueError: A rank has an error, or the `facts` of requests or plans differ between ranks.
    """
    request = attempt(operation.check)
    if operation.measures:  # measuring waits for all ranks, so they must agree first
        operation.agree(request if isinstance(request, ValueError) else request.facts)
        assert not isinstance(request, ValueError)
        request = operation.choose(request)
    build = build or operation.build
    plan = request if isinstance(request, ValueError) else attempt(build, request)
    operation.agree(plan if isinstance(plan, ValueError) else plan.facts)
    assert not isinstance(plan, ValueError)
    operation.connect(plan)
    return plan


def derived(operation: Operation[Request, Plan], plans: RecentCache) -> Plan:
    """Return the plan of an operation, made without communication and cached.

    The operation must depend only on a plan on which all ranks agreed. Ranks then need no
    comparison on the host in each layer. The facts contain the identity of the agreed plan, and
    messages on the CPU contain the identity of the derived plan. So a rank with a different plan
    causes an error.

    Args:
        operation: The operation.
        plans: Cache of derived plans by identity.
    """
    request = operation.check()
    key = identity(request.facts)
    plan = plans.find(key)
    if plan is None:
        plan = plans.keep(key, operation.build(request))
    operation.connect(plan)
    return plan
