"""Runs one rank's part of a schedule: posts and awaits transfers, calls back for every pair.

Decides what travels in one message and when buffers are free. What is computed at a pair is the
caller's (`passes`); which rows are where at what time was decided by the schedule.

An `Executor` advances one boundary at a time, so that the rings of several head chunks can run one
behind the other (`head_chunks`). torch's profiler, and NVTX where it is emitted, see every pair and
every wait by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..schedule.program import parts_of
from ..schedule.tables import Boundary, Chunk, Hop, Pair
from .buffers import Buffers
from .partials import Partials
from .row_maps import RowMaps, taken

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """One call of the kernel: the query and key chunks as they are held, and what it planned."""

    queries: Chunk
    keys: Chunk
    work: Any


@dataclass(frozen=True)
class Pass:
    """What one rank needs for one pass: its program, and the work of each pair.

    calls: of each pair, for the parts in which its chunks came; none where nothing is visible.
    partials: (family, owner) -> the chunk with all rows of which this rank holds partial results.
    longest: of each family, the most rows of a chunk of others. kept: chunks of others that forward
    leaves behind and backward finds. deferred: the program of head chunks that compute the pair of
    their own chunks last. held_bytes: the most that this rank holds of chunks of others. call:
    which call this is; every message bears it.
    """

    name: str
    program: Sequence[Boundary]
    calls: Mapping[Pair, Sequence[Call]]
    maps: RowMaps
    partials: dict[tuple[str, int], Chunk]
    longest: dict[str, int]
    kept: Sequence[Chunk] = ()
    deferred: Sequence[Boundary] = ()
    held_bytes: int = 0
    call: CallTag = NO_CALL

    def envelope(self, content: object) -> Envelope:
        """What the message with this content bears, the same on every rank."""
        return Envelope(self.call, crc32(f"{self.name} {content}".encode()))


@dataclass
class _Flight:
    """An exchange under way: what arrives, and what is done with once it left."""

    land: int
    pending: Pending
    arriving: list[tuple[Chunk, Message]]
    leaving: list[tuple[Chunk, Message]]


class Executor:
    """One rank's state during a pass: chunks held, partial results, exchanges in flight.

    own: the tensors of each family of copies that this rank has from the start; kept: those of
    `run.kept`. wire: dtype of travelling partial results, None for that of their sums.
    """

    def __init__(
        self,
        run: Pass,
        endpoint: Endpoint,
        own: dict[str, Tensors],
        kept: Sequence[Tensors] = (),
        wire: torch.dtype | None = None,
    ):
        self.run, self.endpoint, self.me = run, endpoint, endpoint.rank
        self.held = {Chunk(family, self.me): Message(None, own[family]) for family in own}
        self.held |= {c: Message(None, t) for c, t in zip(run.kept, kept, strict=False)}
        some = next(iter(own.values()))[0]
        self.total_dtype = accumulation_dtype(some.dtype)
        self.wire_dtype = wire or self.total_dtype
        self.buffers = Buffers(some.device, endpoint)
        for family, tensors in own.items():
            rows = [(t.shape[1:], t.dtype) for t in tensors]
            self.buffers.introduce(family, rows, run.longest.get(family, 0))
        self.partials = Partials(run.maps, run.partials, self.buffers)
        self.flights: list[_Flight] = []
        self._packed: dict[Chunk, Message] = {}  # copies of rows that are being sent
        self._sends = Counter(
            hop.chunk for b in run.program for hop in b.posts if hop.src == self.me
        )
        self._started = 0  # boundaries whose transfers have been posted

    def accumulate(self, family: str, rows: Sequence[torch.Size], stats: int = 0) -> None:
        """Partial results of `family` have such rows. They are summed in the accumulation dtype,
        and sent in the wire's but for the last `stats` tensors."""
        total = [(shape, self.total_dtype) for shape in rows]
        wire = [(shape, self.wire_dtype) for shape in rows[: len(rows) - stats]]
        longest = self.run.longest.get(family, 0)
        self.partials.introduce(family, total, wire + total[len(wire) :], longest)

    def advance(self, compute: Callable[[Pair, Call], None]) -> bool:
        """Compute the pairs of the last boundary, then post the transfers of the next one.

        compute: called for every call of a pair, once its chunks are held. (It is not kept: a cycle
        would hold all buffers until the garbage collector comes.) Returns False at the end of the
        program. Posting comes before computing within a boundary (BurstEngine Algorithms 1 and 2),
        so between two calls only transfers are under way: that is where another head chunk
        computes.
        """
        if self._started:
            # What lands where it was posted blocks: only now, when every rank has posted it.
            self._land(self._started - 1)
            for pair in self.run.program[self._started - 1].pairs:
                for call in self.run.calls.get(pair, ()):
                    words = f"queries of rank {pair.query}, keys of rank {pair.key}"
                    with record_function(f"{self.run.name}: {words}"):
                        compute(pair, call)
        if self._started == len(self.run.program):
            return False
        boundary = self.run.program[self._started]
        self._land(boundary.index)
        self._release(boundary.release)
        for channel, hops in _exchanges(boundary.posts):
            self._post(channel, hops, boundary.index)
        self._started += 1
        return True

    def kept(self, chunk: Chunk) -> Tensors:
        """The rows of `chunk`, from the messages in which they came."""
        parts, rows = parts_of(self.held, *chunk), self.run.maps.count(chunk)
        if chunk in self.held and rows == self.run.longest[chunk.family]:
            return self.held[chunk].tensors
        whole = self.buffers.apart(chunk.family, rows).tensors  # a buffer would keep its whole room
        for part in parts:
            rows = taken(self.held[part].tensors, self.run.maps.where(part, part.rows & chunk.rows))
            where = self.run.maps.where(chunk, part.rows & chunk.rows)
            for target, source in zip(whole, rows, strict=True):
                target[where] = source
        return whole

    def _post(self, channel: Channel, hops: list[Hop], index: int) -> None:
        arriving, leaving, sends, receives = [], [], [], []
        for hop in hops:
            chunk, sealed = hop.chunk, self.buffers.device.type == "cpu"
            if hop.src == self.me:
                message = self._outgoing(chunk)
                flat = message.flat if sealed else None
                sends.append(Send(hop.dst, hop.link, message.tensors, flat))
                leaving.append((chunk, message))
            else:
                message = self.buffers.take(self._kind(chunk), self.run.maps.count(chunk))
                envelope, whole = self.run.envelope(chunk), message if sealed else None
                receives.append(Receive(hop.src, message.tensors, whole, envelope))
                arriving.append((chunk, message))
        words = "; ".join(map(_words, hops))
        label = f"{self.run.name}, boundary {index}, rank {self.me}: {words}"
        pending = self.endpoint.exchange(channel, sends, receives, label)
        self.flights.append(_Flight(hops[0].land, pending, arriving, leaving))

    def _kind(self, chunk: Chunk) -> str:
        """The kind of buffer in which a chunk travels."""
        return self.partials.wire(chunk.family) if chunk.accumulated else chunk.family

    def _outgoing(self, chunk: Chunk) -> Message:
        """The message to be sent: what came, as it came, or a copy of some rows of it."""
        if chunk.accumulated:
            message = self.partials.send(chunk)
            packing.write_envelope_(message, self.run.envelope(chunk))
            return message
        if chunk in self.held and self.held[chunk].flat is not None:
            return self.held[chunk]
        if chunk in self._packed:
            return self._packed[chunk]
        (source,) = parts_of(self.held, *chunk)
        rows = taken(self.held[source].tensors, self.run.maps.where(source, chunk.rows))
        if self.buffers.device.type != "cpu" and all(t.is_contiguous() for t in rows):
            return Message(None, rows)  # nothing is copied where tensors travel one by one
        message = self.buffers.take(chunk.family, self.run.maps.count(chunk))
        for target, row in zip(message.tensors, rows, strict=True):
            target.copy_(row)
        packing.write_envelope_(message, self.run.envelope(chunk))
        self._packed[chunk] = message
        return message

    def _land(self, index: int) -> None:
        """Wait for what lands at this boundary; copies are held, partial results are added."""
        landing = [f for f in self.flights if f.land == index]
        self.flights = [f for f in self.flights if f.land != index]
        for flight in landing:
            with record_function(f"{self.run.name}: wait, boundary {index}"):
                flight.pending.wait()
            for chunk, message in flight.leaving:
                self._left(chunk, message)
            for chunk, message in flight.arriving:
                if chunk.accumulated:
                    self.partials.receive(chunk, message)
                else:
                    self.held[chunk] = message

    def _left(self, chunk: Chunk, message: Message) -> None:
        """Free what was sent where nothing else holds it."""
        self._sends[chunk] -= 1
        if chunk.accumulated:
            self.buffers.give(self._kind(chunk), message)
        elif chunk in self._packed and not self._sends[chunk]:
            self.buffers.give(chunk.family, self._packed.pop(chunk))

    def _release(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if parts_of(self.run.kept, *chunk):
                continue
            message = self.held.pop(chunk)
            if message.room is not None:  # else these are the caller's own tensors
                self.buffers.give(chunk.family, message)


def _exchanges(hops: Sequence[Hop]) -> Iterator[tuple[Channel, list[Hop]]]:
    """Hops that share a process group and land together start together."""

    def key(hop: Hop) -> tuple[Channel, int]:
        return Channel(hop.ring, hop.chunk.accumulated), hop.land

    for (channel, _), group in groupby(sorted(hops, key=key), key):
        yield channel, list(group)


def _words(hop: Hop) -> str:
    return f"{hop.chunk.family} of rank {hop.chunk.owner} from rank {hop.src} to rank {hop.dst}"
