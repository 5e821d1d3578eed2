"""Attention whose queries come in chunks of rows, one behind the other: FPDT's, on any ring.

Only one chunk's q, out, dq, partial results and travelling queries exist at a time; the gradients
of the keys and values are summed in one buffer over all chunks. Every chunk is a pass of its own,
made by `planning.row_chunks`. Source: FPDT (arXiv 2408.16978), section 4, there with head
parallelism alone.

Shape letters: s local rows, r rows of a chunk, b batch, h query heads, k key/value heads, d width,
w value width; p ranks that share heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..comm.packing import CallTag
from ..kernels.base import Rows
from ..kernels.online_softmax import accumulation_dtype, row_delta, sink_gradient
from ..schedule.tables import Chunk
from . import head_chunks
from .executor import Pass, Tensors
from .job import Job
from .passes import Backward
from .rank import attend, heads_here, heads_to_rows, interleaved, rows_of, rows_to_heads
from .visiting import Host, Visiting


class Chunks:
    """One call of one rank: its keys, of all rows, and what its chunks of queries add up.

    keys: contiguous k [s, b, k, d], v [s, b, k, w], or what `keys` of another call of the same
    tensors holds (`exchanged`). sink [h] or None. max_logits [h] or None: raised in place.
    host: where the keys of others rest between the forwards of chunks; None: they travel again.
    """

    def __init__(
        self,
        job: Job,
        call: CallTag,
        keys: Tensors,
        sink: torch.Tensor | None = None,
        max_logits: torch.Tensor | None = None,
        exchanged: bool = False,
        host: Host | None = None,
    ):
        self.job, self.call = job, call
        self._visiting = None if host is None else Visiting(host)
        name = f"{job.forward.name}: keys"
        self.keys = keys if exchanged else self._to_rows(replace(job.forward, name=name), keys)
        self.sink, self.max_logits = (
            None if x is None else x[heads_here(job)] for x in (sink, max_logits)
        )
        self._sums: list[Tensors] = []  # of every head chunk: dk, dv, as far as they are needed
        self._dsink: torch.Tensor | None = None

    def forward(
        self, index: int, q: torch.Tensor, stored: Tensors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [r, b, h, w] in the dtype of q and lse of the queries of a chunk, q [r, b, h, d].

        lse is as the ring has it, [p r, b, h / p] in the accumulation dtype. stored: what `kept`
        took of the results of this chunk; only the other rows are computed.
        """
        job, chunk = self.job, self.job.chunks[index]
        run = replace(chunk.forward, call=self.call)
        (rows,) = self._to_rows(run, (q,))
        if stored is None:
            out, lse = self._attend(run, rows)
            (out,) = rows_to_heads(job, run, (out,), (job.heads,), out.dtype)
            assert out is not None
            return out, lse
        partial = chunk.recompute
        assert partial is not None
        again = replace(partial.run, call=self.call)
        inputs = rows_of(rows, partial.rest), *self.keys
        some, lse, _ = attend(job, again, inputs, self.sink, self.max_logits)
        out = some.new_zeros((len(rows), *some.shape[1:])).index_copy_(0, partial.rest, some)
        (out,) = rows_to_heads(job, run, (out,), (job.heads,), out.dtype)
        assert out is not None
        out.index_copy_(0, partial.own_kept, stored[0].detach())
        return out, interleaved(partial, stored[1], lse)

    def _attend(self, run: Pass, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        visiting, given = self._visiting, (self.sink, self.max_logits)
        if visiting is None:
            return attend(self.job, run, (q, *self.keys), *given)[:2]
        run = visiting.run(run)
        results = attend(self.job, run, (q, *self.keys), *given, begin=visiting.begin)
        visiting.settle()
        return results[:2]

    def kept(self, index: int, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """Of the results of a chunk those that the store of the plan keeps, as copies."""
        partial = self.job.chunks[index].recompute
        assert partial is not None
        return out.index_select(0, partial.own_kept), lse.index_select(0, partial.kept)

    def backward(
        self,
        index: int,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
    ) -> torch.Tensor | None:
        """dq [r, b, h, d] of a chunk, in the accumulation dtype, or the wire's where ranks share
        heads; None if it is not needed. The gradients of keys and values are added up.

        q, out: contiguous, as of `forward`; lse: as `forward` returned it; dout [r, b, h, w].
        """
        job, run = self.job, replace(self.job.chunks[index].backward, call=self.call)
        dout = dout.contiguous()
        delta = row_delta(dout, out, lse.dtype)
        rows = Rows(q, dout, lse, delta, out)
        if len(job.ulysses_links) > 1:  # with delta out need not travel
            q, dout, delta = self._to_rows(run, (q, dout, delta))
            rows = Rows(q, dout, lse, delta)
        if self.sink is not None:
            gradient = sink_gradient(self.sink, lse, delta)
            self._dsink = gradient if self._dsink is None else self._dsink + gradient
        dq = self._ring(run, rows)
        if dq is not None and len(job.ulysses_links) > 1:
            dq = dq.to(job.wire_dtype)
            (dq,) = rows_to_heads(job, run, (dq,), (job.heads,), lse.dtype)
        return dq

    def _ring(self, run: Pass, rows: Rows) -> torch.Tensor | None:
        """dq of the ring; dk and dv are added to the sums."""
        job, (k, v) = self.job, self.keys
        chunks = list(head_chunks.split(run, job.head_chunks, rows.q.shape[2], k.shape[2]))
        keys = [(k[:, :, n], v[:, :, n]) for _, _, n in chunks]
        self._sums = self._sums or [self._zeros(each) for each in keys]
        rings = []
        for (part, h, _), mine, sums in zip(chunks, keys, self._sums, strict=True):
            of_heads = Rows(*(None if x is None else x[:, :, h] for x in rows))  # pyright: ignore
            ring = Backward(
                part, job.ring, job.kernel, job.scoring, of_heads, mine, (), job.wire_dtype,
                job.needs_grad,
            )  # fmt: skip
            ring.executor.partials.begin(Chunk("dkv", job.ring.rank), sums)
            rings.append(ring)
        head_chunks.run_staggered(rings)
        dqs = [ring.result()[0] for ring in rings]
        return None if dqs[0] is None else head_chunks.join(dqs)  # pyright: ignore

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """dk [s, b, k, d], dv [s, b, k, w], dsink [h] in the accumulation dtype, dk and dv in the
        wire's where ranks share heads; None where not needed. After the last chunk, once."""
        job, (k, v) = self.job, self.keys
        chunks = list(head_chunks.split(job.backward, job.head_chunks, 0, k.shape[2]))
        sums = self._sums or [self._zeros((k[:, :, n], v[:, :, n])) for _, _, n in chunks]
        joined = iter([head_chunks.join(parts) for parts in zip(*sums, strict=True)])
        self._sums, sums = [], []
        dk, dv = (next(joined) if needed else None for needed in job.needs_grad[1:])
        if len(job.ulysses_links) > 1:
            run = replace(job.backward, call=self.call, name=f"{job.backward.name}: keys")
            narrow = tuple(None if g is None else g.to(job.wire_dtype) for g in (dk, dv))
            dtype = accumulation_dtype(k.dtype)
            dk, dv = rows_to_heads(job, run, narrow, (job.kv_heads, job.kv_heads), dtype)
        dsink = None
        if self._dsink is not None:
            dsink = self._dsink.new_zeros(job.heads)
            dsink[heads_here(job)] = self._dsink
        return dk, dv, dsink

    def _zeros(self, keys: Tensors) -> Tensors:
        dtype = accumulation_dtype(keys[0].dtype)
        needed = zip(keys, self.job.needs_grad[1:], strict=True)
        return tuple(
            torch.zeros(t.shape, dtype=dtype, device=t.device) for t, needs in needed if needs
        )

    def _to_rows(self, run: Pass, tensors: Tensors) -> Tensors:
        return heads_to_rows(self.job, replace(run, call=self.call), tensors)


# --- all chunks of a call, as `rank` does it with all rows at once -----------------------------


def forward(
    job: Job,
    call: CallTag,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: Tensors | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """As `rank.forward`, one chunk after another."""
    q, k, v = shard
    chunks = Chunks(job, call, (k, v), sink, max_logits)
    out, lses = q.new_empty((*q.shape[:3], v.shape[3])), []
    found = _stored_by_chunk(job, stored)
    for index, chunk in enumerate(job.chunks):
        part, lse = chunks.forward(index, rows_of_chunk(q, chunk.rows), found(index))
        _put(out, chunk.rows, part)
        lses.append(lse)
    return out, (q, *chunks.keys, out, torch.cat(lses))


def backward(
    job: Job, call: CallTag, dout: torch.Tensor, saved: Tensors, sink: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """As `rank.backward`, one chunk after another; dq is in the dtype of q."""
    q, k, v, out, lse = saved
    chunks = Chunks(job, call, (k, v), sink, exchanged=True)
    dq = torch.empty_like(q) if job.needs_grad[0] else None
    lses = lse.split([len(job.ulysses_links) * _count(chunk.rows, q) for chunk in job.chunks])
    for index, (chunk, mine) in enumerate(zip(job.chunks, lses, strict=True)):
        q_c, out_c, dout_c = (rows_of_chunk(x, chunk.rows) for x in (q, out, dout))
        part = chunks.backward(index, q_c, out_c, mine, dout_c)
        if dq is not None and part is not None:
            _put(dq, chunk.rows, part.to(q.dtype))
    return dq, *chunks.gradients()


def rows_to_keep(job: Job, saved: Tensors) -> Tensors:
    """As `rank.rows_to_keep`: the rows of the first chunk, then those of the second, ..."""
    out, lse = (t.detach() for t in saved[3:5])
    lses = iter(lse.split([len(job.ulysses_links) * _count(c.rows, out) for c in job.chunks]))
    kept = []
    for chunk in job.chunks:
        assert chunk.recompute is not None
        mine = rows_of_chunk(out, chunk.rows).index_select(0, chunk.recompute.own_kept)
        kept.append((mine, next(lses).index_select(0, chunk.recompute.kept)))
    outs, stats = zip(*kept, strict=True)
    return torch.cat(outs), torch.cat(stats)


def _stored_by_chunk(job: Job, stored: Tensors | None) -> Callable[[int], Tensors | None]:
    if stored is None:
        return lambda index: None
    partials = [chunk.recompute for chunk in job.chunks if chunk.recompute is not None]
    lengths = [len(each.own_kept) for each in partials], [len(each.kept) for each in partials]
    parts = [t.split(each) for t, each in zip(stored, lengths, strict=True)]
    return lambda index: (parts[0][index], parts[1][index])


def rows_of_chunk(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """These rows of x, contiguous; None for all."""
    return x.contiguous() if rows is None else x.index_select(0, rows)


def _put(whole: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor) -> None:
    if rows is None:
        whole.copy_(part)
    else:
        whole.index_copy_(0, rows, part)


def _count(rows: torch.Tensor | None, whole: torch.Tensor) -> int:
    return len(whole) if rows is None else len(rows)
