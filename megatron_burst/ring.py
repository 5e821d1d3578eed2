"""Attention over a ring: forward, and backward with either side, written once.

`_walk` runs one rank's program over one endpoint and is the only place where chunks arrive,
wait, leave and are given up; `forward` and `backward` add what to compute at each pair. They
do not know layouts, masks or algorithms: those are in the program and in each pair's work.

All three are generators that yield once per boundary, after everything that starts there has
been started: one process that holds all ranks can drive them in lock-step, and a process that
holds one rank just runs its own to the end.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from zlib import crc32

import torch

from . import parcels
from .comm import Channel, Endpoint, Pending, Receive, Send
from .hops import Boundary, Chunk, Hop, Pair
from .kernels import Kernel, Rows, Scoring
from .merge import accumulation_dtype, add_sink_, empty_result, merge_
from .parcels import Parcel

Tensors = tuple[torch.Tensor, ...]
Keys = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Pass:
    """What one rank needs for one pass over the ring: its program, and the work of each pair."""

    name: str
    program: Sequence[Boundary]
    works: dict[Pair, Any]  # a pair with nothing visible is absent
    kept: Sequence[Chunk] = ()  # forward leaves these behind, backward finds them


class _Buffers:
    """Receive buffers and gradient sums by kind of chunk, reused once nobody holds them."""

    def __init__(self, shapes: dict[str, list[tuple[torch.Size, torch.dtype]]], device):
        self.shapes = shapes
        self.device = device
        self.free: dict[str, list[Parcel]] = defaultdict(list)

    def take(self, kind: str) -> Parcel:
        if self.free[kind]:
            return self.free[kind].pop()
        return parcels.make(self.shapes[kind], self.device)

    def give(self, kind: str, parcel: Parcel) -> None:
        self.free[kind].append(parcel)


@dataclass
class _Flight:
    """An exchange on its way: what comes, what goes, and the gradients to give back when gone."""

    land: int
    pending: Pending
    arriving: list[tuple[Chunk, Parcel]]
    leaving: list[tuple[str, Parcel]]


class _Walk:
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
        self.buffers = _Buffers(shapes, some.device)
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
        return parcels.pack(tensors, _name(chunk)) if sent else Parcel(None, tensors)

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
                parcel = self.buffers.take(kind)
                name = _name(hop.chunk)
                receives.append(Receive(hop.src, parcel.tensors, parcel.flat, name))
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
        parcels.seal_(parcel, _name(chunk))
        return parcel

    def _land(self, index: int) -> None:
        landing = [f for f in self.flights if f.land == index]
        self.flights = [f for f in self.flights if f.land != index]
        for flight in landing:
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
            if chunk.owner != self.endpoint.rank:
                self.buffers.give(chunk.family, parcel)


def forward(
    run: Pass,
    endpoint: Endpoint,
    kernel: Kernel,
    q: torch.Tensor,
    keys: Keys,
    scoring: Scoring,
    sink: torch.Tensor | None,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor, list[Keys]]]:
    """Attention of the local queries to the keys of all ranks (Algorithm 1 of BurstEngine).

    q [s, b, h, d], keys (k [s, b, k, d], v [s, b, k, w]), contiguous; sink [h] or None: a logit
    every row sees besides its keys, with no value. Returns out [s, b, h, w] in the dtype of q,
    lse [s, b, h] in the accumulation dtype, and the keys to be kept for backward.
    """
    out, lse = empty_result(q, keys[1].shape[-1])
    walk = _Walk(run, endpoint, {Chunk("kv", endpoint.rank): keys}, None)

    def compute(pair: Pair) -> None:
        k, v = walk.held[Chunk("kv", pair.key)].tensors
        for rows, part, part_lse in kernel.forward(q, k, v, run.works[pair], scoring):
            merge_(out[rows], lse[rows], part, part_lse)

    yield from walk.steps(compute)
    if sink is not None:
        add_sink_(out, lse, sink)
    kept = [walk.held[chunk].tensors for chunk in run.kept]
    return out.to(q.dtype), lse, [(k, v) for k, v in kept]


def backward(
    run: Pass,
    endpoint: Endpoint,
    kernel: Kernel,
    rows: Rows,
    keys: Keys,
    kept: Sequence[Keys],
    scoring: Scoring,
    wire: torch.dtype | None,
    needs_grad: tuple[bool, bool, bool],
) -> Generator[None, None, tuple[torch.Tensor | None, ...]]:
    """Gradients of the local q, k, v in the accumulation dtype, None where not needed.

    Which side travels is the program's business: own chunks are held from the start, visiting
    ones arrive or were `kept`, and gradients are summed per chunk wherever it is. `rows` is the
    local query chunk, `keys` the local (k, v). Source: Algorithms 1 and 2 of BurstEngine.
    """
    me = endpoint.rank
    held: dict[Chunk, Tensors] = {Chunk("query", me): tuple(rows[:4]), Chunk("kv", me): keys}
    walk = _Walk(run, endpoint, held | dict(zip(run.kept, kept, strict=True)), wire)
    _, *kv_needs = needs_grad
    walk.track("dquery", [rows.q.shape] * needs_grad[0])
    walk.track("dkv", [t.shape for t, needed in zip(keys, kv_needs, strict=True) if needed])

    def compute(pair: Pair) -> None:
        q, dout, lse, delta = walk.held[Chunk("query", pair.query)].tensors
        out = rows.out if pair.query == me else None
        sums = iter(walk.total(Chunk("dquery", pair.query)) + walk.total(Chunk("dkv", pair.key)))
        grads = [next(sums) if needed else None for needed in needs_grad]
        k, v = walk.held[Chunk("kv", pair.key)].tensors
        kernel.backward(Rows(q, dout, lse, delta, out), k, v, run.works[pair], scoring, *grads)

    yield from walk.steps(compute)
    sums = iter(walk.total(Chunk("dquery", me)) + walk.total(Chunk("dkv", me)))
    return tuple(next(sums) if needed else None for needed in needs_grad)


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


def _exchanges(hops: Sequence[Hop]) -> Iterator[tuple[Channel, list[Hop]]]:
    """Hops that share a process group and land together start together."""

    def key(hop: Hop) -> tuple[Channel, int]:
        return Channel(hop.ring, hop.chunk.gradient), hop.land

    for (channel, _), group in groupby(sorted(hops, key=key), key):
        yield channel, list(group)


def _name(chunk: Chunk) -> int:
    """The name that the seal of a chunk bears, the same on every rank."""
    return crc32(repr(chunk).encode())


def _words(hop: Hop) -> str:
    return f"{hop.chunk.family} of rank {hop.chunk.owner} from rank {hop.src} to rank {hop.dst}"
