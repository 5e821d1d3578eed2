# SPDX-License-Identifier: Apache-2.0
"""Layouts by name: `make`. Owns which arguments go with which name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .balanced import Balanced, Window
from .layouts import NAMES, BlockStriped, Contiguous, DocumentZigzag, Layout, Striped, Zigzag

LAYOUTS: dict[str, type[Layout]] = {cls.name: cls for cls in (Contiguous, Zigzag, Striped)}
# Of each argument besides cp_size the layouts that take it.
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
    """The layout called `name` over `cp_size` ranks; ValueError if there is none.

    block: only for "block_striped". cu_seqlens: cumulative lengths of documents, for "zigzag", then
    within each document, and for "balanced", which needs them or a tree. per_node, windows,
    padding, row_cost: only for "balanced", see `Balanced`. tree: only for "balanced", in place of
    cu_seqlens and padding: what `mb.trees.pack` returns, or a `masks.Tree`.
    """
    if name not in NAMES:
        raise ValueError(f"layout must be one of {', '.join(NAMES)}, got {name!r}")
    given = {"block": block, "cu_seqlens": cu_seqlens, "per_node": per_node, "windows": windows,
             "padding": padding, "tree": tree, "row_cost": row_cost}  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if name not in _TAKEN[key]:
            raise ValueError(
                f"{key} goes with layout {' or '.join(_TAKEN[key])}, got {name} with {key}="
                f"{given[key]}"
            )
    if name == "block_striped" and block is None:
        raise ValueError("block: layout block_striped needs one, the block of the mask, got None")
    if name == "balanced" and cu_seqlens is None and tree is None:
        raise ValueError(
            "cu_seqlens: layout balanced needs the cumulative lengths of the documents, got None"
        )
    return _maker(name, cu_seqlens is not None)(cp_size, **given)


def _maker(name: str, packed: bool) -> Callable[..., Any]:
    if name == "balanced":
        return Balanced
    if name == "zigzag" and packed:
        return DocumentZigzag
    return BlockStriped if name == "block_striped" else LAYOUTS[name]
