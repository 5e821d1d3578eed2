# SPDX-License-Identifier: Apache-2.0
"""Format in which index keys are sent: one row per unit, so that no schedule splits a unit.

A unit is a block of consecutive positions. The selection rule sets its length
(`SelectionRule.block`). If the rule scores means of keys, a row contains the means of one unit,
which usually have fewer bytes than the keys. Otherwise a row contains all keys of one unit. In the
layout and the mask of the ring, units take the place of positions.

Shape letters: t key rows, u units, n means per unit (all keys of the unit, if the rule has no
means), b batch, k index key heads, d width.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...kernels.online_softmax import accumulation_dtype
from ...layout import LAYOUTS, Layout, Span, make
from ...masks import Causal, Full, Mask
from ...masks.base import Combined
from ...masks.tables import Documents
from ...options import AttentionOptions
from .rules import SelectionRule, parts_per_unit


class UnitLayout(Layout):
    """Layout of units, derived from a layout of positions.

    Args:
        of: Layout of positions. It must keep each unit on one rank.
        block: Number of positions of a unit; unit u starts at position u * block.
    """

    def __init__(self, of: Layout, block: int):
        super().__init__(of.cp_size)
        self.of, self.block, self.name = of, block, of.name

    def __repr__(self) -> str:
        return f"UnitLayout({self.of.complete_text}, {self.block})"

    def describe(self) -> str:
        return f"{self.of.describe()}, units of {self.block}"

    def check(self, seq_len: int) -> None:
        self.of.check(seq_len * self.block)

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        spans, block = self.of.spans(rank, seq_len * self.block), self.block
        return tuple(Span(span.start // block, 1, span.length // block) for span in spans)


def by_units(
    options: AttentionOptions, size: int, index_q: torch.Tensor, rule: SelectionRule
) -> AttentionOptions:
    """Return options for a ring that sends one row per unit (block of consecutive positions).

    In the layout and the mask of the result, units take the place of positions. If the layout or
    the mask is invalid, return `options` unchanged; the checks of the plan then raise the error.

    Args:
        options: Options with the layout and mask of positions.
        size: Number of ranks.
        index_q: Index queries of this rank; only their number of rows, dimension 0, is used.
        rule: Selection rule.

    Raises:
        ValueError: The layout or the mask splits a unit, or the options have a key layout.
    """
    layout, mask, block = options.layout, options.mask, rule.block
    if block == 1:
        return options
    if options.key_layout is not None:
        raise ValueError(
            f"rule: blocks of {block} keys need keys of the queries' sequence, and this plan was "
            f"made with key_layout={options.key_layout}; use a rule that selects single keys, such "
            "as dsa"
        )
    if isinstance(layout, str) and layout in LAYOUTS and layout != "balanced":
        layout = make(layout, cp_size=size)
    mask, seq_len = Causal() if mask is None else mask, index_q.shape[0] * size
    if not isinstance(layout, Layout) or not isinstance(mask, Mask) or layout.cp_size != size:
        return options
    layout.check(seq_len)
    mask.check(seq_len)
    _check_layout(layout, seq_len, block)
    mask_of_units = _of_units(mask, block, rule.own and is_causal(mask))
    if mask_of_units is None:
        raise ValueError(
            f"mask: a rule with blocks of {block} positions supports Causal, Full and Documents, "
            f"combined by &; documents (not padding) must start at multiples of {block}; got "
            f"{mask!r:.200}"
        )
    return replace(options, layout=UnitLayout(layout, block), mask=mask_of_units)


def _check_layout(layout: Layout, seq_len: int, block: int) -> None:
    for rank in range(layout.cp_size):
        for start, stride, length in layout.spans(rank, seq_len):
            if length and (stride != 1 or start % block or length % block):
                raise ValueError(
                    f"layout {layout.name} cuts the blocks of {block} positions of the rule: rank "
                    f"{rank} holds {length} positions from {start} on, {stride} apart; each block "
                    "must be on one rank: use layout contiguous if a rank's rows of the sequence "
                    f"are a multiple of {block}, or zigzag if they are a multiple of {2 * block} "
                    "(rows of each document, if documents are cut)"
                )


def _of_units(mask: Mask, block: int, padded: bool) -> Mask | None:
    """Convert a mask of positions to a mask of units, or return None if that is impossible.

    A unit is a block of `block` consecutive positions. If `padded` is True, padding may start
    within a unit. Only queries of this unit see a mean that includes padding keys, and these
    queries always select the unit.
    """
    if isinstance(mask, Combined) and mask.symbol == "&":
        a, b = (_of_units(part, block, padded) for part in (mask.a, mask.b))
        return None if a is None or b is None else a & b
    if type(mask) is Documents and not mask.for_other_keys:
        bounds, pads = mask.bounds.copy(), list(mask.padding)
        if padded:
            bounds[pads] += -bounds[pads] % block
        return None if (bounds % block).any() else Documents(bounds // block, pads)
    return mask if type(mask) in (Causal, Full) else None


def is_causal(mask: Mask) -> bool:
    """Return whether a mask that `by_units` supports is causal: no query sees a later position."""
    if isinstance(mask, Combined):
        return is_causal(mask.a) or is_causal(mask.b)
    return type(mask) is Causal


def rows_of_units(k: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    """Convert index keys to the rows that are sent, one row per unit.

    Args:
        k: Index keys [keys, batch, key heads, width].
        rule: Selection rule, which sets the length of a unit and n, the number of means or keys
            that are sent per unit.

    Returns:
        Rows [units, batch, key heads, n * width]. Means have the dtype of scores (float32 or
        float64); keys keep their dtype.
    """
    part_size = rule.block // parts_per_unit(rule)
    if part_size > 1:
        k = k.to(accumulation_dtype(k.dtype)).unflatten(0, (-1, part_size)).mean(dim=1)
    return rows_of_parts(k, rule).contiguous()


def keys_of_units(rows: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    """Split received rows, one per unit, into the means or keys of the units.

    Args:
        rows: Rows [units, batch, key heads, n * width].
        rule: Selection rule, which sets n, the number of means or keys of a unit.

    Returns:
        Means or keys [units * n, batch, key heads, width].
    """
    return rows.unflatten(3, (parts_per_unit(rule), -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def rows_of_parts(keys: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    """Join the means or keys of each unit into one row; the inverse of `keys_of_units`.

    Args:
        keys: Means or keys [units * n, batch, key heads, width].
        rule: Selection rule, which sets n, the number of means or keys of a unit.

    Returns:
        Rows [units, batch, key heads, n * width].
    """
    return keys.unflatten(0, (-1, parts_per_unit(rule))).permute(0, 2, 3, 1, 4).flatten(3)


def gradient_of_keys(rows: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    """Convert the gradient of the sent rows to the gradient of index keys.

    A sent row, made by `rows_of_units`, has all keys of one unit (block of consecutive positions)
    or the means of n equal parts of the unit.

    Args:
        rows: Gradient of the sent rows [units, batch, key heads, n * width].
        rule: Selection rule, which sets the length of a unit and n.

    Returns:
        Gradient of the index keys [keys, batch, key heads, width].
    """
    part_size = rule.block // parts_per_unit(rule)
    return keys_of_units(rows, rule).repeat_interleave(part_size, dim=0) / part_size


def unit_placeholders(
    q: torch.Tensor, k: torch.Tensor, rule: SelectionRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return placeholders (q, k, v) for the plan of a ring that sends index keys, one row per unit.

    A unit is a block of consecutive positions. A plan reads only the shapes, dtype and device of
    the placeholders. A row of q stands for all queries of a unit, and has the index heads of all
    these queries.
    """
    (rows, batch, heads, width), n = q.shape, parts_per_unit(rule)
    dtype = k.dtype if n == rule.block else accumulation_dtype(k.dtype)
    scalar = k.new_empty(1, dtype=dtype)
    q = scalar.expand(rows // rule.block, batch, heads * rule.block, n * width)
    k = scalar.expand(len(k) // rule.block, batch, k.shape[2], n * width)
    return q, k, k[..., :1]
