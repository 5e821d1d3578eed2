"""Events of one rank while a plan runs, on four streams, timed by the clock of the host.

`traced(plan)` returns a copy of the plan whose kernel and transports record events: compute (the
local attention of a pair, with its merge), intra and inter (an exchange over links of that class,
from its start until all of it has arrived) and wait (the rank only waits for an exchange). A thread
per exchange records its end, so tracing costs a little time. Plans on CUDA are refused: the host
runs ahead of the device there, and its clock does not time the device's work.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...comm.transport import Channel, Counters, Endpoint, Pending, Receive, Send
from ...kernels.base import Kernel, Rows, Scoring
from ...planning.plan import Plan

STREAMS = ("compute", "intra", "inter", "wait")


class Event(NamedTuple):
    """One event. begin, end: seconds of a clock that all processes of a host share."""

    rank: int
    stream: str
    name: str
    begin: float
    end: float


def traced(plan: Plan) -> tuple[Plan, list[Event]]:
    """A copy of the plan that records its events, and the list to which it adds them.

    Raises ValueError unless every rank is a gloo process of its own.
    """
    if "cpu" not in plan.groups.devices:
        raise ValueError(
            "a trace needs one gloo process per rank: the clock of the host says nothing about "
            f"ranks in one process or on GPUs; these groups are on {plan.groups.backend}"
        )
    events: list[Event] = []
    rank, topology, job = plan.groups.rank, plan.groups.topology, plan.job
    ring, sharing = (
        _Endpoint(end, rank, [topology.link(rank, other) for other in ranks], events)
        for end, ranks in (
            (job.ring, topology.ring(rank)),
            (job.ulysses, topology.ulysses_group(rank)),
        )
    )
    kernel = _Kernel(job.kernel, rank, events)
    tracing = dataclasses.replace(job, ring=ring, ulysses=sharing, kernel=kernel)
    return dataclasses.replace(plan, job=tracing), events


@dataclass
class _Endpoint:
    real: Endpoint
    grid_rank: int
    links: Sequence[str]  # link class to each member of the ring
    events: list[Event]

    @property
    def rank(self) -> int:
        return self.real.rank

    @property
    def counters(self) -> Counters:
        return self.real.counters

    @property
    def room(self) -> int:
        return self.real.room

    @room.setter
    def room(self, size: int) -> None:
        self.real.room = size

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending:
        begin = time.perf_counter()
        links = {self.links[message.peer] for message in (*sends, *receives)}
        name = label.split(": ", 1)[-1]
        pending = self.real.exchange(channel, sends, receives, label)

        def landed(end: float) -> None:
            for link in sorted(links):
                self.events.append(Event(self.grid_rank, link, name, begin, end))

        return _Watched(pending, landed, lambda *span: self._waited(name, *span))

    def released(self, tensors: Sequence[torch.Tensor]) -> None:
        self.real.released(tensors)

    def _waited(self, name: str, begin: float, end: float) -> None:
        self.events.append(Event(self.grid_rank, "wait", name, begin, end))


class _Watched:
    """A pending exchange, and a thread that waits for it and records when it ended."""

    def __init__(
        self,
        pending: Pending,
        landed: Callable[[float], None],
        waited: Callable[[float, float], None],
    ):
        self._error: BaseException | None = None
        self._waited = waited

        def watch() -> None:
            try:
                pending.wait()
            except BaseException as error:
                self._error = error
            landed(time.perf_counter())

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        begin = time.perf_counter()
        self._thread.join()
        self._waited(begin, time.perf_counter())
        if self._error is not None:
            raise self._error


@dataclass
class _Kernel:
    real: Kernel
    rank: int
    events: list[Event]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Any,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        begin = time.perf_counter()
        self.real.forward(q, k, v, work, scoring, out, lse, max_logits)
        self._took("forward", begin)

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Any,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        begin = time.perf_counter()
        self.real.backward(rows, k, v, work, scoring, dq, dk, dv)
        self._took("backward", begin)

    def _took(self, name: str, begin: float) -> None:
        self.events.append(Event(self.rank, "compute", name, begin, time.perf_counter()))
