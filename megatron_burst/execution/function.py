# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank as one autograd function.

Decides what is saved for backward, and where results that a checkpoint keeps come from and go to.
`forward` and `backward` are one rank's part as plain functions of tensors: exchange heads, run the
ring, exchange them back.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..comm.groups import Groups
from ..comm.packing import CallTag
from ..kernels.autograd import first_order_only
from ..kernels.base import Rows
from ..kernels.online_softmax import row_delta, sink_gradient
from . import ring, row_chunks
from .job import Job, Tensors, rows_of
from .ulysses import heads_here, heads_to_rows, rows_to_heads

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
        return row_chunks.forward(job, call, shard, sink, stored, max_logits)
    run, partial = chunk.forward, chunk.recompute
    if shared:
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
        return row_chunks.backward(job, call, dout, saved, sink)
    q, k, v, out, lse = saved
    if shared:
        (dout,) = heads_to_rows(job, call, run.name, (dout,), job.order)
    delta = row_delta(dout, out, lse.dtype)
    rows = Rows(q, dout.contiguous(), lse, delta, out)
    rings = ring.backward_rings(job, run, call, rows, (k, v))
    ring.run(rings)
    grads = ring.gradients(rings, job.needs_grad)
    if shared:
        narrow = [None if g is None else g.to(job.wire_dtype) for g in grads]
        heads = job.heads, job.kv_heads, job.kv_heads
        grads = rows_to_heads(job, call, run.name, narrow, heads, lse.dtype, job.order)
    dsink = None
    if sink is not None:
        here = slice(None)
        if shared:
            here = heads_here(job)
        dsink = torch.zeros(job.heads, dtype=lse.dtype, device=lse.device)
        dsink[here] = sink_gradient(sink[here], lse, delta)
    return *grads, dsink


def rows_to_keep(job: Job, saved: Tensors) -> Tensors:
    """Out and lse of the rows that the store keeps. saved: as `forward` returned it."""
    if len(job.chunks) > 1:
        return row_chunks.rows_to_keep(job, saved)
    again = next(iter(job.chunks)).recompute
    assert again is not None
    return tuple(rows_of(t.detach(), again.kept) for t in saved[3:5])


# --- autograd -----------------------------------------------------------------------------------


class Keeper(Protocol):
    """Keeps out and lse of some rows between a forward and its recompute."""

    @property
    def filled(self) -> bool: ...

    def put(self, key: object, tensors: Tensors) -> None: ...

    def get(self, key: object) -> Tensors: ...


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
    """A call of attention on this rank.

    operation: public name, for errors. kept: where a checkpoint keeps results, or None.
    recompute_job: runs if `kept` has results; None for `job`. A kernel that depends on the rows of
    queries differs there. max_logits [h]: raised in place, or None. return_lse: return also lse,
    without a gradient.
    """

    operation: str
    groups: Groups
    job: Job
    tag: CallTag
    kept: KeptResults | None
    recompute_job: Job | None = None
    max_logits: torch.Tensor | None = None
    return_lse: bool = False


class Attention(torch.autograd.Function):
    """Attention of this rank: its backward waits for the other ranks.

    sink [h] or None; shard: q, k, v. Returns out, with `return_lse` (out, lse).
    """

    @staticmethod
    def forward(
        ctx: Any, call: AttentionRun, sink: torch.Tensor | None, *shard: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        qkv = tuple(t.contiguous() for t in shard)
        stored = None if call.kept is None else call.kept.found()
        job = call.job if stored is None else call.recompute_job or call.job
        with call.groups.running(qkv[0].device.type):
            out, saved = forward(job, call.tag, qkv, sink, stored, call.max_logits)
        if call.kept is not None and stored is None:
            call.kept.leave(rows_to_keep(job, saved))
        ctx.operation, ctx.job, ctx.groups = call.operation, call.job, call.groups
        ctx.tag, ctx.dtype = call.tag, qkv[0].dtype
        ctx.save_for_backward(sink, *saved)
        if not call.return_lse:
            return out
        ctx.mark_non_differentiable(saved[4])
        return out, saved[4]

    @staticmethod
    @first_order_only()
    def backward(ctx: Any, dout: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sink, *saved = ctx.saved_tensors
        ctx.groups.check()
        ctx.groups.calls.backward(ctx.tag)
        with ctx.groups.running(dout.device.type):
            *grads, dsink = backward(ctx.job, ctx.tag, dout, tuple(saved), sink)
        _, sink_needed, *needed = ctx.needs_input_grad
        if dsink is not None:
            dsink = dsink.to(sink.dtype) if sink_needed else None
        for i, grad in enumerate(grads):
            grads[i] = None if grad is None or not needed[i] else grad.to(ctx.dtype)
        return None, dsink, *grads
