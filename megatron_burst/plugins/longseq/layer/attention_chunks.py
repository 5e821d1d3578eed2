# SPDX-License-Identifier: Apache-2.0
"""The attention half of a transformer layer in chunks of rows, as one autograd function.

Between input norm and residual a layer has a dozen tensors as long as its rows; here only those of
one chunk exist at a time, besides keys and values, which every chunk of queries needs. Forward runs
each chunk as far as its keys and values, then each chunk whole. Backward runs each chunk again,
first for what came through its queries, then for what came through its keys and values, whose
gradients are complete only after the last chunk. Results of core attention and their log-sum-exp
are kept, so that no attention is computed twice. Source: FPDT (arXiv 2408.16978), section 4, there
with head parallelism and for one model.

Shape letters: s rows of this rank's shard, r of a chunk, t tensor-parallel ranks that share rows,
b batch, h query heads, g key/value heads, d width, w value width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....execution.function import StoredResults
from ....execution.host_keys import KeyHostMemory
from ....execution.rank_plan import Tensors
from ....execution.row_chunks import RowChunkedCall
from ....kernels.autograd import first_order_only
from ....megatron.attention.core_attention import AttentionCall
from ..tiles import ParameterSums
from .attention_rows import AttentionHalf, ChunkRows

Result = tuple[torch.Tensor, torch.Tensor]  # out [t r, b, h, w] and lse of a chunk


@dataclass(frozen=True)
class ChunkedHalf:
    """One run of an attention half: what forward and backward share, besides tensors.

    kept: where a checkpoint around the layer leaves or finds results. parameters: of the half, in
    the order in which their gradients are returned. host: memory for keys of other ranks between
    the chunks of a forward; None: they are received for every chunk.
    """

    half: AttentionHalf
    call: AttentionCall
    kept: StoredResults | None
    parameters: Sequence[torch.Tensor]
    host: KeyHostMemory | None = None

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s / t, b, H] -> [s / t, b, H], differentiable."""
        trained = hidden.requires_grad or bool(self.parameters)
        saves = torch.is_grad_enabled() and trained
        out: Any = _Half.apply(self, saves, hidden, self.call.sink, *self.parameters)
        return out

    def forward(self, hidden: torch.Tensor, saves: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output, and of every chunk what holds its results until backward (`_held`)."""
        half, plan, kept = self.half, self.call.plan, self.kept
        rows, ring = half.rows(plan), None
        again = kept is not None and kept.store.filled
        if not again or plan.recompute is None or plan.recompute.keep < 1:
            # What is left to recompute beside a store sees few keys, and each chunk other ones.
            host = None if again else self.host
            ring = self._ring(hidden, rows, self.call.max_logits, host)
        whole, held = None, []
        for index, each in enumerate(rows):
            attend = _Attend(ring, index, None if kept is None else kept.load())
            part = half.run(hidden.index_select(0, each.mine), each, attend).detach()
            if whole is None:
                whole = part.new_empty((len(hidden), *part.shape[1:]))
            whole.index_copy_(0, each.mine, part)
            # At once, so that a tier of host memory takes results chunk by chunk.
            if kept is not None and ring is not None and not again:
                kept.save(ring.kept(index, *attend.result))
            if saves:
                held.append(_held(attend.result))
        assert whole is not None  # there is at least one chunk
        return whole, held

    def backward(
        self, hidden: torch.Tensor, held: Sequence[torch.Tensor], dy: torch.Tensor, needed: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the hidden states (if `needed`), the sink and the parameters."""
        rows = self.half.rows(self.call.plan)
        dhidden = torch.zeros_like(hidden) if needed else None
        sums = ParameterSums(self.parameters)
        ring = self._ring(hidden, rows)
        for index, (each, result) in enumerate(zip(rows, held, strict=True)):
            recall = _Recall(ring, index, _released(result))
            part, y = self._graph(hidden, each, needed, recall)
            inputs = [part] * needed + recall.leaves
            gradients = sums.backward([y], inputs, [dy.index_select(0, each.mine)])
            if dhidden is not None and gradients[0] is not None:
                dhidden.index_add_(0, each.mine, gradients[0])
            del y, recall, gradients
        dk, dv, dsink = ring.gradients()
        del ring
        for each in rows:
            part, keys = self._graph(hidden, each, needed, None)
            pairs = [
                (x, dx.index_select(0, each.whole).to(x.dtype))
                for x, dx in zip(keys, (dk, dv), strict=True)
                if x.requires_grad and dx is not None
            ]
            if pairs:
                outputs, grads = zip(*pairs, strict=True)
                gradients = sums.backward(outputs, [part] * needed, grads)
                if dhidden is not None and gradients[0] is not None:
                    dhidden.index_add_(0, each.mine, gradients[0])
                del outputs, grads, gradients
            del keys, pairs
        return dhidden, dsink, *sums.result()

    def _graph(
        self, hidden: torch.Tensor, rows: ChunkRows, needed: bool, recall: _Recall | None
    ) -> tuple[torch.Tensor, Any]:
        """A chunk's hidden states, and with a graph what becomes of them: its output, or without
        `recall` its keys and values.
        """
        part = hidden.index_select(0, rows.mine).detach().requires_grad_(needed)
        with torch.enable_grad():
            if recall is None:
                return part, self.half.called(part, rows)[1:3]
            return part, self.half.run(part, rows, recall)

    def _ring(
        self,
        hidden: torch.Tensor,
        rows: Sequence[ChunkRows],
        max_logits: torch.Tensor | None = None,
        host: KeyHostMemory | None = None,
    ) -> RowChunkedCall:
        """A call of attention over keys and values of all rows, made chunk by chunk."""
        plan = self.call.plan
        k, v = (
            torch.empty(x, dtype=dtype, device=device) for x, dtype, device in plan.signature[1:]
        )
        with torch.no_grad():
            for each in rows:
                reached = self.half.called(hidden.index_select(0, each.mine), each)
                k.index_copy_(0, each.whole, reached.k)
                v.index_copy_(0, each.whole, reached.v)
                del reached
        return plan.chunked(k, v, self.call.sink, self.call.label, max_logits, host)


class _Half(torch.autograd.Function):
    """An attention half, for autograd; sink [h] and parameters are there for their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        chunks: ChunkedHalf,
        saves: bool,
        hidden: torch.Tensor,
        sink: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        out, held = chunks.forward(hidden, saves)
        ctx.chunks = chunks
        ctx.save_for_backward(hidden, *held)
        return out

    @staticmethod
    @first_order_only("an attention half in chunks (--burst-sequence-chunks)")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, *held = ctx.saved_tensors
        _, _, needed, needs_sink, *_ = ctx.needs_input_grad
        dhidden, dsink, *rest = ctx.chunks.backward(hidden, held, dy, needed)
        sink = ctx.chunks.call.sink
        dsink = dsink.to(sink.dtype) if needs_sink and dsink is not None else None
        return None, None, dhidden, dsink, *rest


class _Attend:
    """Core attention of a chunk of queries in forward: what a checkpoint kept, or the ring's."""

    def __init__(self, ring: RowChunkedCall | None, index: int, stored: Tensors | None):
        self._ring, self._index, self._stored = ring, index, stored
        self.result: Result

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._ring is not None:
            self.result = self._ring.forward(self._index, q, self._stored)
        else:
            assert self._stored is not None
            out, lse = self._stored
            self.result = out, lse
        return self.result[0]


class _Recall:
    """Core attention of a chunk of queries in backward: forward's result, and the ring's gradient.

    leaves: a query that nothing before it wants a gradient of. The backward of the ring runs for it
    all the same: keys may, and other ranks take part.
    """

    def __init__(self, ring: RowChunkedCall, index: int, result: Result):
        self._ring, self._index, self._result = ring, index, result
        self.leaves: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not q.requires_grad:
            q = q.detach().requires_grad_()
            self.leaves.append(q)
        out: Any = _Recalled.apply(self._ring, self._index, q, *self._result)
        return out


class _Recalled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: RowChunkedCall, index: int, q: torch.Tensor, out: torch.Tensor, lse: Any
    ) -> torch.Tensor:
        ctx.ring, ctx.index = ring, index
        ctx.save_for_backward(q, out, lse)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse = ctx.saved_tensors
        dq = ctx.ring.backward(ctx.index, q, out, lse, dout)
        return None, None, None if dq is None else dq.to(q.dtype), None, None


class _Hold(torch.autograd.Function):
    """Saves tensors as autograd does, when it is called and not when a larger function ends."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        raise RuntimeError("a holder of saved tensors was differentiated")


def _held(result: Result) -> torch.Tensor:
    """An empty tensor that holds a result; hooks of saved tensors see this result at once."""
    with torch.enable_grad():
        holder: Any = _Hold.apply(torch.empty(0, requires_grad=True), *result)
    return holder


def _released(holder: torch.Tensor) -> Result:
    node: Any = holder.grad_fn
    out, lse = node.saved_tensors
    return out, lse
