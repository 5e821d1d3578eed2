"""Is a result right? A few rows and columns of it, computed in float64 from the mask itself.

No time counts unless its result passed here. Thorough checks are the tests'; this one sees that a
kernel or a rival computed the case that stands in its row of the table: rows of out and dq from
nothing but the inputs, columns of dk and dv from the statistics of all rows, which are those of
a forward whose sampled rows were right.

Shape letters: r rows, c columns of the sample; s, t all of them; k heads of keys, g = h / k.
"""

from __future__ import annotations

import numpy as np
import torch

from .cases import Case
from .rivals import Inputs

COUNT = 16
TOLERANCE = 0.02  # of the largest value; bf16 alone makes about 0.005


class Sample:
    """Rows and columns of one case, the same for all who compute it."""

    def __init__(self, inputs: Inputs, case: Case):
        s, t = len(inputs.q), len(inputs.k)
        random = np.random.default_rng(1)
        self.inputs, self.case = inputs, case
        self.rows, self.columns = (
            np.sort(random.choice(n, size=min(COUNT, n), replace=False)) for n in (s, t)
        )
        self.out, self.lse = self._forward()

    def forward_error(self, out: torch.Tensor, rows: slice) -> float:
        """Of out [some rows, b, h, w], those of the slice."""
        mine, others = self._inside(rows, len(self.inputs.q), self.rows)
        hidden = self.out[others]
        if hidden.numel() and hidden.abs().max() > 0:  # rows that it left out do see something
            return float("inf")
        return _error(out[self._local(rows, mine)], self.out[mine])

    def backward_error(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lse: torch.Tensor,
        delta: torch.Tensor,
        rows: slice,
        columns: slice,
    ) -> float:
        """Of dq, dk, dv of the slices; lse, delta [s, b, h] of all rows."""
        dq, dk, dv = grads
        mine, _ = self._inside(rows, len(self.inputs.q), self.rows)
        theirs, _ = self._inside(columns, len(self.inputs.k), self.columns)
        exact_dq = self._row_gradient(delta)[mine]
        exact_dk, exact_dv = (x[theirs] for x in self._column_gradients(lse, delta))
        at, across = self._local(rows, mine), self._local(columns, theirs, self.columns)
        return max(
            _error(dq[at], exact_dq), _error(dk[across], exact_dk), _error(dv[across], exact_dv)
        )

    def _inside(self, part: slice, length: int, chosen: np.ndarray) -> tuple[list[int], list[int]]:
        """Which of the chosen are in the slice, and which are not, as indices into the sample."""
        inside = set(range(length)[part])
        mine = [i for i, row in enumerate(chosen.tolist()) if row in inside]
        return mine, [i for i in range(len(chosen)) if i not in mine]

    def _local(self, part: slice, mine: list[int], chosen: np.ndarray | None = None) -> list[int]:
        """Where the chosen lie in the slice."""
        every = self.rows if chosen is None else chosen
        return [int(every[i]) - (part.start or 0) for i in mine]

    def _scores(self, q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[k, g, rows, columns] in float64, -inf where hidden."""
        q = q[:, 0].double().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("rkgd,ckd->kgrc", q, k[:, 0].double()) * self.inputs.scale
        return scores.masked_fill_(~seen.to(q.device), float("-inf"))

    def _row_scores(self) -> torch.Tensor:
        q, k = self.inputs.q, self.inputs.k
        seen = self.case.visible(self.rows, np.arange(len(k)))
        return self._scores(q[self.rows], k, seen)

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._row_scores()
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - _finite(lse)[..., None])
        out = torch.einsum("kgrc,ckw->rkgw", p, self.inputs.v[:, 0].double())
        return out.flatten(1, 2).unsqueeze(1), lse.permute(2, 0, 1).flatten(1).unsqueeze(1)

    def _row_gradient(self, delta: torch.Tensor) -> torch.Tensor:
        """dq of the sampled rows, by their own statistics."""
        scores, heads = self._row_scores(), self.inputs.k.shape[2]
        p = torch.exp(scores - _finite(scores.logsumexp(-1))[..., None])
        dout = self.inputs.dout[self.rows, 0].double().unflatten(1, (heads, -1))
        dp = torch.einsum("rkgw,ckw->kgrc", dout, self.inputs.v[:, 0].double())
        own = delta[self.rows, 0].double().unflatten(1, (heads, -1)).permute(1, 2, 0)
        ds = p * (dp - own[..., None]) * self.inputs.scale
        dq = torch.einsum("kgrc,ckd->rkgd", ds, self.inputs.k[:, 0].double())
        return dq.flatten(1, 2).unsqueeze(1)

    def _column_gradients(
        self, lse: torch.Tensor, delta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of the sampled columns."""
        q, k, v, dout, scale = self.inputs
        grouped = (k.shape[2], -1)
        seen = self.case.visible(np.arange(len(q)), self.columns)
        scores = self._scores(q, k[self.columns], seen)
        stats, own = (
            x[:, 0].double().unflatten(1, grouped).permute(1, 2, 0)[..., None] for x in (lse, delta)
        )
        p = torch.exp(scores - _finite(stats))
        grad = dout[:, 0].double().unflatten(1, grouped)
        dp = torch.einsum("rkgw,ckw->kgrc", grad, v[self.columns, 0].double())
        ds = p * (dp - own) * scale
        dk = torch.einsum("kgrc,rkgd->ckd", ds, q[:, 0].double().unflatten(1, grouped))
        dv = torch.einsum("kgrc,rkgw->ckw", p, grad)
        return dk.unsqueeze(1), dv.unsqueeze(1)


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference over the largest value; infinite where one is not finite."""
    if not exact.numel():
        return 0.0
    difference = (got.double() - exact).abs()
    if not difference.isfinite().all():
        return float("inf")
    return (difference.max() / exact.abs().max().clamp_min(1e-6)).item()


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)
