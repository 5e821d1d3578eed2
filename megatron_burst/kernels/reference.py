# SPDX-License-Identifier: Apache-2.0
"""The reference kernel: dense attention from its formula, for any dtype, device and mask.

The kernel computes in the accumulation dtype and materializes all scores. It is slow and serves as
the specification: tests compare every other kernel with it, and compare it with handwritten
matrices.

Shape letters as in `base`, and g = h / k: the number of query heads per key head.
"""

from __future__ import annotations

import numpy as np
import torch

from ..layout.layouts import ShardPairs
from ..layout.sharding import to_device
from ..masks import Mask
from .base import Rows, Scoring
from .online_softmax import merge_


class ReferenceWork:
    """Dense tables of the hidden pairs of a pair of shards, copied to each device once."""

    def __init__(self, table: np.ndarray):
        self.hidden = ~table  # bool [s, t]
        self.unseen = self.hidden.all(axis=0)  # bool [t]: keys that no row sees
        self._by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool tensors on `device`: hidden pairs [s, t], and keys that no query sees [t]."""
        if device not in self._by_device:
            packed = to_device(np.concatenate([self.hidden.ravel(), self.unseen]), device)
            hidden, unseen = packed.split([self.hidden.size, self.unseen.size])
            self._by_device[device] = hidden.view(self.hidden.shape), unseen
        return self._by_device[device]


class ReferenceKernel:
    """Attention kernel "reference": dense attention, computed directly from its formula."""

    name = "reference"
    softcaps = True
    maximum = True
    deterministic = True
    passed_over: tuple[str, ...] = ()

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        return None

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[ReferenceWork | None]:
        works = []
        for pair in pairs:
            q, k = (np.concatenate([span.positions() for span in spans]) for spans in pair)
            table = np.array(mask.visible(q[:, None], k[None, :]))
            works.append(ReferenceWork(table) if table.any() else None)
        return works

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
        part = torch.einsum(
            "bkgst,tbkw->sbkgw", _probabilities(scores, stats), _without_unseen(v, work)
        )
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
        dout = _to_accumulation(rows.dout).unflatten(2, grouped)
        dp = torch.einsum("sbkgw,tbkw->bkgst", dout, _without_unseen(v, work))
        ds = p * (dp - delta.unsqueeze(-1)) * scoring.scale
        if scoring.softcap is not None:  # d cap tanh(t / cap) / dt = 1 - tanh^2
            hidden, _ = work.on(ds.device)
            ds = ds * (1 - (scores.masked_fill(hidden, 0.0) / scoring.softcap) ** 2)
        if dq is not None:
            dq += torch.einsum("bkgst,tbkd->sbkgd", ds, _without_unseen(k, work)).flatten(2, 3)
        if dk is not None:
            dk += torch.einsum(
                "bkgst,sbkgd->tbkd", ds, _to_accumulation(rows.q).unflatten(2, grouped)
            )
        if dv is not None:
            dv += torch.einsum("bkgst,sbkgw->tbkw", p, dout)


def _to_accumulation(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _without_unseen(x: torch.Tensor, work: ReferenceWork) -> torch.Tensor:
    """Return keys or values with 0 in rows that no query sees, so that 0 * NaN cannot occur."""
    _, unseen = work.on(x.device)
    return _to_accumulation(x).masked_fill(unseen[:, None, None, None], 0.0)


def _scores(
    q: torch.Tensor, k: torch.Tensor, work: ReferenceWork, scoring: Scoring
) -> torch.Tensor:
    """Return the scores of all pairs [b, k, g, s, t], with -inf for hidden pairs."""
    scores = torch.einsum(
        "sbkgd,tbkd->bkgst", _to_accumulation(q).unflatten(2, (k.shape[2], -1)), _to_accumulation(k)
    )
    scores = scores * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    hidden, _ = work.on(q.device)
    return scores.masked_fill(hidden, float("-inf"))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - lse), 0 in rows without visible keys."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))


def _rows_last(lse: torch.Tensor) -> torch.Tensor:
    """Permute and reshape lse from [b, k, g, s] to [s, b, h]."""
    return lse.permute(3, 0, 1, 2).flatten(2, 3)
