# SPDX-License-Identifier: Apache-2.0
"""One softmax over several sets of keys, as one autograd function.

Each set of keys has its own ring, and all rings merge into the same outputs and log-sum-exps. In
backward, the ring of each set uses the log-sum-exp and the output over all sets. Therefore each
ring computes the gradients of the joint softmax.

Shape letters: s local query rows, t local key rows, b batch, h query heads, k key/value heads, d
width, w value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from ..kernels.autograd import first_order_only
from ..kernels.base import Rows
from ..kernels.online_softmax import row_delta, sink_gradient
from . import ring
from .function import RankCall
from .key_sums import keys_to_owners
from .rank_plan import Tensors
from .ulysses import heads_here, heads_to_rows, rows_to_heads

Keys = Sequence[Tensors]


def forward(
    calls: Sequence[RankCall],
    q: torch.Tensor,
    keys: Keys,
    sink: torch.Tensor | None,
    stored: Tensors | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor], list[Tensors]]:
    """Compute the attention output of one rank over all sets of keys.

    Args:
        calls: One call per set of keys.
        q: Contiguous queries [s, b, h, d].
        keys: Contiguous k [t, b, k, d] and v [t, b, k, w] of each set, or k alone if values are the
            keys.
        sink: Sink logits [h], which are added to the softmax of every row; or None.
        stored: out and lse of the first forward, if this is a recomputation; otherwise None.

    Returns:
        out [s, b, h, w]. Then the tensors that backward needs: q, out and lse, and k and v of each
        set. If ranks share heads, the tensors for backward have the rows of all ranks that share
        heads, and this rank's heads.
    """
    first, first_tag, max_logits = calls[0].rank_plan, calls[0].tag, calls[0].max_logits
    order, name = first.chunks[0].order, first.forward.name
    if len(first.ulysses_links) > 1:
        (q,) = heads_to_rows(first, first_tag, f"{name}: queries", (q,), (order,))
        sink, max_logits = (None if x is None else x[heads_here(first)] for x in (sink, max_logits))
    sums: list[Tensors] = []  # out and lse of each head chunk
    rings: list[ring.Ring] = []
    ring_keys = []
    for call, key_set in zip(calls, keys, strict=True):
        rank_plan, rank_pass = call.rank_plan, call.rank_plan.forward
        orders = (rank_plan.key_order,) * len(key_set)
        key_set = heads_to_rows(rank_plan, call.tag, f"{rank_pass.name}: keys", key_set, orders)
        ring_keys.append(key_set)
        if stored is None:
            rings = ring.forward_rings(rank_plan, rank_pass, call.tag, q, key_set, max_logits)
            sums = _accumulate(rings, "out", sums)
    if stored is None:
        out, lse = ring.outputs(rings, q.dtype, sink)
    else:
        out, lse = (t.detach() for t in stored)  # autograd sets the history of a returned tensor
    full_out = out
    if len(first.ulysses_links) > 1:
        (full_out,) = rows_to_heads(
            first, first_tag, name, (out,), (first.heads,), out.dtype, (order,)
        )
        assert full_out is not None
    return full_out, (q, out, lse), ring_keys


def _accumulate(rings: Sequence[ring.Ring], family: str, sums: Sequence[Tensors]) -> list[Tensors]:
    """Run the rings of one set of keys, starting from `sums`; return the new sums.

    Args:
        rings: Rings of all head chunks.
        family: Partial results that are summed over the sets of keys, "out" or "dquery".
        sums: Sums over the earlier sets of keys, one tuple per head chunk; empty for the first set.
    """
    if sums and len(sums) != len(rings):  # the sets have different numbers of head chunks
        whole = [ring.join(parts) for parts in zip(*sums, strict=True)]
        sums = [
            tuple(x[:, :, head_ring.heads.heads].contiguous() for x in whole) for head_ring in rings
        ]
    for head_ring, parts in zip(rings, sums, strict=bool(sums)):
        head_ring.partials.begin(head_ring.rank_pass.totals[family, head_ring.me], parts)
    ring.run(rings)
    return _sums_of(rings, family)


def _sums_of(rings: Sequence[ring.Ring], family: str) -> list[Tensors]:
    """Return the partial results of a family for this rank's own rows, one tuple per head chunk."""
    return [
        head_ring.partials.total_rows(head_ring.rank_pass.totals[family, head_ring.me])
        for head_ring in rings
    ]


