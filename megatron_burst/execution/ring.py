# SPDX-License-Identifier: Apache-2.0
"""The loop of a ring: start transfers, wait, compute, add results, free chunks.

`Ring` runs one rank's part of a pass (forward or backward) for one head chunk (group of heads). The
schedule decides which rows are on which rank at which time, and `planning/build.py` decides their
positions in buffers. `run` interleaves the rings of several head chunks, each one step behind the
previous one. `Forward` and `Backward` define what one kernel call computes.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from ..comm import packing
from ..comm.packing import CallTag, Envelope, Message
from ..comm.relays import Relays
from ..comm.transport import Pending, Receive, Send
from ..kernels.base import Kernel, Rows, Scoring, WritingKernel
from ..kernels.online_softmax import accumulation_dtype, add_sink_
from ..schedule.head_shares import deferred_chunks
from ..schedule.tables import Chunk
from .buffers import Buffers, MessageKind, OpenSum, ResultAccumulator, rows_at
from .rank_plan import Exchange, KernelCall, Payload, RankPass, RankPlan, Target, Tensors

UNNAMED = nullcontext()
DONE = object()


class ChunkTable(Protocol):
    """Mapping from a chunk (rows of one rank) to the message whose buffers hold its tensors.

    It is a dict, or a table that also keeps chunks in host memory. The ring calls `pop` when it no
    longer needs a chunk, and then reuses the buffers.
    """

    def __setitem__(self, chunk: Chunk, message: Message, /) -> None: ...

    def __getitem__(self, chunk: Chunk, /) -> Message: ...

    def pop(self, chunk: Chunk, /) -> Message: ...


class HeadChunk(NamedTuple):
    """A range of a rank's heads that has its own ring.

    Attributes:
        number: Number of the head chunk.
        heads: Query heads of the head chunk.
        kv_heads: Key/value heads of the head chunk.
        deferred: True if attention of the rank's own queries to its own keys is computed last.
        title: Suffix for the name of the pass in errors and profiles.
    """

    number: int
    heads: slice
    kv_heads: slice
    deferred: bool
    title: str


class _PendingExchange(NamedTuple):
    """Transfers that have started together and have not ended.

    Attributes:
        pending: Handle to wait for the exchange.
        arriving: Pairs (rows to receive, message for them).
        leaving: Pairs (sent rows, their message); the messages are freed after the wait.
    """

    pending: Pending
    arriving: list[tuple[Payload, Message]]
    leaving: list[tuple[Payload, Message]]


class Ring:
    """One rank's part of a pass over one head chunk.

    The object holds the chunks on this rank, the partial results and the transfers in flight.

    Args:
        rank_plan: Plan of this rank.
        rank_pass: The pass.
        tag: Tag of the call; messages on the CPU contain it.
        heads: The head chunk.
        compute: Object whose method `pair` computes attention of one query chunk to one key chunk:
            `Forward`, `Backward`, or an object of the plugin `sparse`.
        own: Family ("query", "kv") -> tensors of this rank's own chunk.
        sums: Family of partial results -> shape of one row of each tensor.
        exact: Number of tensors, at the end of each family of `sums`, that are sent in the dtype of
            the sums. The other tensors are sent in the wire dtype.
        writes_new: True if `compute` writes all rows of new sums (`OpenSum.new`). False if new sums
            must be cleared first.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        rank_pass: RankPass,
        tag: CallTag,
        heads: HeadChunk,
        compute: Any,
        own: dict[str, Tensors],
        sums: Mapping[str, Sequence[torch.Size]],
        *,
        exact: int = 0,
        writes_new: bool = False,
    ):
        self.rank_pass, self.heads, self.compute, self._tag = rank_pass, heads, compute, tag
        self.steps = rank_pass.deferred if heads.deferred else rank_pass.steps
        assert self.steps, "the pass was planned without deferred steps"
        self.writes_new = writes_new
        self.endpoint, self.me = rank_plan.ring, rank_plan.ring.rank
        own_chunks = {
            Chunk(family, self.me): Message(None, tensors) for family, tensors in own.items()
        }
        self.chunks: ChunkTable = own_chunks
        device, dtype = own["query"][0].device, own["query"][0].dtype
        self._on_cpu = device.type == "cpu"
        key = dtype, rank_plan.wire_dtype, heads.heads.stop - heads.heads.start
        if key not in rank_pass.kinds:
            rank_pass.kinds[key] = kinds(
                rank_pass, own, sums, exact, accumulation_dtype(dtype), rank_plan.wire_dtype
            )
        of_kind, self._wire = rank_pass.kinds[key]
        self.buffers = Buffers(device, rank_plan.ring, of_kind)
        self.partials = ResultAccumulator(self.buffers, self._wire)
        self._relays: Relays | None = None  # made by the first step with a chain
        # Partial results of the rank's own rows that the relay stream received, by boundary.
        self._own_parts: dict[int, list[tuple[Target, Message]]] = {}
        self._read_beside: list[object] = []  # sums that the relay stream may still read
        self._pending: dict[int, list[_PendingExchange]] = {}  # by the boundary that waits
        self._packed: dict[Chunk, Message] = {}  # copies of rows that are being sent
        self._sends = dict(rank_pass.sends)  # remaining number of sends

    def __iter__(self) -> Iterator[None]:
        """Run the pass; yield once per step, after the transfers of the step have started.

        Other rings can compute before the iteration continues.
        """
        for step in self.steps:
            self._finish(step.index)
            for chunk in step.release:  # chunks of other ranks
                self.buffers.give(chunk.family, self.chunks.pop(chunk))
            # Transfers are posted before the computation that hides them (BurstEngine Algorithms 1
            # and 2).
            for exchange in step.exchanges:
                self._post(exchange, step.index)
            if step.relays:
                self._read_beside += self.partials.held()
                self._relays = self._relays or self.endpoint.relays(self.buffers.device)
                self._relays.start(partial(self._relay, self._relays, step.relays))
            yield
            # An exchange that ends at its own boundary blocks, so every rank must have posted it.
            if step.index in self._pending or self._relays is not None:
                self._finish(step.index)
            for call in step.calls:
                with self._range("queries of rank %d, keys of rank %d", *call.pair[:2]):
                    if call.parts:
                        call.parts.compute(call, self)
                        continue
                    queries, keys = self.chunks[call.queries], self.chunks[call.keys]
                    clear = not self.writes_new
                    sums = [self.partials.open(target, clear=clear) for target in call.targets]
                    self.compute.pair(call, queries.tensors, keys.tensors, sums)
                    for target, part in zip(call.targets, sums, strict=True):
                        if not isinstance(target.place.at, slice):
                            self.partials.merge(target, part)
                    del queries, keys, sums  # otherwise alive until the next pair
        self._read_beside.clear()

    def abandon(self) -> None:
        """Protect the buffers of the relay stream after an error; see `Relays.abandon`."""
        if self._relays is not None:
            self._relays.abandon()

    def _post(self, exchange: Exchange, boundary: int) -> None:
        """Start the transfers of an exchange; `boundary` is the index of the step, for errors."""
        sends, receives, arriving, leaving = [], [], [], []
        for payload in exchange.leaving:
            message, hop = self._outgoing(payload), payload.hop
            flat = message.flat if self._on_cpu or payload.packed else None
            sends.append(Send(hop.dst, hop.link, message.tensors, flat))
            leaving.append((payload, message))
        for payload in exchange.arriving:
            message = self.buffers.take(self._wire[payload.hop.chunk.family], payload.row_count)
            if self._on_cpu:
                envelope = self._envelope(payload)
                receive = Receive(payload.hop.src, message.tensors, message, envelope)
            else:
                packed_message = message if payload.packed else None
                receive = Receive(payload.hop.src, message.tensors, packed_message)
            receives.append(receive)
            arriving.append((payload, message))
        label = _Label(self.rank_pass.name + self.heads.title, self.me, exchange, boundary)
        pending = self.endpoint.exchange(exchange.channel, sends, receives, label)
        flight = _PendingExchange(pending, arriving, leaving)
        self._pending.setdefault(exchange.land, []).append(flight)

    def _relay(self, relays: Relays, chain: Sequence[tuple[int, Sequence[Exchange]]]) -> None:
        """Run a chain of transfers, `Step.relays`, on the relay stream."""
        with self.buffers.beside(relays.memory):
            for boundary, exchanges in chain:
                self._finish(boundary, relayed=True)
                relays.mark(boundary)
                for exchange in exchanges:
                    self._post(exchange, boundary)

    def _finish(self, boundary: int, relayed: bool = False) -> None:
        """Wait for the transfers that end before step `boundary`, and free sent messages.

        If `relayed`, the relay stream waits. Received sums of the rank's own rows are then added
        later, by the computing stream, because kernels add to these sums too.
        """
        if self._relays is not None and not relayed:
            self._relays.wait(boundary)
            for target, message in self._own_parts.pop(boundary, ()):
                self.partials.receive(target, message)
        for flight in self._pending.pop(boundary, ()):
            with self._range("wait, boundary %d", boundary):
                flight.pending.wait()
            for payload, message in flight.leaving:
                self._free_sent(payload, message)
            for payload, message in flight.arriving:
                if payload.target is None:
                    self.chunks[payload.hop.chunk] = message
                elif relayed and payload.hop.chunk.owner == self.me:
                    self._own_parts.setdefault(boundary, []).append((payload.target, message))
                else:
                    self.partials.receive(payload.target, message)

    def _outgoing(self, payload: Payload) -> Message:
        """Return the message to send: a sum of partial results, a received message, or own rows."""
        chunk = payload.hop.chunk
        if payload.target is not None:
            message = self.partials.send(payload.target)
        elif payload.source is None:
            return self.chunks[chunk]
        elif chunk in self._packed:
            return self._packed[chunk]
        else:
            source, place = payload.source
            rows = rows_at(self.chunks[source].tensors, place)
            if not (self._on_cpu or payload.packed) and all(t.is_contiguous() for t in rows):
                return Message(None, rows)  # sent without a copy
            message = self._packed[chunk] = self.buffers.take(chunk.family, payload.row_count)
            for target, row in zip(message.tensors, rows, strict=True):
                target.copy_(row)
        if self._on_cpu:
            packing.write_envelope_(message, self._envelope(payload))
        return message

    def _free_sent(self, payload: Payload, message: Message) -> None:
        """Free the buffer of a sent message.

        A buffer stays if its message is sent again, or if it belongs to a chunk that is in use.
        """
        chunk = payload.hop.chunk
        self._sends[chunk] -= 1
        if payload.target is not None:
            self.buffers.give(self._wire[chunk.family], message)
        elif chunk in self._packed and not self._sends[chunk]:
            self.buffers.give(chunk.family, self._packed.pop(chunk))

    def _envelope(self, payload: Payload) -> Envelope:
        """Return the envelope, which identifies the message to sender and receiver."""
        return Envelope(self._tag, payload.digest + (self.heads.number << 32))

    def _range(self, words: str, *numbers: int) -> AbstractContextManager[Any]:
        """Return a profiler range (an NVTX range, if enabled), or a no-op without a profiler."""
        if not profiler._is_profiler_enabled:
            return UNNAMED
        return record_function(f"{self.rank_pass.name}{self.heads.title}: {words % numbers}")


