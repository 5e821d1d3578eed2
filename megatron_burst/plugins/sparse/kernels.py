# SPDX-License-Identifier: Apache-2.0
"""Torch kernels that compute attention of this rank's queries to the selected keys of a chunk.

`SelectedReference` computes the scores of all keys. `SelectedAten` gathers the selected keys. The
results of chunks are merged by online softmax, as for every kernel in `kernels`.

Shape letters: s query rows, r rows of a tile, t key rows, b batch, h query heads, k key/value
heads, d width, w value width; H selections of a row; m = max(H, k) heads of keys, each shared by g
= h / m query heads; n gathered units per row and selection.
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

# Limit of the bytes of a tile's tensors; a tile has at least one row. On a CPU each tensor stays
# below 32 MiB, because the C library returns larger blocks to the system and maps them again page
# by page. With DSA's 2,048 keys of 576 columns in float32 a tile has 7 rows on a CPU, 56 on CUDA.
BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}


def _bytes(device: torch.device) -> int:
    return BYTES["cpu" if device.type == "cpu" else "cuda"]


class GatheredKeys(NamedTuple):
    """Selected keys of some query rows (a tile), copied from a chunk of keys.

    Keys are copied in units of `unit` consecutive positions. `unit` is the block size of the
    selection, or 1 if the chunk splits blocks. The module docstring explains the shape letters.

    Attributes:
        places: Index of each gathered unit in the row's list of selected units [r, b, H, n].
        units: Index of each gathered unit in `UnitRows.rows` [r * b * m * n].
        seen: Bool [r, b, m, n * unit], True for visible positions.
        keys: Keys [r, b, m, n * unit, d].
        values: Values [r, b, m, n * unit, w].
    """

    places: torch.Tensor
    units: torch.Tensor
    seen: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class SelectedKernel(PairKernel):
    """Base class of the kernels that compute attention to selected keys.

    Attributes:
        selection: Selection of this rank's queries.
        latent: True if values are the first columns of the keys. Then v has these columns, and k
            has the other columns of the keys.
    """

    def __init__(self, selection: Selection, latent: bool):
        self.selection, self.latent = selection, latent

    def of_rows(self, rows: torch.Tensor) -> SelectedKernel:
        """Return a copy of the kernel for a subset of the query rows; `rows` has int64 indices."""
        selection = replace(self.selection, ids=self.selection.ids.index_select(0, rows))
        return type(self)(selection, self.latent)

    def places(self, work: SelectedPairs, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the selected positions of some query rows in a chunk of keys.

        Returns:
            Row of each selected position in the chunk, int64 [r, b, H, top_k * block]; and a bool
            tensor of the same shape, True if the position is in the chunk and visible.
        """
        ids, block = self.selection.ids[rows], self.selection.block
        _, positions, order = work.on(ids.device)
        selected_positions = ids.long().unsqueeze(-1) * block + torch.arange(
            block, device=ids.device
        )
        selected_positions = selected_positions.flatten(-2)
        at = torch.searchsorted(positions, selected_positions).clamp_(max=len(positions) - 1)
        present = (positions[at] == selected_positions) & (selected_positions >= 0)
        return order[at], present & work.sees(rows, selected_positions.clamp(min=0))

    def whole_keys(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return keys with all columns.

        If `latent` is True, the keys are the columns of v followed by the columns of k.
        """
        return torch.cat([v, k], dim=-1) if self.latent else k

    def split_gradients(
        self, dkeys: torch.Tensor, dvalues: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of k and v, given the gradients of whole keys and values.

        Args:
            dkeys: Gradients of the result of `whole_keys`.
            dvalues: Gradients of the values.
            width: Number of value columns.
        """
        if not self.latent:
            return dkeys, dvalues
        return dkeys[..., width:], dvalues + dkeys[..., :width]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


class SelectedReference(SelectedKernel):
    """Kernel "reference": computes all scores of a chunk and masks keys that are not selected."""

    def _hidden(self, work: SelectedPairs, rows: int, keys: int, heads: int) -> torch.Tensor:
        """Return a bool tensor [s, b, h, t], True for keys that are hidden or not selected."""
        at, present = self.places(work, slice(0, rows))
        table = torch.zeros((*at.shape[:3], keys), dtype=torch.int32, device=at.device)
        table.scatter_add_(-1, at, present.int())
        return (table == 0).repeat_interleave(heads // at.shape[2], dim=2)

    def _dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: SelectedPairs, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores [s, b, h, t], keys [t, b, h, d] and values [t, b, h, w].

        Keys and values are repeated for the query heads that share them.
        """
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
        dkeys, dvalues = self.split_gradients(dkeys, dvalues, v.shape[-1])
        if dk is not None:
            dk += dkeys
        if dv is not None:
            dv += dvalues


class UnitRows:
    """Keys or values as a matrix with one row per unit, batch entry and head.

    The shape is [u * b * k, unit * columns]. A unit is a block of `unit` consecutive positions. If
    `unit` is 1, the matrix of a contiguous tensor is a view.
    """

    def __init__(self, rows: torch.Tensor, unit: int):
        self.shape, self.unit = rows.shape, unit
        count = rows.shape[0] // unit * rows.shape[1] * rows.shape[2]
        self.rows = self._units(rows).reshape(count, unit * rows.shape[3])

    def _units(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape x [t, b, k, columns] to [u, b, k, unit, columns]."""
        return x.unflatten(0, (-1, self.unit)).permute(0, 2, 3, 1, 4)

    def take(self, index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Gather units, which are rows of the matrix.

        Args:
            index: Row of each unit, int64; n units for each element of `shape`.
            shape: Leading dimensions of the result.

        Returns:
            A copy [*shape, n * unit, columns].
        """
        positions = len(index) // math.prod(shape) * self.unit
        return self.rows.index_select(0, index).view(*shape, positions, self.shape[3])

    def add_(self, index: torch.Tensor, grads: torch.Tensor) -> None:
        """Add gradients of gathered units to the rows of the matrix; the backward of `take`.

        Args:
            index: Row of each unit, int64; a row may occur several times.
            grads: Gradients [..., n * unit, columns] of the units, in the order of `index`.
        """
        self.rows.index_add_(0, index, grads.reshape(len(index), self.rows.shape[1]))

    def add_to_(self, total: torch.Tensor) -> None:
        """Add all rows to total [t, b, k, columns], unless the rows are a view of `total`."""
        if self.rows.data_ptr() != total.data_ptr():
            t, b, k, columns = self.shape
            units = self.rows.view(t // self.unit, b, k, self.unit, columns)
            total += units.permute(0, 3, 1, 2, 4).reshape(t, b, k, columns)


def _gradient_rows(total: torch.Tensor | None, unit: int) -> UnitRows | None:
    """Return a `UnitRows` matrix in which gradients are summed; None if `total` is None.

    The matrix is a view of `total` if its memory layout allows it. Otherwise it is a new matrix of
    zeros; the caller adds the sums to `total` with `add_to_`.
    """
    if total is None:
        return None
    plain = total.is_contiguous() and (unit == 1 or total.shape[1] * total.shape[2] == 1)
    return UnitRows(total if plain else torch.zeros_like(total), unit)


class SelectedAten(SelectedKernel):
    """Kernel "aten": gathers the selected keys of a tile of query rows, then uses batched matmuls.

    A tile is a slice of the query rows. The kernel allocates memory for one tile, and for a copy of
    the chunk of keys in the dtype of scores. If `latent` is True, values are columns of the
    gathered keys. Blocks are gathered as a whole if they are contiguous in the chunk.
    """

    def _visible_units(
        self, work: SelectedPairs, rows: slice, unit: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the units of a chunk that some query rows select and see.

        A unit is a block of `unit` consecutive positions. The result may include units that are not
        in the chunk or that have no visible positions.

        Returns:
            Index of each unit in the chunk, int64 [r, b, H, n]; index of each unit in the row's
            list of selected units, with the same shape; and a bool tensor [r, b, H, n, unit], True
            for visible positions.
        """
        ids, block = self.selection.ids[rows], self.selection.block
        _, positions, order = work.on(ids.device)
        selected_units = ids.long()
        if unit < block:
            selected_units = (
                selected_units.unsqueeze(-1) * block + torch.arange(block, device=ids.device)
            ).flatten(-2)
        firsts = positions[::unit].contiguous()
        selected_units = selected_units * unit
        at = torch.searchsorted(firsts, selected_units).clamp_(max=len(firsts) - 1)
        present = (firsts[at] == selected_units) & (selected_units >= 0)
        unit_positions = selected_units.clamp_(min=0).unsqueeze(-1)
        if unit > 1:
            unit_positions = unit_positions + torch.arange(unit, device=ids.device)
        seen = work.sees(rows, unit_positions) & present.unsqueeze(-1)
        present = seen.any(dim=-1)
        # On the CPU, n is the largest number of visible units of a row. On other devices this would
        # synchronize with the host, so n is limited by the number of units of the chunk.
        places, width = at.shape[-1], min(at.shape[-1], len(firsts))
        counts = present.sum(dim=-1, keepdim=True)
        if at.device.type == "cpu":
            width = max(1, int(counts.amax()))
        at = order[at * unit] // unit
        all_places = torch.arange(places, device=at.device).expand_as(at)
        if width == places:
            return at, all_places, seen
        slot = present.cumsum(dim=-1).sub_(1).masked_fill_(~present, width)
        first = at.new_zeros((*at.shape[:-1], width + 1)).scatter_(-1, slot, all_places)
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
    ) -> Iterator[tuple[slice, GatheredKeys]]:
        """Yield tiles of query rows, each with its selected keys and values, copied from the chunk.

        If v is None, values are empty. Keys are copied in units of `unit` consecutive positions.
        """
        ids, (_, batch, key_heads, _) = self.selection.ids, k.shape
        keys = UnitRows(wide(k if v is None else self.whole_keys(k, v)), unit)
        values = None if v is None or self.latent else UnitRows(wide(v), unit)
        heads = max(ids.shape[2], key_heads)
        places = ids.shape[2] * ids.shape[3] * (self.selection.block // unit)
        columns = keys.shape[3] + (0 if values is None else values.shape[3])
        columns = 2 * columns + 3 * (q.shape[2] // heads)  # including gradients and scores
        head_offsets = torch.arange(batch, device=k.device)[:, None, None] * key_heads
        head_offsets = (
            head_offsets + (torch.arange(heads, device=k.device) * key_heads // heads)[:, None]
        )
        limit = _bytes(k.device)
        for outer in tiles(len(q), batch * places * 8 * (5 + unit), limit):
            at, first, seen = self._visible_units(work, outer, unit)
            at, seen = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (at, seen))
            row_bytes = at[0].numel() * unit * columns * keys.rows.element_size()
            for tile in tiles(len(at), row_bytes, limit):
                shape = len(at[tile]), batch, heads
                index = (at[tile] * (batch * key_heads) + head_offsets).flatten()
                keys_tile = keys.take(index, shape)
                width = 0 if v is None else v.shape[-1]
                value = keys_tile[..., :width] if values is None else values.take(index, shape)
                rows = slice(outer.start + tile.start, outer.start + tile.stop)
                yield (
                    rows,
                    GatheredKeys(first[tile], index, seen[tile].flatten(-2), keys_tile, value),
                )

    def _scores(self, q: torch.Tensor, gathered: GatheredKeys, scale: float) -> torch.Tensor:
        """Return scores [r, b, m, g, n * unit] of gathered keys; -inf if a key is not visible."""
        scores = q.unflatten(2, (gathered.seen.shape[2], -1)) @ gathered.keys.mT * scale
        return scores.masked_fill_(~gathered.seen.unsqueeze(3), float("-inf"))

    def add_lse_(
        self, q: torch.Tensor, k: torch.Tensor, work: SelectedPairs, scale: float, lse: torch.Tensor
    ) -> None:
        """Add the scores of the selected keys of a chunk to the log-sum-exp lse [s, b, h]."""
        for rows, gathered in self._gathered(q, k, None, work, work.unit(self.selection.block)):
            stats = self._scores(wide(q[rows]), gathered, scale).logsumexp(dim=-1).flatten(2, 3)
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
        """Add the attention probability of each selected unit in this chunk to `total`, in place.

        `total` is [s, b, H, top_k]. Probabilities are summed over the positions of a unit and over
        the heads that share a selection.
        """
        block = self.selection.block
        unit = work.unit(block)
        for rows, gathered in self._gathered(q, k, None, work, unit):
            heads = gathered.places.shape[2]
            scores = self._scores(wide(q[rows]), gathered, scale)
            stats = _finite(lse[rows]).unflatten(2, scores.shape[2:4])
            p = torch.exp(scores - stats.unsqueeze(-1)).sum(dim=3).unflatten(2, (heads, -1)).sum(3)
            p = p.unflatten(-1, (-1, unit)).sum(-1)
            total[rows].scatter_add_(-1, gathered.places // (block // unit), p)

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
        for rows, gathered in self._gathered(q, k, v, work, work.unit(self.selection.block)):
            scores = self._scores(wide(q[rows]), gathered, scoring.scale)
            stats = scores.logsumexp(dim=-1)
            p = scores.sub_(_finite(stats).unsqueeze(-1)).exp_()
            merge_(out[rows], lse[rows], (p @ gathered.values).flatten(2, 3), stats.flatten(2, 3))

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
            key_sums, value_sums = _gradient_rows(dk, unit), _gradient_rows(dv, unit)
        elif dk is not None or dv is not None:
            total = torch.zeros(
                (*k.shape[:3], rows.q.shape[-1]), dtype=rows.lse.dtype, device=k.device
            )
            latent = _gradient_rows(total, unit)
        for tile, gathered in self._gathered(rows.q, k, v, work, unit):
            heads = gathered.seen.shape[2], -1
            q, dout = (wide(x[tile]).unflatten(2, heads) for x in (rows.q, rows.dout))
            lse, delta = (x[tile].unflatten(2, heads).unsqueeze(-1) for x in (rows.lse, rows.delta))
            scores = self._scores(wide(rows.q[tile]), gathered, scoring.scale)
            p = scores.sub_(_finite(lse)).exp_()
            ds = (dout @ gathered.values.mT).sub_(delta).mul_(p).mul_(scoring.scale)
            if dq is not None:
                dq[tile] += (ds @ gathered.keys).flatten(2, 3)
            if latent is not None:  # one matmul for the gradients of keys and values
                padded = F.pad(dout, (0, q.shape[-1] - width))
                key_grads = torch.cat([ds, p], 3).mT @ torch.cat([q, padded], 3)
                latent.add_(gathered.units, key_grads)
                continue
            grads = ds.mT @ q, p.mT @ dout
            for sums, grad in zip((key_sums, value_sums), grads, strict=True):
                if sums is not None:
                    sums.add_(gathered.units, grad)
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
