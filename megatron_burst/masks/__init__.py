"""Attention masks: which (query position, key position) pairs attend.

A mask describes positions of the global sequence, so one mask serves every layout and every number
of ranks. Masks combine with `&` and `|`. `base` defines the interface, `positions` and `tables`
hold the masks, `tiling` cuts a pair of shards into tiles that kernels can compute, `seen` says
which rows have to travel.
"""

from typing import TYPE_CHECKING, Any

from .base import Band, Cover, Mask, shards_visible
from .positions import Causal, Dilated, Full, Prefix, Window

if TYPE_CHECKING:
    from .tables import BlockSparse, Dense, Documents

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
    "Window",
    "shards_visible",
]


def __getattr__(name: str) -> Any:
    """The masks of `tables`, which are imported when they are first asked for."""
    if name not in ("BlockSparse", "Dense", "Documents"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import tables

    globals()[name] = found = getattr(tables, name)
    return found
