"""Attention as one autograd function: of one rank, or of all ranks that share a process.

Decides what is saved for backward, and where results that a checkpoint keeps come from and go to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..comm.groups import Groups, InProcessGroups
from ..comm.packing import CallTag
from ..kernels.autograd import first_order_only
from . import rank, row_chunks
from .executor import Tensors
from .job import Job


class Keeper(Protocol):
    """Keeps out and lse of some rows between a forward and its recompute."""

    @property
    def filled(self) -> bool: ...

    def put(self, what: object, entry: Tensors) -> None: ...

    def get(self, what: object) -> Tensors: ...


@dataclass(frozen=True)
class Kept:
    """Where this call finds or leaves results: a keeper, and what identifies the call there."""

    keeper: Keeper
    what: object

    def found(self) -> Tensors | None:
        return self.keeper.get(self.what) if self.keeper.filled else None

    def leave(self, rows: Callable[[], Tensors]) -> None:
        if not self.keeper.filled:
            self.keeper.put(self.what, rows())


@contextmanager
def running(groups: Groups, device: torch.device) -> Iterator[None]:
    """Precision is the plan's business and not autocast's."""
    with groups.running(), torch.autocast(device.type, enabled=False):
        yield


def _how(job: Job) -> Any:
    """The module whose `forward`, `backward` and `rows_to_keep` run this job."""
    return rank if len(job.chunks) == 1 else row_chunks


def _inputs(ctx: Any, first: int, gradients: list[torch.Tensor | None]) -> list[Any]:
    """Gradients in the dtype of the inputs, for those inputs that need one."""
    needed = zip(gradients, ctx.needs_input_grad[first:], strict=True)
    return [g.to(ctx.dtype) if g is not None and need else None for g, need in needed]


class Attention(torch.autograd.Function):
    """One rank. q, k, v: its shard; sink [h] or None; max_logits [h], raised in place, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        groups: Groups,
        call: CallTag,
        kept: Kept | None,
        max_logits: torch.Tensor | None,
        sink: torch.Tensor | None,
        *shard: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = (t.contiguous() for t in shard)
        stored = None if kept is None else kept.found()
        with running(groups, q.device):
            out, saved = _how(job).forward(job, call, (q, k, v), sink, stored, max_logits)
        if kept is not None:
            kept.leave(lambda: _how(job).rows_to_keep(job, saved))
        ctx.job, ctx.groups, ctx.call, ctx.dtype = job, groups, call, shard[0].dtype
        ctx.save_for_backward(sink, *saved)
        return out

    @staticmethod
    @first_order_only("mb.attention")
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sink, *saved = ctx.saved_tensors
        ctx.groups.check()
        ctx.groups.calls.backward(ctx.call)
        with running(ctx.groups, dout.device):
            *grads, dsink = _how(ctx.job).backward(ctx.job, ctx.call, dout, tuple(saved), sink)
        if dsink is not None:
            dsink = dsink.to(sink.dtype) if ctx.needs_input_grad[5] else None
        return *[None] * 5, dsink, *_inputs(ctx, 6, grads)


class InProcessAttention(torch.autograd.Function):
    """All ranks of a process at once; shards: q, k, v of rank 0, then of rank 1, ..."""

    @staticmethod
    def forward(
        ctx: Any,
        jobs: list[Job],
        groups: InProcessGroups,
        calls: list[CallTag],
        kept: Kept | None,
        max_logits: torch.Tensor | None,
        sink: torch.Tensor | None,
        *shards: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        flat = [t.contiguous() for t in shards]
        each = [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]
        stored = None if kept is None else kept.found()
        some = [stored and stored[i : i + 2] for i in range(0, 2 * len(jobs), 2)]
        sinks = [sink] * len(jobs)
        found = [max_logits.clone() for _ in jobs] if max_logits is not None else [None] * len(jobs)
        with torch.autocast(flat[0].device.type, enabled=False):
            results = groups.run(_how(jobs[0]).forward, jobs, calls, each, sinks, some, found)
        if max_logits is not None:
            torch.amax(torch.stack(found), dim=0, out=max_logits)  # pyright: ignore
        outs, saved = zip(*results, strict=True)
        if kept is not None:
            pairs = list(zip(jobs, saved, strict=True))
            kept.leave(
                lambda: tuple(t for pair in pairs for t in _how(pair[0]).rows_to_keep(*pair))
            )
        ctx.jobs, ctx.groups, ctx.calls, ctx.dtype = jobs, groups, calls, flat[0].dtype
        ctx.lengths = [len(some) for some in saved]
        ctx.save_for_backward(sink, *(t for some in saved for t in some))
        return outs

    @staticmethod
    @first_order_only("mb.attention")
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sink, *flat = ctx.saved_tensors
        for group, call in zip(ctx.groups.ranks, ctx.calls, strict=True):
            group.calls.backward(call)
        rest = iter(flat)
        saved = [tuple(next(rest) for _ in range(length)) for length in ctx.lengths]
        with torch.autocast(douts[0].device.type, enabled=False):
            results = ctx.groups.run(
                _how(ctx.jobs[0]).backward,
                ctx.jobs,
                ctx.calls,
                douts,
                saved,
                [sink] * len(ctx.jobs),
            )
        dsink = None
        if sink is not None and ctx.needs_input_grad[5]:
            dsink = torch.stack([result[3] for result in results]).sum(0).to(sink.dtype)
        grads = [grad for result in results for grad in result[:3]]
        return *[None] * 5, dsink, *_inputs(ctx, 6, grads)