def kinds(
    rank_pass: RankPass,
    own: Mapping[str, Tensors],
    sums: Mapping[str, Sequence[torch.Size]],
    exact: int,
    total: torch.dtype,
    wire: torch.dtype,
) -> tuple[dict[str, MessageKind], dict[str, str]]:
    """Return the message kinds of a pass by name, and the kind in which each family is sent.

    A family names the tensors of a chunk, such as "kv" or "dkv". The message kind of a family has
    the same name. If sums are rounded before they are sent, they are sent in a second kind, such as
    "dkv wire".

    Args:
        rank_pass: The pass.
        own: Same as in `Ring`.
        sums: Same as in `Ring`.
        exact: Same as in `Ring`.
        total: dtype in which partial results are added.
        wire: dtype in which sums are sent.
    """
    kind_of = {
        f: MessageKind([(t.shape[1:], t.dtype) for t in ts], rank_pass.longest.get(f, 0))
        for f, ts in own.items()
    }
    sent_as = {family: family for family in own}
    for family, shapes in sums.items():
        sum_rows = [(shape, total) for shape in shapes]
        rounded = len(shapes) - exact
        wire_rows = [(shape, wire) for shape in shapes[:rounded]] + sum_rows[rounded:]
        sent_as[family] = family if sum_rows == wire_rows else family + " wire"
        kind_of[family] = MessageKind(sum_rows, rank_pass.longest.get(family, 0))
        if sent_as[family] != family:
            longest = rank_pass.longest.get(sent_as[family], 0)
            kind_of[sent_as[family]] = MessageKind(wire_rows, longest)
    return kind_of, sent_as