def backward(
    calls: Sequence[RankCall],
    dout: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ring_keys: Keys,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], torch.Tensor | None]:
    """Compute the gradients of one rank.

    Args:
        calls: One call per set of keys.
        dout: Gradient of the output, [s, b, h, w].
        saved: q, out and lse that `forward` returned.
        ring_keys: k and v (or k alone) of each set of keys, as `forward` returned them.
        sink: Sink logits [h] of the forward, or None.

    Returns:
        dq; a list with dk and dv of the first set, then of the next set, and so on; dsink [h]. None
        for a gradient that is not needed.
    """
    first = calls[0].rank_plan
    (q, out, lse), order = saved, first.chunks[0].order
    shared = len(first.ulysses_links) > 1
    if shared:
        name = f"{first.backward.name}: output"
        (dout,) = heads_to_rows(first, calls[0].tag, name, (dout,), (order,))
    delta = row_delta(dout, out, lse.dtype)
    rows = Rows(q, dout.contiguous(), lse, delta, out)
    sums: list[Tensors] = []  # dq of each head chunk
    key_gradients: list[torch.Tensor | None] = []
    for call, key_set in zip(calls, ring_keys, strict=True):
        rank_plan, rank_pass = call.rank_plan, call.rank_plan.backward
        rings = ring.backward_rings(rank_plan, rank_pass, call.tag, rows, key_set)
        sums = _accumulate(rings, "dquery", sums)
        dkv = ring.key_gradients(_sums_of(rings, "dkv"), rank_plan.needs_grad[1 : 1 + len(key_set)])
        name = f"{rank_pass.name}: keys"
        key_gradients += keys_to_owners(rank_plan, call.tag, name, dkv, lse.dtype)
    dq = ring.join([part for (part,) in sums]) if first.needs_grad[0] else None
    if shared and dq is not None:
        name, heads = first.backward.name, (first.heads,)
        wire = (dq.to(first.wire_dtype),)
        (dq,) = rows_to_heads(first, calls[0].tag, name, wire, heads, lse.dtype, (order,))
    dsink = None
    if sink is not None:
        own = heads_here(first)
        dsink = torch.zeros(first.heads, dtype=lse.dtype, device=lse.device)
        dsink[own] = sink_gradient(sink[own], lse, delta)
    return dq, key_gradients, dsink


def _by_set(calls: Sequence[RankCall], tensors: Sequence[torch.Tensor]) -> list[Tensors]:
    """Return k and v, or k alone if values are the keys, of each set of keys."""
    remaining = iter(tensors)
    return [tuple(islice(remaining, 2 - call.rank_plan.values_are_keys)) for call in calls]


class JointAttention(torch.autograd.Function):
    """Autograd function for the joint attention of this rank; forward and backward communicate.

    Inputs are a `RankCall` per set of keys, the sink [h] or None, q, and then k and v of each set,
    or k alone if values are the keys. The output is out, or (out, lse) if the first call has
    `return_lse`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        calls: Sequence[RankCall],
        sink: torch.Tensor | None,
        q: torch.Tensor,
        *keys: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        first = calls[0]
        key_sets = _by_set(calls, [t.contiguous() for t in keys])
        stored = None if first.store_entry is None else first.store_entry.load()
        with first.groups.running(q.device.type):
            out, saved, ring_keys = forward(calls, q.contiguous(), key_sets, sink, stored)
        if first.store_entry is not None and stored is None:
            first.store_entry.save(tuple(t.detach() for t in saved[1:]))
        ctx.calls, ctx.operation = calls, first.operation
        ctx.save_for_backward(sink, *saved, *(t for key_set in ring_keys for t in key_set))
        if not first.return_lse:
            return out
        ctx.mark_non_differentiable(saved[2])
        return out, saved[2]

    @staticmethod
    @first_order_only()
    def backward(ctx: Any, dout: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sink, q, out, lse, *keys = ctx.saved_tensors
        groups = ctx.calls[0].groups
        groups.check()
        for call in ctx.calls:
            groups.calls.backward(call.tag)
        key_sets = _by_set(ctx.calls, keys)
        with groups.running(dout.device.type):
            dq, dkv, dsink = backward(ctx.calls, dout, (q, out, lse), key_sets, sink)
        _, sink_needed, *needed = ctx.needs_input_grad
        gradients = [
            None if gradient is None or not needs else gradient.to(q.dtype)
            for gradient, needs in zip((dq, *dkv), needed, strict=True)
        ]
        return None, dsink.to(sink.dtype) if sink_needed and dsink is not None else None, *gradients
