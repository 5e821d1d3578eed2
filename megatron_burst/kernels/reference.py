# SPDX-License-Identifier: Apache-2.0
"""The reference kernel: dense attention by its definition, for any dtype, device and mask.

It computes in the accumulation dtype and materialises every score, so it is slow and serves as the
specification: tests compare every other kernel with it, and it with matrices written by hand.
Shape letters as in `base`; g = h / k query heads share a key head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..layout import Span
from ..layout.sharding import to_device
from ..masks import Mask
from .base import Rows, Scoring
from .online_softmax import merge_


class ReferenceWork:
    """Which local row sees which local column; brought to each device once."""

    def __init__(self, table: np.ndarray):
        self.hidden = ~table  # bool [s, t]
        self.unseen = self.hidden.all(axis=0)  # bool [t]: keys that no row sees
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, unseen) on `device`."""
        if device not in self._there:
            both = to_device(np.concatenate([self.hidden.ravel(), self.unseen]), device)
            hidden, unseen = both.split([self.hidden.size, self.unseen.size])
            self._there[device] = hidden.view(self.hidden.shape), unseen
        return self._there[device]


class ReferenceKernel:
    """The kernel "reference"."""

    name = "reference"
    softcaps = True
    maximum = True
    deterministic = True
    passed_over: tuple[str, ...] = ()

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        return None

    def work_for(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> ReferenceWork | None:
        q, k = (np.concatenate([s.positions() for s in spans]) for spans in (q_spans, k_spans))
        table = np.array(mask.visible(q[:, None], k[None, :]))
        return ReferenceWork(table) if table.any() else None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: ReferenceWork,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        scores = _scores(q, k, work, scoring)
        if max_logits is not None:
            highest = scores.amax(dim=(0, 3, 4)).flatten()
            torch.maximum(max_logits, highest, out=max_logits)
        stats = torch.logsumexp(scores, dim=-1)
        part = torch.einsum("bkgst,tbkw->sbkgw", _probabilities(scores, stats), _seen(v, work))
        merge_(out, lse, part.flatten(2, 3), _rows_last(stats))

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: ReferenceWork,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        scores = _scores(rows.q, k, work, scoring)
        grouped = (k.shape[2], -1)
        lse, delta = (x.unflatten(2, grouped).permute(1, 2, 3, 0) for x in (rows.lse, rows.delta))
        p = _probabilities(scores, lse)
        dout = _wide(rows.dout).unflatten(2, grouped)
        dp = torch.einsum("sbkgw,tbkw->bkgst", dout, _seen(v, work))
        ds = p * (dp - delta.unsqueeze(-1)) * scoring.scale
        if scoring.softcap is not None:  # d cap tanh(t / cap) / dt = 1 - tanh^2
            hidden, _ = work.on(ds.device)
            ds = ds * (1 - (scores.masked_fill(hidden, 0.0) / scoring.softcap) ** 2)
        if dq is not None:
            dq += torch.einsum("bkgst,tbkd->sbkgd", ds, _seen(k, work)).flatten(2, 3)
        if dk is not None:
            dk += torch.einsum("bkgst,sbkgd->tbkd", ds, _wide(rows.q).unflatten(2, grouped))
        if dv is not None:
            dv += torch.einsum("bkgst,sbkgw->tbkw", p, dout)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _seen(x: torch.Tensor, work: ReferenceWork) -> torch.Tensor:
    """Keys or values, 0 where no row sees them: 0 times the NaN of some padding would be NaN."""
    _, unseen = work.on(x.device)
    return _wide(x).masked_fill(unseen[:, None, None, None], 0.0)


def _scores(
    q: torch.Tensor, k: torch.Tensor, work: ReferenceWork, scoring: Scoring
) -> torch.Tensor:
    """[b, k, g, s, t], -inf where a row does not see a column."""
    scores = torch.einsum("sbkgd,tbkd->bkgst", _wide(q).unflatten(2, (k.shape[2], -1)), _wide(k))
    scores = scores * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    hidden, _ = work.on(q.device)
    return scores.masked_fill(hidden, float("-inf"))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), 0 in rows that saw nothing."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))


def _rows_last(lse: torch.Tensor) -> torch.Tensor:
    """[b, k, g, s] -> [s, b, h]."""
    return lse.permute(3, 0, 1, 2).flatten(2, 3)
