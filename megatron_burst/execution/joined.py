# SPDX-License-Identifier: Apache-2.0
"""Pairs of one step as one call, over chunks of keys that are copied into one buffer.

For kernels that read and write all that belongs to their queries at every call, however few keys of
a chunk these want: that of attention over a selection does, and so does every one where documents
make small pieces. The copy moves far less than that. What such a call adds to the gradients of the
keys goes to the chunks that they came from. Decides which pairs are one call, and in which order
their keys lie; which pairs a step computes is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ..comm.packing import Message
from ..layout import Span
from ..layout.sharding import to_device
from ..schedule.head_shares import shared_order, shared_spans
from ..schedule.tables import Chunk
from .buffers import PartialResults
from .job import Call, Pass, Step

Spans = tuple[Span, ...]


def joined(
    run: Pass,
    kernel: Any,
    planned: Callable[[Spans, Spans], Any],
    spans_of: Callable[[Chunk], Spans],
    device: torch.device,
) -> Pass:
    """The pass, with one call for the pairs of a step that have the same rows of queries.

    planned: what the kernel plans for spans of queries and of keys, None where nothing is visible.
    spans_of: of a chunk. Keys are brought in the order of their positions where that makes fewer
    spans, which take fewer tiles, unless the kernel `joins` pairs always and orders keys itself.
    """
    in_order = not getattr(kernel, "joins", False)
    made: dict[Any, list[Call]] = {}  # the same calls in steps and in deferred

    def one(calls: Sequence[Call]) -> list[Call]:
        key = tuple((call.pair, call.queries, call.keys) for call in calls)
        if key not in made:
            first, shards = calls[0], [spans_of(call.keys) for call in calls]
            spans = shared_spans(shards) if in_order else tuple(chain(*shards))
            order = shared_order(shards) if in_order else None
            call = replace(first, work=planned(spans_of(first.queries), spans))
            if len(calls) > 1:
                rows = None if order is None else to_device(order, device)
                own = first.targets[:1]
                call = replace(call, targets=own, parts=tuple(calls), order=rows)
            made[key] = [] if call.work is None else [call]
        return made[key]

    def step(each: Step) -> Step:
        same: dict[Any, list[Call]] = {}
        for call in each.calls:
            same.setdefault((call.queries, call.pair.query_rows), []).append(call)
        return replace(each, calls=tuple(chain(*map(one, same.values()))))

    return replace(run, steps=tuple(map(step, run.steps)), deferred=tuple(map(step, run.deferred)))


def compute(call: Call, held: Any, partials: PartialResults, computes: Any) -> None:
    """Compute a joined call: its target is that of the queries, out or dquery, and those of its
    parts have gradients of keys besides. held, partials, computes: chunks, partial results and what
    a pair computes, of a `Ring`."""
    chunks = [held[part.keys].tensors for part in call.parts]
    order = slice(None) if call.order is None else call.order
    keys = tuple(torch.cat(each)[order] for each in zip(*chunks, strict=True))
    (own,) = call.targets
    of_keys = [target for part in call.parts for target in part.targets[1:]]
    grads = [partials.open(target) for target in of_keys]
    sums = [partials.open(own)]
    if grads:
        rows = sum(len(each[0]) for each in chunks)
        whole = tuple(t.new_zeros((rows, *t.shape[1:])) for t in grads[0].tensors)
        sums.append(Message(None, whole))
    computes.pair(call, held[call.queries].tensors, keys, sums)
    if not isinstance(own.place.at, slice):
        partials.merge(own, sums[0])
    if not grads:  # in forward
        return
    del keys
    lengths = [len(each[0]) for each in chunks]
    for number, more in enumerate(sums[1].tensors):
        if call.order is not None:
            more = torch.empty_like(more).index_copy_(0, call.order, more)
        for part, rows in zip(grads, more.split(lengths), strict=True):
            part.tensors[number].add_(rows)
    for target, part in zip(of_keys, grads, strict=True):
        if not isinstance(target.place.at, slice):
            partials.merge(target, part)
