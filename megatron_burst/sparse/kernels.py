# SPDX-License-Identifier: Apache-2.0
"""Attention of a pair of shards over a selection: dense with a mask, or by gathering the keys.

Both know the selection of this rank's queries, which stay at home, and merge by online softmax as
every kernel of `kernels` does.

Shape letters: s query rows, t key rows, b batch, h query heads, k key/value heads, d width, w value
width; H selections of a row; m = max(H, k) heads of keys, each with g = h / m query heads; n places
of a tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..kernels.base import Rows, Scoring
from ..kernels.online_softmax import merge_
from .indexer import wide
from .pairs import PairKernel, SelectedPairs, tiles
from .selection import Selection


class Gathered(NamedTuple):
    """Keys of some rows. places [r, b, H, n]: which of the selected positions of a row they are.
    at: where they lie in the chunk [r, b, m, n]; there: is it in it, and seen? keys
    [r, b, m, n, d], values [r, b, m, n, w]."""

    places: torch.Tensor
    at: torch.Tensor
    there: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Selected(PairKernel):
    """What both kernels share: where the selected keys of some rows lie in a chunk.

    latent: are values the first columns of the keys, which travel without them?
    """

    def __init__(self, selection: Selection, latent: bool):
        self.selection, self.latent = selection, latent

    def of_rows(self, rows: torch.Tensor) -> Selected:
        """The same for these rows of the queries, int64, alone."""
        selection = replace(self.selection, ids=self.selection.ids.index_select(0, rows))
        return type(self)(selection, self.latent)

    def places(self, work: SelectedPairs, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the chunk int64, bool) [r, b, H, n]: where each selected position of these rows
        lies, and whether it is there at all and seen."""
        ids, block = self.selection.ids[rows], self.selection.block
        _, positions, order = work.on(ids.device)
        wanted = ids.long().unsqueeze(-1) * block + torch.arange(block, device=ids.device)
        wanted = wanted.flatten(-2)
        at = torch.searchsorted(positions, wanted).clamp_(max=len(positions) - 1)
        there = (positions[at] == wanted) & (wanted >= 0)
        return order[at], there & work.sees(rows, wanted.clamp(min=0))

    def whole_keys(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys in all their columns."""
        return torch.cat([v, k], dim=-1) if self.latent else k

    def add_keys_(
        self, dkeys: torch.Tensor, dvalues: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of k and v as they travel; width: of the values."""
        if not self.latent:
            return dkeys, dvalues
        return dkeys[..., width:], dvalues + dkeys[..., :width]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


class SelectedReference(Selected):
    """The kernel "reference": all scores of a pair, those not selected hidden."""

    def _hidden(self, work: SelectedPairs, rows: int, keys: int, heads: int) -> torch.Tensor:
        """bool [s, b, h, t]."""
        at, there = self.places(work, slice(0, rows))
        table = torch.zeros((*at.shape[:3], keys), dtype=torch.int32, device=at.device)
        table.scatter_add_(-1, at, there.int())
        return (table == 0).repeat_interleave(heads // at.shape[2], dim=2)

    def _dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: SelectedPairs, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores [s, b, h, t], and keys and values of every query head [t, b, h, .]."""
        group = q.shape[2] // k.shape[2]
        keys = wide(self.whole_keys(k, v)).repeat_interleave(group, dim=2)
        values = wide(v).repeat_interleave(group, dim=2)
        hidden = self._hidden(work, len(q), len(k), q.shape[2])
        scores = torch.einsum("sbhd,tbhd->sbht", wide(q), keys) * scale
        return scores.masked_fill(hidden, float("-inf")), keys, values

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: SelectedPairs,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        scores, _, values = self._dense(q, k, v, work, scoring.scale)
        stats = scores.logsumexp(dim=-1)
        p = torch.exp(scores - _finite(stats).unsqueeze(-1))
        merge_(out, lse, torch.einsum("sbht,tbhw->sbhw", p, values), stats)

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: SelectedPairs,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        scores, keys, values = self._dense(rows.q, k, v, work, scoring.scale)
        p = torch.exp(scores - _finite(rows.lse).unsqueeze(-1))
        dout, heads = wide(rows.dout), (k.shape[2], -1)
        dp = torch.einsum("sbhw,tbhw->sbht", dout, values)
        ds = p * (dp - rows.delta.unsqueeze(-1)) * scoring.scale
        if dq is not None:
            dq += torch.einsum("sbht,tbhd->sbhd", ds, keys)
        dkeys = torch.einsum("sbht,sbhd->tbhd", ds, wide(rows.q)).unflatten(2, heads).sum(3)
        dvalues = torch.einsum("sbht,sbhw->tbhw", p, dout).unflatten(2, heads).sum(3)
        dkeys, dvalues = self.add_keys_(dkeys, dvalues, v.shape[-1])
        if dk is not None:
            dk += dkeys
        if dv is not None:
            dv += dvalues


class SelectedAten(Selected):
    """The kernel "aten": gathers the selected keys of a tile of rows, and multiplies batches."""

    def _tiles(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[slice]:
        ids = self.selection.ids
        places = ids.shape[3] * self.selection.block * max(ids.shape[2], k.shape[2])
        return tiles(len(q), q.shape[1] * places * (k.shape[3] + v.shape[3]))

    def _gather(
        self, k: torch.Tensor, v: torch.Tensor, work: SelectedPairs, rows: slice
    ) -> Gathered:
        at, there = self.places(work, rows)
        # The places that are in this chunk first. Where nobody waits for a device, no more of them
        # are gathered than a row has; elsewhere never more than the chunk has.
        width = min(at.shape[-1], len(k))
        if at.device.type == "cpu":
            width = max(1, int(there.sum(dim=-1).amax()))
        first = there.byte().argsort(dim=-1, descending=True, stable=True)[..., :width]
        at, there = at.gather(-1, first), there.gather(-1, first)
        heads = max(at.shape[2], k.shape[2])
        at, there = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (at, there))
        where = at, *self._others(at, k)
        values = wide(v[where])
        return Gathered(first, at, there, self.whole_keys(wide(k[where]), values), values)

    def _scores(self, q: torch.Tensor, found: Gathered, scale: float) -> torch.Tensor:
        """[r, b, m, g, n], -inf where nothing was gathered."""
        scores = q.unflatten(2, (found.at.shape[2], -1)) @ found.keys.mT * scale
        return scores.masked_fill_(~found.there.unsqueeze(3), float("-inf"))

    def add_lse_(
        self, q: torch.Tensor, k: torch.Tensor, work: SelectedPairs, scale: float, lse: torch.Tensor
    ) -> None:
        """Add what this pair has to the log-sum-exp lse [s, b, h] of the selection, in place."""
        for rows in self._tiles(q, k, k[..., :0]):
            found = self._gather(k, k[..., :0], work, rows)
            stats = self._scores(wide(q[rows]), found, scale).logsumexp(dim=-1).flatten(2, 3)
            torch.logaddexp(lse[rows], stats, out=lse[rows])

    def add_probabilities_(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        work: SelectedPairs,
        scale: float,
        lse: torch.Tensor,
        total: torch.Tensor,
    ) -> None:
        """Add to total [s, b, H, top_k] the attention to each selected unit of this pair, summed
        over the heads that share the selection, in place."""
        for rows in self._tiles(q, k, k[..., :0]):
            found = self._gather(k, k[..., :0], work, rows)
            heads = found.places.shape[2]
            scores = self._scores(wide(q[rows]), found, scale)
            stats = _finite(lse[rows]).unflatten(2, scores.shape[2:4])
            p = torch.exp(scores - stats.unsqueeze(-1)).sum(dim=3).unflatten(2, (heads, -1)).sum(3)
            total[rows].scatter_add_(-1, found.places // self.selection.block, p)

    def _others(self, at: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch and the head of the keys at each place, to index k [t, b, k, .] with."""
        batch = torch.arange(at.shape[1], device=at.device)[:, None, None]
        heads = torch.arange(at.shape[2], device=at.device) * k.shape[2] // at.shape[2]
        return batch, heads[:, None]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: SelectedPairs,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        for rows in self._tiles(q, k, v):
            found = self._gather(k, v, work, rows)
            scores = self._scores(wide(q[rows]), found, scoring.scale)
            stats = scores.logsumexp(dim=-1)
            p = torch.exp(scores - _finite(stats).unsqueeze(-1))
            merge_(out[rows], lse[rows], (p @ found.values).flatten(2, 3), stats.flatten(2, 3))

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: SelectedPairs,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        for tile in self._tiles(rows.q, k, v):
            found = self._gather(k, v, work, tile)
            heads = found.at.shape[2], -1
            q, dout = (wide(x[tile]).unflatten(2, heads) for x in (rows.q, rows.dout))
            lse, delta = (x[tile].unflatten(2, heads).unsqueeze(-1) for x in (rows.lse, rows.delta))
            scores = self._scores(wide(rows.q[tile]), found, scoring.scale)
            p = torch.exp(scores - _finite(lse))
            ds = p * (dout @ found.values.mT - delta) * scoring.scale
            if dq is not None:
                dq[tile] += (ds @ found.keys).flatten(2, 3)
            grads = self.add_keys_(ds.mT @ q, p.mT @ dout, v.shape[-1])
            where = found.at, *self._others(found.at, k)
            for total, grad in zip((dk, dv), grads, strict=True):
                if total is not None:
                    total.index_put_(where, grad, accumulate=True)


KERNELS = {"aten": SelectedAten, "reference": SelectedReference}
