# SPDX-License-Identifier: Apache-2.0
"""State scan along a prefix tree: the entering state of a piece is the state after its parent.

A piece is a run of consecutive positions on one rank. The map of a piece is the effect of the piece
on a state. In one exchange, every rank receives the maps of all ancestors of its pieces. Every rank
then computes the states from the roots to its own pieces, for all pieces of one depth at once.
Backward sums the gradients of the children of a piece, and the exchange returns the gradients of
maps to the ranks that computed the maps.

Shape letters: p pieces of this rank, r pieces of this rank and all their ancestors, b batch, h
heads, d rows (keys), w columns (values).
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm.groups import check_label
from ..comm.rows import exchange_rows, longest
from ..kernels.autograd import first_order_only
from .maps import Map, gradient, transposed
from .plan import LinearPlan
from .program import TreeWalk


def along_tree(
    plan: LinearPlan, decay: torch.Tensor | None, increment: torch.Tensor, label: object
) -> torch.Tensor:
    """Return the state that enters each piece of this rank, [p, b, h, d, w].

    Args:
        plan: Plan of the call.
        decay: Same as in `mb.state_scan`.
        increment: Same as in `mb.state_scan`.
        label: Same as in `mb.state_scan`.
    """
    check_label(label)
    assert plan.states is not None
    walk = plan.walk()
    maps = [t.to(plan.states.dtype) for t in (decay, increment) if t is not None]
    plan.groups.expect(longest(walk.longest, maps))
    received = exchange_rows(maps, walk.paths, plan.groups, plan.identity, ("states", label))
    return _TreeScan.apply(walk, *received)  # pyright: ignore[reportReturnType]


class _TreeScan(torch.autograd.Function):
    """Autograd function of a scan along a tree on one rank.

    Inputs are the maps of r pieces: transitions (if maps have them) and increments [r, b, h, d, w].
    The output is the entering states [p, b, h, d, w].
    """

    @staticmethod
    def forward(ctx: Any, walk: TreeWalk, *maps: torch.Tensor) -> torch.Tensor:
        *transitions, increment = maps
        entering = torch.zeros_like(increment)
        with torch.autocast(increment.device.type, enabled=False):
            for level in walk.levels:
                transition = transitions[0][level.above] if transitions else None
                leaving = Map(transition, increment[level.above])(entering[level.above])
                entering[level.pieces] = leaving[level.nth]
        ctx.walk = walk
        ctx.save_for_backward(*transitions, entering)
        return entering[walk.own]

    @staticmethod
    @first_order_only("mb.state_scan")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *transitions, entering = ctx.saved_tensors
        of_entering, of_increment = torch.zeros_like(entering), torch.zeros_like(entering)
        of_entering[ctx.walk.own] = upstream
        of_transitions = [torch.zeros_like(t) for t in transitions]
        with torch.autocast(entering.device.type, enabled=False):
            for level in reversed(ctx.walk.levels):
                above = level.above
                leaving = torch.zeros_like(entering[above])
                leaving.index_add_(0, level.nth, of_entering[level.pieces])
                of_increment[above] = leaving
                transition = transitions[0][above] if transitions else None
                if transition is not None:
                    of_transitions[0][above] = gradient(transition, leaving, entering[above])
                back = transposed(transition, entering.dim())
                of_entering[above] = Map(back, of_entering[above])(leaving)
        return None, *of_transitions, of_increment
