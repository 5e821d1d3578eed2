"""Layouts: which positions of the sequence each rank holds, and in which order.

`layouts`, `balanced` (with its solver), `chains`, `routes` and `registry` are arithmetic on
positions and need no torch; `sharding` cuts and joins tensors.
"""

from .balanced import Balanced
from .chains import Chains, Piece, chains
from .layouts import (
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
    padding_documents,
)
from .registry import LAYOUTS, make
from .routes import Route, preceding, relayout, successors

__all__ = [
    "LAYOUTS",
    "NAMES",
    "Balanced",
    "BlockStriped",
    "Chains",
    "Contiguous",
    "DocumentZigzag",
    "Layout",
    "LayoutName",
    "Piece",
    "Route",
    "Span",
    "Spans",
    "Striped",
    "Zigzag",
    "chains",
    "check_fraction",
    "document_bounds",
    "integer",
    "make",
    "padding_documents",
    "preceding",
    "relayout",
    "successors",
]