class _Label(NamedTuple):
    """Description of an exchange for error messages, formatted only if an error occurs."""

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
    """Run the rings of all head chunks (groups of heads), each one step behind the previous one.

    While one ring computes, the transfers of another ring are in flight. The last transfers of a
    ring overlap with the computation of the next ring. So only the last transfers of the last ring
    overlap with no computation.
    """
    waiting, running = [iter(ring) for ring in rings], []
    try:
        while waiting or running:
            running += waiting[:1]
            del waiting[:1]
            for ring in list(running):
                if next(ring, DONE) is DONE:
                    running.remove(ring)
    except BaseException:
        for ring in rings:
            ring.abandon()
        raise


def head_chunks(rank_plan: RankPlan, heads: int, kv_heads: int) -> list[HeadChunk]:
    """Return the head chunks of a rank.

    A head chunk is a group of heads with its own transfers. Attention of the rank's own queries to
    its own keys needs no transfer. The last head chunks do this computation last, to hide their
    last transfers of gradients. Computation of the first head chunks hides the first transfers of
    the last head chunks.

    Args:
        rank_plan: Plan of this rank.
        heads: Number of query heads in this rank's ring.
        kv_heads: Number of key/value heads in this rank's ring.
    """
    count = rank_plan.head_chunks
    if count == 1:
        return [HeadChunk(0, slice(0, heads), slice(0, kv_heads), False, "")]
    chunk_heads, chunk_kv_heads, first_deferred = (
        heads // count,
        kv_heads // count,
        count - deferred_chunks(count),
    )
    return [
        HeadChunk(
            i,
            slice(i * chunk_heads, (i + 1) * chunk_heads),
            slice(i * chunk_kv_heads, (i + 1) * chunk_kv_heads),
            i >= first_deferred,
            f", heads {i * chunk_heads} to {(i + 1) * chunk_heads - 1}",
        )
        for i in range(count)
    ]


