"""Runs one rank's part of a schedule: posts and awaits transfers, calls back for every pair.

Decides how buffers are reused and what travels in one message. What is computed at a pair is the
caller's (`passes`); which chunk is where at what time was decided by the schedule.

An `Executor` advances one boundary at a time, so that the rings of several head chunks can run one
behind the other (`head_chunks`). torch's profiler, and NVTX where it is emitted, see every pair and
every wait by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from zlib import crc32

import torch
from torch.profiler import record_function

from ..comm import packing
from ..comm.packing import NO_CALL, CallTag, Envelope, Message
from ..comm.transport import Channel, Endpoint, Pending, Receive, Send
from ..kernels.online_softmax import accumulation_dtype
from ..schedule.tables import Boundary, Chunk, Hop, Pair

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pass:
    """What one rank needs for one pass over the ring: its program, and the work of each pair.

    works: what the kernel planned for each pair; a pair with nothing visible is absent.
    kept: travelling chunks that forward leaves behind and backward finds.
    rows: of each owner's keys, where they differ between owners; empty: all alike.
    deferred: the program of head chunks that compute the pair of their own chunks last.
    call: which call this is; every message bears it.
    """

    name: str
    program: Sequence[Boundary]
    works: dict[Pair, Any]
    kept: Sequence[Chunk] = ()
    rows: Sequence[int] = ()
    deferred: Sequence[Boundary] = ()
    call: CallTag = NO_CALL

    def envelope(self, content: object) -> Envelope:
        """What the message with this content bears, the same on every rank."""
        return Envelope(self.call, crc32(f"{self.name} {content}".encode()))


class _Buffers:
    """Receive buffers and gradient sums by kind of chunk, reused once nothing holds them."""

    def __init__(
        self, shapes: dict[str, list[tuple[torch.Size, torch.dtype]]], device, endpoint: Endpoint
    ):
        self.shapes = shapes
        self.device = device
        self.endpoint = endpoint
        self.free: dict[tuple, list[Message]] = defaultdict(list)

    def take(self, kind: str, rows: int | None = None) -> Message:
        """A message for `kind`, or one like it with so many rows."""
        shapes = self.shapes[kind]
        if rows is not None:
            shapes = [(torch.Size((rows, *shape[1:])), dtype) for shape, dtype in shapes]
        free = self.free[kind, tuple(shape for shape, _ in shapes)]
        return free.pop() if free else packing.empty(shapes, self.device, self.endpoint.room)

    def give(self, kind: str, message: Message) -> None:
        self.endpoint.released(message.tensors)
        self.free[kind, tuple(t.shape for t in message.tensors)].append(message)


@dataclass
class _Flight:
    """An exchange under way: what arrives, and the gradient buffers that are free once it left."""

    land: int
    pending: Pending
    arriving: list[tuple[Chunk, Message]]
    leaving: list[tuple[str, Message]]


class Executor:
    """One rank's state during a pass: chunks held, gradient sums, exchanges in flight.

    held: the chunks that this rank has from the start. wire: dtype of travelling gradients, None
    for that of their sums.
    """

    def __init__(
        self,
        run: Pass,
        endpoint: Endpoint,
        held: dict[Chunk, Tensors],
        wire: torch.dtype | None = None,
    ):
        self.run, self.endpoint = run, endpoint
        self.held = {chunk: self._packed(chunk, tensors) for chunk, tensors in held.items()}
        self.sums: dict[Chunk, Message] = {}
        self.flights: list[_Flight] = []
        some = next(iter(held.values()))[0]
        shapes = {chunk.family: [(t.shape, t.dtype) for t in ts] for chunk, ts in held.items()}
        self.buffers = _Buffers(shapes, some.device, endpoint)
        self.total_dtype = accumulation_dtype(some.dtype)
        self.wire_dtype = wire or self.total_dtype
        self._started = 0  # boundaries whose transfers have been posted

    def sum_gradients(self, family: str, shapes: Sequence[torch.Size]) -> None:
        """Gradients of `family` are summed in the accumulation dtype and sent in the wire's."""
        for kind, dtype in ((family, self.total_dtype), (self._wire(family), self.wire_dtype)):
            self.buffers.shapes[kind] = [(shape, dtype) for shape in shapes]

    def total(self, chunk: Chunk) -> Tensors:
        """The running sum of a gradient; zero when first asked for."""
        if chunk not in self.sums:
            self.sums[chunk] = self.buffers.take(chunk.family)
            whole = self.sums[chunk].flat
            assert whole is not None
            whole.zero_()  # all of its tensors at once
        return self.sums[chunk].tensors

    def advance(self, compute: Callable[[Pair], None]) -> bool:
        """Compute the pair of the last boundary, then post the transfers of the next one.

        compute: called for every pair with something visible, once both of its chunks are held. (It
        is not kept: a cycle would hold all buffers until the garbage collector comes.) Returns
        False at the end of the program. Posting comes before computing within a boundary
        (BurstEngine Algorithms 1 and 2), so between two calls only transfers are under way: that
        is where another head chunk computes.
        """
        if self._started:
            # What lands where it was posted blocks: only now, when every rank has posted it.
            self._land(self._started - 1)
            pair = self.run.program[self._started - 1].pair
            if pair is not None and pair in self.run.works:
                with record_function(f"{self.run.name}: {_pair(pair)}"):
                    compute(pair)
        if self._started == len(self.run.program):
            return False
        boundary = self.run.program[self._started]
        self._land(boundary.index)
        self._release(boundary.release)
        for channel, hops in _exchanges(boundary.posts):
            self._post(channel, hops, boundary.index)
        self._started += 1
        return True

    def _packed(self, chunk: Chunk, tensors: Tensors) -> Message:
        """What this rank has from the start; copied into one message only if it is to be sent."""
        sent = any(
            hop.chunk == chunk and hop.src == self.endpoint.rank
            for boundary in self.run.program
            for hop in boundary.posts
        )
        if not sent:
            return Message(None, tensors)
        return packing.pack(tensors, self.run.envelope(chunk))

    def _wire(self, family: str) -> str:
        """The kind of buffer in which chunks of `family` travel."""
        same = not family.startswith("d") or self.wire_dtype == self.total_dtype
        return family if same else family + " wire"

    def _post(self, channel: Channel, hops: list[Hop], index: int) -> None:
        me = self.endpoint.rank
        arriving, leaving, sends, receives = [], [], [], []
        for hop in hops:
            kind = self._wire(hop.chunk.family)
            if hop.src == me:
                message = self._outgoing(hop.chunk, kind)
                sends.append(Send(hop.dst, hop.link, message.tensors, message.flat))
                if hop.chunk.gradient:
                    leaving.append((kind, message))
            else:
                rows = self.run.rows[hop.chunk.owner] if self.run.rows else None
                message = self.buffers.take(kind, rows)
                envelope = self.run.envelope(hop.chunk)
                receives.append(Receive(hop.src, message.tensors, message, envelope))
                arriving.append((hop.chunk, message))
        label = f"{self.run.name}, boundary {index}, rank {me}: " + "; ".join(map(_words, hops))
        pending = self.endpoint.exchange(channel, sends, receives, label)
        self.flights.append(_Flight(hops[0].land, pending, arriving, leaving))

    def _outgoing(self, chunk: Chunk, kind: str) -> Message:
        if not chunk.gradient:
            return self.held[chunk]
        self.total(chunk)
        message = self.sums.pop(chunk)
        if kind != chunk.family:
            wire = self.buffers.take(kind)
            for target, source in zip(wire.tensors, message.tensors, strict=True):
                target.copy_(source)
            self.buffers.give(chunk.family, message)
            message = wire
        packing.write_envelope_(message, self.run.envelope(chunk))
        return message

    def _land(self, index: int) -> None:
        """Wait for what lands at this boundary: activations are held, gradients are added."""
        landing = [f for f in self.flights if f.land == index]
        self.flights = [f for f in self.flights if f.land != index]
        for flight in landing:
            with record_function(f"{self.run.name}: wait, boundary {index}"):
                flight.pending.wait()
            # A sent gradient was moved out of `sums`, so its buffer has no other user now.
            for kind, message in flight.leaving:
                self.buffers.give(kind, message)
            for chunk, message in flight.arriving:
                if chunk.gradient:
                    self._add(chunk, message)
                else:
                    self.held[chunk] = message

    def _add(self, chunk: Chunk, message: Message) -> None:
        """What arrived becomes the sum, where there is none yet and nothing has to be converted."""
        kind = self._wire(chunk.family)
        if chunk not in self.sums and kind == chunk.family:
            self.sums[chunk] = message
            return
        for total, part in zip(self.total(chunk), message.tensors, strict=True):
            total += part
        self.buffers.give(kind, message)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk in self.run.kept:
                continue
            message = self.held.pop(chunk)
            if message.flat is not None:  # else these are the caller's own tensors
                self.buffers.give(chunk.family, message)


def _exchanges(hops: Sequence[Hop]) -> Iterator[tuple[Channel, list[Hop]]]:
    """Hops that share a process group and land together start together."""

    def key(hop: Hop) -> tuple[Channel, int]:
        return Channel(hop.ring, hop.chunk.gradient), hop.land

    for (channel, _), group in groupby(sorted(hops, key=key), key):
        yield channel, list(group)


def _pair(pair: Pair) -> str:
    return f"queries of rank {pair.query}, keys of rank {pair.key}"


def _words(hop: Hop) -> str:
    return f"{hop.chunk.family} of rank {hop.chunk.owner} from rank {hop.src} to rank {hop.dst}"
