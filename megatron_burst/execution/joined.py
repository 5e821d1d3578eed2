# SPDX-License-Identifier: Apache-2.0
"""Pairs of one step as one call, over chunks of keys that are copied into one buffer.

For kernels that read and write all that belongs to their queries at every call, however few keys of
a chunk these want, as attention over a selection does: the copy moves far less than that. What such
a call adds to the gradients of the keys goes to the chunks that they came from. Decides which pairs
are one call; which of them a step computes is the schedule's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..comm.packing import Message
from .buffers import PartialResults
from .job import Call, Pass, Step

JoinedWork = Callable[[Sequence[Any]], Any]


def joined(run: Pass, work_of: JoinedWork) -> Pass:
    """The pass, with one call for the pairs of a step that have the same rows of queries.

    work_of: from what the kernel planned for some pairs, what it needs for their keys one behind
    the other.
    """
    works: dict[tuple[int, ...], Any] = {}

    def one(calls: Sequence[Call]) -> Call:
        if len(calls) == 1:
            return calls[0]
        key = tuple(id(call.work) for call in calls)  # the same objects in steps and in deferred
        if key not in works:
            works[key] = work_of([call.work for call in calls])
        first = calls[0]
        return replace(first, work=works[key], targets=first.targets[:1], parts=tuple(calls))

    def step(each: Step) -> Step:
        same: dict[Any, list[Call]] = {}
        for call in each.calls:
            same.setdefault((call.queries, call.pair.query_rows), []).append(call)
        return replace(each, calls=tuple(map(one, same.values())))

    return replace(run, steps=tuple(map(step, run.steps)), deferred=tuple(map(step, run.deferred)))


def compute(call: Call, held: Any, partials: PartialResults, computes: Any) -> None:
    """Compute a joined call: its target is that of the queries, out or dquery, and those of its
    parts have gradients of keys besides. held, partials, computes: chunks, partial results and what
    a pair computes, of a `Ring`."""
    chunks = [held[part.keys].tensors for part in call.parts]
    keys = tuple(torch.cat(each) for each in zip(*chunks, strict=True))
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
    first = 0
    # Without gradients, in forward, nothing is left to do.
    for chunk, target, part in zip(chunks if grads else (), of_keys, grads, strict=True):
        stop = first + len(chunk[0])
        for tensor, more in zip(part.tensors, sums[1].tensors, strict=True):
            tensor += more[first:stop]
        if not isinstance(target.place.at, slice):
            partials.merge(target, part)
        first = stop