# --- forward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """The computation of a kernel call in forward: out and lse, merged into the sums.

    Attributes:
        kernel: Local attention kernel.
        scoring: Scale and softcap.
        max_logits: [h], updated in place to the largest score of each head, or None.
    """

    kernel: Kernel
    scoring: Scoring
    max_logits: torch.Tensor | None

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        (q,), (k, *values), (out, lse) = queries, keys, sums[0].tensors
        v, kernel = values[0] if values else k, self.kernel
        if _writes_new(kernel):
            new = sums[0].new
            kernel.forward(q, k, v, call.work, self.scoring, out, lse, self.max_logits, new=new)
        else:
            kernel.forward(q, k, v, call.work, self.scoring, out, lse, self.max_logits)


def forward_rings(
    rank_plan: RankPlan,
    rank_pass: RankPass,
    tag: CallTag,
    q: torch.Tensor,
    keys: Tensors,
    max_logits: torch.Tensor | None = None,
) -> list[Ring]:
    """Return one ring per head chunk; each computes attention to the keys of all ranks.

    Source: BurstEngine Algorithm 1.

    Args:
        rank_plan: Plan of this rank.
        rank_pass: The forward pass.
        tag: Tag of the call; messages on the CPU contain it.
        q: [s, b, h, d].
        keys: k [s, b, k, d] and v [s, b, k, w], or k alone if values are the keys.
        max_logits: [h], updated in place to the largest score of each head, or None.
    """
    rings = []
    for part in head_chunks(rank_plan, q.shape[2], keys[0].shape[2]):
        h, n = part.heads, part.kv_heads
        own = {"kv": tuple(of_heads(t, n) for t in keys), "query": (of_heads(q, h),)}
        stat = own["query"][0].shape[1:3]
        rows = {"out": [torch.Size((*stat, keys[-1].shape[-1])), stat]}
        compute = Forward(
            rank_plan.kernel, rank_plan.scoring, None if max_logits is None else max_logits[h]
        )
        rings.append(
            Ring(
                rank_plan, rank_pass, tag, part, compute, own, rows,
                exact=1, writes_new=_writes_new(rank_plan.kernel),
            )
        )  # fmt: skip
    return rings


def outputs(
    rings: Sequence[Ring], dtype: torch.dtype, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [s, b, h, w] in `dtype` and lse [s, b, h] in the accumulation dtype.

    Args:
        rings: Rings of all head chunks, after they ran.
        dtype: dtype of out.
        sink: Sink logits [h], which are added to the softmax of every row; or None.
    """
    outs, lses = [], []
    for ring in rings:
        out, lse = ring.partials.total_rows(ring.rank_pass.totals["out", ring.me])
        if sink is not None:
            add_sink_(out, lse, sink[ring.heads.heads])
        outs.append(out.to(dtype))
        lses.append(lse)
    return join(outs), join(lses)


