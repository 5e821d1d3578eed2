# SPDX-License-Identifier: Apache-2.0
"""Frames: groups of saved tensors, one per layer, which backward fetches one layer ahead.

This module decides which frame is fetched next. Frames are numbered in the order of forward. The
numbers restart in each period. A period ends when no frame is left: after a step, or after each
micro-batch if only one is in flight. The order in which backward visited frames in the last period
is the prediction for the next period. Without a prediction, the frame before the current one is
fetched, which is correct for one micro-batch. If another frame is needed than predicted, the frame
that was fetched ahead is discarded and fetched again later. So at most one frame is on the device
too early.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol


class Fetchable(Protocol):
    """Host copy that can be fetched ahead of its use and discarded again."""

    def fetch(self) -> None: ...

    def unfetch(self) -> None: ...


class HostFrame:
    """Context that records the tensors of one layer that are moved to the host.

    Tensors that are moved inside `with frame:` belong to the frame. The context may be entered
    repeatedly.
    """

    def __init__(self, order: FrameOrder):
        self.number: int | None = None  # set when the first tensor is moved
        self._order = order
        self._copies: dict[object, weakref.ref[Any]] = {}

    def __enter__(self) -> HostFrame:
        self._order.stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._order.stack().pop()

    def add(self, handle: object, copy: Fetchable) -> None:
        """Add a copy on the host to the frame.

        Args:
            handle: Key of the handle (`MovedTensor`) to the copy.
            copy: The copy.
        """
        if self.number is None or not self._copies:
            self._order.enter(self)
        self._copies[handle] = weakref.ref(copy)

    def drop(self, handle: object) -> None:
        """Remove the copy of a handle that was destroyed; `handle` is the key of the handle."""
        self._copies.pop(handle, None)
        if not self._copies:
            self._order.leave(self)

    def visit(self) -> None:
        """Fetch this frame, which backward needs now, and the frame that is predicted as next."""
        self._order.visit(self)

    def copies(self) -> list[Fetchable]:
        """Return the copies that still exist, without duplicates, in the order of `add`."""
        copies = (ref() for ref in list(self._copies.values()))
        return list({id(copy): copy for copy in copies if copy is not None}.values())

    def fetch(self) -> None:
        for copy in self.copies():
            copy.fetch()

    def unfetch(self) -> None:
        for copy in self.copies():
            copy.unfetch()


class FrameOrder:
    """Registry of the frames that have tensors in host memory.

    A frame consists of the saved tensors of one layer. The registry predicts which frame backward
    needs next, and fetches this frame in advance.

    Args:
        before: Function that is called before each fetch of the frame that backward needs.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._live: dict[int, weakref.ref[HostFrame]] = {}
        self._next = 0  # number of the next frame of this period
        self._visits: dict[int, None] = {}  # numbers of visited frames, in order
        self._learned: dict[int, int] = {}  # number of a frame -> number of its successor
        self._current: int | None = None
        # Number of a frame that was fetched ahead -> number of frames at that time.
        self._ahead: dict[int, int] = {}
        self._local = threading.local()

    def stack(self) -> list[HostFrame]:
        """Return the frames whose contexts this thread has entered, the innermost last."""
        if not hasattr(self._local, "frames"):
            self._local.frames = []
        return self._local.frames

    @property
    def live(self) -> int:
        """Number of frames (layers) with tensors on the host."""
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
        """Begin a new period, such as a step.

        The order in which backward needed frames in the last period becomes the prediction.
        """
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
        """Discard frames that were fetched ahead, because backward needs frame `number` instead.

        If frame `number` did not exist at the time of the fetch, a recomputation has made it. Then
        the prediction may still be correct, and nothing is discarded.
        """
        for wrong in [n for n, count in self._ahead.items() if number < count]:
            self._ahead.pop(wrong)
            frame = self._frame(wrong)
            if frame is not None:
                frame.unfetch()

    def _following(self, number: int) -> HostFrame | None:
        learned = self._frame(self._learned.get(number))
        if learned is not None:
            return learned
        before = (n for n in list(self._live) if n < number and n not in self._visits)
        return self._frame(max(before, default=None))

    def _frame(self, number: int | None) -> HostFrame | None:
        ref = None if number is None else self._live.get(number)
        return None if ref is None else ref()
