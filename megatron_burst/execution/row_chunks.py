# SPDX-License-Identifier: Apache-2.0
"""Attention with queries in row chunks that are computed one after the other, on any ring.

Partial results and sent queries exist for only one row chunk at a time. The gradients of keys and
values are summed over all row chunks in one buffer. Each row chunk has its own passes, made by
`planning`. `RowChunkState` runs these passes. `forward` and `backward` use it for a call with all
rows. `RowChunkedCall` is for a layer that computes projection, attention and output projection one
row chunk at a time, without a complete q.

Source: FPDT (arXiv 2408.16978), section 4, which has head parallelism only.

Shape letters: s local rows, r rows of a row chunk, b batch, h query heads, k key/value heads, d
width, w value width; p ranks that share heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.groups import Groups
from ..comm.packing import CallTag
from ..kernels.base import Rows
from ..kernels.online_softmax import accumulation_dtype, row_delta, sink_gradient
from . import ring
from .host_keys import HostKeys, KeyHostMemory
from .key_sums import keys_to_owners
from .rank_plan import RankPlan, Tensors, rows_of
from .ulysses import heads_here, heads_to_rows, rows_to_heads

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class RowChunkState:
    """State of a call on one rank: the keys and values, and gradients summed over row chunks.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        keys: Contiguous k [s, b, k, d] and v [s, b, k, w]; with `exchanged`, the attribute `keys`
            of a `RowChunkState` that was made from these tensors.
        sink: Sink logits [h], or None.
        max_logits: [h], updated in place to the largest score of each head, or None.
        exchanged: True if ranks already exchanged the heads of `keys`.
        host: Host memory that keeps keys of other ranks between the forwards of row chunks. If
            None, the forward of every row chunk receives these keys again.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        call: CallTag,
        keys: Tensors,
        sink: torch.Tensor | None = None,
        max_logits: torch.Tensor | None = None,
        exchanged: bool = False,
        host: KeyHostMemory | None = None,
    ):
        self.rank_plan, self.call = rank_plan, call
        self._host_keys = None if host is None else HostKeys(host)
        name = f"{rank_plan.forward.name}: keys"
        orders = (rank_plan.key_order,) * 2
        self.keys = keys if exchanged else heads_to_rows(rank_plan, call, name, keys, orders)
        self.sink, self.max_logits = (
            None if x is None else x[heads_here(rank_plan)] for x in (sink, max_logits)
        )
        self._sums: list[Tensors] = []  # per head chunk: dk and dv, each only if needed
        self._dsink: torch.Tensor | None = None

    def forward(
        self, index: int, q: torch.Tensor, stored: Tensors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention output of a row chunk.

        Args:
            index: Number of the row chunk.
            q: Queries of the row chunk, [r, b, h, d].
            stored: Result of `kept` for this row chunk; only rows without a stored result are
                computed. None computes all rows.

        Returns:
            out [r, b, h, w] in the dtype of q; lse [p r, b, h / p] in the accumulation dtype, with
            the rows of the p ranks that share heads, and this rank's heads.
        """
        rank_plan, chunk = self.rank_plan, self.rank_plan.chunks[index]
        rank_pass, recompute = chunk.forward, chunk.recompute
        if self._host_keys is not None:
            assert chunk.host_forward is not None
            rank_pass = chunk.host_forward
        (queries,) = heads_to_rows(rank_plan, self.call, rank_pass.name, (q,), (chunk.order,))
        if stored is None:
            rings = self._rings(rank_pass, queries)
            if self._host_keys is not None:
                self._host_keys.provide(rings)
        else:
            assert recompute is not None
            rings = self._rings(recompute.forward, rows_of(queries, recompute.missing))
        ring.run(rings)
        out, lse = ring.outputs(rings, q.dtype, self.sink)
        if stored is None and self._host_keys is not None:
            self._host_keys.finish()
        if stored is not None:
            assert recompute is not None
            ring_out = out.new_zeros((len(queries), *out.shape[1:]))
            out = ring_out.index_copy_(0, recompute.missing, out)
        (out,) = rows_to_heads(
            rank_plan,
            self.call,
            rank_pass.name,
            (out,),
            (rank_plan.heads,),
            out.dtype,
            (chunk.order,),
        )
        assert out is not None
        if stored is not None:
            assert recompute is not None
            out.index_copy_(0, recompute.own_kept, stored[0].detach())
            lse = recompute.all_rows(stored[1], lse)
        return out, lse

    def _rings(self, rank_pass: ring.RankPass, queries: torch.Tensor) -> list[ring.Ring]:
        tensors = queries, self.keys, self.max_logits
        return ring.forward_rings(self.rank_plan, rank_pass, self.call, *tensors)

    def kept(self, index: int, out: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """Return out and lse of the rows of a row chunk that the attention store keeps.

        Args:
            index: Number of the row chunk.
            out: [r, b, h, w], from `forward`.
            lse: From `forward`.

        Raises:
            ValueError: The plan keeps no results.
        """
        recompute = self.rank_plan.chunks[index].recompute
        if recompute is None:
            raise ValueError(
                "plan.chunked: kept() requires a plan that keeps results; make it with "
                "mb.prepare(..., store=0.5), or recompute every row chunk completely"
            )
        return out.index_select(0, recompute.own_kept), lse.index_select(0, recompute.kept)

    def backward(
        self,
        index: int,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute dq of a row chunk, and add its contributions to dk, dv and dsink.

        Args:
            index: Number of the row chunk.
            q: Contiguous queries of the row chunk, [r, b, h, d].
            out: Contiguous output of the row chunk, [r, b, h, w].
            lse: From `forward`.
            dout: Gradient of the output, [r, b, h, w].

        Returns:
            dq [r, b, h, d] in the accumulation dtype, or in the wire dtype if ranks share heads;
            None if q needs no gradient.
        """
        rank_plan, rank_pass = self.rank_plan, self.rank_plan.chunks[index].backward
        shared = len(rank_plan.ulysses_links) > 1
        dout = dout.contiguous()
        delta = row_delta(dout, out, lse.dtype)
        rows = Rows(q, dout, lse, delta, out)
        if shared:  # delta replaces out, which is not sent
            orders = (rank_plan.chunks[index].order,) * 3
            q, dout, delta = heads_to_rows(
                rank_plan, self.call, rank_pass.name, (q, dout, delta), orders
            )
            rows = Rows(q, dout, lse, delta)
        if self.sink is not None:
            gradient = sink_gradient(self.sink, lse, delta)
            self._dsink = gradient if self._dsink is None else self._dsink + gradient
        rings = ring.backward_rings(rank_plan, rank_pass, self.call, rows, self.keys)
        self._sums = self._sums or self._zeros()
        for head_ring, sums in zip(rings, self._sums, strict=True):
            head_ring.partials.begin(rank_pass.totals["dkv", rank_plan.ring.rank], sums)
        ring.run(rings)
        dq = ring.gradients(rings, (rank_plan.needs_grad[0], False, False))[0]
        if dq is not None and shared:
            dq = dq.to(rank_plan.wire_dtype)
            orders, heads = (rank_plan.chunks[index].order,), (rank_plan.heads,)
            (dq,) = rows_to_heads(
                rank_plan, self.call, rank_pass.name, (dq,), heads, lse.dtype, orders
            )
        return dq

    def gradients(self) -> Gradients:
        """Return the gradients of keys, values and sink. Call it once, after the last row chunk.

        Returns:
            dk [s, b, k, d], dv [s, b, k, w] and dsink [h]; None for a gradient that is not needed.
            dsink has the accumulation dtype. dk and dv have the wire dtype if ranks share heads,
            otherwise the accumulation dtype.
        """
        rank_plan = self.rank_plan
        sums, self._sums = self._sums or self._zeros(), []
        gradients = ring.key_gradients(sums, rank_plan.needs_grad[1:])
        del sums
        name, dtype = f"{rank_plan.backward.name}: keys", accumulation_dtype(self.keys[0].dtype)
        dk, dv = keys_to_owners(rank_plan, self.call, name, gradients, dtype)
        dsink = None
        if self._dsink is not None:
            dsink = self._dsink.new_zeros(rank_plan.heads)
            dsink[heads_here(rank_plan)] = self._dsink
        return dk, dv, dsink

    def _zeros(self) -> list[Tensors]:
        """Return tensors of zeros for the sums of dk and dv, one tuple per head chunk.

        A gradient that is not needed is omitted.
        """
        needed = [
            t for t, needs in zip(self.keys, self.rank_plan.needs_grad[1:], strict=True) if needs
        ]
        dtype, sums = accumulation_dtype(self.keys[0].dtype), []
        for part in ring.head_chunks(self.rank_plan, 0, self.keys[0].shape[2]):
            shapes = [t[:, :, part.kv_heads].shape for t in needed]
            device = self.keys[0].device
            sums.append(tuple(torch.zeros(s, dtype=dtype, device=device) for s in shapes))
        return sums


# --- all chunks of a call that has all rows at once ---------------------------------------------


def forward(
    rank_plan: RankPlan,
    call: CallTag,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: Tensors | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """Compute the attention output of all row chunks, one after the other.

    Arguments and results are the same as in `function.forward`, but lse has the row chunks one
    after the other.
    """
    q, k, v = shard
    chunks = RowChunkState(rank_plan, call, (k, v), sink, max_logits)
    out, lses = q.new_empty((*q.shape[:3], v.shape[3])), []
    stored_of = _stored_by_chunk(rank_plan, stored)
    for index, chunk in enumerate(rank_plan.chunks):
        part, lse = chunks.forward(index, _rows_of_chunk(q, chunk.rows), stored_of(index))
        _put(out, chunk.rows, part)
        lses.append(lse)
    return out, (q, *chunks.keys, out, torch.cat(lses))


def backward(
    rank_plan: RankPlan,
    call: CallTag,
    dout: torch.Tensor,
    saved: Tensors,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Compute the gradients of all row chunks, one after the other.

    Arguments and results are the same as in `function.backward`, but dq has the dtype of q.
    """
    q, k, v, out, lse = saved
    chunks = RowChunkState(rank_plan, call, (k, v), sink, exchanged=True)
    dq = torch.empty_like(q) if rank_plan.needs_grad[0] else None
    for index, (chunk, stats) in enumerate(
        zip(rank_plan.chunks, _by_chunk(rank_plan, lse, q), strict=True)
    ):
        q_c, out_c, dout_c = (_rows_of_chunk(x, chunk.rows) for x in (q, out, dout))
        part = chunks.backward(index, q_c, out_c, stats, dout_c)
        if dq is not None and part is not None:
            _put(dq, chunk.rows, part.to(q.dtype))
    return dq, *chunks.gradients()


def rows_to_keep(rank_plan: RankPlan, saved: Tensors) -> Tensors:
    """Return out and lse of the rows that the attention store keeps, ordered by row chunk."""
    out, lse = (t.detach() for t in saved[3:5])
    kept = []
    for chunk, stats in zip(rank_plan.chunks, _by_chunk(rank_plan, lse, out), strict=True):
        assert chunk.recompute is not None
        rows = _rows_of_chunk(out, chunk.rows).index_select(0, chunk.recompute.own_kept)
        kept.append((rows, stats.index_select(0, chunk.recompute.kept)))
    outs, stats = zip(*kept, strict=True)
    return torch.cat(outs), torch.cat(stats)


def _stored_by_chunk(
    rank_plan: RankPlan, stored: Tensors | None
) -> Callable[[int], Tensors | None]:
    if stored is None:
        return lambda index: None
    recomputes = [chunk.recompute for chunk in rank_plan.chunks if chunk.recompute is not None]
    lengths = (
        [len(length.own_kept) for length in recomputes],
        [len(length.kept) for length in recomputes],
    )
    parts = [t.split(length) for t, length in zip(stored, lengths, strict=True)]
    return lambda index: (parts[0][index], parts[1][index])


def _by_chunk(
    rank_plan: RankPlan, lse: torch.Tensor, all_rows: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Split lse into one tensor per row chunk.

    Args:
        rank_plan: Plan of this rank.
        lse: lse of all row chunks, one after the other. Each row chunk has the rows of all ranks
            that share heads.
        all_rows: A tensor whose length is the number of rows of this rank.
    """
    rows = [len(all_rows) if chunk.rows is None else len(chunk.rows) for chunk in rank_plan.chunks]
    return lse.split([len(rank_plan.ulysses_links) * count for count in rows])


def _rows_of_chunk(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return a contiguous tensor with the rows of x at the indices `rows`; None: all rows."""
    return x.contiguous() if rows is None else x.index_select(0, rows)


def _put(all_rows: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor) -> None:
    if rows is None:
        all_rows.copy_(part)
    else:
        all_rows.index_copy_(0, rows, part)


# --- a call whose caller passes one row chunk of queries at a time ------------------------------


def check_keys(k: torch.Tensor, v: torch.Tensor, made_for_k: object, made_for_v: object) -> None:
    """Check that k and v fit the plan.

    Args:
        k: Keys of this rank.
        v: Values of this rank.
        made_for_k: (shape, dtype, device) of k in the plan.
        made_for_v: (shape, dtype, device) of v in the plan.

    Raises:
        ValueError: k or v has another shape, dtype or device.
    """
    for name, tensor, expected in (("k", k, made_for_k), ("v", v, made_for_v)):
        actual: object = f"{tensor!r:.100}"
        if isinstance(tensor, torch.Tensor):
            actual = tuple(tensor.shape), tensor.dtype, str(tensor.device)
        if actual != expected:
            raise ValueError(
                f"{name}: the plan was made for {expected}, got {actual}; call mb.prepare for "
                "these tensors"
            )


class RowChunkedCall:
    """A call of attention with one row chunk of queries at a time; made by `Plan.chunked`.

    Every method is a collective call: all ranks of the plan call the same methods in the same
    order. Row chunks may be computed in any order. Autograd does not record the methods, so pass
    detached tensors. The object keeps a reference to keys and values. The caller must keep out and
    lse. Backward may use another `RowChunkedCall` than forward, made from the same keys and values.

    Args:
        rank_plan: Plan of this rank.
        groups: Groups of the plan.
        identity: Digest of the plan.
        keys: Contiguous, detached k [s, b, k, d] and v [s, b, k, w].
        sink: Detached sink [h], or None.
        label: Same as in `mb.attention`.
        max_logits: [h], updated in place to the largest score of each head, or None.
        host: Host memory for keys, or None.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        groups: Groups,
        identity: int,
        keys: Tensors,
        sink: torch.Tensor | None = None,
        label: object = None,
        max_logits: torch.Tensor | None = None,
        host: KeyHostMemory | None = None,
    ):
        self._groups, self._device, self._job = groups, keys[0].device.type, rank_plan
        self._shape, self._dtype = keys[0].shape, keys[0].dtype
        self._value_width = keys[1].shape[3]
        self._tag = groups.calls.forward(identity, label, sink is not None, host is not None)
        self._differentiated: set[int] = set()
        self._ended = False
        with groups.running(self._device):
            self._chunks = RowChunkState(rank_plan, self._tag, keys, sink, max_logits, host=host)

    @torch.no_grad()
    def forward(
        self, c: int, q_c: torch.Tensor, stored: Tensors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention output of row chunk `c`.

        Args:
            c: Number of the row chunk.
            q_c: Queries of the row chunk, q[plan.row_chunks[c]], [r, b, h, d].
            stored: Result of `kept` for this row chunk, in a recomputation; otherwise None.

        Returns:
            out [r, b, h, w] in the dtype of q, and lse in the accumulation dtype: [r, b, h], or [p
            r, b, h / p] if p ranks share heads.

        Raises:
            ValueError: There is no such row chunk, or q_c has another shape or dtype.
        """
        self._check(c, q_c)
        with self._groups.running(self._device):
            return self._chunks.forward(c, q_c.contiguous(), stored)

    @torch.no_grad()
    def kept(self, c: int, out_c: torch.Tensor, lse_c: torch.Tensor) -> Tensors:
        """Return out and lse of the rows of a row chunk that the plan's `store` keeps.

        Args:
            c: Number of the row chunk.
            out_c: Output from `forward`.
            lse_c: lse from `forward`.

        Returns:
            Copies of out and lse, for the argument `stored` of `forward` in a recomputation.

        Raises:
            ValueError: The plan keeps no results.
        """
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
        """Compute dq of row chunk `c`, and add its contributions to dk, dv and dsink.

        Only shapes are checked: `out_c` and `lse_c` must be the results for this row chunk.

        Args:
            c: Number of the row chunk.
            q_c: Queries, as passed to `forward`.
            out_c: Output from `forward`.
            lse_c: lse from `forward`.
            dout_c: Gradient of the output, [r, b, h, w].

        Returns:
            dq [r, b, h, d] in the accumulation dtype, or in `grad_wire_dtype` if ranks share heads;
            None if q needs no gradient.

        Raises:
            ValueError: There is no such row chunk, its backward was already called, or a tensor has
                another shape.
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
        """Return the gradients of keys, values and sink. Call it once, after the last row chunk.

        Returns:
            dk [s, b, k, d], dv [s, b, k, w] and dsink [h], with dtypes as in `backward`; None for a
            gradient that is not needed.

        Raises:
            ValueError: `gradients` was already called, or backward of a row chunk is missing.
        """
        self._groups.check()
        missing = sorted(set(range(len(self._job.chunks))) - self._differentiated)
        if missing and not self._ended:
            raise ValueError(
                f"gradients: backward was not called for row chunks {missing}; call `backward` "
                "for every row chunk first"
            )
        self._check_open("gradients")
        self._ended = True
        with self._groups.running(self._device):
            return self._chunks.gradients()

    def _check_open(self, name: str) -> None:
        if self._ended:
            raise ValueError(
                f"{name}: gradients() was called before, which ends a row-chunked call; start a "
                "new one with `plan.chunked`"
            )

    def _check_results(
        self, c: int, out_c: torch.Tensor, lse_c: torch.Tensor, dout_c: torch.Tensor
    ) -> None:
        """Raise ValueError if backward was already called for row chunk c, or a shape is wrong."""
        self._check_open("backward")
        if c in self._differentiated:
            raise ValueError(
                f"backward was already called for row chunk {c}; call it once per row chunk"
            )
        rank_plan, rows = self._job, self._job.chunks[c].rows
        count, ranks = self._shape[0] if rows is None else len(rows), len(rank_plan.ulysses_links)
        result = count, self._shape[1], rank_plan.heads, self._value_width
        stats = count * ranks, self._shape[1], rank_plan.heads // ranks
        shapes = {"out_c": (out_c, result), "lse_c": (lse_c, stats), "dout_c": (dout_c, result)}
        for name, (tensor, expected) in shapes.items():
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)
            if got != expected:
                raise ValueError(f"{name} of row chunk {c} must have shape {expected}, got {got}")

    def _check(self, c: int, q_c: torch.Tensor) -> None:
        """Raise ValueError unless q_c has the shape and dtype of the queries of row chunk c."""
        self._groups.check()
        rank_plan, shape = self._job, self._shape
        if not (isinstance(c, int) and 0 <= c < len(rank_plan.chunks)):
            raise ValueError(
                f"c must be a row chunk of the plan, 0 to {len(rank_plan.chunks) - 1}, got {c!r}"
            )
        rows = rank_plan.chunks[c].rows
        expected = shape[0] if rows is None else len(rows), shape[1], rank_plan.heads, shape[3]
        if not isinstance(q_c, torch.Tensor) or (q_c.shape, q_c.dtype) != (expected, self._dtype):
            got = f"{tuple(q_c.shape)} {q_c.dtype}" if isinstance(q_c, torch.Tensor) else repr(q_c)
            raise ValueError(
                f"q_c of row chunk {c} must be {expected} {self._dtype}, got {got}; use "
                f"q[plan.row_chunks[{c}]]"
            )
