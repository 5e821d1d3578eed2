# SPDX-License-Identifier: Apache-2.0
"""Layouts: the positions of the sequence that each rank holds, and their order.

`registry` makes a layout from its name, and `layouts` and `balanced` define the layouts. `pieces`
lists the runs of consecutive positions on each rank, and `routes` computes which rows ranks
exchange. These modules need no torch. `sharding` cuts tensors into shards and joins shards.
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
    Replicated,
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

# Most calls do not need these names, so their modules are imported at the first use.
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
    "Replicated",
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
    globals()[name] = member = getattr(import_module(f".{_LATE[name]}", __name__), name)
    return member
