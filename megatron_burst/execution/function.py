# SPDX-License-Identifier: Apache-2.0
"""Attention as one autograd function: of one rank, or of all ranks that share a process.

Decides what is saved for backward, and where results that a checkpoint keeps come from and go to.
`forward` and `backward` are one rank's part as plain functions of tensors: exchange heads, run the
ring, exchange them back.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..comm.groups import Groups, InProcessGroups
from ..comm.packing import CallTag
from ..kernels.autograd import first_order_only
from ..kernels.base import Rows
from ..kernels.online_softmax import row_delta, sink_gradient
from . import ring
from .job import Job, Tensors, rows_of

Gradients = tuple[torch.Tensor | None, ...]


# --- one rank -----------------------------------------------------------------------------------


def forward(
    job: Job,
    call: CallTag,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: Tensors | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """(out [s, b, h, w], what backward needs: q, k, v, out and lse).

    shard: contiguous q [s, b, h, d], k [s, b, k, d], v [s, b, k, w]. sink [h] or None. stored: out
    and lse of the rows that were kept when this call ran first, if it runs again. max_logits [h]
    or None: raised, for the heads whose ring this rank runs, to the largest score it computes.
    """
    chunk, shared = job.chunks[0], len(job.ulysses_links) > 1
    if len(job.chunks) > 1:
        from . import row_chunks  # not needed by other calls

        return row_chunks.forward(job, call, shard, sink, stored, max_logits)
    run, partial = chunk.forward, chunk.recompute
    if shared:
        from .ulysses import heads_here, heads_to_rows  # not needed by other calls

        shard = heads_to_rows(job, call, run.name, shard, job.order)
        sink, max_logits = (None if x is None else x[heads_here(job)] for x in (sink, max_logits))
    q, k, v = shard
    if stored is None:
        rings = ring.forward_rings(job, run, call, q, (k, v), max_logits)
    else:
        assert partial is not None
        rest = rows_of(q, partial.rest)
        rings = ring.forward_rings(job, partial.run, call, rest, (k, v), max_logits)
    ring.run(rings)
    out, lse = ring.outputs(rings, q.dtype, sink)
    if stored is not None:
        assert partial is not None
        out, lse = partial.whole(stored[0], out), partial.whole(stored[1], lse)
    whole = out
    if shared:
        from .ulysses import rows_to_heads

        (whole,) = rows_to_heads(job, call, run.name, (out,), (job.heads,), out.dtype, job.order)
        assert whole is not None
    return whole, (q, k, v, out, lse)


def backward(
    job: Job, call: CallTag, dout: torch.Tensor, saved: Tensors, sink: torch.Tensor | None
) -> Gradients:
    """dq, dk, dv in the accumulation dtype, or the wire's where ranks exchange heads and none is
    shared; the gradient [h] of the sink. None where not needed.

    dout [s, b, h, w]; saved: as `forward` returned it.
    """
    run, shared = job.chunks[0].backward, len(job.ulysses_links) > 1
    if len(job.chunks) > 1:
        from . import row_chunks  # not needed by other calls

        return row_chunks.backward(job, call, dout, saved, sink)
    q, k, v, out, lse = saved
    if shared:
        from .ulysses import heads_to_rows  # not needed by other calls

        (dout,) = heads_to_rows(job, call, run.name, (dout,), job.order)
    delta = row_delta(dout, out, lse.dtype)
    rows = Rows(q, dout.contiguous(), lse, delta, out)
    rings = ring.backward_rings(job, run, call, rows, (k, v))
    ring.run(rings)
    grads = ring.gradients(rings, job.needs_grad)
    if shared:
        from .ulysses import rows_to_heads

        narrow = [None if g is None else g.to(job.wire_dtype) for g in grads]
        heads = job.heads, job.kv_heads, job.kv_heads
        grads = rows_to_heads(job, call, run.name, narrow, heads, lse.dtype, job.order)
    dsink = None
    if sink is not None:
        here = slice(None)
        if shared:
            from .ulysses import heads_here

            here = heads_here(job)
        dsink = torch.zeros(job.heads, dtype=lse.dtype, device=lse.device)
        dsink[here] = sink_gradient(sink[here], lse, delta)
    return *grads, dsink


def rows_to_keep(job: Job, saved: Tensors) -> Tensors:
    """out and lse of the rows that the store keeps. saved: as `forward` returned it."""
    if len(job.chunks) > 1:
        from . import row_chunks  # not needed by other calls

        return row_chunks.rows_to_keep(job, saved)
    again = next(iter(job.chunks)).recompute
    assert again is not None
    return tuple(rows_of(t.detach(), again.kept) for t in saved[3:5])


# --- autograd -----------------------------------------------------------------------------------


class Keeper(Protocol):
    """Keeps out and lse of some rows between a forward and its recompute."""

    @property
    def filled(self) -> bool: ...

    def put(self, what: object, entry: Tensors) -> None: ...

    def get(self, what: object) -> Tensors: ...


@dataclass(frozen=True)
class KeptResults:
    """Where this call finds or leaves results: a keeper, and what identifies the call there."""

    keeper: Keeper
    what: object

    def found(self) -> Tensors | None:
        """Return the results of the first run of this call, None in the first run."""
        return self.keeper.get(self.what) if self.keeper.filled else None

    def leave(self, results: Tensors) -> None:
        """Keep the results of the first run of this call."""
        self.keeper.put(self.what, results)


@dataclass(frozen=True)
class AttentionRun:
    """A call of attention on the ranks of this process, mostly one.

    operation: public name, for errors. jobs, tags: of each rank. kept: where a checkpoint keeps
    results, or None. recompute_jobs: run if `kept` has results; None if they are `jobs`. A kernel
    that depends on the rows of queries differs there. max_logits [h]: raised in place, or None.
    return_lse: return also lse of each rank, without a gradient.
    """

    operation: str
    groups: Groups | InProcessGroups
    jobs: Sequence[Job]
    tags: Sequence[CallTag]
    kept: KeptResults | None
    recompute_jobs: Sequence[Job] | None = None
    max_logits: torch.Tensor | None = None
    return_lse: bool = False


class Attention(torch.autograd.Function):
    """Attention of the ranks of this process: the backward of one rank waits for the others.

    sink [h] or None; shards: q, k, v of the first rank, then of the second, and so on. Returns out
    of each rank, then with `return_lse` lse of each rank.
    """

    @staticmethod
    def forward(
        ctx: Any, call: AttentionRun, sink: torch.Tensor | None, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tensors, count, groups = [t.contiguous() for t in shards], len(call.jobs), call.groups
        qkv = [tuple(tensors[i : i + 3]) for i in range(0, len(tensors), 3)]
        stored = None if call.kept is None else call.kept.found()
        jobs = call.jobs if stored is None else call.recompute_jobs or call.jobs
        stored_by_rank = [stored and stored[i : i + 2] for i in range(0, 2 * count, 2)]
        arguments = (
            jobs, call.tags, qkv, [sink] * count, stored_by_rank, [call.max_logits] * count,
        )  # fmt: skip
        with groups.running(tensors[0].device.type):
            if groups.together:
                results = groups.run(forward, *arguments)
            else:  # without `Groups.run`: `test_corridor` limits the functions on this path
                results = [*map(forward, *arguments)]
        outs, saved = zip(*results, strict=True)
        if call.kept is not None and stored is None:
            pairs = zip(jobs, saved, strict=True)
            call.kept.leave(tuple(t for job, each in pairs for t in rows_to_keep(job, each)))
        ctx.operation, ctx.jobs, ctx.groups, ctx.tags = call.operation, call.jobs, groups, call.tags
        ctx.dtype, ctx.lengths = tensors[0].dtype, [len(each) for each in saved]
        ctx.save_for_backward(sink, *(t for each in saved for t in each))
        if not call.return_lse:
            return outs
        lses = [each[4] for each in saved]
        ctx.mark_non_differentiable(*lses)
        return *outs, *lses

    @staticmethod
    @first_order_only()
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = len(ctx.jobs)
        douts = gradients[:count]  # none of lse
        sink, *flat = ctx.saved_tensors
        for rank, tag in zip(ctx.groups.ranks, ctx.tags, strict=True):
            rank.check()
            rank.calls.backward(tag)
        rest = iter(flat)
        saved = [tuple(next(rest) for _ in range(length)) for length in ctx.lengths]
        arguments = ctx.jobs, ctx.tags, douts, saved, [sink] * count
        with ctx.groups.running(douts[0].device.type):
            if ctx.groups.together:  # as in forward
                results = ctx.groups.run(backward, *arguments)
            else:
                results = [*map(backward, *arguments)]
        _, sink_needed, *needed = ctx.needs_input_grad
        dsink = None
        if sink is not None and sink_needed:
            parts: list[Any] = [result[3] for result in results]
            total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            dsink = total.to(sink.dtype)
        grads = [grad for result in results for grad in result[:3]]
        for i, grad in enumerate(grads):
            grads[i] = None if grad is None or not needed[i] else grad.to(ctx.dtype)
        return None, dsink, *grads
