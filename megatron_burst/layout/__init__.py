# SPDX-License-Identifier: Apache-2.0
"""Layouts: which positions of the sequence each rank holds, and in which order.

`layouts`, `balanced` (with its solver), `pieces`, `routes` and `registry` are arithmetic on
positions and need no torch; `sharding` cuts and joins tensors.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .balanced import Balanced
    from .pieces import Chains, Piece, chains
    from .routes import Route, preceding, relayout, successors

# Of modules that a plain call does not need; imported when they are first asked for.
_LATE = {
    "Balanced": "balanced",
    "Chains": "pieces",
    "Piece": "pieces",
    "chains": "pieces",
    "Route": "routes",
    "preceding": "routes",
    "relayout": "routes",
    "successors": "routes",
}

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


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_LATE[name]}", __name__), name)
    return found
