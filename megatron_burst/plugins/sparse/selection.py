# SPDX-License-Identifier: Apache-2.0
"""What was selected: for every query, and group of heads, the units of keys that it attends to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...layout.layouts import Layout
from ...masks import Mask


@dataclass(frozen=True, eq=False)
class Selection:
    """The units of keys that this rank's queries attend to, made by `mb.select` or by hand.

    ids: int32 [s, b, H, top_k], ascending, -1 in places that are not taken: unit u is the positions
    of the whole sequence from u * block. H divides the query heads: a selection per query head, per
    group of them, or (1) for all. layout, mask: of the queries and keys. A query attends to what is
    selected and `mask` shows. checked: are the ids known to be right, as those of `mb.select` are?
    A copy with other ids is not (`dataclasses.replace`).
    """

    ids: torch.Tensor
    layout: Layout
    mask: Mask
    block: int = 1
    checked: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def counts(self) -> torch.Tensor:
        """int32 [s, b, H]: how many units each query has."""
        return (self.ids >= 0).sum(dim=-1, dtype=torch.int32)

    def check(self, q: torch.Tensor, key_heads: int, seq_len: int) -> None:
        """Raise ValueError unless this is a selection for queries q [s, b, h, d], whose key_heads
        key heads are of a sequence of seq_len positions.

        Reads the values of a selection made by hand, for which the host waits.
        """
        ids = self.ids
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int32 or ids.dim() != 4:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else repr(ids)
            raise ValueError(f"selection: ids must be int32 [s, b, heads, top_k], got {got:.100}")
        heads = ids.shape[2]
        if 0 in ids.shape:
            raise ValueError(f"selection: ids must hold at least one place, got {tuple(ids.shape)}")
        if ids.shape[:2] != q.shape[:2] or ids.device != q.device:
            raise ValueError(
                f"selection: ids of {tuple(ids.shape[:2])} rows and batch on {ids.device}, queries "
                f"have {tuple(q.shape[:2])} on {q.device}"
            )
        if q.shape[2] % heads or (heads % key_heads and key_heads % heads):
            raise ValueError(
                f"selection: {heads} selections of a row must divide the {q.shape[2]} query heads, "
                f"and divide or be a multiple of the {key_heads} key heads"
            )
        if type(self.block) is not int or self.block < 1 or seq_len % self.block:
            raise ValueError(
                f"selection: block must be a positive divisor of the {seq_len} positions, got "
                f"{self.block!r}"
            )
        if self.checked:
            return
        least, most = int(ids.min()), int(ids.max())
        if least < -1 or most >= seq_len // self.block:
            raise ValueError(
                f"selection: ids must be -1 or units below {seq_len // self.block}, got {least} to "
                f"{most}"
            )
        before, after = ids[..., :-1], ids[..., 1:]
        if not bool(((after == -1) | ((after > before) & (before >= 0))).all()):
            raise ValueError("selection: ids of a query must ascend, with -1 after all others")


def selected(*fields: Any) -> Selection:
    """A selection whose ids are right."""
    made = Selection(*fields)
    object.__setattr__(made, "checked", True)
    return made
