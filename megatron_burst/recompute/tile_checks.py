"""What is checked of a call of `tiled`: its tiles, its arguments, and where its graphs end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import torch
from torch.autograd.graph import GradientEdge

Fate = Literal["keep", "move", "recompute"]


def slices_of(rows: int, tiles: int | Sequence[slice]) -> tuple[slice, ...]:
    """The tiles of a call, as slices that follow each other from 0 to `rows`."""
    if not isinstance(tiles, int):
        found = tuple(tiles)
        ends = [0, *(s.stop for s in found)]
        gaps = [s.start for s in found] != ends[:-1] or any(s.step not in (None, 1) for s in found)
        if not found or gaps or ends[-1] != rows:
            raise ValueError(
                f"tiled: tiles must be slices that follow each other from 0 to {rows}, got {found}"
            )
        return found
    if type(tiles) is not int or tiles < 1:
        raise ValueError(f"tiled: tiles must be an integer from 1 on, got {tiles!r}")
    length, longer = divmod(rows, tiles)
    lengths = [length + 1] * longer + [length] * (tiles - longer)
    return tuple(slice(a, b) for a, b in pairwise(accumulate(lengths, initial=0)))


def check_call(
    rows: int,
    others: Sequence[Any],
    parameters: Sequence[torch.Tensor],
    slices: Sequence[slice],
    fates: Sequence[Fate],
    host: object,
) -> None:
    """Raise ValueError naming the argument that cannot be."""
    for index, other in enumerate(others):
        if isinstance(other, torch.Tensor) and (other.ndim == 0 or other.shape[0] != rows):
            raise ValueError(
                f"tiled: others[{index}] has shape {list(other.shape)}, and is cut into tiles like "
                f"x, of {rows} rows; what fn needs whole belongs to fn, and to parameters="
            )
    if len(fates) != len(slices) or not set(fates) <= set(get_args(Fate)):
        raise ValueError(
            f"tiled: fates must be {len(slices)} of {', '.join(get_args(Fate))}, got {fates!r}"
        )
    if "move" in fates and host is None:
        raise ValueError('tiled: fates has "move", which needs host=')
    if any(getattr(p, "_backward_hooks", None) for p in parameters):
        raise ValueError(
            "tiled: a parameter has a hook of Tensor.register_hook, which would see the gradient "
            "of every tile; use register_post_accumulate_grad_hook, which sees their sum"
        )


def check_leaves(
    y: GradientEdge | None, anchor: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> None:
    """Raise ValueError if a graph ends in a tensor whose gradient nobody would collect."""
    known = {id(t) for t in (anchor, *parameters)}
    seen = {p.grad_fn for p in parameters}  # what made a parameter is autograd's own affair
    seen.add(None)
    left = [y.node if y is not None else None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the nodes that stand for leaves
        if isinstance(variable, torch.Tensor) and id(variable) not in known:
            raise ValueError(
                f"tiled: fn computes gradients for a tensor of shape {list(variable.shape)} that "
                "is neither among its arguments nor in parameters="
            )
        left += [each for each, _ in node.next_functions] if node is not None else []
