# SPDX-License-Identifier: Apache-2.0
"""Plans of DeepSeek-V4's hybrid attention: one for the window, one for the compressed keys.

Both plans cover the same queries. Values are the keys. Compressed keys are on the rank that holds
the last row of their window (`WindowLayout`).

On CUDA, dense kernels support at most 256 columns, and keys of DeepSeek-V4 have 512. For wider
keys, the kernels of selected keys run with a selection of all keys that a query sees.

Shape letters: s local rows, t local compressed keys, b batch, h query heads, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ....layout import Layout
from ....layout import make as make_layout
from ....layout.sharding import to_device
from ....masks import Mask, Window
from ....masks.compressed import Compressed
from ....megatron.attention.plan_book import PlanBook, RowChunkSizes, Tensors
from ....megatron.data.cut import BatchCut
from ....megatron.data.packed import Pack
from ....options import AttentionOptions
from ....planning.plan import Plan
from ....planning.prepare import AttentionOperation
from ....planning.stand_ins import rows_like
from ....planning.validate import Request
from ..options import SparseOptions
from ..selection import Selection, selected
from ..window_layout import WindowLayout
from .hybrid_settings import key_algorithm, too_wide

POSITIONS_KEPT = 64  # kinds of layers x micro-batches in flight
BLOCK = 64  # most keys per entry in the list of all visible keys


class IndexerSettings(NamedTuple):
    """Settings of an indexer, which must be equal on all ranks.

    Attributes:
        heads: Number of index heads.
        width: Width of index heads.
        top_k: Number of compressed keys that the indexer selects per query.
        loss_coeff: Weight of the indexer's loss.
    """

    heads: int
    width: int
    top_k: int
    loss_coeff: float


@dataclass(frozen=True, kw_only=True)
class HybridOperation(AttentionOperation):
    """Operation that makes the plan of attention to the keys of the window or compressed keys.

    The settings of the indexer must be equal on all ranks.
    """

    indexer: IndexerSettings | None

    def check(self) -> Request:
        request = super().check()
        return replace(request, facts=request.facts | {"indexer": self.indexer})


@dataclass(frozen=True)
class HybridKind:
    """Properties of the window's keys, or of the compressed keys, of hybrid attention layers.

    Layers with equal properties share plans; see `plan_book.Kind`.

    Attributes:
        burst: Options of the run.
        cut: How the run splits batches over context-parallel ranks.
        window: Number of positions of the window, including the query's own position.
        ratio: Number of rows of a compressed key; 0 for the keys of the window.
        indexer: Settings of the indexer that selects compressed keys for each query, or None.
    """

    burst: SparseOptions
    cut: BatchCut
    window: int
    ratio: int = 0
    indexer: IndexerSettings | None = None

    @property
    def name(self) -> str:
        """Name of the keys in messages."""
        if not self.ratio:
            return f"hybrid attention, window of {self.window} keys"
        selected = "selected " if self.indexer else ""
        return f"hybrid attention, {selected}keys of {self.ratio} rows"

    def own_mask(self, pack: Pack | None, seq_len: int) -> None:
        """Return None: these layers do not support a mask of the user."""

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: None
    ) -> HybridOperation:
        """Return the operation of attention to these keys.

        Args:
            book: Cache of the plans of the layers of a context-parallel group.
            tensors: Queries "q" [s, b, h, d].
            pack: Documents of a packed batch, or None.
            rows: Row chunks; not used.
            own: Mask of the layer; not used.
        """
        q = tensors["q"]
        layout = self._layout(book, pack)
        keywords: Any = self.burst.keywords() | {"layout": layout}
        keywords["mask"] = self._window(pack)
        keys = rows_like(q, 1, q.shape[3])
        if self.ratio:
            mask = Compressed(self.ratio)
            if pack is not None:
                mask = Compressed(self.ratio, cu_seqlens=pack.documents, padding=pack.padding)
            key_layout = WindowLayout(layout, mask, len(q) * book.groups.size)
            keywords |= {"mask": mask, "key_layout": key_layout}
            keys = q.new_empty(()).expand(key_layout.rows, q.shape[1], 1, q.shape[3])
        lists = self.indexer is not None or needs_lists(q)
        keywords["algorithm"] = key_algorithm(self.burst, self.ratio, lists)
        if lists:  # the kernel is not run: the plan of each call is derived from this plan
            keywords |= {"side": "kv", "kernel": "reference"}
        return HybridOperation(
            groups=book.groups,
            tensors=(q, keys, None),
            shapes=None,
            options=AttentionOptions(**keywords),
            needs_grad=(True, True, True),
            sink=None,
            max_logits=None,
            indexer=self.indexer,
            rates=book.rates(self.burst) if keywords["algorithm"] == "auto" else None,
        )

    def log(
        self, book: PlanBook, plan: Plan, tensors: Tensors, pack: Pack | None, own: None
    ) -> None:
        """Log the first plan of these layers; see `Kind.log`."""
        if self not in book.logged:
            book.logged.add(self)
            line = f"{self.name}: {plan.describe()}"
            book.startup = book.startup or line
            book.log(line)

    def _layout(self, book: PlanBook, pack: Pack | None) -> Layout:
        size = book.groups.size
        if pack is not None:
            return pack.layout(self.cut, size)
        return make_layout(self.cut.name if size > 1 else "contiguous", cp_size=size)

    def _window(self, pack: Pack | None) -> Mask:
        window = Window(self.window - 1, 0)
        return window if pack is None else window & pack.mask


def needs_lists(query: torch.Tensor) -> bool:
    """Return whether only the kernels of selected keys support these queries.

    Args:
        query: Queries [s, b, h, d].
    """
    return too_wide(query.shape[-1], query.is_cuda)


class HybridPlans(NamedTuple):
    """Plans of one forward of a layer.

    Attributes:
        window: Plan of the keys of the window.
        compressed: Plan of the compressed keys; None for layers without them.
    """

    window: Plan
    compressed: Plan | None = None

    @property
    def row_positions(self) -> torch.Tensor:
        """Position of each row of this rank in its document, int64 [s]; cached per plan."""
        plan = self.window
        cache = plan.groups.recent("hybrid positions", POSITIONS_KEPT)
        positions = cache.find(plan.identity)
        if positions is None:
            rows = plan.layout.positions(plan.groups.rank, _length(plan))
            made = to_device(rows - _starts(rows, plan.mask.breaks), plan.device)
            positions = cache.keep(plan.identity, made)
        return positions

    @property
    def key_positions(self) -> torch.Tensor:
        """Position, in the document, of the first row of each compressed key's window, int64 [t].

        The position is 0 for padding keys.
        """
        plan = self.compressed
        assert plan is not None
        cache = plan.groups.recent("hybrid positions", POSITIONS_KEPT)
        positions = cache.find(plan.identity)
        if positions is None:
            layout, mask = plan.options.key_layout, plan.mask
            assert isinstance(layout, WindowLayout)
            assert isinstance(mask, Compressed)
            keys = np.empty(0, dtype=np.int64)
            if layout.rows:
                keys = layout.positions(plan.groups.rank, layout.key_len)
            first = mask.first_rows(keys, _length(plan))
            made = np.where(first < 0, 0, first - _starts(first, mask.bounds))
            positions = cache.keep(plan.identity, to_device(made, plan.device))
        return positions


def all_visible(plan: Plan, window: int) -> Selection | None:
    """Return a selection of all keys that the queries of a plan see; None if there are no keys.

    The selection has units of up to `BLOCK` consecutive keys. The mask hides the keys of a unit
    that a query does not see.

    Args:
        plan: Plan of the window or of the compressed keys.
        window: Positions of the window, including the query's own position.
    """
    mask, layout = plan.mask, plan.options.key_layout
    key_len = layout.key_len if isinstance(layout, WindowLayout) else _length(plan)
    if not key_len:
        return None
    cache = plan.groups.recent("hybrid lists", POSITIONS_KEPT)
    ids, block = cache.find(plan.identity), math.gcd(BLOCK, key_len)
    if ids is None:
        rows = plan.layout.positions(plan.groups.rank, _length(plan))
        if isinstance(mask, Compressed):
            low, stop = mask.keys_of_queries(rows)
            lengths = np.diff(mask.bounds) if mask.packed else _length(plan)
            most = int(np.max(mask.windows(lengths)))
        else:
            low, stop = np.maximum(_starts(rows, mask.breaks), rows - window + 1), rows + 1
            most = min(window, _length(plan))
        units = low[:, None] // block + np.arange((most + block - 2) // block + 1)
        units[units * block >= stop[:, None]] = -1
        ids = cache.keep(plan.identity, to_device(units.astype(np.int32), plan.device))
    ids = ids[:, None, None].expand(-1, plan.signature[0][0][1], -1, -1)
    return selected(ids, plan.layout, mask, block, layout)


def _length(plan: Plan) -> int:
    """Return the number of positions of the queries' sequence."""
    return plan.signature[0][0][0] * plan.groups.size


def _starts(positions: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the start of the document of each position; 0 if there are no documents."""
    bounds = np.asarray(bounds)
    index = np.searchsorted(bounds, positions, side="right") - 1
    return np.where(index < 0, 0, bounds[np.maximum(index, 0)]) if len(bounds) else 0 * positions
