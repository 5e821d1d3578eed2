# SPDX-License-Identifier: Apache-2.0
"""Copies of device memory on the host, and handles to the copied tensors.

A copy contains a range of elements of one storage. The last elements of the range are on the host;
the first elements stay on the device in separate memory. Several tensors may share one copy, which
is fetched once for all of them. A copy references its source tensor until the compute stream waits
for the transfer to the host (`release`). So the order in which device memory is reused does not
depend on the speed of the transfer.
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
    """Host memory and copy engines of one `HostMemory`, with counts of copied bytes.

    Attributes:
        arena: Allocator of the host memory.
        out: Engine of copies to the host.
        back: Engine of copies from the host.
        strict: True to fill memory with NaN until a copy into it is complete.
        bytes_out: Bytes copied to the host.
        bytes_back: Bytes copied back.
    """

    arena: Arena
    out: WorkerEngine | StreamEngine
    back: WorkerEngine | StreamEngine
    strict: bool
    bytes_out: int = 0
    bytes_back: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _dropped: deque[Callable[[], None]] = field(default_factory=deque)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Return a context that one thread at a time can enter; it protects records of copies."""
        with self._lock:
            self._run_dropped()
            yield

    def drop(self, action: Callable[[], None]) -> None:
        """Run `action` as soon as no thread is inside `exclusive`.

        This method never waits for the lock, because a handle may be destroyed at any time on any
        thread, even on a thread for which the holder of the lock waits.
        """
        self._dropped.append(action)
        if self._lock.acquire(blocking=False):
            try:
                self._run_dropped()
            finally:
                self._lock.release()

    def _run_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft()()


class HostCopy:
    """Copy of a contiguous device tensor `flat` [n].

    flat[cut:] is copied to the host, and flat[:cut] to other device memory.
    """

    def __init__(self, traffic: HostTraffic, flat: torch.Tensor, cut: int):
        self.traffic, self._cut = traffic, cut
        self._count, self._like = len(flat), (flat.dtype, flat.device)
        self._device_part = flat[:cut].clone() if cut else None
        source = _as_bytes(flat[cut:])
        self._block = traffic.arena.take(len(source))
        self._sent = traffic.out.copy(self._block.bytes(), source, self._block.after)
        self._block.after.append(self._sent)
        self._source: torch.Tensor | None = source
        traffic.bytes_out += len(source)
        self._buffer: torch.Tensor | None = None
        self._arrived: Event | None = None
        self._fetched: torch.Tensor | None = None
        self._handles: set[object] = set()
        self._waiting: set[object] = set()  # handles that have not received `_fetched`

    @property
    def holds_source(self) -> bool:
        """True while the source tensor is referenced, that is, before `release`."""
        return self._source is not None

    def sent(self) -> bool:
        """Return whether the transfer to the host is complete, without waiting."""
        return self._sent.done()

    def release(self) -> None:
        """Make later work wait for the transfer to the host, and drop the source tensor."""
        if self._source is not None:
            self._sent.wait()
            self._source = None

    def fetch(self) -> None:
        """Begin the transfer back to the device, unless this transfer has already begun."""
        if self._buffer is not None or self._fetched is not None:
            return
        self.release()  # otherwise the elements would be on the device twice
        dtype, device = self._like
        self._buffer = torch.empty(self._count, dtype=dtype, device=device)
        target = _as_bytes(self._buffer[self._cut :])
        if self.traffic.strict:
            _as_bytes(self._buffer).fill_(0xFF)
        self._arrived = self.traffic.back.copy(target, self._block.bytes(), (self._sent,))
        self._block.after[:] = [self._sent, self._arrived]
        self.traffic.bytes_back += len(target)

    def unfetch(self) -> None:
        """Discard the transfer back to the device if no handle has received the result."""
        if self._buffer is not None:
            self.traffic.back.guard(self._buffer)
            self._buffer = self._arrived = None

    def take(self, handle: object) -> torch.Tensor:
        """Return all n elements on the device, for one of the handles to this copy.

        The device tensor is kept until all handles have received it.

        Args:
            handle: Key of the handle.
        """
        if self._fetched is None:
            self.fetch()
            assert self._buffer is not None
            assert self._arrived is not None
            self._arrived.wait()
            if self._device_part is not None:
                self._buffer[: self._cut].copy_(self._device_part)
            self._fetched, self._buffer, self._arrived = self._buffer, None, None
            self._waiting = set(self._handles)
        fetched = self._fetched
        self._forget(handle)
        return fetched

    def _forget(self, handle: object) -> None:
        self._waiting.discard(handle)
        if not self._waiting:
            self._fetched = None

    def add(self, handle: object) -> None:
        self._handles.add(handle)

    def drop(self, handle: object) -> None:
        """Record that the handle with this key was destroyed."""
        self._handles.discard(handle)
        self._forget(handle)

    def __del__(self) -> None:
        if getattr(self, "_source", None) is not None:
            self.traffic.out.guard(self._source)  # pyright: ignore[reportArgumentType]
        if getattr(self, "_buffer", None) is not None:
            self.unfetch()


