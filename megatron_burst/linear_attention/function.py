"""The state scan as one autograd function: of one rank, or of all ranks that share a process.

Its backward is the same algorithm on the reversed chains, with turned transitions and the gradients
of the states that entered as increments. Decides what is saved for it.

Shape letters: p pieces of a rank, b batch, h heads, d rows (keys), w columns (values); D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..comm.groups import Groups, InProcessGroups
from ..comm.packing import CallTag
from ..kernels.autograd import first_order_only
from .executor import Scan
from .finals import Finals
from .maps import Map, gradient, turned


@dataclass(frozen=True)
class ScanJob:
    """What one rank executes of a scan, in both directions."""

    groups: Groups
    forward: Scan
    backward: Scan
    finals: Finals


class Given(NamedTuple):
    """One rank's tensors: decay None or [p, b, h], [p, b, h, d] or [p, b, h, d, d]; increment
    [p, b, h, d, w]; initial [D, b, h, d, w] or None."""

    decay: torch.Tensor | None
    increment: torch.Tensor
    initial: torch.Tensor | None


class Asked(NamedTuple):
    """What every call of one rank needs beside tensors; leaving: are final states wanted?"""

    job: ScanJob
    call: CallTag
    leaving: bool


class StateScan(torch.autograd.Function):
    """flat: decay, increment and initial state of every rank of this process; returns the entering
    states of each, then, if they are wanted, the final states of each."""

    @staticmethod
    def forward(
        ctx: Any,
        asked: Sequence[Asked],
        groups: Groups | InProcessGroups,
        *flat: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        given = [Given(*flat[i : i + 3]) for i in range(0, len(flat), 3)]  # pyright: ignore
        results = _on_ranks(groups, _forward, asked, given)
        entering, finals = zip(*results, strict=True)
        ctx.asked, ctx.groups = asked, groups
        ctx.kinds = [None if t is None else (t.dtype, t.shape) for t in flat]
        saved = ((each.decay, state) for each, state in zip(given, entering, strict=True))
        ctx.save_for_backward(*(t for pair in saved for t in pair))
        return (*entering, *finals) if asked[0].leaving else entering

    @staticmethod
    @first_order_only("mb.state_scan")
    def backward(ctx: Any, *arrived: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        asked, number = ctx.asked, len(ctx.asked)
        for each in asked:
            each.job.groups.check()
            each.job.groups.calls.backward(each.call)
        saved = [ctx.saved_tensors[i : i + 2] for i in range(0, 2 * number, 2)]
        finals = arrived[number:] or [None] * number
        needs = [ctx.needs_input_grad[i : i + 3] for i in range(2, 2 + 3 * number, 3)]
        kinds = [ctx.kinds[i : i + 3] for i in range(0, 3 * number, 3)]
        every = saved, arrived[:number], finals, needs, kinds
        results = _on_ranks(ctx.groups, _backward, asked, *every)
        return None, None, *(t for result in results for t in result)


def _on_ranks(groups: Groups | InProcessGroups, function: Any, *of_each: Sequence[Any]) -> Any:
    """The results of `function` on the ranks of this process; precision is ours, not autocast's."""
    device = of_each[0][0].job.forward.device.type
    with torch.autocast(device, enabled=False):
        if isinstance(groups, InProcessGroups):
            return groups.run(function, *of_each)
        with groups.running():
            return [function(*(each[0] for each in of_each))]


def _forward(asked: Asked, given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Entering states and final states, or None."""
    job, call, leaving = asked
    dtype = job.forward.states.dtype
    decay, increment, start = (None if t is None else t.to(dtype) for t in given)
    assert increment is not None
    initial = {} if start is None else dict(enumerate(start))
    found = job.forward.run(call, Map(decay, increment), initial, leaving)
    final = job.finals.spread(call, found.leaving, start) if leaving else None
    return found.entering, final


def _backward(
    asked: Asked,
    saved: tuple[torch.Tensor | None, torch.Tensor],
    entered: torch.Tensor,
    final: torch.Tensor | None,
    needs: Sequence[bool],
    kinds: Sequence[tuple[torch.dtype, torch.Size] | None],
) -> list[torch.Tensor | None]:
    """Gradients of decay, increment and initial state. entered, final: the gradients that came."""
    job, call, _ = asked
    decay, entering = saved
    dtype = job.backward.states.dtype
    decay = None if decay is None else decay.to(dtype)
    last = {} if final is None else job.finals.collect(call, final)
    maps = Map(turned(decay, entering.dim()), entered.to(dtype))
    found = job.backward.run(call, maps, last, kinds[2] is not None)
    of_decay = of_initial = None
    if decay is not None and needs[0]:
        of_decay = gradient(decay, found.entering, entering)
    if kinds[2] is not None and needs[2]:
        of_initial = entering.new_zeros(kinds[2][1])
        for document, state in found.leaving.items():
            of_initial[document] = state
        for document in job.finals.empty if final is not None else ():
            assert final is not None
            of_initial[document] = final[document]
    results = of_decay, found.entering if needs[1] else None, of_initial
    return [
        None if t is None or kind is None else t.to(kind[0])
        for t, kind in zip(results, kinds, strict=True)
    ]


def following(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The first tensor; the backward of what is made of it runs wherever one of them needs a
    gradient, and before that of what made the others."""
    return _Following.apply(first, *others)  # pyright: ignore[reportReturnType]


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = len(others)
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(None,) * ctx.others
