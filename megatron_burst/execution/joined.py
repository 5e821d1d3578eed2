# SPDX-License-Identifier: Apache-2.0
"""Joined calls: kernel calls that read several key chunks from one buffer.

Without joined calls, a step has one kernel call per pair of a query chunk and a key chunk, and each
call reads and writes all query rows. This is expensive if few keys of a chunk are visible, as with
sparse attention or short documents. Copying the keys into one buffer moves far fewer bytes. Each
key chunk is copied once, to its position in the order that the kernel reads, and is then freed if
nothing else needs it. Key gradients stay in one buffer until the gradients of a chunk are needed.

The schedule decides which pairs a step computes. This module decides which pairs form one call, and
the order of their keys.
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
from ..layout import Spans
from ..layout.layouts import SpanArray
from ..layout.sharding import to_device
from ..schedule.head_shares import shared_order, shared_spans
from ..schedule.rings import Schedule
from ..schedule.tables import Chunk
from .buffers import OpenSum
from .rank_plan import KernelCall, RankPass, Step, Target, Tensors

if TYPE_CHECKING:
    from .ring import Ring


class WorkSource(Protocol):
    """Source of kernel plans for pairs of query and key spans, such as `build.KernelWorkCache`.

    A kernel plan is what a kernel computes once per shape, mask and spans, before the call.
    """

    kernel: Any

    def of(self, pairs: Sequence[tuple[SpanArray, SpanArray]]) -> list[Any]: ...

    def spans(self, schedule: Schedule, chunks: Sequence[Chunk]) -> list[SpanArray]: ...


class KeyPart(NamedTuple):
    """One of several chunks of keys that a kernel call reads from one buffer.

    Attributes:
        keys: The chunk.
        rows: Number of rows of the chunk.
        at: Positions of the rows in the buffer: a slice, or int64 on the device.
        target: Rows of a partial result to which the key gradients are added; None in forward.
        last: True if nothing needs the chunk after the call.
    """

    keys: Chunk
    rows: int
    at: slice | torch.Tensor
    target: Target | None
    last: bool


class JoinedKeys(tuple[KeyPart, ...]):
    """Chunks of keys that one kernel call reads from one buffer."""

    def compute(self, call: KernelCall, ring: Ring) -> None:
        """Compute attention of the queries of `call` to these keys."""
        compute(call, ring)


def joined(
    rank_pass: RankPass, schedule: Schedule, works: WorkSource, device: torch.device
) -> RankPass:
    """Return a pass in which one call computes all pairs of a step with the same query rows.

    Keys are sorted by position if that makes fewer spans, because fewer spans need fewer tiles. The
    rank's own keys get a separate call, which needs no copy. If the kernel has a true attribute
    `joins`, the call also includes the rank's own keys, and the kernel sorts the keys itself.

    Args:
        rank_pass: The pass with one call per pair.
        schedule: Schedule of the pass.
        works: Source of kernel plans.
        device: Device of index tensors.
    """
    in_order = not getattr(works.kernel, "joins", False)
    joined_calls: dict[Any, list[KernelCall]] = {}  # shared by steps and deferred steps

    def joined_call(calls: Sequence[KernelCall], last: frozenset[Chunk]) -> list[KernelCall]:
        key = tuple((call.pair, call.queries, call.keys, call.keys in last) for call in calls)
        if key not in joined_calls:
            first, chunks = calls[0], [call.keys for call in calls]
            queries, *shards = works.spans(schedule, [first.queries, *chunks])
            spans = SpanArray(Spans.of(shared_spans(shards) if in_order else chain(*shards)))
            order = shared_order(shards) if in_order else None
            (work,) = works.of([(queries, spans)])
            merged = replace(first, work=work)
            if len(calls) > 1:
                rows = [sum(span.length for span in shard) for shard in shards]
                parts = JoinedKeys(
                    KeyPart(call.keys, n, at, (*call.targets[1:], None)[0], call.keys in last)
                    for call, n, at in zip(calls, rows, _places(rows, order, device), strict=True)
                )
                merged = replace(merged, targets=first.targets[:1], parts=parts)
            joined_calls[key] = [] if merged.work is None else [merged]
        return joined_calls[key]

    def joined_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
        # `arriving`: last boundary that posts the receive of a chunk. `leaving`: boundary at which
        # the sends of each chunk end.
        arriving, leaving = -1, dict[Chunk, int]()
        posted = ((step.index, exchange) for step in steps for exchange in step.exchanges)
        for index, exchange in posted:
            if any(payload.target is None for payload in exchange.arriving):
                arriving = index
            for payload in exchange.leaving:
                if payload.target is None:
                    chunk = payload.source[0] if payload.source else payload.hop.chunk
                    leaving[chunk] = max(leaving.get(chunk, 0), exchange.land)
        new_steps, freed = [], set[Chunk]()
        for step, after in zip_longest(steps, steps[1:]):
            release = tuple(chunk for chunk in step.release if chunk not in freed)
            uses = Counter(call.keys for call in step.calls)
            last = frozenset(
                chunk
                for chunk in (after.release if after and step.index >= arriving else ())
                if uses[chunk] == 1 and leaving.get(chunk, 0) <= step.index
            )  # before `arriving`, later receives reuse the buffer through `release`
            calls_by_queries: dict[Any, list[KernelCall]] = {}
            for call in step.calls:
                own = in_order and call.keys.owner == call.queries.owner
                calls_by_queries.setdefault((call.queries, call.pair.query_rows, own), []).append(
                    call
                )
            calls = tuple(chain(*(joined_call(group, last) for group in calls_by_queries.values())))
            freed |= {part.keys for call in calls for part in call.parts if part.last}
            new_steps.append(replace(step, release=release, calls=calls))
        return tuple(new_steps)

    return replace(
        rank_pass, steps=joined_steps(rank_pass.steps), deferred=joined_steps(rank_pass.deferred)
    )


def _places(
    rows: Sequence[int], order: np.ndarray | None, device: torch.device
) -> list[slice | torch.Tensor]:
    """Return where the rows of each chunk are in the buffer of a joined call.

    Args:
        rows: Number of rows of each chunk of keys.
        order: Sorted order of the concatenated rows (result of `shared_order`); None to keep the
            order of the chunks.
        device: Device of index tensors.

    Returns:
        A slice or an int64 tensor per chunk.
    """
    ends = list(accumulate(rows))
    if order is None:
        return [slice(end - count, end) for end, count in zip(ends, rows, strict=True)]
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    together = to_device(places, device)
    positions: list[slice | torch.Tensor] = []
    for end, count in zip(ends, rows, strict=True):
        own = places[end - count : end]
        follow = own[-1] - own[0] == count - 1 and (np.diff(own) == 1).all()
        positions.append(slice(own[0], own[-1] + 1) if follow else together[end - count : end])
    return positions


def compute(call: KernelCall, ring: Ring) -> None:
    """Run one kernel call over several chunks of keys, and add the results to the partial results.

    Args:
        call: The call. `call.targets` has one target, for out or dquery. The targets of key
            gradients are in `call.parts`.
        ring: Ring that holds the chunks and the partial results.
    """
    partials, (own,), parts = ring.partials, call.targets, call.parts
    keys, sums = _gather_keys(parts, ring), [partials.open(own, clear=not ring.writes_new)]
    grads: Tensors = ()
    if parts[0].target is not None:
        grads = ring.buffers.separate("dkv", len(keys[0])).tensors
        if not ring.writes_new:
            for tensor in grads:
                tensor.zero_()
        sums.append(OpenSum(Message(None, grads), ring.writes_new))
    ring.compute.pair(call, ring.chunks[call.queries].tensors, keys, sums)
    if not isinstance(own.place.at, slice):
        partials.merge(own, sums[0])
    del keys, sums
    for target, at in ((part.target, part.at) for part in parts if part.target is not None):
        if target.place.whole and partials.begin(target, (), partial(_write, grads, at)):
            continue
        key_sums = partials.open(target)
        for tensor, rows in zip(key_sums.tensors, grads, strict=True):
            tensor.add_(rows[at])
        if not isinstance(target.place.at, slice):
            partials.merge(target, key_sums)


def _gather_keys(parts: Sequence[KeyPart], ring: Ring) -> Tensors:
    """Copy several chunks of keys into one buffer; free chunks that nothing else needs."""
    rows = sum(part.rows for part in parts)
    first = ring.chunks[parts[0].keys].tensors
    keys = tuple(t.new_empty((rows, *t.shape[1:])) for t in first)
    for part in parts:
        for tensor, rows_of in zip(keys, ring.chunks[part.keys].tensors, strict=True):
            if isinstance(part.at, slice):
                tensor[part.at] = rows_of
            else:
                tensor.index_copy_(0, part.at, rows_of)
        if part.last:
            ring.endpoint.released(ring.chunks.pop(part.keys).tensors)
    return keys


def _write(grads: Tensors, at: slice | torch.Tensor, message: Message) -> None:
    """Copy the key gradients of one chunk (the rows `at` of `grads`) into a message."""
    for tensor, rows in zip(message.tensors, grads, strict=True):
        tensor.copy_(rows[at])
