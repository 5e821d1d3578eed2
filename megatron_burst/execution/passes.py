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
from ..kernels.online_softmax import add_sink_
from ..schedule.tables import Pair
from .executor import Call, Executor, Pass, Tensors

Keys = tuple[torch.Tensor, torch.Tensor]


class Forward:
    """Attention of the queries to the keys of all ranks (BurstEngine Algorithm 1).

    q [s, b, h, d], keys (k [s, b, k, d], v [s, b, k, w]) of this rank. max_logits [h] or None:
    raised to the largest score of each head. wire: dtype of partial outputs that travel. Run it to
    its end with `head_chunks.run_staggered`, then ask for the `result`.
    """

    def __init__(
        self,
        run: Pass,
        endpoint: Endpoint,
        kernel: Kernel,
        scoring: Scoring,
        q: torch.Tensor,
        keys: Keys,
        wire: torch.dtype | None = None,
        max_logits: torch.Tensor | None = None,
    ):
        self.run, self.kernel, self.scoring, self.dtype = run, kernel, scoring, q.dtype
        self.max_logits = max_logits
        self.executor = Executor(run, endpoint, {"kv": keys, "query": (q,)}, wire=wire)
        stat = q.shape[1:3]
        rows = [torch.Size((*stat, keys[1].shape[-1])), stat]
        self.executor.accumulate("out", rows, stats=1)

    def compute(self, pair: Pair, call: Call) -> None:
        (q,) = self.executor.held[call.queries].tensors
        k, v = self.executor.held[call.keys].tensors
        rows = call.queries._replace(family="out")
        with self.executor.partials.adding(rows, pair.query_rows & rows.rows) as (out, lse):
            self.kernel.forward(q, k, v, call.work, self.scoring, out, lse, self.max_logits)

    def result(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """out [s, b, h, w] in the dtype of q, lse [s, b, h] in the accumulation dtype, and k, v of
        every chunk that is kept for backward.

        sink [h] or None: a logit that every row sees besides its keys, with no value.
        """
        out, lse = self.executor.partials.whole("out", self.executor.me)
        if sink is not None:
            add_sink_(out, lse, sink)
        kept = tuple(t for chunk in self.run.kept for t in self.executor.kept(chunk))
        return out.to(self.dtype), lse, kept


class Backward:
    """Gradients of the local q, k, v (BurstEngine Algorithms 1 and 2).

    What travels is the program's business: own chunks are held from the start, those of others
    arrive or were `kept`, and gradients are summed per chunk wherever it is. `rows` is the local
    query chunk, `keys` the local (k, v); `kept`: k, v of each chunk of `run.kept`.
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
        self.kernel, self.scoring = kernel, scoring
        self.rows, self.needs_grad = rows, needs_grad
        own: dict[str, Tensors] = {"query": tuple(rows[:4]), "kv": keys}
        chunks = list(zip(kept[::2], kept[1::2], strict=True))
        self.executor = Executor(run, endpoint, own, chunks, wire)
        self.executor.accumulate("dquery", [rows.q.shape[1:]] * needs_grad[0])
        needed = zip(keys, needs_grad[1:], strict=True)
        self.executor.accumulate("dkv", [t.shape[1:] for t, needs in needed if needs])

    def compute(self, pair: Pair, call: Call) -> None:
        q, dout, lse, delta = self.executor.held[call.queries].tensors
        k, v = self.executor.held[call.keys].tensors
        # out does not travel: a travelling query chunk brings delta instead (BurstEngine 3.1).
        out = self.rows.out if call.queries.owner == self.executor.me else None
        rows, partials = Rows(q, dout, lse, delta, out), self.executor.partials
        queries, keys = call.queries._replace(family="dquery"), call.keys._replace(family="dkv")
        with (
            partials.adding(queries, pair.query_rows & queries.rows) as dquery,
            partials.adding(keys, pair.key_rows & keys.rows) as dkv,
        ):
            sums = self._by_tensor(dquery + dkv)
            self.kernel.backward(rows, k, v, call.work, self.scoring, *sums)

    def result(self) -> tuple[torch.Tensor | None, ...]:
        """dq, dk, dv in the accumulation dtype; None where no gradient is needed."""
        own = (self.executor.partials.whole(family, self.executor.me)
               for family in ("dquery", "dkv"))  # fmt: skip
        return self._by_tensor(sum(own, ()))

    def _by_tensor(self, sums: Tensors) -> tuple[torch.Tensor | None, ...]:
        """Of q, k, v: the sum, or None where it is not needed."""
        found = iter(sums)
        return tuple(next(found) if needed else None for needed in self.needs_grad)
