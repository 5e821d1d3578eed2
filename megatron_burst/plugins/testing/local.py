# SPDX-License-Identifier: Apache-2.0
"""Scheduler and transport for ranks that are threads of one process.

For tests, and to check the numerics of a large grid on one device. Each thread runs the same code
as a distributed rank, until it must wait for another rank; then another thread runs. The module
detects deadlocks, and the use of a buffer before its message has arrived.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...comm import packing
from ...comm.packing import Envelope
from ...comm.relays import InOrder, Relays
from ...comm.transport import (
    AllToAll,
    Channel,
    Counters,
    Receive,
    Send,
    Tensors,
    all_to_all_by_messages,
)

T = TypeVar("T")
MOST = 1 << 10  # limit of ranks


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process, which is reused by later calls.

    The pool is cached, because torch's first operations in a thread are slow. The cache's key is
    the process id `process`, because a forked process needs a new pool.
    """
    return ThreadPoolExecutor(MOST)


class RankSwitch:
    """Scheduler that runs one function per rank in turns, and transfers messages between ranks.

    Each rank has a thread, and exactly one thread runs at a time. When a rank waits, pauses or
    ends, the next rank that is ready runs. So the order of execution is always the same.
    """

    def __init__(self) -> None:
        self.mailboxes: dict[tuple[Channel, int, int], deque[Mail]] = {}
        self._gathers: dict[int, int] = defaultdict(int)  # by rank
        self._rounds: dict[int, dict[int, Any]] = {}  # number of a gather -> values by rank
        self._turns: Turns | None = None  # set during `run`

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run one function per rank and return the results. An error on one rank ends all ranks."""
        if self._turns is not None:
            raise RuntimeError("the ranks of this process run already; make one call at a time")
        if not 0 < len(functions) <= MOST:
            raise ValueError(f"got {len(functions)} ranks; pass arguments for 1 to {MOST} ranks")
        self._turns = Turns(functions)
        try:
            return self._turns.run()
        except BaseException:
            self.clear()
            raise
        finally:
            self._turns = None

    def pause(self) -> None:
        """Let the other ranks that are ready run before this rank continues."""
        if self._turns is not None:
            self._turns.wait(lambda: True, "")

    def wait(self, ready: Callable[[], bool], reason: str) -> None:
        """Run other ranks until `ready` returns true.

        Args:
            ready: Function that returns True if this rank can continue.
            reason: Description of what is missing, for the error message.

        Raises:
            RuntimeError: Deadlock: no rank can run.
        """
        if ready():
            return
        if self._turns is None:
            raise RuntimeError(f"deadlock: {reason}")
        self._turns.wait(ready, reason)

    def all_gather(self, rank: int, size: int, value: T) -> list[T]:
        """Return the values of all `size` ranks, by rank. All ranks must call it."""
        self._gathers[rank] += 1
        number = self._gathers[rank]
        values = self._rounds.setdefault(number, {})
        values[rank] = value
        self.wait(lambda: len(values) == size, f"some ranks did not call gather {number}")
        self._rounds.pop(number, None)
        return [values[rank] for rank in range(size)]

    def clear(self) -> None:
        """Drop all pending messages."""
        self.mailboxes.clear()
        self._gathers.clear()
        self._rounds.clear()


class Stopped(BaseException):
    """Exception that ends the thread of a rank after another rank failed."""


class Turn:
    """State of one rank in `Turns`. The rank's thread waits for `lock` until its turn begins."""

    def __init__(self, function: Callable[[], Any]):
        self.function, self.lock = function, Lock()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for, self.ended, self.result = "", False, None
        self.lock.acquire()


