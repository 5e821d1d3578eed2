"""Which (query position, key position) pairs attend.

A mask knows positions and spans only: no ranks, no layout names, no tensors. Masks combine with
`&` and `|`. `base` says what a mask must answer; everything else here is a description.
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
