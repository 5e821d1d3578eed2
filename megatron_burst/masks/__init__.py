# SPDX-License-Identifier: Apache-2.0
"""Attention masks: the (query position, key position) pairs that attend.

A mask uses positions in the whole sequence, so one mask is valid for every layout and number of
ranks. Masks combine with `&` and `|`. `base` defines the interface, and `positions`, `tables`,
`diffusion`, `compressed` and `tree` define the masks. `verify` checks whether the methods of a mask
agree. `tiling` cuts a pair of shards into tiles that kernels can compute, and `seen` computes the
rows that must be sent.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Band, Cover, Mask
from .positions import Causal, Dilated, Full, Prefix, Window

if TYPE_CHECKING:
    from .compressed import Compressed
    from .diffusion import BlockDiffusion, FrameTiles
    from .tables import BlockSparse, Dense, Documents, SameSpan, shards_visible
    from .tree import Tree
    from .verify import check

__all__ = [
    "Band",
    "BlockDiffusion",
    "BlockSparse",
    "Causal",
    "Compressed",
    "Cover",
    "Dense",
    "Dilated",
    "Documents",
    "FrameTiles",
    "Full",
    "Mask",
    "Prefix",
    "SameSpan",
    "Tree",
    "Window",
    "check",
    "shards_visible",
]


# A plain call does not need these names, so their modules are imported at the first use.
_LATE = dict.fromkeys(["BlockSparse", "Dense", "Documents", "SameSpan", "shards_visible"], "tables")
_LATE |= {"Tree": "tree", "check": "verify"}
_LATE |= {"BlockDiffusion": "diffusion", "FrameTiles": "diffusion", "Compressed": "compressed"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = member = getattr(import_module(f".{_LATE[name]}", __name__), name)
    return member
