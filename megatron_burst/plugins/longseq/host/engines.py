# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies between device and host, with one engine per direction.

On CUDA each direction has a stream. A copy begins after the work that the caller's stream has
queued. Streams that use the data wait for the event of the copy; the host never waits. On a CPU
each direction has a thread that copies in the order of the calls. If a rate is set, the thread
sleeps after each copy to emulate a link of this rate. Tests run the CUDA engine with streams that
only record calls; it is not tested on a GPU.

With `strict`, a copy writes to separate memory, and the first wait for the copy writes the data to
the target. Code that does not wait then always reads old data, even if the copy is fast.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arena import Event


def pause(until: float) -> None:
    """Sleep until `time.perf_counter()` reaches `until`."""
    time.sleep(max(0.0, until - time.perf_counter()))


class Meter:
    """Total bytes and total seconds of completed copies."""

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes, self.seconds = self.nbytes + nbytes, self.seconds + seconds

    def rate(self) -> float | None:
        """Return bytes per second of all copies so far; None before the first copy."""
        return self.nbytes / self.seconds if self.seconds else None


class _Publication:
    """Second step of a copy with `strict`: it copies from separate memory to the target, once."""

    def __init__(self) -> None:
        self._put: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def hold(self, target: torch.Tensor, arrived: torch.Tensor) -> None:
        def put() -> None:
            target.copy_(arrived)
            if arrived.is_cuda:  # it was allocated on the stream of the engine
                arrived.record_stream(torch.cuda.current_stream())

        self._put = put

    def run(self) -> None:
        with self._lock:
            put, self._put = self._put, None
            if put is not None:
                put()


class WorkerEvent:
    """Handle to a copy that a worker thread makes."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.publish = _Publication()

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def settle(self) -> None:
        self._over.wait()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise RuntimeError("a copy between device and host failed") from self._error
        self.publish.run()


class WorkerEngine:
    """Engine that copies on a thread, in the order of the requests.

    Args:
        rate: Bytes per second to emulate; None for full speed.
        strict: True to write to the target only at the first wait for a copy; for tests.
    """

    def __init__(self, rate: float | None = None, strict: bool = False):
        self._meter = Meter()
        self._rate, self._strict = rate, strict
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Event:
        """Queue a copy of the bytes of `source` to `target`, and return its event.

        The copy begins after the copies `after`. The engine holds both tensors until the copy is
        complete.
        """
        if self._thread is None:
            work = (self._requests, self._rate, self._strict, self._meter)
            self._thread = threading.Thread(target=_work, args=work, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._requests.put, None)
        event = WorkerEvent()
        self._requests.put((target, source, tuple(after), event))
        return event

    def guard(self, tensor: torch.Tensor) -> None:
        """Do nothing: a queued copy holds its tensors, so the caller may drop them at any time."""

    def rate(self) -> float | None:
        """Return bytes per second of completed copies; None before the first."""
        return self._meter.rate()


def _work(requests: Any, rate: float | None, strict: bool, meter: Meter) -> None:
    free_at = 0.0  # time at which the emulated link is free
    while (request := requests.get()) is not None:
        target, source, after, event = request
        try:
            for previous in after:
                previous.wait()
            begun = time.perf_counter()
            if strict:
                event.publish.hold(target, source.clone())
            else:
                target.copy_(source)
            if rate is not None:
                free_at = max(free_at, begun) + source.numel() / rate
                pause(free_at)
            meter.add(source.numel(), time.perf_counter() - begun)
            event.end()
        except BaseException as error:  # raised in the thread that waits
            event.end(error)
        del request, target, source, after, event


class StreamEvent:
    """Handle to a copy on a CUDA stream."""

    def __init__(self, begun: Any, ended: Any, nbytes: int, meter: Meter):
        self._begun, self._ended, self._nbytes, self._meter = begun, ended, nbytes, meter
        self.publish = _Publication()

    def done(self) -> bool:
        return self._ended.query()

    def measure(self) -> None:
        """Add the bytes and seconds of a complete copy to the meter. Call this once per copy."""
        self._meter.add(self._nbytes, self._begun.elapsed_time(self._ended) / 1e3)

    def settle(self) -> None:
        self._ended.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._ended)
        self.publish.run()


class StreamEngine:
    """Engine that copies on its own CUDA stream.

    Args:
        device: CUDA device.
        strict: True to write to the target only at the first wait for a copy; for tests.
    """

    def __init__(self, device: torch.device, strict: bool = False):
        self._meter, self._strict = Meter(), strict
        self._unmeasured: deque[StreamEvent] = deque()
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Event:
        """Queue a copy of the bytes of `source` to `target`, and return its event.

        The copy begins after the queued work of the current stream and after the copies `after`.
        The caller must hold both tensors until it has waited for the copy, or call `guard`.
        """
        ready = torch.cuda.current_stream().record_event()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        event = StreamEvent(begun, ended, source.numel(), self._meter)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            for previous in after:
                previous.wait()
            begun.record(self.stream)
            if self._strict and target.is_cuda:
                arrived = torch.empty_like(target).copy_(source, non_blocking=True)
                event.publish.hold(target, arrived)
            else:
                target.copy_(source, non_blocking=True)
            ended.record(self.stream)
        self._measure()
        self._unmeasured.append(event)
        return event

    def rate(self) -> float | None:
        """Return bytes per second of completed copies; None before the first."""
        self._measure()
        return self._meter.rate()

    def _measure(self) -> None:
        while self._unmeasured and self._unmeasured[0].done():
            self._unmeasured.popleft().measure()

    def guard(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor until the copy is complete; the caller may drop it."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)


def pin(address: int, size: int) -> Callable[[], None]:
    """Register host memory with CUDA and return a function that unregisters it.

    Raises:
        RuntimeError: CUDA refuses to pin the memory.
    """
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status:
        raise RuntimeError(
            f"host memory: CUDA could not pin {size} bytes (cudaHostRegister: error {status}); "
            "lower --burst-host-memory"
        )

    def undo() -> None:
        runtime.cudaHostUnregister(address)

    return undo
