# SPDX-License-Identifier: Apache-2.0
"""Measurement of the time that a rank waits for transfers.

On the CPU the wait time is the time that the host is blocked. On a GPU a wait blocks the stream, so
the wait time is the time between two CUDA events around the wait. Events are read only after they
have completed, so the measurement blocks neither the host nor the stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Waitable(Protocol):
    """Handle of an exchange that has started; `wait` waits for the exchange on host or stream."""

    def wait(self) -> None: ...


@dataclass
class WaitClock:
    """Total time that one rank waits for transfers.

    Set it as `clock` of endpoints, and call `take` regularly to read it.
    """

    _seconds: float = 0.0
    _open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)
    _spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _off: bool = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context in which waits are not measured, such as waits of the relay stream."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def timed(self, pending: Waitable, on_host: bool) -> Waitable:
        """Return `pending`, wrapped so that its wait is measured.

        Args:
            pending: A started exchange.
            on_host: True if `wait` blocks the host, False if it blocks the current stream.
        """
        return _TimedWait(self, pending, on_host)

    def take(self) -> float:
        """Return the total seconds of the waits that have ended since the last call of `take`."""
        self._read_passed()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def wait_on_host(self, pending: Waitable) -> None:
        begin = time.perf_counter()
        pending.wait()
        self._seconds += time.perf_counter() - begin

    def wait_on_stream(self, pending: Waitable) -> None:
        # Captured events cannot be read.
        if self._off or torch.cuda.is_current_stream_capturing():
            pending.wait()
            return
        self._read_passed()  # limits the number of open events
        begin, end = self._spare.pop() if self._spare else (_event(), _event())
        begin.record()
        pending.wait()
        end.record()
        self._open.append((begin, end))

    def _read_passed(self) -> None:
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
            self._spare.append((begin, end))


@dataclass
class _TimedWait:
    clock: WaitClock
    pending: Waitable
    on_host: bool

    def wait(self) -> None:
        wait = self.clock.wait_on_host if self.on_host else self.clock.wait_on_stream
        wait(self.pending)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