# --- backward -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward:
    """The computation of a kernel call in backward: parts of dq, dk and dv, added to the sums.

    Attributes:
        kernel: Local attention kernel.
        scoring: Scale and softcap.
        out: Output of this rank's queries, or None. Query chunks of other ranks have delta instead
            (BurstEngine 3.1).
        me: Index of this rank in the ring.
        needs_grad: Whether q, k and v need a gradient; q and k if values are the keys.
    """

    kernel: Kernel
    scoring: Scoring
    out: torch.Tensor | None
    me: int
    needs_grad: tuple[bool, ...]

    def pair(
        self, call: KernelCall, queries: Tensors, keys: Tensors, sums: Sequence[OpenSum]
    ) -> None:
        (q, dout, lse, delta), (k, *values) = queries, keys
        out = self.out if call.queries.owner == self.me else None
        dq, dk, *dvalues = by_tensor(sums[0].tensors + sums[1].tensors, self.needs_grad)
        if values:
            (v,), (dv,) = values, dvalues
        else:  # values are the keys; kernels need separate sums
            v, dv = k, None if dk is None else torch.zeros_like(dk)
        rows, kernel = Rows(q, dout, lse, delta, out), self.kernel
        if _writes_new(kernel):
            new = sums[0].new, sums[1].new, sums[1].new and bool(values)
            kernel.backward(rows, k, v, call.work, self.scoring, dq, dk, dv, new=new)
        else:
            kernel.backward(rows, k, v, call.work, self.scoring, dq, dk, dv)
        if not values and dk is not None and dv is not None:
            dk += dv


