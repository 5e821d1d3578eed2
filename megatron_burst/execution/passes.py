"""Attention over a ring: forward, and backward with either side, written once.

What is computed at each pair, and what comes of it. Layouts, masks and algorithms are in the
program of a `Pass` and in the work of each pair.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.transport import Endpoint
from ..kernels.base import Kernel, Rows, Scoring
from ..kernels.online_softmax import add_sink_, empty_result
from ..schedule.tables import Chunk, Pair
from .executor import Executor, Pass, Tensors

Keys = tuple[torch.Tensor, torch.Tensor]


class Forward:
    """Attention of the local queries to the keys of all ranks (BurstEngine Algorithm 1).

    q [s, b, h, d], keys (k [s, b, k, d], v [s, b, k, w]). max_logits [h] or None: raised to the
    largest score of each head. Run it to its end with `head_chunks.run_staggered`, then ask for the
    `result`.
    """

    def __init__(
        self,
        run: Pass,
        endpoint: Endpoint,
        kernel: Kernel,
        scoring: Scoring,
        q: torch.Tensor,
        keys: Keys,
        max_logits: torch.Tensor | None = None,
    ):
        self.run, self.kernel, self.scoring, self.q = run, kernel, scoring, q
        self.max_logits = max_logits
        self.out, self.lse = empty_result(q, keys[1].shape[-1])
        held = {Chunk("kv", endpoint.rank): keys}
        self.executor = Executor(run, endpoint, held)

    def compute(self, pair: Pair) -> None:
        k, v = self.executor.held[Chunk("kv", pair.key)].tensors
        work = self.run.works[pair]
        results = self.out, self.lse, self.max_logits
        self.kernel.forward(self.q, k, v, work, self.scoring, *results)

    def result(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """out [s, b, h, w] in the dtype of q, lse [s, b, h] in the accumulation dtype, and k, v of
        every travelling chunk that is kept for backward.

        sink [h] or None: a logit that every row sees besides its keys, with no value.
        """
        if sink is not None:
            add_sink_(self.out, self.lse, sink)
        kept = (t for chunk in self.run.kept for t in self.executor.held[chunk].tensors)
        return self.out.to(self.q.dtype), self.lse, tuple(kept)


class Backward:
    """Gradients of the local q, k, v (BurstEngine Algorithms 1 and 2).

    Which side travels is the program's business: own chunks are held from the start, travelling
    chunks arrive or were `kept`, and gradients are summed per chunk wherever it is. `rows` is the
    local query chunk, `keys` the local (k, v); `kept`: k, v of each chunk of `run.kept`.
    """

    def __init__(
        self,
        run: Pass,
        endpoint: Endpoint,
        kernel: Kernel,
        scoring: Scoring,
        rows: Rows,
        keys: Keys,
        kept: Sequence[torch.Tensor],
        wire: torch.dtype | None,
        needs_grad: tuple[bool, bool, bool],
    ):
        self.run, self.kernel, self.scoring = run, kernel, scoring
        self.rows, self.needs_grad, self.me = rows, needs_grad, endpoint.rank
        held: dict[Chunk, Tensors] = {Chunk("query", self.me): tuple(rows[:4])}
        held[Chunk("kv", self.me)] = keys
        held |= zip(run.kept, zip(kept[::2], kept[1::2], strict=True), strict=True)
        self.executor = Executor(run, endpoint, held, wire)
        self.executor.sum_gradients("dquery", [rows.q.shape] * needs_grad[0])
        needed = [t.shape for t, needs in zip(keys, needs_grad[1:], strict=True) if needs]
        self.executor.sum_gradients("dkv", needed)

    def compute(self, pair: Pair) -> None:
        q, dout, lse, delta = self.executor.held[Chunk("query", pair.query)].tensors
        k, v = self.executor.held[Chunk("kv", pair.key)].tensors
        # out does not travel: a travelling query chunk brings delta instead (BurstEngine 3.1).
        out = self.rows.out if pair.query == self.me else None
        rows, work = Rows(q, dout, lse, delta, out), self.run.works[pair]
        self.kernel.backward(rows, k, v, work, self.scoring, *self._sums(pair))

    def result(self) -> tuple[torch.Tensor | None, ...]:
        """dq, dk, dv in the accumulation dtype; None where no gradient is needed."""
        return self._sums(Pair(self.me, self.me))

    def _sums(self, pair: Pair) -> tuple[torch.Tensor | None, ...]:
        """Where the gradients of these chunks are summed; None where not needed."""
        query, keys = Chunk("dquery", pair.query), Chunk("dkv", pair.key)
        sums = iter(self.executor.total(query) + self.executor.total(keys))
        return tuple(next(sums) if needed else None for needed in self.needs_grad)
