"""One rank's forward and backward: exchange heads, run the ring, exchange them back.

Plain functions of tensors; autograd is `function`'s.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..comm.packing import CallTag
from ..kernels.base import Rows
from ..kernels.online_softmax import row_delta, sink_gradient
from ..schedule.head_shares import Share
from . import head_chunks, ulysses
from .executor import Pass, Tensors
from .job import Job, PartialPass
from .passes import Backward, Forward


def forward(
    job: Job,
    call: CallTag,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: Tensors | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """(out [s, b, h, w], what backward needs: q, k, v, out, lse and kept keys of the ring).

    shard: contiguous q [s, b, h, d], k [s, b, k, d], v [s, b, k, w]. sink [h] or None. stored: out
    and lse of the rows that were kept when this call ran first, if it runs again. max_logits [h]
    or None: raised, for the heads whose ring this rank runs, to the largest score it computes.
    """
    run, partial = replace(job.forward, call=call), job.recompute
    q, k, v = heads_to_rows(job, run, shard)
    inputs = q, k, v
    if stored is not None:
        assert partial is not None
        run = replace(partial.run, call=call)
        inputs = rows_of(q, partial.rest), k, v
    mine = (None if x is None else x[heads_here(job)] for x in (sink, max_logits))
    out, lse, kept = attend(job, run, inputs, next(mine), next(mine))
    if stored is not None:
        assert partial is not None
        pairs = zip(stored, (out, lse), strict=True)
        (out, lse), kept = (interleaved(partial, *pair) for pair in pairs), ()
    done = replace(job.forward, call=call)
    (whole,) = rows_to_heads(job, done, (out,), (job.heads,), out.dtype)
    assert whole is not None
    return whole, (q, k, v, out, lse, *kept)


def attend(
    job: Job,
    run: Pass,
    inputs: Tensors,
    sink: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    begin: Callable[[list[Forward]], None] = lambda rings: None,
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """One ring per head chunk: out, lse, and the keys that each keeps for backward. begin: called
    with the rings before they run."""
    q, k, v = inputs
    chunks = list(head_chunks.split(run, job.head_chunks, q.shape[2], k.shape[2]))
    rings = [
        Forward(part, job.ring, job.kernel, job.scoring, q[:, :, h], (k[:, :, n], v[:, :, n]),
                job.wire_dtype, None if max_logits is None else max_logits[h])
        for part, h, n in chunks
    ]  # fmt: skip
    begin(rings)
    head_chunks.run_staggered(rings)
    results = [
        ring.result(None if sink is None else sink[h])
        for ring, (_, h, _) in zip(rings, chunks, strict=True)
    ]
    outs, lses, kept = zip(*results, strict=True)
    return head_chunks.join(outs), head_chunks.join(lses), tuple(t for some in kept for t in some)


def backward(
    job: Job, call: CallTag, dout: torch.Tensor, saved: Tensors, sink: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv in the accumulation dtype, or the wire's where ranks exchange heads and none is
    shared; the gradient [h] of the sink. None where not needed.

    dout [s, b, h, w]; saved: as `forward` returned it.
    """
    run = replace(job.backward, call=call)
    q, k, v, out, lse, *kept = saved
    (dout,) = heads_to_rows(job, run, (dout,))
    delta = row_delta(dout, out, lse.dtype)
    rows = q, dout.contiguous(), lse, delta, out
    each = 2 * len(run.kept)
    chunks = head_chunks.split(run, job.head_chunks, q.shape[2], k.shape[2])
    rings = [
        Backward(part, job.ring, job.kernel, job.scoring, Rows(*(x[:, :, h] for x in rows)),
                 (k[:, :, n], v[:, :, n]), kept[i * each : (i + 1) * each], job.wire_dtype,
                 job.needs_grad)
        for i, (part, h, n) in enumerate(chunks)
    ]  # fmt: skip
    head_chunks.run_staggered(rings)
    parts = zip(*(ring.result() for ring in rings), strict=True)
    grads = tuple(None if None in part else head_chunks.join(part) for part in parts)
    if len(job.ulysses_links) > 1:
        grads = tuple(None if g is None else g.to(job.wire_dtype) for g in grads)
        heads = job.heads, job.kv_heads, job.kv_heads
        grads = rows_to_heads(job, run, grads, heads, lse.dtype)
    dsink = None
    if sink is not None:
        dsink = torch.zeros(job.heads, dtype=lse.dtype, device=lse.device)
        dsink[heads_here(job)] = sink_gradient(sink[heads_here(job)], lse, delta)
    return *grads, dsink


def heads_here(job: Job) -> slice:
    """The query heads that this rank's ring computes."""
    return Share(job.heads, len(job.ulysses_links)).of(job.ulysses.rank)


def heads_to_rows(job: Job, run: Pass, tensors: Tensors) -> Tensors:
    """What the ring sees: all rows of the ranks that share heads, and this rank's heads."""
    if len(job.ulysses_links) == 1:
        return tensors
    envelope, label = run.envelope("heads to rows"), f"{run.name}, ulysses rank {job.ulysses.rank}"
    return tuple(ulysses.scatter(job.ulysses, job.ulysses_links, tensors, envelope, label))


def rows_to_heads(
    job: Job,
    run: Pass,
    tensors: tuple[torch.Tensor | None, ...],
    heads: tuple[int, ...],
    sums: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """The inverse of `heads_to_rows`; heads: of each tensor, on this rank. sums: as in
    `ulysses.gather`."""
    if len(job.ulysses_links) == 1:
        return tensors
    envelope, label = run.envelope("rows to heads"), f"{run.name}, ulysses rank {job.ulysses.rank}"
    found = ulysses.gather(job.ulysses, job.ulysses_links, tensors, heads, sums, envelope, label)
    return tuple(found)


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows of x: x itself where they are all of them."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


def rows_to_keep(job: Job, saved: Tensors) -> Tensors:
    """out and lse of the rows that the store keeps. saved: as `forward` returned it."""
    assert job.recompute is not None
    return tuple(rows_of(t.detach(), job.recompute.kept) for t in saved[3:5])


def interleaved(partial: PartialPass, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The rows that were kept and those computed again, each in its place."""
    if not len(partial.rest):
        return stored.detach()  # as a result it gets a history of its own
    whole = new.new_empty((len(partial.kept) + len(partial.rest), *new.shape[1:]))
    whole.index_copy_(0, partial.kept, stored.detach())
    whole.index_copy_(0, partial.rest, new)
    return whole
