"""Check of a result: some rows and columns, computed in float64 from the mask itself.

A time counts only if its result passed. The tests check thoroughly; this check ensures that a
kernel or rival computed the case of its row in the table. Rows of out and dq are computed from the
inputs alone, columns of dk and dv from the statistics of all rows of a forward whose sampled rows
were right (without such a forward they are not checked).

Shape letters: r rows, c columns of the sample; s, t all of them; k heads of keys, g = h / k.
"""

from __future__ import annotations

import numpy as np
import torch

from .cases import Case
from .rivals import Inputs

COUNT = 16
TOLERANCE = 0.02  # relative to the largest value; allows bf16 roundings, but no wrong mask


class Sample:
    """Rows and columns of one case, equal for all kernels and rivals."""

    def __init__(self, inputs: Inputs, case: Case):
        random = np.random.default_rng(1)
        self.inputs, self.case = inputs, case
        self.rows, self.columns = (
            np.sort(random.choice(len(x), size=min(COUNT, len(x)), replace=False))
            for x in inputs[:2]
        )
        self.out, self.dq = self._of_rows()

    def forward_error(self, out: torch.Tensor, rows: slice) -> float:
        """Return the error of out [.., b, h, w] in `rows`; all other rows must see nothing."""
        inside, local, others = _inside(self.rows, rows, len(self.inputs.q))
        if self.out[others].any():
            return float("inf")
        return _error(out[local], self.out[inside])

    def backward_error(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        statistics: tuple[torch.Tensor, torch.Tensor] | None,
        rows: slice,
        columns: slice,
    ) -> float:
        """Return the error of dq, dk, dv in `rows` and `columns`.

        `statistics` is lse and delta, each [s, b, h]; None if dk and dv are not checked.
        """
        dq, *others = grads
        inside, local, _ = _inside(self.rows, rows, len(self.inputs.q))
        errors = [_error(dq[local], self.dq[inside])]
        if statistics is not None:
            inside, local, _ = _inside(self.columns, columns, len(self.inputs.k))
            for got, exact in zip(others, self._of_columns(*statistics), strict=True):
                errors.append(_error(got[local], exact[inside]))
        return max(errors)

    def _scores(self, q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return scores [k, g, rows, columns] in float64, -inf where hidden."""
        q = q[:, 0].double().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("rkgd,ckd->kgrc", q, k[:, 0].double()) * self.inputs.scale
        return scores.masked_fill_(~seen.to(q.device), float("-inf"))

    def _of_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and dq of the sampled rows."""
        q, k, v, dout, scale = self.inputs
        keys, values = k[:, 0].double(), v[:, 0].double()
        seen = self.case.visible(self.rows, np.arange(len(k)))
        scores = self._scores(q[self.rows], k, seen)
        p = torch.exp(scores - _finite(scores.logsumexp(-1, keepdim=True)))
        out = torch.einsum("kgrc,ckw->rkgw", p, values)
        grad = dout[self.rows, 0].double().unflatten(1, (k.shape[2], -1))
        dp = torch.einsum("rkgw,ckw->kgrc", grad, values)
        delta = (grad * out).sum(-1).permute(1, 2, 0)[..., None]
        dq = torch.einsum("kgrc,ckd->rkgd", p * (dp - delta) * scale, keys)
        return out.flatten(1, 2).unsqueeze(1), dq.flatten(1, 2).unsqueeze(1)

    def _of_columns(
        self, lse: torch.Tensor, delta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dk and dv of the sampled columns."""
        q, k, v, dout, scale = self.inputs
        grouped = (k.shape[2], -1)
        seen = self.case.visible(np.arange(len(q)), self.columns)
        scores = self._scores(q, k[self.columns], seen)
        stats, delta = (
            x[:, 0].double().unflatten(1, grouped).permute(1, 2, 0)[..., None] for x in (lse, delta)
        )
        p = torch.exp(scores - _finite(stats))
        grad = dout[:, 0].double().unflatten(1, grouped)
        dp = torch.einsum("rkgw,ckw->kgrc", grad, v[self.columns, 0].double())
        rows = q[:, 0].double().unflatten(1, grouped)
        dk = torch.einsum("kgrc,rkgd->ckd", p * (dp - delta) * scale, rows)
        dv = torch.einsum("kgrc,rkgw->ckw", p, grad)
        return dk.unsqueeze(1), dv.unsqueeze(1)


def _inside(chosen: np.ndarray, part: slice, length: int) -> tuple[list[int], list[int], list[int]]:
    """Return the chosen indices in a slice, their places in the slice, and the other indices."""
    places = {row: i for i, row in enumerate(range(length)[part])}
    inside = [i for i, row in enumerate(chosen.tolist()) if row in places]
    local = [places[row] for row in chosen[inside].tolist()]
    return inside, local, [i for i in range(len(chosen)) if i not in inside]


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return largest difference / largest value; infinite if a value is not finite."""
    if not exact.numel():
        return 0.0
    difference = (got.double() - exact).abs()
    if not difference.isfinite().all():
        return float("inf")
    return (difference.max() / exact.abs().max().clamp_min(1e-6)).item()


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)