class Turns:
    """Round-robin scheduler of one call of `RankSwitch.run`."""

    def __init__(self, functions: Sequence[Callable[[], Any]]):
        self._ranks = [Turn(function) for function in functions]
        self._round = iter(self._ranks)
        self._current = self._ranks[0]
        self._progress = False  # true if a rank ran in this round
        self._error: BaseException | None = None
        self._end = Lock()  # released when all ranks ended or one failed
        self._end.acquire()

    def run(self) -> list[Any]:
        """Run all ranks to their end and return their results, by rank."""
        enter = thread_modes()
        threads = [
            _threads(os.getpid()).submit(copy_context().run, self._run, rank, enter)
            for rank in self._ranks
        ]
        try:
            self._pass_on()
            self._end.acquire()
        except BaseException as error:  # such as KeyboardInterrupt
            self._error = error
        for rank, thread in zip(self._ranks, threads, strict=True):
            if not rank.ended:
                self._current = rank
                rank.lock.release()
            thread.result()
        if self._error is not None:
            raise self._error
        return [rank.result for rank in self._ranks]

    def wait(self, ready: Callable[[], bool], reason: str) -> None:
        """Run other ranks until `ready` returns True for this rank; see `RankSwitch.wait`."""
        rank = self._current
        if self._error is None:
            rank.ready, rank.waits_for = ready, reason
            self._pass_on()
            rank.lock.acquire()
        if self._error is not None:
            raise Stopped

    def _pass_on(self) -> None:
        """Start the next rank that is ready to continue.

        If no rank is ready, all ranks have finished, or they wait for one another (deadlock). In
        both cases `run` ends.
        """
        while True:
            for rank in self._round:
                if not rank.ended and rank.ready():
                    self._current, self._progress = rank, True
                    rank.lock.release()
                    return
            running = [rank for rank in self._ranks if not rank.ended]
            if running and not self._progress:
                self._error = RuntimeError(f"deadlock: {running[0].waits_for}")
            if not running or not self._progress:
                self._end.release()
                return
            self._round, self._progress = iter(running), False

    def _run(self, rank: Turn, enter: Callable[[], AbstractContextManager[None]]) -> None:
        """Run the function of one rank in the rank's thread, then start the next rank.

        Args:
            rank: The rank.
            enter: Context of `thread_modes`.
        """
        rank.lock.acquire()
        stopping = self._error is not None
        try:
            if not stopping:
                with enter():
                    rank.result = rank.function()
        except Stopped:
            stopping = True
        except BaseException as error:
            stopping = self._error is not None
            self._error = self._error or error
            if not stopping:
                rank.ended = True
                self._end.release()
                return
        rank.ended = True
        if not stopping:
            self._pass_on()


