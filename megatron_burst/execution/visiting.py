# SPDX-License-Identifier: Apache-2.0
"""Keys and values of other ranks in host memory between the row chunks of a forward.

The first forward receives the keys for all row chunks, and they are copied out while it computes.
Later forwards send nothing and fetch the keys one chunk ahead, so two chunks of keys are on the
device. Source: FPDT (arXiv 2408.16978), section 4.2: offload with double buffering.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..comm.packing import Message
from ..schedule.tables import Chunk
from .ring import ChunkStore, Ring


class Resting(Protocol):
    """What `mb.HostMemory.move` returns. moved: False if host memory did not take the tensor, and
    it is the tensor itself.
    """

    @property
    def moved(self) -> bool: ...

    def fetch(self) -> None: ...

    def release(self) -> None: ...

    def get(self) -> torch.Tensor: ...


class Host(Protocol):
    """Host memory; `mb.HostMemory`. framed=False: the tensor belongs to no frame of backward."""

    def move(self, tensor: torch.Tensor, *, framed: bool) -> Any: ...


class _Copied:
    """A tensor for which host memory had no room, in memory of its own on the device."""

    moved = False

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.clone()

    def fetch(self) -> None:
        """Nothing to fetch."""

    def release(self) -> None:
        """Nothing to wait for."""

    def get(self) -> torch.Tensor:
        """The tensor."""
        return self._tensor


def _rest(host: Host, tensor: torch.Tensor) -> Resting:
    """Move a tensor whose buffer is used again; a copy of it if host memory does not take it."""
    moved = host.move(tensor, framed=False)
    return moved if moved.moved else _Copied(tensor)


Stash = dict[Chunk, tuple[Resting, ...]]


class Visiting:
    """What arrived for one call, ring by ring; empty until its first forward."""

    def __init__(self, host: Host):
        self._host = host
        self._stashes: list[Stash] = []

    def provide(self, rings: Sequence[Ring]) -> None:
        """Before the rings of a forward run, one of every head chunk: those of the first forward
        leave what arrives on the host, those of later ones find it there and send nothing.
        """
        first = not self._stashes
        if first:
            self._stashes = [{} for _ in rings]
        for ring, stash in zip(rings, self._stashes, strict=True):
            if first:
                ring.chunks = _Arriving(ring.chunks, ring.me, self._host, stash)
            else:
                ring.steps = tuple(replace(s, exchanges=(), release=()) for s in ring.steps)
                wanted = [call.keys for step in ring.steps for call in step.calls]
                visitors = [chunk for chunk in wanted if chunk.owner != ring.me]
                ring.chunks = _Fetched(ring.chunks, visitors, stash)

    def settle(self) -> None:
        """After the rings ran: what still leaves has left."""
        for stash in self._stashes:
            for moved in stash.values():
                _release(moved)


class _Arriving:
    """The store of a first forward: chunks of other ranks are copied to the host."""

    def __init__(self, own: ChunkStore, me: int, host: Host, stash: Stash):
        self._held, self._me, self._host, self._stash = own, me, host, stash

    def __setitem__(self, chunk: Chunk, message: Message, /) -> None:
        self._held[chunk] = message
        if chunk.family == "kv" and chunk.owner != self._me:
            self._stash[chunk] = tuple(_rest(self._host, t) for t in message.tensors)

    def __getitem__(self, chunk: Chunk, /) -> Message:
        return self._held[chunk]

    def pop(self, chunk: Chunk, /) -> Message:
        """The message of a chunk, whose buffer is used again once the copy has left."""
        _release(self._stash.get(chunk, ()))
        return self._held.pop(chunk)


class _Fetched:
    """The store of a later forward: chunks of other ranks come from the host when asked for, in
    the order of the pass, and the next one is on its way.
    """

    def __init__(self, own: ChunkStore, visitors: list[Chunk], stash: Stash):
        self._own, self._order, self._stash = own, visitors, stash
        self._visitor: Chunk | None = None
        self._message = Message(None, ())
        self._fetch()

    def __getitem__(self, chunk: Chunk, /) -> Message:
        if chunk not in self._stash:
            return self._own[chunk]
        if chunk != self._visitor:
            # Dropped before the next arrives: with the one on its way two are there at most.
            self._message = Message(None, ())
            self._message = Message(None, tuple(moved.get() for moved in self._stash[chunk]))
            self._visitor = chunk
            while self._order and self._order[0] != chunk:
                del self._order[0]
            while self._order and self._order[0] == chunk:
                del self._order[0]
            self._fetch()
        return self._message

    def __setitem__(self, chunk: Chunk, message: Message, /) -> None:
        raise AssertionError(f"{chunk} arrived in a forward that receives nothing")

    def pop(self, chunk: Chunk, /) -> Message:
        raise AssertionError(f"{chunk} is released by a forward that receives nothing")

    def _fetch(self) -> None:
        for chunk in self._order[:1]:
            for moved in self._stash[chunk]:
                moved.fetch()


def _release(moved: Iterable[Resting]) -> None:
    for each in moved:
        each.release()
