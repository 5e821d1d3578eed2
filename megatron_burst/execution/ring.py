# SPDX-License-Identifier: Apache-2.0
"""The loop of a ring: post, wait, compute, merge and release, forward and backward alike.

`Ring` runs one rank's part of a pass over some heads. Which rows are where at what time was decided
by the schedule, where they lie in which buffer by `planning/build.py`; here they move. `run` lets
the rings of several head chunks run one behind the other, and `Forward` and `Backward` say what one
pair computes.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from ..comm import packing
from ..comm.packing import CallTag, Envelope, Message
from ..comm.transport import Pending, Receive, Send
from ..kernels.base import Kernel, Rows, Scoring
from ..kernels.online_softmax import accumulation_dtype, add_sink_
from ..schedule.head_shares import deferred_chunks
from ..schedule.tables import Chunk
from .buffers import Buffers, MessageKind, PartialResults, taken
from .job import Call, Exchange, Job, Pass, Payload, Tensors

UNNAMED = nullcontext()
DONE = object()


class ChunkStore(Protocol):
    """The received chunks that a ring keeps: a dict, or a store in host memory.

    The ring calls `pop` for a chunk that it does not need any more, and reuses the message.
    """

    def __setitem__(self, chunk: Chunk, message: Message, /) -> None: ...

    def __getitem__(self, chunk: Chunk, /) -> Message: ...

    def pop(self, chunk: Chunk, /) -> Message: ...


class HeadChunk(NamedTuple):
    """Some heads of a rank, whose ring runs behind those of the heads before.

    heads, kv_heads: which. title: what it adds to the name of the pass.
    """

    number: int
    heads: slice
    kv_heads: slice
    deferred: bool
    title: str


class _Flight(NamedTuple):
    """An exchange under way: what arrives, and what is done with once it left."""

    pending: Pending
    arriving: list[tuple[Payload, Message]]
    leaving: list[tuple[Payload, Message]]


class Ring:
    """One rank's part of a pass over the heads of a chunk: chunks held, partial results, exchanges
    in flight.

    own: the tensors of each family of copies that this rank has from the start.
    sums: of each family of partial results, what a row of each tensor has; the last
    `exact` of these travel as they are summed, the others in the dtype of the wire. compute: what
    is done with a pair (`Forward`, `Backward`; `sparse` has others).
    """

    def __init__(
        self,
        job: Job,
        run: Pass,
        tag: CallTag,
        heads: HeadChunk,
        compute: Any,
        own: dict[str, Tensors],
        sums: Mapping[str, Sequence[torch.Size]],
        *,
        exact: int = 0,
    ):
        self.run, self.heads, self.compute, self._tag = run, heads, compute, tag
        self.steps = run.deferred if heads.deferred else run.steps
        assert self.steps, "a pass made without the order of head chunks that are deferred"
        self.endpoint, self.me = job.ring, job.ring.rank
        held = {Chunk(family, self.me): Message(None, tensors) for family, tensors in own.items()}
        self.chunks: ChunkStore = held
        device, dtype = own["query"][0].device, own["query"][0].dtype
        self._on_cpu = device.type == "cpu"
        key = dtype, job.wire_dtype, heads.heads.stop - heads.heads.start
        if key not in run.kinds:
            run.kinds[key] = kinds(run, own, sums, exact, accumulation_dtype(dtype), job.wire_dtype)
        of_kind, self._wire = run.kinds[key]
        self.buffers = Buffers(device, job.ring, of_kind)
        self.partials = PartialResults(self.buffers, self._wire)
        self._flights: dict[int, list[_Flight]] = {}  # by where they land
        self._packed: dict[Chunk, Message] = {}  # copies of rows that are being sent
        self._sends = dict(run.sends)  # how often each is still to be sent

    def __iter__(self) -> Iterator[None]:
        """Run the pass. Pauses where only transfers are under way: there other rings compute."""
        for step in self.steps:
            self._land(step.index)
            for chunk in step.release:  # of other ranks
                self.buffers.give(chunk.family, self.chunks.pop(chunk))
            # Posting comes before computing, which hides it (BurstEngine Algorithms 1 and 2).
            for exchange in step.exchanges:
                self._post(exchange, step.index)
            yield
            # What lands where it was posted blocks: only now, when every rank has posted it.
            self._land(step.index)
            for call in step.calls:
                with self._range("queries of rank %d, keys of rank %d", *call.pair[:2]):
                    if call.parts:
                        call.parts.compute(call, self)
                        continue
                    queries, keys = self.chunks[call.queries], self.chunks[call.keys]
                    sums = [self.partials.open(target) for target in call.targets]
                    self.compute.pair(call, queries.tensors, keys.tensors, sums)
                    for target, part in zip(call.targets, sums, strict=True):
                        if not isinstance(target.place.at, slice):
                            self.partials.merge(target, part)
                    del queries, keys, sums  # or they would be here until the next pair

    def _post(self, exchange: Exchange, boundary: int) -> None:
        """Start what shares a process group: take the rows that leave, and room for what comes."""
        sends, receives, arriving, leaving = [], [], [], []
        for payload in exchange.leaving:
            message, hop = self._outgoing(payload), payload.hop
            flat = message.flat if self._on_cpu or payload.packed else None
            sends.append(Send(hop.dst, hop.link, message.tensors, flat))
            leaving.append((payload, message))
        for payload in exchange.arriving:
            message = self.buffers.take(self._wire[payload.hop.chunk.family], payload.count)
            if self._on_cpu:
                envelope = self._envelope(payload)
                receive = Receive(payload.hop.src, message.tensors, message, envelope)
            else:
                whole = message if payload.packed else None
                receive = Receive(payload.hop.src, message.tensors, whole)
            receives.append(receive)
            arriving.append((payload, message))
        label = _Label(self.run.name + self.heads.title, self.me, exchange, boundary)
        pending = self.endpoint.exchange(exchange.channel, sends, receives, label)
        flight = _Flight(pending, arriving, leaving)
        self._flights.setdefault(exchange.land, []).append(flight)

    def _land(self, boundary: int) -> None:
        """Wait for what lands here: copies are held, partial results merged, what left is free."""
        for flight in self._flights.pop(boundary, ()):
            with self._range("wait, boundary %d", boundary):
                flight.pending.wait()
            for payload, message in flight.leaving:
                self._left(payload, message)
            for payload, message in flight.arriving:
                if payload.target is None:
                    self.chunks[payload.hop.chunk] = message
                else:
                    self.partials.receive(payload.target, message)

    def _outgoing(self, payload: Payload) -> Message:
        """The message to be sent: what came, as it came, or a copy of some rows of it."""
        chunk = payload.hop.chunk
        if payload.target is not None:
            message = self.partials.send(payload.target)
        elif payload.source is None:
            return self.chunks[chunk]
        elif chunk in self._packed:
            return self._packed[chunk]
        else:
            source, place = payload.source
            rows = taken(self.chunks[source].tensors, place)
            if not (self._on_cpu or payload.packed) and all(t.is_contiguous() for t in rows):
                return Message(None, rows)  # sent from where they lie
            message = self._packed[chunk] = self.buffers.take(chunk.family, payload.count)
            for target, row in zip(message.tensors, rows, strict=True):
                target.copy_(row)
        if self._on_cpu:
            packing.write_envelope_(message, self._envelope(payload))
        return message

    def _left(self, payload: Payload, message: Message) -> None:
        """Free what was sent where nothing else holds it."""
        chunk = payload.hop.chunk
        self._sends[chunk] -= 1
        if payload.target is not None:
            self.buffers.give(self._wire[chunk.family], message)
        elif chunk in self._packed and not self._sends[chunk]:
            self.buffers.give(chunk.family, self._packed.pop(chunk))

    def _envelope(self, payload: Payload) -> Envelope:
        """What the message bears, the same on every rank."""
        return Envelope(self._tag, payload.digest + (self.heads.number << 32))

    def _range(self, words: str, *numbers: int) -> AbstractContextManager[Any]:
        """A range of torch's profiler, and of NVTX where that is emitted; no words without one."""
        if not profiler._is_profiler_enabled:
            return UNNAMED
        return record_function(f"{self.run.name}{self.heads.title}: {words % numbers}")


