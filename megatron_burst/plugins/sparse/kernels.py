# SPDX-License-Identifier: Apache-2.0
"""Attention of a pair of shards over a selection by torch: dense with a mask, or by gathering keys.

Both know the selection of this rank's queries, which stay at home, and merge by online softmax as
every kernel of `kernels` does.

Shape letters: s query rows, t key rows, b batch, h query heads, k key/value heads, d width, w value
width; H selections of a row; m = max(H, k) heads of keys, each with g = h / m query heads; n places
of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...kernels.base import Rows, Scoring
from ...kernels.online_softmax import merge_
from .indexer import wide
from .pairs import PairKernel, SelectedPairs, tiles
from .selection import Selection

# Bytes of the tensors that a tile of rows makes, at least one row. On a CPU each of them stays
# within 32 MiB, beyond which the C library gives memory back and gets it anew, page by page; of
# DSA's 2,048 keys of 576 columns that is 7 rows in float32. Elsewhere 56, to fill a device.
BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}


def _bytes(device: torch.device) -> int:
    return BYTES["cpu" if device.type == "cpu" else "cuda"]


class Gathered(NamedTuple):
    """Keys of some rows. places [r, b, H, n]: which of the selected units of a row they are.
    index [r * b * m * n]: their rows of `UnitRows`. seen [r, b, m, n * unit]: of their positions.
    keys [r, b, m, n * unit, d], values [r, b, m, n * unit, w].
    """

    places: torch.Tensor
    units: torch.Tensor
    seen: torch.Tensor
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
        lies, and whether it is there at all and seen.
        """
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
        """Bool [s, b, h, t]."""
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