class MovedTensor:
    """Handle to a tensor that was passed to `HostMemory.move`.

    The host memory is freed when all handles to the copy are destroyed.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        nbytes: Bytes of the whole tensor, on the host and on the device.
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
        self._unmoved = tensor.detach() if copy is None else None
        if copy is None:
            return
        self._view = tensor.size(), tensor.stride(), tensor.storage_offset() - start
        self._changes = version_probe(tensor)
        self._version = self._changes()
        self._key = object()  # an id could be reused by a later object
        copy.add(self._key)
        if frame is not None:
            frame.add(self._key, copy)

    @property
    def moved(self) -> bool:
        """True if at least some rows of the tensor are on the host."""
        return self._copy is not None

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device, unless this copy has already begun."""
        if self._copy is not None:
            with self._copy.traffic.exclusive():
                self._copy.fetch()

    def release(self) -> None:
        """Wait for the copy to the host; afterwards the tensor may be freed or overwritten.

        On CUDA only the current stream waits.
        """
        if self._copy is not None:
            with self._copy.traffic.exclusive():
                self._copy.release()
            version = self._version
            self._changes = lambda: version

    def get(self) -> torch.Tensor:
        """Wait for the tensor and return it, detached.

        Returns:
            A tensor with the same shape, dtype and order of strides. If the tensor was not moved,
            the result is an alias. Otherwise each call returns new memory, which tensors with a
            common host copy may share.

        Raises:
            RuntimeError: The tensor was changed in place after it was moved.
        """
        if self._copy is None:
            assert self._unmoved is not None
            return self._unmoved
        if self._changes() != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} needed for backward was changed in place "
                "after it was moved to host memory; make a new tensor (x * 2, not x.mul_(2))"
            )
        with self._copy.traffic.exclusive(), torch.no_grad():
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
    """Return a function that counts in-place changes of a tensor, without keeping its memory."""
    with torch.no_grad():
        alias = tensor.detach()
        alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return lambda: alias._version


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


class PendingCopies:
    """Copies to the host that still reference their source tensors, for at most two frames.

    A frame consists of the saved tensors of one layer. When a third frame begins to move tensors,
    the compute stream first waits for the copies of the oldest frame. This limits device memory,
    but costs time if copying a layer's tensors takes longer than computing a layer.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[object, list[weakref.ref[HostCopy]]]] = []

    def add(self, group: object, copy: HostCopy) -> None:
        """Add a copy that has begun.

        Args:
            group: Frame (tensors of one layer) to which the copied tensor belongs, or a new object
                if it belongs to no frame.
            copy: The copy.
        """
        if not self._groups or self._groups[-1][0] is not group:
            while len(self._groups) > 1:
                self._release(self._groups.pop(0)[1])
            self._groups.append((group, []))
        self._groups[-1][1].append(weakref.ref(copy))

    def settle(self) -> None:
        """Drop the source tensors of copies, without waiting for copies of the last frame.

        The current stream waits for the copies of earlier frames (layers). In the last frame, only
        complete copies drop their source tensors. Backward calls this when it fetches a frame.
        """
        while len(self._groups) > 1:
            self._release(self._groups.pop(0)[1])
        if self._groups and all(self._complete(ref()) for ref in self._groups[0][1]):
            self._groups.clear()

    def drain(self) -> None:
        """Wait for all copies, and drop their source tensors."""
        while self._groups:
            self._release(self._groups.pop(0)[1])

    @staticmethod
    def _complete(copy: HostCopy | None) -> bool:
        if copy is not None and copy.holds_source and copy.sent():
            copy.release()
        return copy is None or not copy.holds_source

    @staticmethod
    def _release(refs: list[weakref.ref[HostCopy]]) -> None:
        for copy in [ref() for ref in refs]:
            if copy is not None:
                copy.release()


Span = tuple[int, int]  # first and end element in a storage


class _CopyRecord(NamedTuple):
    """A host copy, and the storage, version and elements from which it was made."""

    storage: StorageWeakRef  # keeps the address, so that no other storage can have it
    version: int
    dtype: torch.dtype
    span: Span
    copy: weakref.ref[HostCopy]


class CopyIndex:
    """Index of the copies of each storage (`torch.UntypedStorage`).

    Copies that were destroyed are removed.
    """

    def __init__(self) -> None:
        self._records: dict[int, list[_CopyRecord]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def find(self, tensor: torch.Tensor, span: Span) -> tuple[HostCopy, int] | None:
        """Return a copy that contains a range of the tensor's storage; None if there is none.

        Args:
            tensor: The tensor. A copy is not returned if the tensor was changed in place since the
                copy.
            span: First and end element of the range in the storage.

        Returns:
            The copy, and the index of its first element in the storage.
        """
        for record in self._records.get(tensor.untyped_storage()._cdata, ()):
            same = (record.version, record.dtype) == (tensor._version, tensor.dtype)
            if same and record.span[0] <= span[0] and span[1] <= record.span[1]:
                copy = record.copy()
                if copy is not None:
                    return copy, record.span[0]
        return None

    def add(self, tensor: torch.Tensor, span: Span, copy: HostCopy) -> None:
        """Add a copy of the elements `span` (first and end) of the tensor's storage."""
        storage = StorageWeakRef(tensor.untyped_storage())

        def forget(ref: object, table: dict[int, list[_CopyRecord]] = self._records) -> None:
            left = [record for record in table.pop(storage.cdata, []) if record.copy is not ref]
            if left:
                table[storage.cdata] = left

        reference = weakref.ref(copy, forget)
        record = _CopyRecord(storage, tensor._version, tensor.dtype, span, reference)
        self._records.setdefault(storage.cdata, []).append(record)
