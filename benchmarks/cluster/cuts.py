"""Distribution of a problem's tokens over ranks, by the layout of a rival.

All rivals compute the same attention of the same tokens; the layout sets the tokens of a rank.
"documents" is Megatron's layout of packed documents. It needs lengths that are multiples of 2 x
ranks, so every document gets padding behind its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

import megatron_burst as mb
from megatron_burst.layout import Layout, make
from megatron_burst.masks import Causal, Documents, Mask

from .problems import bounds_of, mask_of

LAYOUTS = {
    "zigzag": "zigzag of the whole sequence",
    "documents": "zigzag of each document, padded to multiples of 2 x ranks",
    "balanced": "tokens and visible pairs alike on all ranks",
}
UNKNOWN = float("nan")  # in a truth: this entry is not compared


class Cut(NamedTuple):
    """A layout, the mask over its rows, and the token of each row, -1 for padding.

    Padding follows the tokens of its document, which do not attend to it.
    """

    layout: Layout
    mask: Mask
    tokens: np.ndarray

    def shard(self, x: torch.Tensor, rank: int, padding: torch.Tensor | float) -> torch.Tensor:
        """Return the rows of `rank` from `x` (tokens in dim 0), with `padding` in padding rows."""
        rows = x[torch.from_numpy(np.maximum(self.tokens, 0))]
        empty = torch.from_numpy(self.tokens < 0)
        if isinstance(padding, torch.Tensor):
            rows[empty] = padding[: int(empty.sum())]
        else:
            rows[empty] = padding
        return mb.shard(rows, self.layout, rank, dim=0).clone()


def cut(name: str, mask: str, length: int, nodes: int, per_node: int) -> Cut:
    """Cut `length` tokens under the named mask by the named layout.

    "balanced" may be followed by two numbers, its `row_cost`.

    Raises:
        ValueError: The layout is unknown, or the mask has no documents for it.
    """
    size, bounds = nodes * per_node, bounds_of(mask, length)
    name, *numbers = name.split()
    if name not in LAYOUTS:
        raise ValueError(f"layout: there is {', '.join(LAYOUTS)}, got {name!r}")
    if name == "zigzag":
        return Cut(make("zigzag", cp_size=size), mask_of(mask, length), np.arange(length))
    if bounds is None:
        raise ValueError(f"layout {name} needs packed documents, got the mask {mask!r}")
    if name == "balanced":
        cost = [*map(float, numbers)] or None
        layout = make("balanced", cp_size=size, cu_seqlens=bounds, per_node=per_node, row_cost=cost)
        return Cut(layout, mask_of(mask, length), np.arange(length))
    return each_document(bounds, range(len(bounds) - 1), size)


def each_document(bounds: Sequence[int], numbers: Sequence[int], size: int) -> Cut:
    """Return the numbered documents, each in zigzag over `size` ranks.

    Args:
        bounds: Cumulative lengths of all documents.
    """
    lengths, multiple = np.diff(bounds)[[*numbers]], 2 * size
    padded = np.concatenate([[0], np.cumsum(-(-lengths // multiple) * multiple)])
    tokens, first = np.full(padded[-1], -1), np.repeat(padded[:-1], lengths)
    inside = np.concatenate([np.arange(document_length) for document_length in lengths])
    tokens[first + inside] = np.repeat(np.asarray(bounds)[[*numbers]], lengths) + inside
    layout = make("zigzag", cp_size=size, cu_seqlens=padded)
    return Cut(layout, Documents(padded) & Causal(), tokens)
