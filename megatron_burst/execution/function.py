# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank as one autograd function.

`forward` and `backward` are plain functions of tensors for one rank: exchange heads, run the ring,
exchange heads back. The autograd function saves tensors for backward. The autograd function also
stores and loads the results that a checkpoint keeps.

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
from .key_sums import summed_over_ranks
from .rank_plan import RankPlan, Tensors, rows_of
from .ulysses import heads_here, heads_to_rows, rows_to_heads

Gradients = tuple[torch.Tensor | None, ...]


# --- one rank -----------------------------------------------------------------------------------


def forward(
    rank_plan: RankPlan,
    call: CallTag,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: Tensors | None,
    max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """Compute the attention output of one rank.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        shard: Contiguous q [s, b, h, d], k [s, b, k, d] and, unless values are the keys, v
            [s, b, k, w].
        sink: Sink logits [h], which are added to the softmax of every row; or None.
        stored: out and lse of the kept rows from the first forward, if this is a recomputation;
            otherwise None.
        max_logits: [h] or None. Updated in place to the largest score of each head that this rank's
            ring computes.

    Returns:
        out [s, b, h, w], and the tensors that backward needs: `shard`, out and lse. If ranks share
        heads, the tensors for backward have the rows of all ranks that share heads, and this rank's
        heads.
    """
    chunk, shared = rank_plan.chunks[0], len(rank_plan.ulysses_links) > 1
    if len(rank_plan.chunks) > 1:
        return row_chunks.forward(rank_plan, call, shard, sink, stored, max_logits)
    rank_pass, recompute = chunk.forward, chunk.recompute
    if shared:
        orders = chunk.order, *(rank_plan.key_order,) * (len(shard) - 1)
        shard = heads_to_rows(rank_plan, call, rank_pass.name, shard, orders)
        sink, max_logits = (
            None if x is None else x[heads_here(rank_plan)] for x in (sink, max_logits)
        )
    q, *keys = shard
    if stored is None:
        rings = ring.forward_rings(rank_plan, rank_pass, call, q, tuple(keys), max_logits)
    else:
        assert recompute is not None
        missing_q = rows_of(q, recompute.missing)
        rings = ring.forward_rings(
            rank_plan, recompute.forward, call, missing_q, tuple(keys), max_logits
        )
    ring.run(rings)
    out, lse = ring.outputs(rings, q.dtype, sink)
    if stored is not None:
        assert recompute is not None
        out, lse = recompute.all_rows(stored[0], out), recompute.all_rows(stored[1], lse)
    full_out = out
    if shared:
        (full_out,) = rows_to_heads(
            rank_plan, call, rank_pass.name, (out,), (rank_plan.heads,), out.dtype, (chunk.order,)
        )
        assert full_out is not None
    return full_out, (q, *keys, out, lse)


def backward(
    rank_plan: RankPlan,
    call: CallTag,
    dout: torch.Tensor,
    saved: Tensors,
    sink: torch.Tensor | None,
) -> Gradients:
    """Compute the gradients of one rank.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        dout: Gradient of the output, [s, b, h, w].
        saved: Tensors that `forward` returned for backward.
        sink: Sink logits [h] of the forward, or None.

    Returns:
        dq, dk, dv (unless values are the keys) and dsink [h]; None for a gradient that is not
        needed. Gradients have the accumulation dtype. With ulysses, dq has the wire dtype instead,
        and so do dk and dv if no key head is copied to several ranks.
    """
    chunk, shared = rank_plan.chunks[0], len(rank_plan.ulysses_links) > 1
    rank_pass = chunk.backward
    if len(rank_plan.chunks) > 1:
        return row_chunks.backward(rank_plan, call, dout, saved, sink)
    q, *keys, out, lse = saved
    if shared:
        (dout,) = heads_to_rows(rank_plan, call, rank_pass.name, (dout,), (chunk.order,))
    delta = row_delta(dout, out, lse.dtype)
    rows = Rows(q, dout.contiguous(), lse, delta, out)
    rings = ring.backward_rings(rank_plan, rank_pass, call, rows, tuple(keys))
    ring.run(rings)
    grads = ring.gradients(rings, rank_plan.needs_grad[: 1 + len(keys)])
    if shared:
        wire_grads = [None if g is None else g.to(rank_plan.wire_dtype) for g in grads]
        heads = rank_plan.heads, *(rank_plan.kv_heads,) * len(keys)
        orders = chunk.order, *(rank_plan.key_order,) * len(keys)
        grads = rows_to_heads(rank_plan, call, rank_pass.name, wire_grads, heads, lse.dtype, orders)
    if rank_plan.key_sum is not None:
        dq, *dkv = grads
        grads = dq, *summed_over_ranks(rank_plan, rank_plan.key_sum, call, rank_pass.name, dkv)
    dsink = None
    if sink is not None:
        own_heads = slice(None)
        if shared:
            own_heads = heads_here(rank_plan)
        dsink = torch.zeros(rank_plan.heads, dtype=lse.dtype, device=lse.device)
        dsink[own_heads] = sink_gradient(sink[own_heads], lse, delta)
    return *grads, dsink


def rows_to_keep(rank_plan: RankPlan, saved: Tensors) -> Tensors:
    """Return out and lse of the rows that the store keeps.

    Args:
        rank_plan: Plan of this rank.
        saved: Tensors that `forward` returned for backward.
    """
    if len(rank_plan.chunks) > 1:
        return row_chunks.rows_to_keep(rank_plan, saved)
    recompute = next(iter(rank_plan.chunks)).recompute
    assert recompute is not None
    return tuple(rows_of(t.detach(), recompute.kept) for t in saved[-2:])


# --- autograd -----------------------------------------------------------------------------------


class ResultStore(Protocol):
    """Store that keeps out and lse of some rows between the first forward and its recomputation."""

    @property
    def filled(self) -> bool: ...

    def put(self, key: object, tensors: Tensors) -> None: ...

    def get(self, key: object) -> Tensors: ...


@dataclass(frozen=True)
class StoredResults:
    """Entry of one call in a result store.

    Attributes:
        store: The store.
        key: Identifier of the call in the store.
    """

    store: ResultStore
    key: object

    def load(self) -> Tensors | None:
        """Return the results of the first forward; None if this is the first forward."""
        return self.store.get(self.key) if self.store.filled else None

    def save(self, results: Tensors) -> None:
        """Keep the results of the first forward."""
        self.store.put(self.key, results)


@dataclass(frozen=True)
class RankCall:
    """A call of attention on this rank.

    Attributes:
        operation: Public name of the called function, for errors.
        groups: Groups of the plan.
        rank_plan: Plan of this rank.
        tag: Tag of the call; messages on the CPU contain it.
        store_entry: Entry in the store of the enclosing checkpoint, or None.
        recompute_plan: Plan of the recomputation; None means `rank_plan`. It differs if the kernel
            depends on the query rows and the recomputed rows need another kernel.
        max_logits: [h], updated in place as in `forward`, or None.
        return_lse: True to return lse too. Autograd treats lse as not differentiable.
    """

    operation: str
    groups: Groups
    rank_plan: RankPlan
    tag: CallTag
    store_entry: StoredResults | None
    recompute_plan: RankPlan | None = None
    max_logits: torch.Tensor | None = None
    return_lse: bool = False


class Attention(torch.autograd.Function):
    """Autograd function for the attention of this rank; forward and backward communicate.

    Inputs are a `RankCall`, the sink [h] or None, q, k and, unless values are the keys, v. The
    output is out, or (out, lse) with `return_lse`.
    """

    @staticmethod
    def forward(
        ctx: Any, call: RankCall, sink: torch.Tensor | None, *shard: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        qkv = tuple(t.contiguous() for t in shard)
        stored = None if call.store_entry is None else call.store_entry.load()
        rank_plan = call.rank_plan if stored is None else call.recompute_plan or call.rank_plan
        with call.groups.running(qkv[0].device.type):
            out, saved = forward(rank_plan, call.tag, qkv, sink, stored, call.max_logits)
        if call.store_entry is not None and stored is None:
            call.store_entry.save(rows_to_keep(rank_plan, saved))
        ctx.operation, ctx.rank_plan, ctx.groups = call.operation, call.rank_plan, call.groups
        ctx.tag, ctx.dtype = call.tag, qkv[0].dtype
        ctx.save_for_backward(sink, *saved)
        if not call.return_lse:
            return out
        ctx.mark_non_differentiable(saved[-1])
        return out, saved[-1]

    @staticmethod
    @first_order_only()
    def backward(ctx: Any, dout: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sink, *saved = ctx.saved_tensors
        ctx.groups.check()
        ctx.groups.calls.backward(ctx.tag)
        with ctx.groups.running(dout.device.type):
            *grads, dsink = backward(ctx.rank_plan, ctx.tag, dout, tuple(saved), sink)
        _, sink_needed, *needed = ctx.needs_input_grad
        if dsink is not None:
            dsink = dsink.to(sink.dtype) if sink_needed else None
        for i, grad in enumerate(grads):
            grads[i] = None if grad is None or not needed[i] else grad.to(ctx.dtype)
        return None, dsink, *grads
