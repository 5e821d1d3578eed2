"""Attention masks: which (query position, key position) pairs attend.

A mask describes positions of the global sequence, so one mask serves every layout and every number
of ranks. Masks combine with `&` and `|`. `base` defines the interface, `positions` and `tables`
hold the masks, `tiling` and `band_tiling` cut a pair of shards into tiles that kernels can compute.
"""

from .base import Band, Cover, Mask, shards_visible
from .positions import Causal, Dilated, Full, Prefix, Window
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