class UnitRows:
    """Rows of keys in units as they are gathered: [u * b * k, unit * columns]. Those of single
    positions are the tensor itself, if it is contiguous.
    """

    def __init__(self, rows: torch.Tensor, unit: int):
        self.shape, self.unit = rows.shape, unit
        count = rows.shape[0] // unit * rows.shape[1] * rows.shape[2]
        self.rows = self._units(rows).reshape(count, unit * rows.shape[3])

    def _units(self, x: torch.Tensor) -> torch.Tensor:
        """[u, b, k, unit, columns] of x [t, b, k, columns]."""
        return x.unflatten(0, (-1, self.unit)).permute(0, 2, 3, 1, 4)

    def take(self, index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """[*shape, n * unit, columns] of the units in `index`, n for each of shape."""
        positions = len(index) // math.prod(shape) * self.unit
        return self.rows.index_select(0, index).view(*shape, positions, self.shape[3])

    def add_(self, index: torch.Tensor, grads: torch.Tensor) -> None:
        """Add grads [..., n * unit, columns] to the units in `index`."""
        self.rows.index_add_(0, index, grads.reshape(len(index), self.rows.shape[1]))

    def add_to_(self, total: torch.Tensor) -> None:
        """Add all to total [t, b, k, columns], unless these are its rows."""
        if self.rows.data_ptr() != total.data_ptr():
            t, b, k, columns = self.shape
            units = self.rows.view(t // self.unit, b, k, self.unit, columns)
            total += units.permute(0, 3, 1, 2, 4).reshape(t, b, k, columns)


def _sums(total: torch.Tensor | None, unit: int) -> UnitRows | None:
    """Where gradients of gathered units are added up: in `total` if it lies so, else apart."""
    if total is None:
        return None
    plain = total.is_contiguous() and (unit == 1 or total.shape[1] * total.shape[2] == 1)
    return UnitRows(total if plain else torch.zeros_like(total), unit)


class SelectedAten(Selected):
    """The kernel "aten": gathers the selected keys of a tile of rows, and multiplies batches.

    Beside a tile there is the chunk in the dtype of scores, with the values in front of the keys
    where they are one latent, so that these are gathered once. Whole blocks are gathered where they
    lie so.
    """

    def _listed(
        self, work: SelectedPairs, rows: slice, unit: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [r, b, H, n] twice: units of the chunk that are selected and seen, those that are
        there first, and which of the selected units they are; bool [r, b, H, n, unit]: what is seen
        of them.
        """
        ids, block = self.selection.ids[rows], self.selection.block
        _, positions, order = work.on(ids.device)
        wanted = ids.long()
        if unit < block:
            wanted = (
                wanted.unsqueeze(-1) * block + torch.arange(block, device=ids.device)
            ).flatten(-2)
        firsts = positions[::unit].contiguous()
        wanted = wanted * unit
        at = torch.searchsorted(firsts, wanted).clamp_(max=len(firsts) - 1)
        there = (firsts[at] == wanted) & (wanted >= 0)
        every = wanted.clamp_(min=0).unsqueeze(-1)
        if unit > 1:
            every = every + torch.arange(unit, device=ids.device)
        seen = work.sees(rows, every) & there.unsqueeze(-1)
        there = seen.any(dim=-1)
        # Where nobody waits for a device, no more units are gathered than a row has; elsewhere
        # never more than the chunk has.
        places, width = at.shape[-1], min(at.shape[-1], len(firsts))
        counts = there.sum(dim=-1, keepdim=True)
        if at.device.type == "cpu":
            width = max(1, int(counts.amax()))
        at = order[at * unit] // unit
        every_place = torch.arange(places, device=at.device).expand_as(at)
        if width == places:
            return at, every_place, seen
        slot = there.cumsum(dim=-1).sub_(1).masked_fill_(~there, width)
        first = at.new_zeros((*at.shape[:-1], width + 1)).scatter_(-1, slot, every_place)
        first = first[..., :width]
        seen = seen.gather(-2, first.unsqueeze(-1).expand(*first.shape, unit))
        seen &= (torch.arange(width, device=at.device) < counts).unsqueeze(-1)
        return at.gather(-1, first), first, seen

    def _gathered(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        work: SelectedPairs,
        unit: int,
    ) -> Iterator[tuple[slice, Gathered]]:
        """Some rows at a time, and the keys that they have. v None: without values."""
        ids, (_, batch, key_heads, _) = self.selection.ids, k.shape
        keys = UnitRows(wide(k if v is None else self.whole_keys(k, v)), unit)
        values = None if v is None or self.latent else UnitRows(wide(v), unit)
        heads = max(ids.shape[2], key_heads)
        places = ids.shape[2] * ids.shape[3] * (self.selection.block // unit)
        columns = keys.shape[3] + (0 if values is None else values.shape[3])
        columns = 2 * columns + 3 * (q.shape[2] // heads)  # with gradients, and scores
        others = torch.arange(batch, device=k.device)[:, None, None] * key_heads
        others = others + (torch.arange(heads, device=k.device) * key_heads // heads)[:, None]
        most = _bytes(k.device)
        for some in tiles(len(q), batch * places * 8 * (5 + unit), most):
            at, first, seen = self._listed(work, some, unit)
            at, seen = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (at, seen))
            each = at[0].numel() * unit * columns * keys.rows.element_size()
            for tile in tiles(len(at), each, most):
                shape = len(at[tile]), batch, heads
                index = (at[tile] * (batch * key_heads) + others).flatten()
                found = keys.take(index, shape)
                width = 0 if v is None else v.shape[-1]
                value = found[..., :width] if values is None else values.take(index, shape)
                rows = slice(some.start + tile.start, some.start + tile.stop)
                yield rows, Gathered(first[tile], index, seen[tile].flatten(-2), found, value)

    def _scores(self, q: torch.Tensor, found: Gathered, scale: float) -> torch.Tensor:
        """[r, b, m, g, n * unit], -inf where nothing was gathered."""
        scores = q.unflatten(2, (found.seen.shape[2], -1)) @ found.keys.mT * scale
        return scores.masked_fill_(~found.seen.unsqueeze(3), float("-inf"))

    def add_lse_(
        self, q: torch.Tensor, k: torch.Tensor, work: SelectedPairs, scale: float, lse: torch.Tensor
    ) -> None:
        """Add what this pair has to the log-sum-exp lse [s, b, h] of the selection, in place."""
        for rows, found in self._gathered(q, k, None, work, work.unit(self.selection.block)):
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
        over the heads that share the selection, in place.
        """
        block = self.selection.block
        unit = work.unit(block)
        for rows, found in self._gathered(q, k, None, work, unit):
            heads = found.places.shape[2]
            scores = self._scores(wide(q[rows]), found, scale)
            stats = _finite(lse[rows]).unflatten(2, scores.shape[2:4])
            p = torch.exp(scores - stats.unsqueeze(-1)).sum(dim=3).unflatten(2, (heads, -1)).sum(3)
            p = p.unflatten(-1, (-1, unit)).sum(-1)
            total[rows].scatter_add_(-1, found.places // (block // unit), p)

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
        for rows, found in self._gathered(q, k, v, work, work.unit(self.selection.block)):
            scores = self._scores(wide(q[rows]), found, scoring.scale)
            stats = scores.logsumexp(dim=-1)
            p = scores.sub_(_finite(stats).unsqueeze(-1)).exp_()
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
        width, unit = v.shape[-1], work.unit(self.selection.block)
        key_sums, value_sums, latent, total = None, None, None, None
        if not self.latent:
            key_sums, value_sums = _sums(dk, unit), _sums(dv, unit)
        elif dk is not None or dv is not None:
            total = torch.zeros(
                (*k.shape[:3], rows.q.shape[-1]), dtype=rows.lse.dtype, device=k.device
            )
            latent = _sums(total, unit)
        for tile, found in self._gathered(rows.q, k, v, work, unit):
            heads = found.seen.shape[2], -1
            q, dout = (wide(x[tile]).unflatten(2, heads) for x in (rows.q, rows.dout))
            lse, delta = (x[tile].unflatten(2, heads).unsqueeze(-1) for x in (rows.lse, rows.delta))
            scores = self._scores(wide(rows.q[tile]), found, scoring.scale)
            p = scores.sub_(_finite(lse)).exp_()
            ds = (dout @ found.values.mT).sub_(delta).mul_(p).mul_(scoring.scale)
            if dq is not None:
                dq[tile] += (ds @ found.keys).flatten(2, 3)
            if latent is not None:  # one product for the gradients of both
                both = F.pad(dout, (0, q.shape[-1] - width))
                whole = torch.cat([ds, p], 3).mT @ torch.cat([q, both], 3)
                latent.add_(found.units, whole)
                continue
            grads = ds.mT @ q, p.mT @ dout
            for sums, grad in zip((key_sums, value_sums), grads, strict=True):
                if sums is not None:
                    sums.add_(found.units, grad)
        if latent is not None and total is not None:
            latent.add_to_(total)
            key_grads, value_grads = total[..., width:], total[..., :width]
            if dk is not None:
                dk += key_grads
            if dv is not None:
                dv += value_grads
        for sums, grad in ((key_sums, dk), (value_sums, dv)):
            if sums is not None and grad is not None:
                sums.add_to_(grad)
