"""Visiting keys and values that rest in host memory between the row chunks of a forward.

The first chunk's forward receives what all of them need, and what arrives is copied out beside the
computation with it; later chunks send nothing and fetch it one chunk of keys ahead, so that two are
on the device. Source: FPDT (arXiv 2408.16978), section 4.2: offload with double buffering.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..comm.packing import Message
from ..schedule.tables import Chunk
from .executor import Executor, Pass
from .passes import Forward


class Resting(Protocol):
    """A tensor on the host; `recompute.host.Moved`."""

    def fetch(self) -> None: ...

    def release(self) -> None: ...

    def get(self) -> torch.Tensor: ...


class Host(Protocol):
    """Host memory; `mb.HostMemory`."""

    def move(self, tensor: torch.Tensor, fraction: float = 1.0) -> Any: ...


Stash = dict[Chunk, tuple[Resting, ...]]


class Visiting:
    """What arrived for one call, ring by ring; empty until its first forward."""

    def __init__(self, host: Host):
        self._host = host
        self._stashes: list[Stash] = []

    def run(self, run: Pass) -> Pass:
        """The pass of a chunk: as it is for the first one, without transfers for the others."""
        if not self._stashes:
            return run
        return replace(run, program=_alone(run.program), deferred=_alone(run.deferred))

    def begin(self, rings: Sequence[Forward]) -> None:
        """The rings of a pass, of every head chunk one, are about to run."""
        first = not self._stashes
        if first:
            self._stashes = [{} for _ in rings]
        for ring, stash in zip(rings, self._stashes, strict=True):
            executor = ring.executor
            executor.held = (
                _Arriving(executor, self._host, stash) if first else _Fetched(executor, stash)
            )

    def settle(self) -> None:
        """After the pass: what still leaves has left."""
        for stash in self._stashes:
            for moved in stash.values():
                _release(moved)


class _Arriving(dict[Chunk, Message]):
    """The chunks that an executor holds; those of other ranks are copied to the host."""

    def __init__(self, executor: Executor, host: Host, stash: Stash):
        super().__init__(executor.held)
        self._me, self._host, self._stash = executor.me, host, stash

    def __setitem__(self, chunk: Chunk, message: Message) -> None:
        super().__setitem__(chunk, message)
        if chunk.family == "kv" and chunk.owner != self._me:
            # Receiving into a buffer counts as no change of it: it would be taken for what was in
            # it before, which is on the host.
            torch.autograd.graph.increment_version(message.tensors)
            self._stash[chunk] = tuple(self._host.move(t) for t in message.tensors)

    def pop(self, chunk: Chunk, *default: Message) -> Message:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nobody needs it here any more: its buffer is used again once the copy has left."""
        _release(self._stash.get(chunk, ()))
        return super().pop(chunk, *default)


class _Fetched(dict[Chunk, Message]):
    """The chunks that an executor holds; those of other ranks come from the host when asked for,
    in the order of the pass, and the next one is on its way."""

    def __init__(self, executor: Executor, stash: Stash):
        super().__init__(executor.held)
        self._stash, self._now = stash, (None, None)
        run, own = executor.run, set(self)
        calls = [c for b in run.program for pair in b.pairs for c in run.calls.get(pair, ())]
        self._order = [call.keys for call in calls if call.keys not in own]
        self._fetch(self._order[:1])

    def __missing__(self, chunk: Chunk) -> Message:
        if self._now[0] != chunk:
            self._now = None, None  # before it arrives: with the next one two are there at most
            message = Message(None, tuple(moved.get() for moved in self._stash[chunk]))
            self._now = chunk, message
            while self._order and self._order[0] != chunk:
                self._order.pop(0)
            self._fetch([each for each in self._order if each != chunk][:1])
        message = self._now[1]
        assert message is not None
        return message

    def _fetch(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            for moved in self._stash[chunk]:
                moved.fetch()


def _release(moved: Iterable[Resting]) -> None:
    for each in moved:
        each.release()


def _alone(program: Sequence[Any]) -> list[Any]:
    """What a rank computes, without what it sends, receives and gives back."""
    return [replace(boundary, posts=(), release=()) for boundary in program]
