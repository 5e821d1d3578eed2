# SPDX-License-Identifier: Apache-2.0
"""Keys and values of other ranks, kept in host memory between the forwards of row chunks.

In this module, "keys" means keys and values. Whichever row chunk of a call runs forward first
receives the keys for all row chunks, and copies them to host memory while it computes. The forwards
of the other row chunks do not exchange keys. They fetch keys from host memory one chunk ahead, so
at most two chunks of keys are on the device.

Source: FPDT (arXiv 2408.16978), section 4.2: offload with double buffering.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..comm.packing import Message
from ..schedule.tables import Chunk
from .ring import ChunkTable, Ring


class HostTensor(Protocol):
    """A tensor in host memory, as `mb.HostMemory.move` returns it.

    `moved` is False if host memory was full. The object then holds the tensor itself.
    """

    @property
    def moved(self) -> bool: ...

    def fetch(self) -> None: ...

    def release(self) -> None: ...

    def get(self) -> torch.Tensor: ...


class KeyHostMemory(Protocol):
    """Host memory for keys; implemented by `mb.HostMemory`.

    With `framed=False`, backward does not prefetch the tensor: the caller fetches it.
    """

    def move(self, tensor: torch.Tensor, *, framed: bool) -> Any: ...


class _DeviceCopy:
    """A copy of a tensor on the device, used if host memory is full."""

    moved = False

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.clone()

    def fetch(self) -> None:
        """Do nothing, because the tensor is already on the device."""

    def release(self) -> None:
        """Do nothing, because no copy is pending."""

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        return self._tensor


def _move_or_copy(host: KeyHostMemory, tensor: torch.Tensor) -> HostTensor:
    """Copy a tensor to host memory; if host memory is full, copy the tensor on the device.

    A reference to the tensor is not enough, because the caller reuses the buffer of the tensor.
    """
    moved = host.move(tensor, framed=False)
    return moved if moved.moved else _DeviceCopy(tensor)


HostChunks = dict[Chunk, tuple[HostTensor, ...]]


class HostKeys:
    """Keys of other ranks in host memory, for one call in row chunks.

    The object has one dict per ring (group of heads), from a chunk to the host copies of its
    tensors.
    """

    def __init__(self, host: KeyHostMemory):
        self._host = host
        self._stashes: list[HostChunks] = []

    def provide(self, rings: Sequence[Ring]) -> None:
        """Connect the rings of one row chunk's forward to host memory.

        The rings of the first forward copy received keys to host memory. The rings of later
        forwards fetch keys from host memory, and do not communicate.

        Args:
            rings: Rings of the forward, one per head chunk (group of heads). Their attribute
                `chunks` is replaced; in later forwards, also the attribute `steps`.
        """
        first = not self._stashes
        if first:
            self._stashes = [{} for _ in rings]
        for ring, stash in zip(rings, self._stashes, strict=True):
            if first:
                ring.chunks = _OffloadingChunks(ring.chunks, ring.me, self._host, stash)
            else:
                ring.steps = tuple(replace(step, exchanges=(), release=()) for step in ring.steps)
                needed = [call.keys for step in ring.steps for call in step.calls]
                remote = [chunk for chunk in needed if chunk.owner != ring.me]
                ring.chunks = _PrefetchingChunks(ring.chunks, remote, stash)

    def finish(self) -> None:
        """Wait for pending copies to host memory. Call this method after the rings ran."""
        for stash in self._stashes:
            for moved in stash.values():
                _release(moved)


class _OffloadingChunks:
    """Chunks in the first forward of a call; copies the keys of other ranks to host memory."""

    def __init__(self, own: ChunkTable, me: int, host: KeyHostMemory, stash: HostChunks):
        self._own, self._me, self._host, self._stash = own, me, host, stash

    def __setitem__(self, chunk: Chunk, message: Message, /) -> None:
        self._own[chunk] = message
        if chunk.family == "kv" and chunk.owner != self._me:
            self._stash[chunk] = tuple(_move_or_copy(self._host, t) for t in message.tensors)

    def __getitem__(self, chunk: Chunk, /) -> Message:
        return self._own[chunk]

    def pop(self, chunk: Chunk, /) -> Message:
        """Wait for the copy of a chunk to host memory; then remove and return the chunk.

        The ring reuses the buffer of the chunk after this call.
        """
        _release(self._stash.get(chunk, ()))
        return self._own.pop(chunk)


class _PrefetchingChunks:
    """Chunks in later forwards of a call; fetches the keys of other ranks from host memory.

    Each chunk is fetched while the kernel computes with the previous chunk.

    Args:
        own: Chunks of this rank.
        order: Chunks of keys of other ranks, in the order of the kernel calls.
        stash: Host copies of the tensors of each chunk of keys of other ranks.
    """

    def __init__(self, own: ChunkTable, order: list[Chunk], stash: HostChunks):
        self._own, self._order, self._stash = own, order, stash
        self._fetched: Chunk | None = None
        self._message = Message(None, ())
        self._fetch()

    def __getitem__(self, chunk: Chunk, /) -> Message:
        if chunk not in self._stash:
            return self._own[chunk]
        if chunk != self._fetched:
            # Free the previous chunk first, so that at most two chunks are on the device.
            self._message = Message(None, ())
            self._message = Message(None, tuple(moved.get() for moved in self._stash[chunk]))
            self._fetched = chunk
            while self._order and self._order[0] != chunk:
                del self._order[0]
            while self._order and self._order[0] == chunk:
                del self._order[0]
            self._fetch()
        return self._message

    def __setitem__(self, chunk: Chunk, message: Message, /) -> None:
        raise AssertionError(f"internal error: {chunk} was received in a forward without transfers")

    def pop(self, chunk: Chunk, /) -> Message:
        raise AssertionError(f"internal error: {chunk} was freed in a forward without transfers")

    def _fetch(self) -> None:
        for chunk in self._order[:1]:
            for moved in self._stash[chunk]:
                moved.fetch()


def _release(moved: Iterable[HostTensor]) -> None:
    for tensor in moved:
        tensor.release()
