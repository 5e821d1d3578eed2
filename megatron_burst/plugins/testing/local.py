# SPDX-License-Identifier: Apache-2.0
"""Ranks that share one process: each runs until it has to wait for another.

For tests, and to check the numerics of a large grid on one device. Each rank is a thread, so the
code that runs is the code of real ranks, with exchanges that block. The module determines the order
in which ranks run, detects deadlocks, and detects the use of a buffer that a device may still write
to.
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
MOST = 1 << 10  # ranks


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of the process with this id; after a fork those of the parent are gone.

    They are kept, because torch's first operations in a thread are slow.
    """
    return ThreadPoolExecutor(MOST)


class RankSwitch:
    """Runs one function per rank in turns, and carries messages between the ranks.

    Each rank has a thread, and exactly one thread runs at a time. A rank passes its turn to the
    next rank when it waits, pauses or ends, so the order is the same in every run.
    """

    def __init__(self) -> None:
        self.mailboxes: dict[tuple[Channel, int, int], deque[Mail]] = {}
        self._gathers: dict[int, int] = defaultdict(int)  # by rank
        self._rounds: dict[int, dict[int, Any]] = {}  # number of a gather -> values by rank
        self._turns: Turns | None = None  # while `run` runs

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Return the result of each function. An error of one rank ends the others."""
        if self._turns is not None:
            raise RuntimeError("the ranks of this process run already; make one call at a time")
        if not 0 < len(functions) <= MOST:
            raise ValueError(f"{len(functions)} ranks; give arguments for 1 to {MOST} ranks")
        self._turns = Turns(functions)
        try:
            return self._turns.run()
        except BaseException:
            self.clear()
            raise
        finally:
            self._turns = None

    def pause(self) -> None:
        """Let the other ranks run."""
        if self._turns is not None:
            self._turns.wait(lambda: True, "")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready`, after other ranks ran; RuntimeError if no rank can run."""
        if ready():
            return
        if self._turns is None:
            raise RuntimeError(f"deadlock: {what}")
        self._turns.wait(ready, what)

    def all_gather(self, rank: int, size: int, value: T) -> list[T]:
        """Return the values that all `size` ranks gave to the gather of the same number."""
        self._gathers[rank] += 1
        number = self._gathers[rank]
        values = self._rounds.setdefault(number, {})
        values[rank] = value
        self.wait(lambda: len(values) == size, f"gather {number} lacks a rank")
        self._rounds.pop(number, None)
        return [values[rank] for rank in range(size)]

    def clear(self) -> None:
        """Drop all messages that are under way."""
        self.mailboxes.clear()
        self._gathers.clear()
        self._rounds.clear()


class Stopped(BaseException):
    """Ends a rank after another rank failed."""


class Turn:
    """One rank in `Turns`: its thread runs while `lock` is released for it."""

    def __init__(self, function: Callable[[], Any]):
        self.function, self.lock = function, Lock()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for, self.ended, self.result = "", False, None
        self.lock.acquire()


class Turns:
    """One call of `RankSwitch.run`: passes the turn from rank to rank, round after round."""

    def __init__(self, functions: Sequence[Callable[[], Any]]):
        self._ranks = [Turn(function) for function in functions]
        self._round = iter(self._ranks)
        self._current = self._ranks[0]
        self._progress = False  # whether a rank ran in this round
        self._error: BaseException | None = None
        self._end = Lock()  # released when all ranks ended or one failed
        self._end.acquire()

    def run(self) -> list[Any]:
        """Return the result of each rank."""
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

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until this rank has its turn and is `ready`."""
        rank = self._current
        if self._error is None:
            rank.ready, rank.waits_for = ready, what
            self._pass_on()
            rank.lock.acquire()
        if self._error is not None:
            raise Stopped

    def _pass_on(self) -> None:
        """Give the turn to the next rank that is ready, or end the call."""
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
        """Run one rank in its thread."""
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
    """Return a context that has the modes of torch of this thread in another thread."""
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
    """Have `mode` on the stack of this thread. `with mode` would change the mode, which is also on
    the stack of other threads.
    """
    stack._push_mode(mode)
    try:
        yield
    finally:
        stack._pop_mode()


@dataclass
class Mail:
    """One message from rank to rank; the one that posts first creates it, the other fills it."""

    label: object
    source: Tensors | None = None
    target: Tensors | None = None
    envelope: Envelope | None = None  # what it must bear
    versions: list[int] = field(default_factory=list)
    carried: Tensors | None = None  # a copy of the source, from the sender's wait on
    landed: bool = False

    @property
    def complete(self) -> bool:
        return self.source is not None and self.target is not None

    def leave(self) -> None:
        """Keep a copy of the message, because the sender may write to its tensors from now on."""
        source = self._unchanged()
        if not self.landed:
            self.carried = [t.clone() for t in source]

    def land(self) -> None:
        """The receiver waited: only now the message is there, wherever its sender is."""
        source = self._unchanged() if self.carried is None else self.carried
        assert self.target is not None
        for target, sent in zip(self.target, source, strict=True):
            if target.shape != sent.shape or target.dtype != sent.dtype:
                raise RuntimeError(f"sent {sent.shape} into {target.shape}: {self.label}")
            target.copy_(sent)
        complaint = self.envelope and packing.mismatch(self.target[0], self.envelope)
        if complaint:
            raise RuntimeError(f"exchange failed: {self.label}: {complaint}")
        self.landed, self.carried = True, None

    def _unchanged(self) -> Tensors:
        """Return the tensors of the message, unless they were written to since it was sent."""
        assert self.source is not None
        if _versions(self.source) != self.versions:
            raise RuntimeError(f"overwritten while in flight: {self.label}")
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
                    lambda mail=mail: mail.complete, f"exchange has only one end: {mail.label}"
                )
                arrive(mail)


@dataclass
class LocalEndpoint:
    """An end of the in-process transport (see `transport.Endpoint`).

    What is being received is poisoned until it was waited for, and so is what was released: to read
    it too early or too late gives NaN here, where on a device it gives a wrong number now and then.
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
        self.counters.add(sends)
        self.switch.pause()  # the others post theirs before this rank computes
        return _Delivery(leaving, landing, self.switch)

    def all_to_all(self, trade: AllToAll) -> None:
        all_to_all_by_messages(self, trade)

    def released(self, tensors: Tensors) -> None:
        _poison_(tensors)

    def _mail(self, key: tuple[Channel, int, int], end: str, label: object) -> Mail:
        """The oldest mail of this box that lacks `end`, or a new one."""
        box = self.switch.mailboxes.setdefault(key, deque())
        if box and getattr(box[0], end) is None:
            return box.popleft()
        box.append(Mail(label))
        return box[-1]


def _versions(tensors: Tensors) -> list[int]:
    """How often each was written to; tensors of inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in tensors]


def _poison_(tensors: Tensors) -> None:
    """All bits of these contiguous tensors become ones: NaN in every floating format."""
    for t in tensors:
        t.view(-1).view(torch.uint8).fill_(255)
