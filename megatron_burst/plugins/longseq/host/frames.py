# SPDX-License-Identifier: Apache-2.0
"""Frames: what one layer leaves behind, moved together and fetched one ahead in backward.

Decides what is fetched next. Frames are numbered in the order of forward until none is left (the
end of a step, or of a micro-batch where no two are in flight); in which order backward took those
of the last such period is remembered by number. As long as nothing is known, or what is known is
not there, it is the frame before the current one: right for one micro-batch. A frame fetched in
vain is given up, to be fetched again, so that never more than one is on the device too early.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol


class Fetched(Protocol):
    """Something of a frame that can be on its way back."""

    def fetch(self) -> None: ...

    def unfetch(self) -> None: ...


class HostFrame:
    """What is moved inside of `with frame:`, which may be entered more than once."""

    def __init__(self, order: Order):
        self.number: int | None = None  # until something is moved
        self._order = order
        self._held: dict[object, weakref.ref[Any]] = {}

    def __enter__(self) -> HostFrame:
        self._order.stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._order.stack().pop()

    def add(self, handle: object, copy: Fetched) -> None:
        """A handle of this frame, by its key, and what it stands for."""
        if self.number is None or not self._held:
            self._order.enter(self)
        self._held[handle] = weakref.ref(copy)

    def drop(self, handle: object) -> None:
        """The handle is gone."""
        self._held.pop(handle, None)
        if not self._held:
            self._order.leave(self)

    def visit(self) -> None:
        """Backward needs something of this frame: fetch all of it, and the next one."""
        self._order.visit(self)

    def copies(self) -> list[Fetched]:
        """What is still there, once each, in the order in which it was moved."""
        found = (ref() for ref in list(self._held.values()))
        return list({id(copy): copy for copy in found if copy is not None}.values())

    def fetch(self) -> None:
        for copy in self.copies():
            copy.fetch()

    def unfetch(self) -> None:
        for copy in self.copies():
            copy.unfetch()


class Order:
    """The frames that are there, and in which order backward takes them. before: called before
    anything is fetched because of a visit.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._live: dict[int, weakref.ref[HostFrame]] = {}
        self._next = 0  # number of the next frame of this period
        self._visits: dict[int, None] = {}  # in their order, once each
        self._learned: dict[int, int] = {}  # number of a frame: of the one after it in backward
        self._current: int | None = None
        self._ahead: dict[int, int] = {}  # frames fetched ahead: how many there had been by then
        self._local = threading.local()

    def stack(self) -> list[HostFrame]:
        """Frames that this thread is inside of."""
        if not hasattr(self._local, "frames"):
            self._local.frames = []
        return self._local.frames

    @property
    def live(self) -> int:
        """How many frames have something on the host."""
        return len(self._live)

    def enter(self, frame: HostFrame) -> None:
        if not self._live:
            self._begin()
        frame.number, self._next = self._next, self._next + 1
        self._live[frame.number] = weakref.ref(frame)

    def leave(self, frame: HostFrame) -> None:
        if frame.number is not None:
            self._live.pop(frame.number, None)
            self._ahead.pop(frame.number, None)

    def _begin(self) -> None:
        """A period is over, another one begins."""
        if self._visits:
            self._learned = dict(pairwise(self._visits))
        self._next, self._visits, self._current = 0, {}, None
        self._ahead.clear()

    def visit(self, frame: HostFrame) -> None:
        number = frame.number
        if number is None or number == self._current:
            return
        self._current = number
        self._visits[number] = None
        if self._ahead.pop(number, None) is None:
            self._give_up(number)
        self._before()
        frame.fetch()
        following = self._following(number)
        if following is not None and following.number not in self._ahead:
            assert following.number is not None
            self._ahead[following.number] = self._next
            following.fetch()

    def _give_up(self, number: int) -> None:
        """Another frame was needed than those that were fetched ahead. One that was not there by
        then says nothing about them: a recompute left it behind.
        """
        for other in [n for n, there in self._ahead.items() if number < there]:
            self._ahead.pop(other)
            found = self._frame(other)
            if found is not None:
                found.unfetch()

    def _following(self, number: int) -> HostFrame | None:
        learned = self._frame(self._learned.get(number))
        if learned is not None:
            return learned
        before = (n for n in list(self._live) if n < number and n not in self._visits)
        return self._frame(max(before, default=None))

    def _frame(self, number: int | None) -> HostFrame | None:
        ref = None if number is None else self._live.get(number)
        return None if ref is None else ref()