def thread_modes() -> Callable[[], AbstractContextManager[None]]:
    """Record torch's modes in this thread; return a function for other threads.

    The returned function makes a context in which the recorded modes are active.

    The modes are grad mode, inference mode, autocast, the CUDA stream, and mode objects.
    """
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = [
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    functions, operators = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    device = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            if device is not None:
                stack.enter_context(torch.cuda.stream(device))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            for function in functions:
                stack.enter_context(_pushed(function, torch.overrides))
            for operator in operators:
                stack.enter_context(_pushed(operator, _python_dispatch))
            yield

    return modes


@contextmanager
def _pushed(mode: Any, stack: Any) -> Iterator[None]:
    """Return a context in which a torch mode is on this thread's stack of modes.

    `with mode` would change the mode object, which is also on the stacks of other threads.

    Args:
        mode: Function mode or dispatch mode.
        stack: torch's module that pushes this kind of mode.
    """
    stack._push_mode(mode)
    try:
        yield
    finally:
        stack._pop_mode()


@dataclass
class Mail:
    """Message between two ranks, created by the rank that posts its send or receive first.

    Attributes:
        label: Label of the exchange, for errors.
        source: Tensors of the sender; None until it posts the send.
        target: Tensors of the receiver; None until it posts the receive.
        envelope: Metadata that must be equal on sender and receiver.
        versions: Version counters of the source when it was posted.
        carried: Copy of the source, if the sender waits before the receiver.
        landed: True after the message was copied into the target.
    """

    label: object
    source: Tensors | None = None
    target: Tensors | None = None
    envelope: Envelope | None = None
    versions: list[int] = field(default_factory=list)
    carried: Tensors | None = None
    landed: bool = False

    @property
    def complete(self) -> bool:
        return self.source is not None and self.target is not None

    def leave(self) -> None:
        """Copy the message when the sender waits, because it may then write to its tensors."""
        source = self._unchanged()
        if not self.landed:
            self.carried = [t.clone() for t in source]

    def land(self) -> None:
        """Copy the message into the target when the receiver waits."""
        source = self._unchanged() if self.carried is None else self.carried
        assert self.target is not None
        for target, sent in zip(self.target, source, strict=True):
            if target.shape != sent.shape or target.dtype != sent.dtype:
                raise RuntimeError(
                    f"{self.label}: a tensor of shape {list(sent.shape)} and {sent.dtype} was "
                    f"sent, but the receiver's buffer has shape {list(target.shape)} and "
                    f"{target.dtype}"
                )
            target.copy_(sent)
        complaint = self.envelope and packing.mismatch(self.target[0], self.envelope)
        if complaint:
            raise RuntimeError(f"exchange failed: {self.label}: {complaint}")
        self.landed, self.carried = True, None

    def _unchanged(self) -> Tensors:
        """Return the sender's tensors; raise RuntimeError if they were changed after the post."""
        assert self.source is not None
        if _versions(self.source) != self.versions:
            raise RuntimeError(
                f"{self.label}: a sent tensor was overwritten before the sender waited for the "
                "exchange; wait first"
            )
        return self.source


@dataclass
class _Delivery:
    leaving: list[Mail]
    landing: list[Mail]
    switch: RankSwitch

    def wait(self) -> None:
        for mails, arrive in ((self.leaving, Mail.leave), (self.landing, Mail.land)):
            while mails:
                mail = mails.pop(0)
                self.switch.wait(
                    lambda mail=mail: mail.complete,
                    f"only the sender or only the receiver has posted: {mail.label}",
                )
                arrive(mail)


@dataclass
class LocalEndpoint:
    """Endpoint of the in-process transport, see `transport.Endpoint`.

    Receive buffers are filled with NaN until the receiver has waited, and again when they are
    released. So reading a buffer too early or too late always gives NaN. With a real transport it
    would give wrong numbers only sometimes.

    Attributes:
        rank: Index of this rank in `ranks`.
        ranks: Rank in the grid, by peer index.
        switch: Scheduler of the ranks.
        counters: Counters of sent bytes.
    """

    rank: int
    ranks: Sequence[int]  # peer -> rank in the grid
    switch: RankSwitch
    counters: Counters = field(default_factory=Counters)
    room: int = 0

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: object
    ) -> _Delivery:
        leaving, landing = [], []
        for send in sends:
            key = channel, self.ranks[self.rank], self.ranks[send.peer]
            mail = self._mail(key, "source", label)
            mail.source = send.tensors if send.flat is None else (send.flat,)
            mail.versions = _versions(mail.source)
            leaving.append(mail)
        for receive in receives:
            key = channel, self.ranks[receive.peer], self.ranks[self.rank]
            mail = self._mail(key, "target", label)
            mail.target = receive.tensors
            if receive.message is not None and receive.message.flat is not None:
                mail.target, mail.envelope = (receive.message.flat,), receive.envelope
            _poison_(mail.target)
            landing.append(mail)
        for send in sends:
            self.counters.add(send.link, sum(t.nbytes for t in send.tensors))
        self.switch.pause()  # other ranks post their messages before this rank computes
        return _Delivery(leaving, landing, self.switch)

    def all_to_all(self, trade: AllToAll) -> None:
        all_to_all_by_messages(self, trade)

    def released(self, tensors: Tensors) -> None:
        _poison_(tensors)

    def relays(self, device: torch.device) -> Relays:
        return InOrder()

    def _mail(self, key: tuple[Channel, int, int], end: str, label: object) -> Mail:
        """Return the oldest message that lacks `end`, or a new message.

        Args:
            key: Channel, sender and receiver.
            end: "source" or "target".
            label: Label of the exchange, for errors.
        """
        box = self.switch.mailboxes.setdefault(key, deque())
        if box and getattr(box[0], end) is None:
            return box.popleft()
        box.append(Mail(label))
        return box[-1]


def _versions(tensors: Tensors) -> list[int]:
    """Return the version counter of each tensor; 0 for an inference tensor, which has none."""
    return [0 if t.is_inference() else t._version for t in tensors]


def _poison_(tensors: Tensors) -> None:
    """Fill contiguous tensors with 1 bits, which are NaN in every floating-point format."""
    for t in tensors:
        t.view(-1).view(torch.uint8).fill_(255)
