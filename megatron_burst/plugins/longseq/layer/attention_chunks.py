# SPDX-License-Identifier: Apache-2.0
"""Attention half of a transformer layer in row chunks, as one autograd function.

The attention half is everything from the input norm to the residual after attention. In it, a layer
allocates about twelve tensors of activations for all rows. This module allocates these tensors for
one row chunk at a time. Only keys and values are kept for all rows, because every chunk of queries
needs them. Forward first runs each chunk up to its keys and values, then each chunk completely.
Backward recomputes each chunk twice: first for the gradients through its queries, then for the
gradients through its keys and values, which are complete only after the last chunk. Outputs and
log-sum-exp of core attention are kept, so that no attention is computed twice. Source: FPDT (arXiv
2408.16978), section 4, which uses head parallelism.

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
from .attention_rows import AttentionHalf, RowChunkIndex

# Output [t r, b, h, w] and log-sum-exp of a row chunk.
ChunkResult = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowChunkedHalf:
    """Attention half of a layer (input norm to residual), to be run in row chunks.

    Attributes:
        half: Attention half of the layer.
        call: Plan and arguments of core attention for all rows of this rank.
        stored: Attention outputs that the checkpoint around the layer keeps of this call; None
            without such a checkpoint.
        parameters: Parameters of the attention half, in the order in which their gradients are
            returned.
        host: Host memory that keeps keys of other ranks between the row chunks of a forward. None:
            other ranks send their keys again for every row chunk.
    """

    half: AttentionHalf
    call: AttentionCall
    stored: StoredResults | None
    parameters: Sequence[torch.Tensor]
    host: KeyHostMemory | None = None

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the attention half to hidden states [s / t, b, H], with autograd."""
        trained = hidden.requires_grad or bool(self.parameters)
        saves = torch.is_grad_enabled() and trained
        out: Any = _RowChunkedHalfFunction.apply(
            self, saves, hidden, self.call.sink, *self.parameters
        )
        return out

    def forward(self, hidden: torch.Tensor, saves: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output [s / t, b, H], and one holder per row chunk.

        A holder is an empty tensor whose autograd graph saves the attention output and log-sum-exp
        of a row chunk.

        Args:
            hidden: Hidden states [s / t, b, H].
            saves: True if backward follows. If False, the list of holders is empty.
        """
        half, plan, stored = self.half, self.call.plan, self.stored
        chunks, ring = half.rows(plan), None
        recomputing = stored is not None and stored.store.filled
        if not recomputing or plan.recompute is None or plan.recompute.keep < 1:
            # A recomputation reads few keys, and each chunk reads different keys.
            host = None if recomputing else self.host
            ring = self._ring(hidden, chunks, self.call.max_logits, host)
        output, holders = None, []
        for index, chunk in enumerate(chunks):
            attend = _ForwardAttention(ring, index, None if stored is None else stored.load())
            part = half.run(hidden.index_select(0, chunk.local), chunk, attend).detach()
            if output is None:
                output = part.new_empty((len(hidden), *part.shape[1:]))
            output.index_copy_(0, chunk.local, part)
            # Store results immediately, so that host memory receives them chunk by chunk.
            if stored is not None and ring is not None and not recomputing:
                stored.save(ring.kept(index, *attend.result))
            if saves:
                holders.append(_result_holder(attend.result))
        assert output is not None  # there is at least one chunk
        return output, holders

    def backward(
        self, hidden: torch.Tensor, holders: Sequence[torch.Tensor], dy: torch.Tensor, needed: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the hidden states, the sink and the parameters.

        Args:
            hidden: Hidden states [s / t, b, H].
            holders: Holders that `forward` returned, one per row chunk.
            dy: Gradient of the output [s / t, b, H].
            needed: Whether the hidden states need a gradient. If not, the first result is None.
        """
        chunks = self.half.rows(self.call.plan)
        dhidden = torch.zeros_like(hidden) if needed else None
        sums = ParameterSums(self.parameters)
        ring = self._ring(hidden, chunks)
        for index, (chunk, holder) in enumerate(zip(chunks, holders, strict=True)):
            attention = _BackwardAttention(ring, index, _result_of(holder))
            part, y = self._graph(hidden, chunk, needed, attention)
            inputs = [part] * needed + attention.leaves
            gradients = sums.backward([y], inputs, [dy.index_select(0, chunk.local)])
            if dhidden is not None and gradients[0] is not None:
                dhidden.index_add_(0, chunk.local, gradients[0])
            del y, attention, gradients
        dk, dv, dsink = ring.gradients()
        del ring
        for chunk in chunks:
            part, keys = self._graph(hidden, chunk, needed, None)
            pairs = [
                (x, dx.index_select(0, chunk.shard).to(x.dtype))
                for x, dx in zip(keys, (dk, dv), strict=True)
                if x.requires_grad and dx is not None
            ]
            if pairs:
                outputs, grads = zip(*pairs, strict=True)
                gradients = sums.backward(outputs, [part] * needed, grads)
                if dhidden is not None and gradients[0] is not None:
                    dhidden.index_add_(0, chunk.local, gradients[0])
                del outputs, grads, gradients
            del keys, pairs
        return dhidden, dsink, *sums.result()

    def _graph(
        self,
        hidden: torch.Tensor,
        rows: RowChunkIndex,
        needed: bool,
        attention: _BackwardAttention | None,
    ) -> tuple[torch.Tensor, Any]:
        """Run a row chunk with autograd; return its hidden states (a leaf) and its output.

        If `attention` is None, the chunk runs only up to core attention. Its keys and values are
        then returned in place of the output.

        Args:
            hidden: Hidden states of all chunks [s / t, b, H].
            rows: Rows of the chunk.
            needed: Whether the hidden states need a gradient.
            attention: Function that replaces core attention, or None.
        """
        part = hidden.index_select(0, rows.local).detach().requires_grad_(needed)
        with torch.enable_grad():
            if attention is None:
                return part, self.half.core_inputs(part, rows)[1:3]
            return part, self.half.run(part, rows, attention)

    def _ring(
        self,
        hidden: torch.Tensor,
        chunks: Sequence[RowChunkIndex],
        max_logits: torch.Tensor | None = None,
        host: KeyHostMemory | None = None,
    ) -> RowChunkedCall:
        """Compute keys and values of all rows, chunk by chunk; start attention with them.

        Args:
            hidden: Hidden states [s / t, b, H].
            chunks: Rows of each chunk.
            max_logits: Largest attention logit of each head [h], which the call updates, or None.
            host: Host memory for keys of other ranks, or None.
        """
        plan = self.call.plan
        k, v = (
            torch.empty(x, dtype=dtype, device=device) for x, dtype, device in plan.signature[1:]
        )
        with torch.no_grad():
            for chunk in chunks:
                inputs = self.half.core_inputs(hidden.index_select(0, chunk.local), chunk)
                k.index_copy_(0, chunk.shard, inputs.k)
                v.index_copy_(0, chunk.shard, inputs.v)
                del inputs
        return plan.chunked(k, v, self.call.sink, self.call.label, max_logits, host)


class _RowChunkedHalfFunction(torch.autograd.Function):
    """Autograd function of an attention half.

    The sink [h] and the parameters are arguments only because autograd returns their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunks: RowChunkedHalf,
        saves: bool,
        hidden: torch.Tensor,
        sink: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        out, holders = chunks.forward(hidden, saves)
        ctx.chunks = chunks
        ctx.save_for_backward(hidden, *holders)
        return out

    @staticmethod
    @first_order_only("an attention half in chunks (--burst-sequence-chunks)")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, *holders = ctx.saved_tensors
        _, _, needed, needs_sink, *_ = ctx.needs_input_grad
        dhidden, dsink, *dparameters = ctx.chunks.backward(hidden, holders, dy, needed)
        sink = ctx.chunks.call.sink
        dsink = dsink.to(sink.dtype) if needs_sink and dsink is not None else None
        return None, None, dhidden, dsink, *dparameters


class _ForwardAttention:
    """Core attention of a row chunk in forward, or the result that the attention store kept."""

    def __init__(self, ring: RowChunkedCall | None, index: int, stored: Tensors | None):
        self._ring, self._index, self._stored = ring, index, stored
        self.result: ChunkResult

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._ring is not None:
            self.result = self._ring.forward(self._index, q, self._stored)
        else:
            assert self._stored is not None
            out, lse = self._stored
            self.result = out, lse
        return self.result[0]


class _BackwardAttention:
    """Core attention of a recomputed row chunk, which returns the saved output of forward.

    The backward of this output computes the gradients together with other ranks.

    Attributes:
        leaves: Detached queries that require a gradient, if the queries themselves need none; else
            empty. With them, backward runs in any case: keys may need gradients, and other ranks
            take part in backward.
    """

    def __init__(self, ring: RowChunkedCall, index: int, result: ChunkResult):
        self._ring, self._index, self._result = ring, index, result
        self.leaves: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not q.requires_grad:
            q = q.detach().requires_grad_()
            self.leaves.append(q)
        out: Any = _StoredAttention.apply(self._ring, self._index, q, *self._result)
        return out


class _StoredAttention(torch.autograd.Function):
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


class _SavedResult(torch.autograd.Function):
    """Autograd function that saves its inputs at once, not when the enclosing function returns."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        raise RuntimeError("internal error: backward reached a saved-tensor holder")


def _result_holder(result: ChunkResult) -> torch.Tensor:
    """Return an empty tensor whose autograd graph saves `result`.

    So the result passes through saved-tensor hooks, which may move it to the host.
    """
    with torch.enable_grad():
        holder: Any = _SavedResult.apply(torch.empty(0, requires_grad=True), *result)
    return holder


def _result_of(holder: torch.Tensor) -> ChunkResult:
    node: Any = holder.grad_fn
    out, lse = node.saved_tensors
    return out, lse
