"""One rank's way through a pass: chunks arrive, wait, leave and are given up, nowhere else.

`Walk` runs one rank's program over one endpoint and calls back for every pair that has something
to compute. It does not know what is computed, nor layouts, masks or algorithms: those are in the
program and in each pair's work. Decides how buffers are reused and what travels in one message.

Walks are generators that yield once per boundary, after everything that starts there has been
started: one process that holds all ranks can drive them in lock-step (`lockstep`), a process that
holds one rank just runs its own to the end, and several head chunks of one rank can run one
behind the other (`staggered`). torch's profiler, and NVTX where it is emitted, see every pair and
every wait by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from zlib import crc32

import torch
from torch.profiler import record_function

from ..comm import packing
from ..comm.packing import UNSTAMPED, Parcel, Seal, Stamp
from ..comm.transport import Channel, Endpoint, Pending, Receive, Send
from ..kernels.online_softmax import accumulation_dtype
from ..schedule.tables import Boundary, Chunk, Hop, Pair

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pass:
    """What one rank needs for one pass over the ring: its program, and the work of each pair."""

    name: str
    program: Sequence[Boundary]
    works: dict[Pair, Any]  # a pair with nothing visible is absent
    kept: Sequence[Chunk] = ()  # forward leaves these behind, backward finds them
    rows: Sequence[int] = ()  # of each owner's keys, where they differ; empty: all alike
    own_last: Sequence[Boundary] = ()  # the program of head chunks that end last
    stamp: Stamp = UNSTAMPED  # which call this is

    def seal(self, content: object) -> Seal:
        """What the message with this content bears, the same on every rank."""
        return Seal(self.stamp, crc32(f"{self.name} {content}".encode()))


class _Buffers:
    """Receive buffers and gradient sums by kind of chunk, reused once nobody holds them."""

    def __init__(self, shapes: dict[str, list[tuple[torch.Size, torch.dtype]]], device, room: int):
        self.shapes = shapes
        self.device = device
        self.room = room
        self.free: dict[tuple, list[Parcel]] = defaultdict(list)

    def take(self, kind: str, rows: int | None = None) -> Parcel:
        """A parcel for `kind`, or one like it with so many rows."""
        shapes = self.shapes[kind]
        if rows is not None:
            shapes = [(torch.Size((rows, *shape[1:])), dtype) for shape, dtype in shapes]
        free = self.free[kind, tuple(shape for shape, _ in shapes)]
        return free.pop() if free else packing.make(shapes, self.device, self.room)

    def give(self, kind: str, parcel: Parcel) -> None:
        self.free[kind, tuple(t.shape for t in parcel.tensors)].append(parcel)


@dataclass
class _Flight:
    """An exchange on its way: what comes, what goes, and the gradients to give back when gone."""

    land: int
    pending: Pending
    arriving: list[tuple[Chunk, Parcel]]
    leaving: list[tuple[str, Parcel]]


class Walk:
    """One rank's state during a pass: chunks held, gradient sums, exchanges in flight."""

    def __init__(
        self, run: Pass, endpoint: Endpoint, held: dict[Chunk, Tensors], wire: torch.dtype | None
    ):
        self.run, self.endpoint = run, endpoint
        self.held = {chunk: self._wrapped(chunk, tensors) for chunk, tensors in held.items()}
        self.sums: dict[Chunk, Parcel] = {}
        self.flights: list[_Flight] = []
        some = next(iter(held.values()))[0]
        shapes = {chunk.family: [(t.shape, t.dtype) for t in ts] for chunk, ts in held.items()}
        self.buffers = _Buffers(shapes, some.device, endpoint.room)
        self.total_dtype = accumulation_dtype(some.dtype)
        self.wire_dtype = wire or self.total_dtype

    def track(self, family: str, shapes: Sequence[torch.Size]) -> None:
        """Gradients of `family` are summed in the accumulation dtype and sent in the wire's."""
        for kind, dtype in ((family, self.total_dtype), (self._wire(family), self.wire_dtype)):
            self.buffers.shapes[kind] = [(shape, dtype) for shape in shapes]

    def _wrapped(self, chunk: Chunk, tensors: Tensors) -> Parcel:
        """What this rank has from the start; packed if it is to be sent."""
        sent = any(
            hop.chunk == chunk and hop.src == self.endpoint.rank
            for boundary in self.run.program
            for hop in boundary.posts
        )
        return packing.pack(tensors, self.run.seal(chunk)) if sent else Parcel(None, tensors)

    def _wire(self, family: str) -> str:
        """The kind of buffer in which chunks of `family` travel."""
        same = not family.startswith("d") or self.wire_dtype == self.total_dtype
        return family if same else family + " wire"

    def total(self, chunk: Chunk) -> Tensors:
        """The running sum of a gradient; zero when first asked for."""
        if chunk not in self.sums:
            self.sums[chunk] = self.buffers.take(chunk.family)
            for t in self.sums[chunk].tensors:
                t.zero_()
        return self.sums[chunk].tensors

    def steps(self, compute: Callable[[Pair], None]) -> Generator[None, None, None]:
        """Run the program; `compute` is called for every pair that has something visible."""
        for boundary in self.run.program:
            self._land(boundary.index)
            self._release(boundary.release)
            for channel, hops in _exchanges(boundary.posts):
                self._post(channel, hops, boundary.index)
            yield
            self._land(boundary.index)
            if boundary.pair is not None and boundary.pair in self.run.works:
                with record_function(f"{self.run.name}: {_pair(boundary.pair)}"):
                    compute(boundary.pair)

    def _post(self, channel: Channel, hops: list[Hop], index: int) -> None:
        me = self.endpoint.rank
        arriving, leaving, sends, receives = [], [], [], []
        for hop in hops:
            kind = self._wire(hop.chunk.family)
            if hop.src == me:
                parcel = self._outgoing(hop.chunk, kind)
                sends.append(Send(hop.dst, hop.link, parcel.tensors, parcel.flat))
                if hop.chunk.gradient:
                    leaving.append((kind, parcel))
            else:
                rows = self.run.rows[hop.chunk.owner] if self.run.rows else None
                parcel = self.buffers.take(kind, rows)
                seal = self.run.seal(hop.chunk)
                receives.append(Receive(hop.src, parcel.tensors, parcel, seal))
                arriving.append((hop.chunk, parcel))
        label = f"{self.run.name}, boundary {index}, rank {me}: " + "; ".join(map(_words, hops))
        pending = self.endpoint.exchange(channel, sends, receives, label)
        self.flights.append(_Flight(hops[0].land, pending, arriving, leaving))

    def _outgoing(self, chunk: Chunk, kind: str) -> Parcel:
        if not chunk.gradient:
            return self.held[chunk]
        self.total(chunk)
        parcel = self.sums.pop(chunk)
        if kind != chunk.family:
            wire = self.buffers.take(kind)
            for target, source in zip(wire.tensors, parcel.tensors, strict=True):
                target.copy_(source)
            self.buffers.give(chunk.family, parcel)
            parcel = wire
        packing.seal_(parcel, self.run.seal(chunk))
        return parcel

    def _land(self, index: int) -> None:
        landing = [f for f in self.flights if f.land == index]
        self.flights = [f for f in self.flights if f.land != index]
        for flight in landing:
            with record_function(f"{self.run.name}: wait, boundary {index}"):
                flight.pending.wait()
            for kind, parcel in flight.leaving:
                self.buffers.give(kind, parcel)
            for chunk, parcel in flight.arriving:
                if not chunk.gradient:
                    self.held[chunk] = parcel
                    continue
                for total, part in zip(self.total(chunk), parcel.tensors, strict=True):
                    total += part
                self.buffers.give(self._wire(chunk.family), parcel)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk in self.run.kept:
                continue
            parcel = self.held.pop(chunk)
            if parcel.flat is not None:  # else it is the caller's own
                self.buffers.give(chunk.family, parcel)


def lockstep(walks: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """Run the generators of all local ranks boundary by boundary; their return values."""
    results: list[Any] = [None] * len(walks)
    running = dict(enumerate(walks))
    while running:
        for index, walk in list(running.items()):
            try:
                next(walk)
            except StopIteration as stop:
                results[index] = stop.value
                del running[index]
    return results


def staggered(
    walks: Sequence[Generator[None, None, Any]],
) -> Generator[None, None, list[Any]]:
    """Walks of independent head chunks on one rank, each one boundary behind the one before.

    So the hops of one group are on the links while another computes, and of the last hops, which
    nothing follows that could hide them, only those of the last group are waited for in vain.
    """
    results: list[Any] = [None] * len(walks)
    running, begun = {}, 0
    while running or begun < len(walks):
        if begun < len(walks):
            running[begun] = walks[begun]
            begun += 1
        for index, walk in list(running.items()):
            try:
                next(walk)
            except StopIteration as stop:
                results[index] = stop.value
                del running[index]
        yield
    return results


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
