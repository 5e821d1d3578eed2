# SPDX-License-Identifier: Apache-2.0
"""What is on the host: copies of device memory, and handles to tensors that lie in them.

A copy is of one run of elements of one storage, the last part of which is on the host; the rest
stays on the device in memory of its own. Any number of tensors may lie in it: it travels back once
for all of them. It holds the source until the computation has waited for the copy out (`release`),
so that on a device the memory is used again in an order that does not depend on the host's speed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .arena import Arena, Event
from .engines import StreamEngine, WorkerEngine
from .frames import HostFrame


@dataclass
class HostTraffic:
    """Where copies go and come through, and how many bytes they moved."""

    arena: Arena
    out: WorkerEngine | StreamEngine
    back: WorkerEngine | StreamEngine
    strict: bool
    bytes_out: int = 0
    bytes_back: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _dropped: deque[Callable[[], None]] = field(default_factory=deque)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else changes what is known of copies and frames: threads may share a host."""
        with self._lock:
            self._let_go()
            yield

    def drop(self, action: Callable[[], None]) -> None:
        """Do it as soon as nobody is inside of `alone`: handles die at any time in any thread, also
        in one that somebody in there waits for.
        """
        self._dropped.append(action)
        if self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        while self._dropped:
            self._dropped.popleft()()


class HostCopy:
    """The elements of `flat` [n] (a run of device memory) from `cut` on, on the host."""

    def __init__(self, traffic: HostTraffic, flat: torch.Tensor, cut: int):
        self.traffic, self._cut = traffic, cut
        self._count, self._like = len(flat), (flat.dtype, flat.device)
        self._rest = flat[:cut].clone() if cut else None
        going = _as_bytes(flat[cut:])
        self._block = traffic.arena.take(len(going))
        self._sent = traffic.out.copy(self._block.bytes(), going, self._block.after)
        self._block.after.append(self._sent)
        self._source: torch.Tensor | None = going
        traffic.bytes_out += len(going)
        self._buffer: torch.Tensor | None = None
        self._arrived: Event | None = None
        self._whole: torch.Tensor | None = None
        self._handles: set[object] = set()
        self._waiting: set[object] = set()  # handles that have not taken the whole that is there

    @property
    def held(self) -> bool:
        """Whether the source is still held."""
        return self._source is not None

    def sent(self) -> bool:
        """Whether the copy out is over."""
        return self._sent.done()

    def release(self) -> None:
        """What the caller does next comes after the copy out; the source is held no longer."""
        if self._source is not None:
            self._sent.wait()
            self._source = None

    def fetch(self) -> None:
        """Begin to copy it back, unless it is there or on its way."""
        if self._buffer is not None or self._whole is not None:
            return
        self.release()  # or it would be on the device twice
        dtype, device = self._like
        self._buffer = torch.empty(self._count, dtype=dtype, device=device)
        target = _as_bytes(self._buffer[self._cut :])
        if self.traffic.strict:
            _as_bytes(self._buffer).fill_(0xFF)
        self._arrived = self.traffic.back.copy(target, self._block.bytes(), (self._sent,))
        self._block.after[:] = [self._sent, self._arrived]
        self.traffic.bytes_back += len(target)

    def unfetch(self) -> None:
        """Give up what is on its way back and was not taken."""
        if self._buffer is not None:
            self.traffic.back.guard(self._buffer)
            self._buffer = self._arrived = None

    def take(self, handle: object) -> torch.Tensor:
        """All elements [n]. Held for the other handles until each has taken them."""
        if self._whole is None:
            self.fetch()
            assert self._buffer is not None
            assert self._arrived is not None
            self._arrived.wait()
            if self._rest is not None:
                self._buffer[: self._cut].copy_(self._rest)
            self._whole, self._buffer, self._arrived = self._buffer, None, None
            self._waiting = set(self._handles)
        whole = self._whole
        self._forget(handle)
        return whole

    def _forget(self, handle: object) -> None:
        self._waiting.discard(handle)
        if not self._waiting:
            self._whole = None

    def add(self, handle: object) -> None:
        self._handles.add(handle)

    def drop(self, handle: object) -> None:
        """The handle is gone."""
        self._handles.discard(handle)
        self._forget(handle)

    def __del__(self) -> None:
        if getattr(self, "_source", None) is not None:
            self.traffic.out.guard(self._source)  # pyright: ignore[reportArgumentType]
        if getattr(self, "_buffer", None) is not None:
            self.unfetch()