def kinds(
    run: Pass,
    own: Mapping[str, Tensors],
    sums: Mapping[str, Sequence[torch.Size]],
    exact: int,
    total: torch.dtype,
    wire: torch.dtype,
) -> tuple[dict[str, MessageKind], dict[str, str]]:
    """The kinds of messages of a pass, and of each family in which kind it travels: apart where
    sums travel in another dtype than they are summed in. own, sums, exact: as of `Ring`.
    """
    of = {
        f: MessageKind([(t.shape[1:], t.dtype) for t in ts], run.longest.get(f, 0))
        for f, ts in own.items()
    }
    travels = {family: family for family in own}
    for family, shapes in sums.items():
        here = [(shape, total) for shape in shapes]
        narrow = len(shapes) - exact
        there = [(shape, wire) for shape in shapes[:narrow]] + here[narrow:]
        travels[family] = family if here == there else family + " wire"
        of[family] = MessageKind(here, run.longest.get(family, 0))
        of[travels[family]] = MessageKind(there, run.longest.get(family, 0))
    return of, travels


class _Label(NamedTuple):
    """What errors say of an exchange; made into words only then."""

    title: str
    rank: int
    exchange: Exchange
    boundary: int

    def __str__(self) -> str:
        words = [
            f"{hop.chunk.family} of rank {hop.chunk.owner} from rank {hop.src} to rank {hop.dst}"
            for payloads in (self.exchange.leaving, self.exchange.arriving)
            for hop in (payload.hop for payload in payloads)
        ]
        return f"{self.title}, boundary {self.boundary}, rank {self.rank}: {'; '.join(words)}"


