# SPDX-License-Identifier: Apache-2.0
"""Plans of the next micro-batch, made by a thread while the device computes the current one.

With packed documents every micro-batch has other lengths, so it needs a new plan. The data path
reads one batch ahead (`data.loader`) and passes its documents to `PlanBook.plan_ahead`. If only
tensor-parallel rank 0 reads batches, the thread of the other ranks waits for the documents that
rank 0 broadcasts (`data.next_pack`, `PlanBook.plan_received`). One thread per process then checks
the calls and builds the plans. The thread does not communicate. The forward compares a thread's
plan between ranks, exactly as a plan that it makes itself.

The facts of a call are the names and values that ranks compare. The forward uses a thread's plan
only if the facts of both calls are equal. If a rank has no document lengths in advance, its thread
makes no plan, and its forward makes the same plan. If the thread raised an error, the forward makes
the plan too and raises the error on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from ...comm.consensus import identity
from ...comm.operation import Operation
from ...comm.recent import RecentCache
from .. import patching
from ..data.packed import Pack

CALLS_EXPECTED = 16  # limit of kinds of layers x shapes of tensors
PLANS_AHEAD = 64  # limit of plans that the thread made and no forward has used yet
UNUSED = 32  # if a forward uses none of the first plans, the thread makes no more


class ExpectedCall(Protocol):
    """Protocol of the hashable description of an attention call (`plan_book.LayerCall`)."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        ...

    def length(self, book: Any) -> int:
        """Return the number of tokens of the sequence over all ranks of the plan book."""
        ...

    def operation(self, book: Any, pack: Pack, needs_grad: Collection[str]) -> Operation[Any, Any]:
        """Return the operation that makes the plan of this call for a pack; no communication.

        `needs_grad` has the names of the tensors that require a gradient.
        """
        ...


PlanKey = tuple[ExpectedCall, Pack]
# A call, the names of its tensors that require a gradient, and the stream of its device.
CallContext = tuple[ExpectedCall, Collection[str], torch.cuda.Stream | None]


class PlansAhead:
    """Plans that a thread makes before the layers of a plan book need them.

    Attributes:
        started: Number of plans that the thread was requested to make.
        used: Number of these plans that a forward used.
    """

    def __init__(self) -> None:
        self.started, self.used = 0, 0
        self._expected = RecentCache(CALLS_EXPECTED)
        self._futures = RecentCache(PLANS_AHEAD)  # by call and pack
        self._receiving: Future | None = None  # of `_plan_received`, for the newest pack

    def expect(self, call: ExpectedCall, needs_grad: Collection[str]) -> None:
        """Register a call, so that later packs get its plan from the thread.

        Args:
            call: The call.
            needs_grad: Names of its tensors that require a gradient.
        """
        self._expected.keep(call, needs_grad)

    def start(self, book: Any, pack: Pack, planned: Iterable[PlanKey]) -> None:
        """Let the thread make the plans of all registered calls for the next micro-batch.

        Args:
            book: The plan book of the calls.
            pack: The documents of the next micro-batch.
            planned: Calls and packs that have a plan already.
        """
        if not self._unused():
            calls, known = self._calls(), [*planned, *self._futures]
            self._keep(_submit_plans(_planner(), book, pack, calls, known))

    def start_received(
        self, book: Any, receive: Callable[[], Pack | None], planned: Iterable[PlanKey]
    ) -> None:
        """Let the thread receive the documents of the next micro-batch, then make its plans.

        Args:
            book: The plan book of the calls.
            receive: Function that waits for the documents. It returns None if the next micro-batch
                is unknown.
            planned: Calls and packs that have a plan already.
        """
        if not self._unused():
            arguments = book, receive, self._calls(), [*planned, *self._futures]
            self._receiving = _planner().submit(_plan_received, _planner(), *arguments)

    def collect(self) -> None:
        """Wait for the documents that `start_received` requested last, and keep their plans.

        Call it for all plan books when this micro-batch arrives, before any `start_received`.
        Otherwise the one thread could wait for a later message before it makes the plans.
        """
        received, self._receiving = self._receiving, None
        self._keep(_result(received) or {})

    def _calls(self) -> list[CallContext]:
        return [(call, needs, _stream(call)) for call, needs in self._expected.items()]

    def _keep(self, futures: Mapping[PlanKey, Future]) -> None:
        for key, future in futures.items():
            self._futures.keep(key, future)
        self.started += len(futures)

    def _unused(self) -> bool:
        """Return whether forwards get other packs than the thread."""
        return self.started >= UNUSED and not self.used

    def builder(
        self, call: ExpectedCall, pack: Pack, operation: Operation[Any, Any]
    ) -> Callable[[Any], Any]:
        """Return a function that returns the plan of a checked call (a request).

        The function returns the plan that the thread has made, or makes the plan itself.

        Args:
            call: The call that needs the plan.
            pack: The documents of the micro-batch.
            operation: The operation of the forward.
        """
        future = self._futures.pop((call, pack), None)

        def build(request: Any) -> Any:
            facts, plan = _result(future) or (None, None)
            if facts != identity(request.facts):
                return operation.build(request)
            self.used += 1
            return plan

        return build


def _planner() -> ThreadPoolExecutor:
    """Return the thread pool of the run, which has one thread."""
    state = patching.run_state()
    if state.planner is None:
        state.planner = ThreadPoolExecutor(1, thread_name_prefix="megatron_burst planner")
    return state.planner


def _plan_received(
    planner: ThreadPoolExecutor,
    book: Any,
    receive: Callable[[], Pack | None],
    calls: Iterable[CallContext],
    known: Iterable[PlanKey],
) -> dict[PlanKey, Future]:
    """Wait for a pack in the planning thread; return the futures of its plans."""
    pack = receive()
    return {} if pack is None else _submit_plans(planner, book, pack, calls, known)


def _submit_plans(
    planner: ThreadPoolExecutor,
    book: Any,
    pack: Pack,
    calls: Iterable[CallContext],
    known: Iterable[PlanKey],
) -> dict[PlanKey, Future]:
    """Let the thread make the plans for a pack, except the `known` ones; return their futures."""
    planned = [call for call, other in known if other == pack]
    return {
        (call, pack): planner.submit(_plan, book, call, pack, needs_grad, stream)
        for call, needs_grad, stream in calls
        if call not in planned and call.length(book) == pack.total
    }


def _plan(
    book: Any,
    call: ExpectedCall,
    pack: Pack,
    needs_grad: Collection[str],
    stream: torch.cuda.Stream | None,
) -> tuple[int, Any]:
    """Make a plan in the planning thread.

    The plan's indices are copied to the device on `stream`, on which the forward uses them.

    Returns:
        A digest of the facts that ranks compare, and the plan; (0, None) if "auto" must first
            measure, which the forward does.
    """
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        operation = call.operation(book, pack, needs_grad)
        if operation.measures:  # "auto" measures in the first forward
            return 0, None
        request = operation.check()
        return identity(request.facts), operation.build(request)


def _result(future: Future | None) -> Any:
    """Wait for a result of the thread; return None if the thread raised an error."""
    try:
        return None if future is None else future.result()
    except Exception:
        logging.getLogger(__name__).debug("a plan was not made ahead", exc_info=True)
        return None


def _stream(call: ExpectedCall) -> torch.cuda.Stream | None:
    """Return the current CUDA stream of the device of a call; None on the CPU."""
    return torch.cuda.current_stream(call.device) if call.device.type == "cuda" else None
