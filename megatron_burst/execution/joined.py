# SPDX-License-Identifier: Apache-2.0
"""Pairs of one step as one call, over chunks of keys that are copied into one buffer.

For kernels that read and write all that belongs to their queries at every call, however few keys of
a chunk these want: that of attention over a selection does, and so does every one where documents
make small pieces. The copy moves far less than that. Keys are copied once, each chunk to its place
in the order that the kernel reads, and a chunk that nothing else wants is let go of then. Gradients
of keys stay in one buffer until each chunk's are asked for. Decides which pairs are one call, and
in which order their keys lie; which pairs a step computes is the schedule's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ..comm.packing import Message
from ..layout import Span
from ..layout.sharding import to_device
from ..schedule.head_shares import shared_order, shared_spans
from ..schedule.rings import Schedule
from ..schedule.tables import Chunk
from .job import Call, Pass, Step, Target, Tensors

if TYPE_CHECKING:
    from .ring import Ring


class Works(Protocol):
    """What the kernel plans for pairs of spans; `planning.build.Works`."""

    kernel: Any

    def of(self, *spans: tuple[Span, ...]) -> Any: ...

    def spans(self, schedule: Schedule, chunk: Chunk) -> tuple[Span, ...]: ...


class Part(NamedTuple):
    """A chunk of keys in a joined call.

    rows: how many; at: where they lie among the keys of the call, a slice or int64 on the device.
    target: of their gradients, None in forward. last: does nothing want the chunk after the call?
    """

    keys: Chunk
    rows: int
    at: slice | torch.Tensor
    target: Target | None
    last: bool


class Parts(tuple[Part, ...]):
    """The chunks of keys of a joined call."""

    def compute(self, call: Call, ring: Ring) -> None:
        """Compute the call, as `compute` does."""
        compute(call, ring)


def joined(run: Pass, schedule: Schedule, works: Works, device: torch.device) -> Pass:
    """The pass, with one call for the pairs of a step that have the same rows of queries.

    Keys are brought in the order of their positions where that makes fewer spans, which take fewer
    tiles, and a rank's own keys, which need no copy, are a call of their own; unless the kernel
    `joins` pairs always and orders keys itself.
    """
    in_order = not getattr(works.kernel, "joins", False)
    made: dict[Any, list[Call]] = {}  # the same calls in steps and in deferred

    def one(calls: Sequence[Call], last: frozenset[Chunk]) -> list[Call]:
        key = tuple((call.pair, call.queries, call.keys, call.keys in last) for call in calls)
        if key not in made:
            first, shards = calls[0], [works.spans(schedule, call.keys) for call in calls]
            spans = shared_spans(shards) if in_order else tuple(chain(*shards))
            order = shared_order(shards) if in_order else None
            call = replace(first, work=works.of(works.spans(schedule, first.queries), spans))
            if len(calls) > 1:
                rows = [sum(span.length for span in shard) for shard in shards]
                parts = Parts(
                    Part(each.keys, n, at, (*each.targets[1:], None)[0], each.keys in last)
                    for each, n, at in zip(calls, rows, _places(rows, order, device), strict=True)
                )
                call = replace(call, targets=first.targets[:1], parts=parts)
            made[key] = [] if call.work is None else [call]
        return made[key]

    def joined_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
        arriving, leaving = -1, dict[Chunk, int]()  # until which boundary
        for at, exchange in ((step.index, each) for step in steps for each in step.exchanges):
            if any(payload.target is None for payload in exchange.arriving):
                arriving = at
            for payload in exchange.leaving:
                if payload.target is None:
                    chunk = payload.source[0] if payload.source else payload.hop.chunk
                    leaving[chunk] = max(leaving.get(chunk, 0), exchange.land)
        found, freed = [], set[Chunk]()
        for step, after in zip_longest(steps, steps[1:]):
            release = tuple(chunk for chunk in step.release if chunk not in freed)
            uses = Counter(call.keys for call in step.calls)
            last = frozenset(
                chunk
                for chunk in (after.release if after and step.index >= arriving else ())
                if uses[chunk] == 1 and leaving.get(chunk, 0) <= step.index
            )  # before that, what is given back is used again
            same: dict[Any, list[Call]] = {}
            for call in step.calls:
                own = in_order and call.keys.owner == call.queries.owner
                same.setdefault((call.queries, call.pair.query_rows, own), []).append(call)
            calls = tuple(chain(*(one(each, last) for each in same.values())))
            freed |= {part.keys for call in calls for part in call.parts if part.last}
            found.append(replace(step, release=release, calls=calls))
        return tuple(found)

    return replace(run, steps=joined_steps(run.steps), deferred=joined_steps(run.deferred))


def _places(
    rows: Sequence[int], order: np.ndarray | None, device: torch.device
) -> list[slice | torch.Tensor]:
    """Where the rows of each part lie in a call's keys. order: as of `shared_order`."""
    ends = list(accumulate(rows))
    if order is None:
        return [slice(end - count, end) for end, count in zip(ends, rows, strict=True)]
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    together = to_device(places, device)
    found: list[slice | torch.Tensor] = []
    for end, count in zip(ends, rows, strict=True):
        own = places[end - count : end]
        follow = own[-1] - own[0] == count - 1 and (np.diff(own) == 1).all()
        found.append(slice(own[0], own[-1] + 1) if follow else together[end - count : end])
    return found


def compute(call: Call, ring: Ring) -> None:
    """Compute a joined call of a ring: its target is that of the queries, out or dquery, and its
    parts have those of gradients of keys besides.
    """
    partials, (own,), parts = ring.partials, call.targets, call.parts
    keys, sums = _gathered(parts, ring), [partials.open(own)]
    grads: Tensors = ()
    if parts[0].target is not None:
        grads = ring.buffers.apart("dkv", len(keys[0])).tensors
        for tensor in grads:
            tensor.zero_()
        sums.append(Message(None, grads))
    ring.compute.pair(call, ring.chunks[call.queries].tensors, keys, sums)
    if not isinstance(own.place.at, slice):
        partials.merge(own, sums[0])
    del keys, sums
    for target, at in ((part.target, part.at) for part in parts if part.target is not None):
        if target.place.whole and partials.begin(target, (), partial(_write, grads, at)):
            continue
        there = partials.open(target)
        for tensor, rows in zip(there.tensors, grads, strict=True):
            tensor.add_(rows[at])
        if not isinstance(target.place.at, slice):
            partials.merge(target, there)


def _gathered(parts: Sequence[Part], ring: Ring) -> Tensors:
    """The keys of all parts, each copied to its place, and let go of where it is wanted no more."""
    rows = sum(part.rows for part in parts)
    first = ring.chunks[parts[0].keys].tensors
    whole = tuple(t.new_empty((rows, *t.shape[1:])) for t in first)
    for part in parts:
        for tensor, rows_of in zip(whole, ring.chunks[part.keys].tensors, strict=True):
            if isinstance(part.at, slice):
                tensor[part.at] = rows_of
            else:
                tensor.index_copy_(0, part.at, rows_of)
        if part.last:
            ring.endpoint.released(ring.chunks.pop(part.keys).tensors)
    return whole


def _write(grads: Tensors, at: slice | torch.Tensor, message: Message) -> None:
    """The gradients of a part into a message of its own."""
    for tensor, rows in zip(message.tensors, grads, strict=True):
        tensor.copy_(rows[at])
