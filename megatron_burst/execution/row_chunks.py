# SPDX-License-Identifier: Apache-2.0
"""Attention whose queries come in chunks of rows, one behind the other: FPDT's, on any ring.

Only one row chunk's q, out, dq, partial results and travelling queries exist at a time; the
gradients of the keys and values are summed in one buffer over all of them. Every row chunk is a
pass of its own, made by `planning`. `RowChunks` runs them; `forward` and `backward` do so for a
call that has all rows at once, and `ChunkedCall` for code that has no whole q: a layer that
projects, attends and projects back chunk by chunk. Source: FPDT (arXiv 2408.16978), section 4,
there with head parallelism alone.

Shape letters: s local rows, r rows of a chunk, b batch, h query heads, k key/value heads, d width,
w value width; p ranks that share heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.groups import Groups
from ..comm.packing import CallTag
from ..kernels.base import Rows
from ..kernels.online_softmax import accumulation_dtype, row_delta, sink_gradient
from . import ring
from .job import Job, Tensors, rows_of
from .ulysses import heads_here, heads_to_rows, rows_to_heads
from .visiting import Host, Visiting

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class RowChunks:
    """One call of one rank: its keys, of all rows, and what its chunks of queries add up.

    keys: contiguous k [s, b, k, d], v [s, b, k, w], or what `keys` of another call of the same
    tensors holds (`exchanged`). sink [h] or None. max_logits [h] or None: raised in place.
    host: memory for keys of other ranks between the forwards of chunks; None: every chunk's forward
    receives them.
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
        self.keys = keys if exchanged else heads_to_rows(job, call, name, keys, job.order)
        self.sink, self.max_logits = (
            None if x is None else x[heads_here(job)] for x in (sink, max_logits)
        )
        self._sums: list[Tensors] = []  # of every head chunk: dk, dv, as far as they are needed
        self._dsink: torch.Tensor | None = None

    def forward(
        self, index: int, q: torch.Tensor, stored: Tensors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out [r, b, h, w] in the dtype of q and lse of the queries of a chunk, q [r, b, h, d].

        lse is as the ring has it, [p r, b, h / p] in the accumulation dtype. stored: what `kept`
        took of the results of this chunk; only the other rows are computed.
        """
        job, chunk = self.job, self.job.chunks[index]
        run, partial = chunk.forward, chunk.recompute
        if self._visiting is not None:
            assert chunk.host_forward is not None
            run = chunk.host_forward
        (queries,) = heads_to_rows(job, self.call, run.name, (q,), chunk.order)
        if stored is None:
            rings = self._rings(run, queries)
            if self._visiting is not None:
                self._visiting.provide(rings)
        else:
            assert partial is not None
            rings = self._rings(partial.run, rows_of(queries, partial.rest))
        ring.run(rings)
        out, lse = ring.outputs(rings, q.dtype, self.sink)
        if stored is None and self._visiting is not None:
            self._visiting.settle()
        if stored is not None:
            assert partial is not None
            whole = out.new_zeros((len(queries), *out.shape[1:]))
            out = whole.index_copy_(0, partial.rest, out)
        (out,) = rows_to_heads(
            job, self.call, run.name, (out,), (job.heads,), out.dtype, chunk.order
        )
        assert out is not None
        if stored is not None:
            assert partial is not None
            out.index_copy_(0, partial.own_kept, stored[0].detach())
            lse = partial.whole(stored[1], lse)
        return out, lse

    def _rings(self, run: ring.Pass, queries: torch.Tensor) -> list[ring.Ring]:
        given = queries, self.keys, self.max_logits
        return ring.forward_rings(self.job, run, self.call, *given)

    def kept(self, index: int, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """Copies of the results of a chunk that the store of the plan keeps. Raises ValueError
        where it keeps none.
        """
        partial = self.job.chunks[index].recompute
        if partial is None:
            raise ValueError(
                "plan.chunked: kept() needs a plan that keeps some results; make it with "
                "mb.prepare(..., store=0.5), or recompute every chunk as a whole"
            )
        return out.index_select(0, partial.own_kept), lse.index_select(0, partial.kept)

    def backward(
        self,
        index: int,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
    ) -> torch.Tensor | None:
        """Dq [r, b, h, d] of a chunk, in the accumulation dtype, or the wire's where ranks share
        heads; None if it is not needed. The gradients of keys and values are added up.

        q, out: contiguous, as of `forward`; lse: as `forward` returned it; dout [r, b, h, w].
        """
        job, run = self.job, self.job.chunks[index].backward
        shared = len(job.ulysses_links) > 1
        dout = dout.contiguous()
        delta = row_delta(dout, out, lse.dtype)
        rows = Rows(q, dout, lse, delta, out)
        if shared:  # with delta out need not travel
            order = job.chunks[index].order
            q, dout, delta = heads_to_rows(job, self.call, run.name, (q, dout, delta), order)
            rows = Rows(q, dout, lse, delta)
        if self.sink is not None:
            gradient = sink_gradient(self.sink, lse, delta)
            self._dsink = gradient if self._dsink is None else self._dsink + gradient
        rings = ring.backward_rings(job, run, self.call, rows, self.keys)
        self._sums = self._sums or self._zeros()
        for each, sums in zip(rings, self._sums, strict=True):
            each.partials.begin(run.totals["dkv", job.ring.rank], sums)
        ring.run(rings)
        dq = ring.gradients(rings, (job.needs_grad[0], False, False))[0]
        if dq is not None and shared:
            dq = dq.to(job.wire_dtype)
            order, heads = job.chunks[index].order, (job.heads,)
            (dq,) = rows_to_heads(job, self.call, run.name, (dq,), heads, lse.dtype, order)
        return dq

    def gradients(self) -> Gradients:
        """Dk [s, b, k, d], dv [s, b, k, w], dsink [h] in the accumulation dtype, dk and dv in the
        wire's where ranks share heads; None where not needed. After the last chunk, once.
        """
        job = self.job
        sums, self._sums = self._sums or self._zeros(), []
        joined = iter([ring.join(parts) for parts in zip(*sums, strict=True)])
        del sums
        dk, dv = (next(joined) if needed else None for needed in job.needs_grad[1:])
        if len(job.ulysses_links) > 1:
            name, heads = f"{job.backward.name}: keys", (job.kv_heads, job.kv_heads)
            narrow = [None if g is None else g.to(job.wire_dtype) for g in (dk, dv)]
            dtype = accumulation_dtype(self.keys[0].dtype)
            dk, dv = rows_to_heads(job, self.call, name, narrow, heads, dtype, job.order)
        dsink = None
        if self._dsink is not None:
            dsink = self._dsink.new_zeros(job.heads)
            dsink[heads_here(job)] = self._dsink
        return dk, dv, dsink

    def _zeros(self) -> list[Tensors]:
        """Dk and dv of every head chunk, as far as they are needed."""
        needed = [t for t, needs in zip(self.keys, self.job.needs_grad[1:], strict=True) if needs]
        dtype, sums = accumulation_dtype(self.keys[0].dtype), []
        for part in ring.head_chunks(self.job, 0, self.keys[0].shape[2]):
            shapes = [t[:, :, part.kv_heads].shape for t in needed]
            device = self.keys[0].device
            sums.append(tuple(torch.zeros(s, dtype=dtype, device=device) for s in shapes))
        return sums


# --- all chunks of a call that has all rows at once ---------------------------------------------


def forward(
    job: Job,
    call: CallTag,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: Tensors | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """As `function.forward`, one chunk after another; q and out are saved as they came."""
    q, k, v = shard
    chunks = RowChunks(job, call, (k, v), sink, max_logits)
    out, lses = q.new_empty((*q.shape[:3], v.shape[3])), []
    stored_of = _stored_by_chunk(job, stored)
    for index, chunk in enumerate(job.chunks):
        part, lse = chunks.forward(index, _rows_of_chunk(q, chunk.rows), stored_of(index))
        _put(out, chunk.rows, part)
        lses.append(lse)
    return out, (q, *chunks.keys, out, torch.cat(lses))


def backward(
    job: Job, call: CallTag, dout: torch.Tensor, saved: Tensors, sink: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """As `function.backward`, one chunk after another; dq is in the dtype of q."""
    q, k, v, out, lse = saved
    chunks = RowChunks(job, call, (k, v), sink, exchanged=True)
    dq = torch.empty_like(q) if job.needs_grad[0] else None
    for index, (chunk, stats) in enumerate(zip(job.chunks, _by_chunk(job, lse, q), strict=True)):
        q_c, out_c, dout_c = (_rows_of_chunk(x, chunk.rows) for x in (q, out, dout))
        part = chunks.backward(index, q_c, out_c, stats, dout_c)
        if dq is not None and part is not None:
            _put(dq, chunk.rows, part.to(q.dtype))
    return dq, *chunks.gradients()


def rows_to_keep(job: Job, saved: Tensors) -> Tensors:
    """As `function.rows_to_keep`: the rows of the first chunk, then those of the second, ..."""
    out, lse = (t.detach() for t in saved[3:5])
    kept = []
    for chunk, stats in zip(job.chunks, _by_chunk(job, lse, out), strict=True):
        assert chunk.recompute is not None
        rows = _rows_of_chunk(out, chunk.rows).index_select(0, chunk.recompute.own_kept)
        kept.append((rows, stats.index_select(0, chunk.recompute.kept)))
    outs, stats = zip(*kept, strict=True)
    return torch.cat(outs), torch.cat(stats)


def _stored_by_chunk(job: Job, stored: Tensors | None) -> Callable[[int], Tensors | None]:
    if stored is None:
        return lambda index: None
    partials = [chunk.recompute for chunk in job.chunks if chunk.recompute is not None]
    lengths = [len(each.own_kept) for each in partials], [len(each.kept) for each in partials]
    parts = [t.split(each) for t, each in zip(stored, lengths, strict=True)]
    return lambda index: (parts[0][index], parts[1][index])


def _by_chunk(job: Job, lse: torch.Tensor, whole: torch.Tensor) -> Sequence[torch.Tensor]:
    """The lse of each chunk, as the ring has it; whole: any tensor of all rows."""
    rows = [len(whole) if chunk.rows is None else len(chunk.rows) for chunk in job.chunks]
    return lse.split([len(job.ulysses_links) * each for each in rows])


def _rows_of_chunk(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """These rows of x, contiguous; None for all."""
    return x.contiguous() if rows is None else x.index_select(0, rows)


def _put(whole: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor) -> None:
    if rows is None:
        whole.copy_(part)
    else:
        whole.index_copy_(0, rows, part)


# --- a call whose chunks of queries the caller makes --------------------------------------------


def check_keys(k: torch.Tensor, v: torch.Tensor, made_for_k: object, made_for_v: object) -> None:
    """Raise ValueError unless k and v have the shape, dtype and device that a plan was made for."""
    for name, tensor, wanted in (("k", k, made_for_k), ("v", v, made_for_v)):
        found: object = f"{tensor!r:.100}"
        if isinstance(tensor, torch.Tensor):
            found = tuple(tensor.shape), tensor.dtype, str(tensor.device)
        if found != wanted:
            raise ValueError(f"{name}: the plan was made for {wanted}, got {found}")


class ChunkedCall:
    """One call of `plan.chunked` on one rank: its keys, and what its chunks have added up so far.

    Every method is a collective of the ranks of the plan, which must call the same ones in the same
    order; chunks may come in any. Nothing here is differentiated: hand in detached tensors. Keys
    and values are held until the object goes; out and lse are the caller's to keep. A forward and
    its backward may belong to two objects, made of the same keys and values.
    """

    def __init__(
        self,
        job: Job,
        groups: Groups,
        identity: int,
        keys: Tensors,
        sink: torch.Tensor | None = None,
        label: object = None,
        max_logits: torch.Tensor | None = None,
        host: Host | None = None,
    ):
        self._groups, self._device, self._job = groups, keys[0].device.type, job
        self._shape, self._dtype = keys[0].shape, keys[0].dtype
        self._value_width = keys[1].shape[3]
        self._tag = groups.calls.forward(identity, label, sink is not None, host is not None)
        self._differentiated: set[int] = set()
        self._ended = False
        with groups.running(self._device):
            self._chunks = RowChunks(job, self._tag, keys, sink, max_logits, host=host)

    @torch.no_grad()
    def forward(
        self, c: int, q_c: torch.Tensor, stored: Tensors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [r, b, h, w] in the dtype of q, lse) of chunk c: of q_c = q[plan.row_chunks[c]].

        Raises ValueError for a chunk that is none, or queries of another shape.

        lse, in the accumulation dtype, is as the ring has it: [r, b, h], and where p ranks share
        heads [p r, b, h / p]. stored: what `kept` returned for this chunk, if it runs again.
        """
        self._check(c, q_c)
        with self._groups.running(self._device):
            return self._chunks.forward(c, q_c.contiguous(), stored)

    @torch.no_grad()
    def kept(self, c: int, out_c: torch.Tensor, lse_c: torch.Tensor) -> Tensors:
        """The results of chunk c that the plan's `store` keeps, for `forward(stored=)`."""
        return self._chunks.kept(c, out_c, lse_c)

    @torch.no_grad()
    def backward(
        self,
        c: int,
        q_c: torch.Tensor,
        out_c: torch.Tensor,
        lse_c: torch.Tensor,
        dout_c: torch.Tensor,
    ) -> torch.Tensor | None:
        """dq_c [r, b, h, d] of chunk c; dk, dv and dsink are added up here.

        q_c, out_c, lse_c: of `forward`; dout_c [r, b, h, w]. In the accumulation dtype, or in
        `grad_wire_dtype` where ranks share heads; None where q needs no gradient. ValueError as of
        `forward`, for results of other shapes, and for a chunk that had its backward. That results
        of the same shapes are those of this chunk is for the caller to see to.
        """
        self._check(c, q_c)
        self._check_results(c, out_c, lse_c, dout_c)
        if not self._differentiated:
            self._groups.calls.backward(self._tag)
        self._differentiated.add(c)
        with self._groups.running(self._device):
            return self._chunks.backward(c, q_c.contiguous(), out_c.contiguous(), lse_c, dout_c)

    @torch.no_grad()
    def gradients(self) -> Gradients:
        """(dk [s, b, k, d], dv [s, b, k, w], dsink [h]) after the last chunk, once; each None where
        it is not needed. dtypes as of `backward`. Raises ValueError the second time, and where a
        chunk had no backward.
        """
        self._groups.check()
        missing = sorted(set(range(len(self._job.chunks))) - self._differentiated)
        if missing and not self._ended:
            raise ValueError(
                f"gradients: chunks {missing} had no backward, so theirs would be missing; call "
                "`backward` for every chunk first"
            )
        self._check_open("gradients")
        self._ended = True
        with self._groups.running(self._device):
            return self._chunks.gradients()

    def _check_open(self, name: str) -> None:
        """Raise ValueError if the gradients were taken."""
        if self._ended:
            raise ValueError(
                f"{name}: the gradients of this call were taken; make another with `plan.chunked`"
            )

    def _check_results(
        self, c: int, out_c: torch.Tensor, lse_c: torch.Tensor, dout_c: torch.Tensor
    ) -> None:
        """Raise ValueError unless chunk c waits for its backward and these fit its queries."""
        self._check_open("backward")
        if c in self._differentiated:
            raise ValueError(f"backward: chunk {c} had its backward, which counts once")
        job, rows = self._job, self._job.chunks[c].rows
        count, ranks = self._shape[0] if rows is None else len(rows), len(job.ulysses_links)
        result = count, self._shape[1], job.heads, self._value_width
        stats = count * ranks, self._shape[1], job.heads // ranks
        given = {"out_c": (out_c, result), "lse_c": (lse_c, stats), "dout_c": (dout_c, result)}
        for name, (tensor, wanted) in given.items():
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)
            if got != wanted:
                raise ValueError(f"{name}: chunk {c} has {wanted}, got {got}")

    def _check(self, c: int, q_c: torch.Tensor) -> None:
        """Raise ValueError unless q_c are the queries of chunk c."""
        self._groups.check()
        job, shape = self._job, self._shape
        if not (isinstance(c, int) and 0 <= c < len(job.chunks)):
            raise ValueError(
                f"c must be a chunk of the plan, 0 to {len(job.chunks) - 1}, got {c!r}"
            )
        rows = job.chunks[c].rows
        wanted = shape[0] if rows is None else len(rows), shape[1], job.heads, shape[3]
        if not isinstance(q_c, torch.Tensor) or (q_c.shape, q_c.dtype) != (wanted, self._dtype):
            got = f"{tuple(q_c.shape)} {q_c.dtype}" if isinstance(q_c, torch.Tensor) else repr(q_c)
            raise ValueError(
                f"q_c: chunk {c} has queries {wanted} {self._dtype}, got {got}; take "
                f"q[plan.row_chunks[{c}]]"
            )
