# SPDX-License-Identifier: Apache-2.0
"""Copies beside the computation, one engine per direction.

On CUDA a stream per direction: a copy begins when what the caller's stream did so far is done, and
its end is an event that streams wait for; the host never waits. On a CPU a thread per direction
does the same in the same order, and sleeps, if a rate is stated, until as many bytes would have
passed. A test of this package runs the CUDA half with streams that only record what they are
told: no GPU was at hand, and nothing else of it has been checked.

strict: a copy arrives beside its target, and the first wait for it puts it there. Code that forgets
to wait therefore reads what was there before, however fast the copy was.
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
    """Sleep until `time.perf_counter()` is `until`."""
    time.sleep(max(0.0, until - time.perf_counter()))


class Meter:
    """Bytes and seconds of copies that are over."""

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes, self.seconds = self.nbytes + nbytes, self.seconds + seconds

    def rate(self) -> float | None:
        """Bytes per second of all copies so far, None before the first."""
        return self.nbytes / self.seconds if self.seconds else None


class _Publish:
    """Puts what arrived beside the target into it, once."""

    def __init__(self) -> None:
        self._put: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def hold(self, target: torch.Tensor, arrived: torch.Tensor) -> None:
        def put() -> None:
            target.copy_(arrived)
            if arrived.is_cuda:  # it belongs to the stream of the engine
                arrived.record_stream(torch.cuda.current_stream())

        self._put = put

    def run(self) -> None:
        with self._lock:
            put, self._put = self._put, None
            if put is not None:
                put()


class WorkerEvent:
    """The end of a copy on a worker thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.publish = _Publish()

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
    """Copies on a thread, in the order in which they are asked for. rate: bytes per second that the
    thread keeps to, None for as fast as it can.
    """

    def __init__(self, rate: float | None = None, strict: bool = False):
        self._meter = Meter()
        self._rate, self._strict = rate, strict
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Event:
        """Copy bytes, once the copies `after` are done; both tensors are held until then."""
        if self._thread is None:
            work = (self._jobs, self._rate, self._strict, self._meter)
            self._thread = threading.Thread(target=_work, args=work, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        event = WorkerEvent()
        self._jobs.put((target, source, tuple(after), event))
        return event

    def guard(self, tensor: torch.Tensor) -> None:
        """A tensor is dropped before its copy is over: the job holds it."""

    def rate(self) -> float | None:
        """Bytes per second of the copies that are over, None before the first."""
        return self._meter.rate()


def _work(jobs: Any, rate: float | None, strict: bool, meter: Meter) -> None:
    free_at = 0.0  # when the link has passed what it was given
    while (job := jobs.get()) is not None:
        target, source, after, event = job
        try:
            for other in after:
                other.wait()
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
        except BaseException as error:  # for who waits, on another thread
            event.end(error)
        del job, target, source, after, event


class StreamEvent:
    """The end of a copy on a stream of CUDA."""

    def __init__(self, begun: Any, ended: Any, nbytes: int, meter: Meter):
        self._begun, self._ended, self._nbytes, self._meter = begun, ended, nbytes, meter
        self.publish = _Publish()

    def done(self) -> bool:
        return self._ended.query()

    def measure(self) -> None:
        """Count it, once, when it is over."""
        self._meter.add(self._nbytes, self._begun.elapsed_time(self._ended) / 1e3)

    def settle(self) -> None:
        self._ended.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._ended)
        self.publish.run()


class StreamEngine:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device, strict: bool = False):
        self._meter, self._strict = Meter(), strict
        self._unmeasured: deque[StreamEvent] = deque()
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Event:
        """Copy bytes after what the current stream did so far and the copies `after`. The caller
        holds both tensors until it has waited for the copy, or calls `guard`.
        """
        ready = torch.cuda.current_stream().record_event()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        event = StreamEvent(begun, ended, source.numel(), self._meter)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            for other in after:
                other.wait()
            begun.record(self.stream)
            if self._strict and target.is_cuda:
                beside = torch.empty_like(target).copy_(source, non_blocking=True)
                event.publish.hold(target, beside)
            else:
                target.copy_(source, non_blocking=True)
            ended.record(self.stream)
        self._measure()
        self._unmeasured.append(event)
        return event

    def rate(self) -> float | None:
        """Bytes per second of the copies that are over, None before the first."""
        self._measure()
        return self._meter.rate()

    def _measure(self) -> None:
        while self._unmeasured and self._unmeasured[0].done():
            self._unmeasured.popleft().measure()

    def guard(self, tensor: torch.Tensor) -> None:
        """A tensor of the device is dropped before its copy is over: its memory is not used again
        before that.
        """
        if tensor.is_cuda:
            tensor.record_stream(self.stream)


def pin(address: int, size: int) -> Callable[[], None]:
    """Register host memory with CUDA; returns what undoes it. Raises RuntimeError."""
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status:
        raise RuntimeError(
            f"host memory: CUDA could not pin {size} bytes (cudaHostRegister: error {status}): "
            "lower --burst-host-memory"
        )

    def undo() -> None:
        runtime.cudaHostUnregister(address)

    return undo
