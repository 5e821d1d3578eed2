"""Ranks that share one process: each runs until it has to wait for another.

For tests, and to check the numerics of a large grid on one device. Every rank is a greenlet with
a stack of its own, so the code that runs is what runs on real ranks, with exchanges that block.
They share one thread, and with it torch's modes (autograd, autocast, dispatch). Owns the order in
which ranks run, and finds out when all of them wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from .transport import Channel, Counters, Receive, Send, Tensors

T = TypeVar("T")


class RankSwitch:
    """Runs one function per rank in turns, and carries messages between them."""

    def __init__(self) -> None:
        self.mailboxes: dict[tuple[Channel, int, int], deque[Mail]] = {}
        self._gathers: dict[int, int] = defaultdict(int)  # of each rank
        self._rounds: dict[int, dict[int, Any]] = {}  # what ranks gave to the gather of a number
        self._main: greenlet | None = None  # what called `run`, while it runs
        self._progress = False

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """The result of each; what one raises ends the others and is raised here."""
        self._main = getcurrent()
        ranks = [greenlet(function) for function in functions]
        for rank in ranks:
            rank.gr_context = copy_context()
        results: list[Any] = [None] * len(ranks)
        try:
            running = dict(enumerate(ranks))
            while running:
                self._progress = False
                for index, rank in list(running.items()):
                    results[index] = rank.switch()  # what it waits for, or its result
                    if rank.dead:
                        del running[index]
                        self._progress = True
                if not self._progress:
                    raise RuntimeError(f"deadlock: {results[next(iter(running))]}")
            return results
        except BaseException:
            self.clear()
            raise
        finally:
            self._main = None
            for rank in ranks:
                if not rank.dead:
                    rank.throw()

    def pause(self) -> None:
        """Let the other ranks run."""
        self._progress = True
        if self._main is not None:
            self._main.switch()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready`, after other ranks ran; RuntimeError if none of them can."""
        while not ready():
            if self._main is None:
                raise RuntimeError(f"deadlock: {what}")
            self._main.switch(what)
        self._progress = True

    def all_gather(self, rank: int, size: int, value: T) -> list[T]:
        """What each of `size` ranks gave to its gather of the same number."""
        self._gathers[rank] += 1
        number = self._gathers[rank]
        given = self._rounds.setdefault(number, {})
        given[rank] = value
        self._progress = True
        self.wait(lambda: len(given) == size, f"gather {number} lacks a rank")
        self._rounds.pop(number, None)
        return [given[each] for each in range(size)]

    def clear(self) -> None:
        """Forget what is under way."""
        self.mailboxes.clear()
        self._gathers.clear()
        self._rounds.clear()


@dataclass
class Mail:
    """One message from rank to rank; the one that posts first creates it, the other fills it."""

    label: str
    source: Tensors | None = None
    target: Tensors | None = None
    versions: list[int] = field(default_factory=list)
    delivered: bool = False

    @property
    def complete(self) -> bool:
        return self.source is not None and self.target is not None

    def deliver(self) -> None:
        """Copy, late on purpose: what was overwritten in flight shows in its version counter."""
        if self.delivered:
            return
        assert self.source is not None
        assert self.target is not None
        if _versions(self.source) != self.versions:
            raise RuntimeError(f"overwritten while in flight: {self.label}")
        for target, source in zip(self.target, self.source, strict=True):
            if target.shape != source.shape or target.dtype != source.dtype:
                raise RuntimeError(f"sent {source.shape} into {target.shape}: {self.label}")
            target.copy_(source)
        self.delivered = True


@dataclass
class _Delivery:
    mails: list[Mail]
    switch: RankSwitch

    def wait(self) -> None:
        for mail in self.mails:
            self.switch.wait(
                lambda mail=mail: mail.complete, f"exchange has only one end: {mail.label}"
            )
            mail.deliver()


@dataclass
class LocalEndpoint:
    """An end of the in-process transport (see `transport.Endpoint`)."""

    rank: int
    ranks: Sequence[int]  # peer -> rank in the grid
    switch: RankSwitch
    counters: Counters = field(default_factory=Counters)
    room: int = 0

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> _Delivery:
        mails = []
        for send in sends:
            key = channel, self.ranks[self.rank], self.ranks[send.peer]
            mail = self._mail(key, "source", label)
            mail.source, mail.versions = send.tensors, _versions(send.tensors)
            mails.append(mail)
        for receive in receives:
            key = channel, self.ranks[receive.peer], self.ranks[self.rank]
            mail = self._mail(key, "target", label)
            mail.target = receive.tensors
            mails.append(mail)
        self.counters.add(sends)
        self.switch.pause()  # the others post theirs before this rank computes
        return _Delivery(mails, self.switch)

    def _mail(self, key: tuple[Channel, int, int], end: str, label: str) -> Mail:
        """The oldest mail of this box that lacks `end`, or a new one."""
        box = self.switch.mailboxes.setdefault(key, deque())
        if box and getattr(box[0], end) is None:
            return box.popleft()
        box.append(Mail(label))
        return box[-1]


def _versions(tensors: Tensors) -> list[int]:
    """How often each was written to; tensors of inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in tensors]