class Moved:
    """A tensor that `HostMemory.move` took over; its host memory is free when this is dropped.

    shape, dtype, nbytes: of the whole tensor, wherever it is.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        copy: HostCopy | None,
        start: int = 0,
        frame: HostFrame | None = None,
    ):
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()
        self._copy, self._frame = copy, frame
        self._left = tensor.detach() if copy is None else None
        if copy is None:
            return
        self._view = tensor.size(), tensor.stride(), tensor.storage_offset() - start
        self._changes = version_probe(tensor)
        self._version = self._changes()
        self._key = object()  # unlike an id, nobody else's after this
        copy.add(self._key)
        if frame is not None:
            frame.add(self._key, copy)

    @property
    def moved(self) -> bool:
        """Whether any of it is on the host."""
        return self._copy is not None

    def fetch(self) -> None:
        """Begin to copy it back, unless it is there or on its way."""
        if self._copy is not None:
            with self._copy.traffic.alone():
                self._copy.fetch()

    def release(self) -> None:
        """Wait for the copy out, after which the tensor may be freed by its owner or written over.
        On CUDA the current stream waits, the host does not.
        """
        if self._copy is not None:
            with self._copy.traffic.alone():
                self._copy.release()
            version = self._version
            self._changes = lambda: version

    def get(self) -> torch.Tensor:
        """The tensor with its shape, dtype and order of strides, without a gradient's history;
        waits for it. Where it was not moved it is an alias of the tensor, else new each time, but
        for memory that several tensors share.

        Raises RuntimeError if the tensor was changed in place since, as autograd would.
        """
        if self._copy is None:
            assert self._left is not None
            return self._left
        if self._changes() != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} needed for backward was changed in place "
                "after it was moved to host memory; make a new tensor (x * 2, not x.mul_(2))"
            )
        with self._copy.traffic.alone(), torch.no_grad():
            if self._frame is not None:
                self._frame.visit()
            return self._copy.take(self._key).as_strided(*self._view).detach()

    def __del__(self) -> None:
        if hasattr(self, "_key"):
            copy, frame, key = self._copy, self._frame, self._key
            assert copy is not None

            def drop() -> None:
                copy.drop(key)
                if frame is not None:
                    frame.drop(key)

            copy.traffic.drop(drop)


def version_probe(tensor: torch.Tensor) -> Callable[[], int]:
    """Tells how often a tensor and its views were changed in place, and holds none of its
    memory.
    """
    with torch.no_grad():
        alias = tensor.detach()
        alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return lambda: alias._version


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


class PendingCopies:
    """Copies whose sources are still held, so that at most two frames' are at a time.

    When a third frame begins to move something, the computation first waits for the copies of the
    oldest: where the link is slower than the layers, memory stays bounded and time is lost.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[object, list[weakref.ref[HostCopy]]]] = []

    def add(self, group: object, copy: HostCopy) -> None:
        """A copy that began, of a frame or of its own."""
        if not self._groups or self._groups[-1][0] is not group:
            while len(self._groups) > 1:
                self._release(self._groups.pop(0)[1])
            self._groups.append((group, []))
        self._groups[-1][1].append(weakref.ref(copy))

    def settle(self) -> None:
        """Backward begins something: release all but the last frame's, and that if it is over."""
        while len(self._groups) > 1:
            self._release(self._groups.pop(0)[1])
        if self._groups and all(self._over(ref()) for ref in self._groups[0][1]):
            self._groups.clear()

    def drain(self) -> None:
        """Release all."""
        while self._groups:
            self._release(self._groups.pop(0)[1])

    @staticmethod
    def _over(copy: HostCopy | None) -> bool:
        if copy is not None and copy.held and copy.sent():
            copy.release()
        return copy is None or not copy.held

    @staticmethod
    def _release(refs: list[weakref.ref[HostCopy]]) -> None:
        for copy in [ref() for ref in refs]:
            if copy is not None:
                copy.release()


Span = tuple[int, int]  # elements of a storage, from and to


class _Known(NamedTuple):
    """A copy, and the memory it is of, as long as that is not changed."""

    storage: StorageWeakRef  # while it is held, no other storage has this address
    version: int
    dtype: torch.dtype
    span: Span
    copy: weakref.ref[HostCopy]


class KnownCopies:
    """Copies by storage; those that are gone are forgotten."""

    def __init__(self) -> None:
        self._of: dict[int, list[_Known]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def find(self, tensor: torch.Tensor, span: Span) -> tuple[HostCopy, int] | None:
        """A copy with these elements of the tensor's storage, and at which one it begins."""
        for known in self._of.get(tensor.untyped_storage()._cdata, ()):
            same = (known.version, known.dtype) == (tensor._version, tensor.dtype)
            if same and known.span[0] <= span[0] and span[1] <= known.span[1]:
                copy = known.copy()
                if copy is not None:
                    return copy, known.span[0]
        return None

    def add(self, tensor: torch.Tensor, span: Span, copy: HostCopy) -> None:
        """A copy of these elements of the tensor's storage."""
        storage = StorageWeakRef(tensor.untyped_storage())

        def forget(ref: object, table: dict[int, list[_Known]] = self._of) -> None:
            left = [known for known in table.pop(storage.cdata, []) if known.copy is not ref]
            if left:
                table[storage.cdata] = left

        known = _Known(storage, tensor._version, tensor.dtype, span, weakref.ref(copy, forget))
        self._of.setdefault(storage.cdata, []).append(known)
