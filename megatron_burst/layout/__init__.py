"""Which positions of the sequence each rank holds: layouts by name, and cutting tensors by them.

Layouts are arithmetic on positions (`layouts`, no torch); `sharding` cuts and joins tensors.
"""

from .layouts import (
    LAYOUTS,
    NAMES,
    BlockStriped,
    Contiguous,
    DocumentZigzag,
    Layout,
    LayoutName,
    Span,
    Striped,
    Zigzag,
    check_fraction,
    document_bounds,
    integer,
    make,
)

__all__ = [
    "LAYOUTS",
    "NAMES",
    "BlockStriped",
    "Contiguous",
    "DocumentZigzag",
    "Layout",
    "LayoutName",
    "Span",
    "Striped",
    "Zigzag",
    "check_fraction",
    "document_bounds",
    "integer",
    "make",
]