def run(rings: Sequence[Ring]) -> None:
    """Run the rings of all head chunks to their ends, each one boundary behind the one before.

    While one computes, the hops of another are on the links; of the last hops, which no compute of
    their own can hide, only those of the last head chunk are exposed.
    """
    waiting, running = [iter(ring) for ring in rings], []
    while waiting or running:
        running += waiting[:1]
        del waiting[:1]
        for ring in list(running):
            if next(ring, DONE) is DONE:
                running.remove(ring)


def head_chunks(job: Job, heads: int, kv_heads: int) -> list[HeadChunk]:
    """The head chunks of a job whose ring has so many heads on this rank.

    The last ones defer the pair of their own chunks, which waits for no transfer, to overlap it
    with their last gradient transfers; the first ones compute while they start.
    """
    count = job.head_chunks
    if count == 1:
        return [HeadChunk(0, slice(0, heads), slice(0, kv_heads), False, "")]
    each, kv_each, first_deferred = (
        heads // count,
        kv_heads // count,
        count - deferred_chunks(count),
    )
    return [
        HeadChunk(
            i, slice(i * each, (i + 1) * each), slice(i * kv_each, (i + 1) * kv_each),
            i >= first_deferred, f", heads {i * each} to {(i + 1) * each - 1}",
        )
        for i in range(count)
    ]  # fmt: skip


# --- forward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """What a pair computes in forward: its part of out and lse, merged into what is there.

    max_logits [h] or None: raised to the largest score of each head.
    """

    kernel: Kernel
    scoring: Scoring
    max_logits: torch.Tensor | None

    def pair(self, call: Call, queries: Tensors, keys: Tensors, sums: Sequence[Message]) -> None:
        (q,), (k, v), (out, lse) = queries, keys, sums[0].tensors
        self.kernel.forward(q, k, v, call.work, self.scoring, out, lse, self.max_logits)


def forward_rings(
    job: Job,
    run: Pass,
    tag: CallTag,
    q: torch.Tensor,
    keys: Tensors,
    max_logits: torch.Tensor | None = None,
) -> list[Ring]:
    """One ring per head chunk: attention of the queries to the keys of all ranks (BurstEngine
    Algorithm 1). q [s, b, h, d], keys (k [s, b, k, d], v [s, b, k, w]) of this rank.
    """
    k, v = keys
    rings = []
    for part in head_chunks(job, q.shape[2], k.shape[2]):
        h, n = part.heads, part.kv_heads
        own = {"kv": (of_heads(k, n), of_heads(v, n)), "query": (of_heads(q, h),)}
        stat = own["query"][0].shape[1:3]
        rows = {"out": [torch.Size((*stat, v.shape[-1])), stat]}
        compute = Forward(job.kernel, job.scoring, None if max_logits is None else max_logits[h])
        rings.append(Ring(job, run, tag, part, compute, own, rows, exact=1))
    return rings


def outputs(
    rings: Sequence[Ring], dtype: torch.dtype, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [s, b, h, w] in `dtype` and lse [s, b, h] in the accumulation dtype.

    sink [h] or None: a logit that every row sees besides its keys, with no value.
    """
    outs, lses = [], []
    for ring in rings:
        out, lse = ring.partials.whole(ring.run.totals["out", ring.me])
        if sink is not None:
            add_sink_(out, lse, sink[ring.heads.heads])
        outs.append(out.to(dtype))
        lses.append(lse)
    return join(outs), join(lses)


