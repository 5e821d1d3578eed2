# SPDX-License-Identifier: Apache-2.0
"""`Selection`: the units of keys that each query attends to, per group of heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...layout.layouts import Layout, Replicated
from ...masks import Mask


@dataclass(frozen=True, eq=False)
class Selection:
    """Units (blocks of consecutive positions) of keys that each query of this rank attends to.

    `mb.select` returns a selection. A caller can also make one.

    A query attends to a position if the unit of the position is selected and the position is
    visible in `mask`.

    Attributes:
        ids: Selected units, int32 [s rows, b batch, H, top_k], ascending, then -1 in unused
            entries. Unit u has the positions from u * block to (u + 1) * block - 1 of the whole
            sequence. H must divide the number of query heads: one selection per query head, per
            group of heads, or for all heads (H = 1).
        layout: Layout of the queries, and of the keys unless `key_layout` is set.
        mask: Mask of the queries and keys.
        block: Number of positions of a unit.
        key_layout: Layout of the keys if they are another sequence, as in `AttentionOptions`. Units
            are then blocks of positions of the keys.
        checked: True for a result of `mb.select`, whose ids need no check. False for a selection
            that the caller makes, and for copies (`dataclasses.replace`).
    """

    ids: torch.Tensor
    layout: Layout
    mask: Mask
    block: int = 1
    key_layout: Layout | Replicated | None = None
    checked: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def counts(self) -> torch.Tensor:
        """Number of selected units for each row, batch entry and selection, int32 [s, b, H]."""
        return (self.ids >= 0).sum(dim=-1, dtype=torch.int32)

    def check(self, q: torch.Tensor, key_heads: int, key_len: int) -> None:
        """Raise ValueError unless the selection fits these queries and keys.

        The values of the ids are checked only if `checked` is False. The host then waits for the
        device.

        Args:
            q: Queries [s, b, h, d].
            key_heads: Number of key heads.
            key_len: Number of positions of the keys' whole sequence.
        """
        ids = self.ids
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int32 or ids.dim() != 4:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else repr(ids)
            raise ValueError(f"selection: ids must be int32 [s, b, heads, top_k], got {got:.100}")
        heads = ids.shape[2]
        if 0 in ids.shape:
            raise ValueError(f"selection: ids must not be empty, got shape {tuple(ids.shape)}")
        if ids.shape[:2] != q.shape[:2] or ids.device != q.device:
            raise ValueError(
                f"selection: ids have (rows, batch) {tuple(ids.shape[:2])} on {ids.device}, but "
                f"the queries have {tuple(q.shape[:2])} on {q.device}; the two must be equal"
            )
        if q.shape[2] % heads or (heads % key_heads and key_heads % heads):
            raise ValueError(
                f"selection: ids have {heads} heads, which must divide the {q.shape[2]} query "
                f"heads, and divide or be a multiple of the {key_heads} key heads"
            )
        if type(self.block) is not int or self.block < 1 or key_len % self.block:
            raise ValueError(
                f"selection: block must be a positive divisor of the {key_len} positions, got "
                f"{self.block!r}"
            )
        if self.checked:
            return
        least, most = int(ids.min()), int(ids.max())
        if least < -1 or most >= key_len // self.block:
            units = "block numbers" if self.block > 1 else "positions"
            raise ValueError(
                f"selection: ids must be -1 (empty entry) or {units} from 0 to "
                f"{key_len // self.block - 1}, got ids from {least} to {most}"
            )
        before, after = ids[..., :-1], ids[..., 1:]
        if not bool(((after == -1) | ((after > before) & (before >= 0))).all()):
            raise ValueError(
                "selection: ids of a query must be in ascending order, followed only by -1; sort "
                "them"
            )


def selected(*fields: Any) -> Selection:
    """Return `Selection(*fields)` with `checked` True. The caller must pass valid ids."""
    made = Selection(*fields)
    object.__setattr__(made, "checked", True)
    return made
