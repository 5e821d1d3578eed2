# SPDX-License-Identifier: Apache-2.0
"""The table of layouts, and the function `make`, which makes a layout from its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .balanced import Balanced, Window
from .layouts import NAMES, BlockStriped, Contiguous, DocumentZigzag, Layout, Striped, Zigzag

LAYOUTS: dict[str, type[Layout]] = {cls.name: cls for cls in (Contiguous, Zigzag, Striped)}
# The layouts that accept each argument. All layouts accept cp_size.
_TAKEN = {"block": ("block_striped",), "cu_seqlens": ("zigzag", "balanced")} | dict.fromkeys(
    ("per_node", "windows", "padding", "tree", "row_cost"), ("balanced",)
)


def make(
    name: str,
    *,
    cp_size: int,
    block: int | None = None,
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
    per_node: int | None = None,
    windows: Sequence[Window] | None = None,
    padding: Sequence[int] | None = None,
    tree: Any = None,
    row_cost: Sequence[float] | None = None,
) -> Layout:
    """Return the layout with this name.

    Args:
        name: "contiguous", "zigzag", "striped", "block_striped" or "balanced".
        cp_size: Number of ranks.
        block: Number of positions of a block. Only for "block_striped", which requires it.
        cu_seqlens: Cumulative lengths of the documents. With "zigzag", the layout is then zigzag
            within each document. "balanced" requires `cu_seqlens` or `tree`.
        per_node: Only for "balanced"; see `Balanced`.
        windows: Only for "balanced"; see `Balanced`.
        padding: Only for "balanced"; see `Balanced`.
        tree: Only for "balanced", in place of `cu_seqlens` and `padding`: the result of
            `mb.trees.pack`, or a `masks.Tree`.
        row_cost: Only for "balanced"; see `Balanced`.

    Raises:
        ValueError: There is no layout of that name. Or an argument is missing, invalid or not
            supported by the layout.

    Example:
        >>> layout = mb.layout.make("zigzag", cp_size=4)
        >>> layout.spans(rank=0, seq_len=16)
        (Span(start=0, stride=1, length=2), Span(start=14, stride=1, length=2))
    """
    if name not in NAMES:
        raise ValueError(f"layout must be one of {', '.join(NAMES)}, got {name!r}")
    arguments = {"block": block, "cu_seqlens": cu_seqlens, "per_node": per_node, "windows": windows,
             "padding": padding, "tree": tree, "row_cost": row_cost}  # fmt: skip
    arguments = {key: value for key, value in arguments.items() if value is not None}
    for key in arguments:
        if name not in _TAKEN[key]:
            raise ValueError(
                f"{key} requires layout {' or '.join(_TAKEN[key])}, got {name} with {key}="
                f"{arguments[key]}"
            )
    if name == "block_striped" and block is None:
        raise ValueError(
            "block: layout block_striped needs the block size of the mask, got None; pass block"
        )
    if name == "balanced" and cu_seqlens is None and tree is None:
        raise ValueError(
            "cu_seqlens: layout balanced needs the cumulative lengths of the documents, got None; "
            "pass cu_seqlens or tree"
        )
    return _maker(name, cu_seqlens is not None)(cp_size, **arguments)


def _maker(name: str, packed: bool) -> Callable[..., Any]:
    if name == "balanced":
        return Balanced
    if name == "zigzag" and packed:
        return DocumentZigzag
    return BlockStriped if name == "block_striped" else LAYOUTS[name]