# --- backward -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward:
    """What a pair computes in backward: its part of dq, dk and dv, added to what is there.

    out: of the queries of rank `me`; it does not travel, a travelling query chunk brings delta
    instead (BurstEngine 3.1).
    """

    kernel: Kernel
    scoring: Scoring
    out: torch.Tensor | None
    me: int
    needs_grad: tuple[bool, bool, bool]

    def pair(self, call: Call, queries: Tensors, keys: Tensors, sums: Sequence[Message]) -> None:
        (q, dout, lse, delta), (k, v) = queries, keys
        out = self.out if call.queries.owner == self.me else None
        grads = by_tensor(sums[0].tensors + sums[1].tensors, self.needs_grad)
        rows = Rows(q, dout, lse, delta, out)
        self.kernel.backward(rows, k, v, call.work, self.scoring, *grads)


def backward_rings(job: Job, run: Pass, tag: CallTag, rows: Rows, keys: Tensors) -> list[Ring]:
    """One ring per head chunk: gradients of the local q, k, v (BurstEngine Algorithms 1 and 2).

    What travels is the program's business: own chunks are held from the start, those of others
    arrive, and gradients are summed per chunk wherever it is. rows: the local query chunk; keys:
    (k, v).
    """
    (k, v), needs, rings = keys, job.needs_grad, []
    for part in head_chunks(job, rows.q.shape[2], k.shape[2]):
        h, n = part.heads, part.kv_heads
        q, dout, lse, delta, out = [None if x is None else of_heads(x, h) for x in rows]
        own: dict[str, Any] = {
            "query": (q, dout, lse, delta),
            "kv": (of_heads(k, n), of_heads(v, n)),
        }
        needed = zip(own["kv"], needs[1:], strict=True)
        sums = {
            "dquery": [own["query"][0].shape[1:]] if needs[0] else [],
            "dkv": [t.shape[1:] for t, needs_grad in needed if needs_grad],
        }
        compute = Backward(job.kernel, job.scoring, out, job.ring.rank, needs)
        rings.append(Ring(job, run, tag, part, compute, own, sums))
    return rings


def gradients(
    rings: Sequence[Ring], needs_grad: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv in the accumulation dtype; None where no gradient is needed."""
    parts = []
    for ring in rings:
        dquery, dkv = (
            ring.partials.whole(ring.run.totals[family, ring.me]) for family in ("dquery", "dkv")
        )
        parts.append(by_tensor(dquery + dkv, needs_grad))
    each = zip(*parts, strict=True)
    return tuple(join(x) if needed else None for x, needed in zip(each, needs_grad, strict=True))


def by_tensor(
    sums: Tensors, needs_grad: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """The sum of each of q, k, v, or None where it is not needed."""
    if len(sums) == len(needs_grad):
        return sums
    rest = iter(sums)
    return tuple(next(rest) if needed else None for needed in needs_grad)


def of_heads(x: torch.Tensor, heads: slice) -> torch.Tensor:
    """These heads (dimension 2): x itself where they are all of them."""
    return x if heads.stop - heads.start == x.shape[2] else x[:, :, heads]


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The heads (dimension 2) of all chunks side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
