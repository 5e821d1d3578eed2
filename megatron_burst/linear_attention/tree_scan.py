# SPDX-License-Identifier: Apache-2.0
"""The state scan along a prefix tree: what enters a piece is what leaves the piece it continues.

Decides that every rank gets the maps of all pieces before its own on their paths, in one exchange,
and follows the tree to its own pieces by itself, all pieces of one depth at once. Backward adds up
the gradients of the pieces that continue one, and the exchange takes gradients of maps home.

Shape letters: p pieces of this rank, r those and the ones before them on their paths, b batch, h
heads, d rows (keys), w columns (values).
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm.groups import check_label
from ..comm.rows import exchange_rows, longest
from ..kernels.autograd import first_order_only
from .maps import Map, gradient, turned
from .plan import LinearPlan
from .program import TreeWalk


def along_tree(
    plan: LinearPlan, decay: torch.Tensor | None, increment: torch.Tensor, label: object
) -> torch.Tensor:
    """Return the states that enter [p, b, h, d, w]; decay, increment: as of `mb.state_scan`."""
    check_label(label)
    assert plan.states is not None
    walk = plan.walk()
    maps = [t.to(plan.states.dtype) for t in (decay, increment) if t is not None]
    plan.groups.expect(longest(walk.longest, maps))
    received = exchange_rows(maps, walk.paths, plan.groups, plan.identity, ("states", label))
    return _Walk.apply(walk, *received)  # pyright: ignore[reportReturnType]


class _Walk(torch.autograd.Function):
    """(transition), increment [r, b, h, d, w] -> entering [p, b, h, d, w]."""

    @staticmethod
    def forward(ctx: Any, walk: TreeWalk, *maps: torch.Tensor) -> torch.Tensor:
        *kept, increment = maps
        entering = torch.zeros_like(increment)
        with torch.autocast(increment.device.type, enabled=False):
            for level in walk.levels:
                transition = kept[0][level.above] if kept else None
                leaving = Map(transition, increment[level.above])(entering[level.above])
                entering[level.pieces] = leaving[level.nth]
        ctx.walk = walk
        ctx.save_for_backward(*kept, entering)
        return entering[walk.own]

    @staticmethod
    @first_order_only("mb.state_scan")
    def backward(ctx: Any, arrived: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *kept, entering = ctx.saved_tensors
        of_entering, of_increment = torch.zeros_like(entering), torch.zeros_like(entering)
        of_entering[ctx.walk.own] = arrived
        of_kept = [torch.zeros_like(t) for t in kept]
        with torch.autocast(entering.device.type, enabled=False):
            for level in reversed(ctx.walk.levels):
                above = level.above
                leaving = torch.zeros_like(entering[above])
                leaving.index_add_(0, level.nth, of_entering[level.pieces])
                of_increment[above] = leaving
                transition = kept[0][above] if kept else None
                if transition is not None:
                    of_kept[0][above] = gradient(transition, leaving, entering[above])
                back = turned(transition, entering.dim())
                of_entering[above] = Map(back, of_entering[above])(leaving)
        return None, *of_kept, of_increment
