# SPDX-License-Identifier: Apache-2.0
"""Affine maps of states, S -> A S + B: applied, one after the other, turned around, cut.

A state, and B, is [b, h, d, w]; A is None (it keeps S), a factor of all S [b, h], of its rows
[b, h, d], or a matrix [b, h, d, d]. Where a rank's pieces lie one behind the other all of these
have a dimension p in front. None for a state is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORMS = ("none", "scalar", "vector", "matrix")  # of A, by its dimensions beyond batch and heads
LETTERS = {"scalar": "p, b, h", "vector": "p, b, h, d", "matrix": "p, b, h, d, d"}


class Map(NamedTuple):
    """S -> transition S + increment."""

    transition: torch.Tensor | None
    increment: torch.Tensor

    def __call__(self, state: torch.Tensor | None) -> torch.Tensor:
        moved = carry(self.transition, state)
        return self.increment if moved is None else moved + self.increment

    def after(self, first: Map) -> Map:
        """The map of `first` and then this one."""
        if self.transition is None or first.transition is None:
            both = None
        elif self.transition.dim() == first.transition.dim() == first.increment.dim():
            both = self.transition @ first.transition
        else:
            both = self.transition * first.transition
        return Map(both, self(first.increment))

    def part(self, slices: tuple[slice, slice, slice]) -> Map:
        """The map of these heads, rows and columns of the states."""
        heads, rows, columns = slices
        transition = self.transition
        if transition is not None:
            some = (heads, rows) if transition.dim() == 3 else (heads,)
            transition = transition[(slice(None), *some)]
        return Map(transition, self.increment[:, heads, rows, columns])


def carry(transition: torch.Tensor | None, state: torch.Tensor | None) -> torch.Tensor | None:
    """A S, with or without p. What is zero in S stays so, also where A has grown beyond all
    numbers: token by token it would never have met them.
    """
    if transition is None or state is None:
        return state
    if transition.dim() == state.dim():
        return (transition @ state).masked_fill((state == 0).all(-2, keepdim=True), 0)
    factor = transition[(...,) + (None,) * (state.dim() - transition.dim())]
    return (factor * state).masked_fill((state == 0) & factor.isinf(), 0)


def turned(transition: torch.Tensor | None, states: int) -> torch.Tensor | None:
    """A^T; states: dimensions of a state beside it."""
    if transition is None or transition.dim() < states:
        return transition
    return transition.mT


def gradient(
    transition: torch.Tensor, leaving: torch.Tensor, entering: torch.Tensor
) -> torch.Tensor:
    """The gradient of A, from the gradient of the states that leave and the states that entered."""
    if transition.dim() == entering.dim():
        return leaving @ entering.mT
    product = leaving * entering
    return product.sum((-2, -1) if transition.dim() == entering.dim() - 2 else -1)


def shape_of(form: str, batch: int, sizes: tuple[int, int, int]) -> tuple[int, ...] | None:
    """The shape of A for states [batch, *sizes], sizes (h, d, w), without p; None if there is no
    A.
    """
    heads, rows, _ = sizes
    beyond = {"scalar": (), "vector": (rows,), "matrix": (rows, rows)}
    return None if form == "none" else (batch, heads, *beyond[form])
