"""Layouts: which positions of the sequence each rank holds, and in which order.

`layouts` is arithmetic on positions and needs no torch; `sharding` cuts and joins tensors.
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
    Spans,
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
    "Spans",
    "Striped",
    "Zigzag",
    "check_fraction",
    "document_bounds",
    "integer",
    "make",
]