def backward_rings(
    rank_plan: RankPlan, rank_pass: RankPass, tag: CallTag, rows: Rows, keys: Tensors
) -> list[Ring]:
    """Return one ring per head chunk; each computes gradients of this rank's q, k and v.

    The schedule decides whether queries or keys are sent. Each rank sums its own contributions to
    the gradients of a chunk. On the way to the owner of the chunk, each rank adds its sum to the
    received sum.

    Source: BurstEngine Algorithms 1 and 2.

    Args:
        rank_plan: Plan of this rank.
        rank_pass: The backward pass.
        tag: Tag of the call; messages on the CPU contain it.
        rows: q, dout, lse, delta and out of this rank.
        keys: k [s, b, k, d] and v [s, b, k, w], or k alone if values are the keys.
    """
    rings, needs = [], rank_plan.needs_grad[: 1 + len(keys)]
    for part in head_chunks(rank_plan, rows.q.shape[2], keys[0].shape[2]):
        h, n = part.heads, part.kv_heads
        q, dout, lse, delta, out = [None if x is None else of_heads(x, h) for x in rows]
        own: dict[str, Any] = {
            "query": (q, dout, lse, delta),
            "kv": tuple(of_heads(t, n) for t in keys),
        }
        needed = zip(own["kv"], needs[1:], strict=True)
        sums = {
            "dquery": [own["query"][0].shape[1:]] if needs[0] else [],
            "dkv": [t.shape[1:] for t, needs_grad in needed if needs_grad],
        }
        compute = Backward(rank_plan.kernel, rank_plan.scoring, out, rank_plan.ring.rank, needs)
        rings.append(
            Ring(
                rank_plan, rank_pass, tag, part, compute, own, sums,
                writes_new=_writes_new(rank_plan.kernel),
            )
        )  # fmt: skip
    return rings


def gradients(
    rings: Sequence[Ring], needs_grad: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return dq, dk, dv in the accumulation dtype; None for a gradient that is not needed.

    Args:
        rings: Rings of all head chunks, after they ran.
        needs_grad: Whether q, k and v need a gradient. If values are the keys, v has no entry, and
            dk includes the gradient of the values.
    """
    parts = []
    for ring in rings:
        dquery, dkv = (
            ring.partials.total_rows(ring.rank_pass.totals[family, ring.me])
            for family in ("dquery", "dkv")
        )
        parts.append(by_tensor(dquery + dkv, needs_grad))
    chunk_gradients = zip(*parts, strict=True)
    return tuple(
        join(heads_of_chunks) if needed else None
        for heads_of_chunks, needed in zip(chunk_gradients, needs_grad, strict=True)
    )


def key_gradients(
    sums: Sequence[Tensors], needs_grad: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return dk and dv in the accumulation dtype; None for a gradient that is not needed.

    Args:
        sums: dk and dv of each head chunk; a gradient that is not needed is omitted.
        needs_grad: Whether k and v, or k alone if values are the keys, need a gradient.
    """
    joined = iter([join(parts) for parts in zip(*sums, strict=True)])
    return tuple(next(joined) if needed else None for needed in needs_grad)


def by_tensor(sums: Tensors, needs_grad: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """Return the sums as (dq, dk, dv), with None for a gradient that is not needed."""
    if len(sums) == len(needs_grad):
        return sums
    remaining = iter(sums)
    return tuple(next(remaining) if needed else None for needed in needs_grad)


def _writes_new(kernel: Kernel) -> TypeGuard[WritingKernel]:
    """Return True if a kernel has the argument `new` of `WritingKernel`."""
    return getattr(kernel, "writes_new", False)


def of_heads(x: torch.Tensor, heads: slice) -> torch.Tensor:
    """Slice the heads (dimension 2) of x; return x itself if `heads` has all heads."""
    return x if heads.stop - heads.start == x.shape[2] else x[:, :, heads]


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the heads (dimension 2) of all head chunks."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
