# SPDX-License-Identifier: Apache-2.0
"""Attention masks: which (query position, key position) pairs attend.

A mask describes positions of the global sequence, so one mask serves every layout and every number
of ranks. Masks combine with `&` and `|`. `base` defines the interface, `positions`, `tables` and
`tree` hold the masks, `verify` checks them, `tiling` cuts a pair of shards into tiles that kernels
can compute, `seen` says which rows have to travel.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Band, Cover, Mask
from .positions import Causal, Dilated, Full, Prefix, Window

if TYPE_CHECKING:
    from .tables import BlockSparse, Dense, Documents, SameSpan, shards_visible
    from .tree import Tree
    from .verify import check

__all__ = [
    "Band",
    "BlockSparse",
    "Causal",
    "Cover",
    "Dense",
    "Dilated",
    "Documents",
    "Full",
    "Mask",
    "Prefix",
    "SameSpan",
    "Tree",
    "Window",
    "check",
    "shards_visible",
]


# Masks that a plain call does not need; imported when they are first asked for.
_LATE = dict.fromkeys(["BlockSparse", "Dense", "Documents", "SameSpan", "shards_visible"], "tables")
_LATE |= {"Tree": "tree", "check": "verify"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_LATE[name]}", __name__), name)
    return found
