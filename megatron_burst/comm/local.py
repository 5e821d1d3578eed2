# SPDX-License-Identifier: Apache-2.0
"""Ranks that share one process: each runs until it has to wait for another.

For tests, and to check the numerics of a large grid on one device. Every rank is a greenlet with
a stack of its own, so the code that runs is what runs on real ranks, with exchanges that block.
They share one thread, and with it torch's modes (autograd, autocast, dispatch). Owns the order in
which ranks run, and finds out when all of them wait, and who uses a buffer at a time when a device
may still write to it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet

from . import packing
from .packing import Envelope
from .transport import Channel, Counters, Receive, Send, Tensors, Trade, all_to_all_by_messages

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
        mode = torch.is_grad_enabled()
        try:
            running = dict(enumerate(ranks))
            while running:
                self._progress = False
                for index, rank in list(running.items()):
                    torch.set_grad_enabled(mode)  # a rank that waits inside of no_grad has its own
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
            torch.set_grad_enabled(mode)

    def pause(self) -> None:
        """Let the other ranks run."""
        self._progress = True
        if self._main is not None:
            self._switch(None)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready`, after other ranks ran; RuntimeError if none of them can."""
        while not ready():
            if self._main is None:
                raise RuntimeError(f"deadlock: {what}")
            self._switch(what)
        self._progress = True

    def _switch(self, what: str | None) -> None:
        """To the other ranks, and back into this one's grad mode, which belongs to the thread."""
        assert self._main is not None
        mode = torch.is_grad_enabled()
        self._main.switch(what)
        torch.set_grad_enabled(mode)

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
        """The sender waited: from now on it may write to what it sent."""
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
        """What was sent. Asked for late on purpose: that it was overwritten in flight shows in its
        version counter."""
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

    def all_to_all(self, trade: Trade) -> None:
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
