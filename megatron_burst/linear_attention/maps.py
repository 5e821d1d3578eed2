# SPDX-License-Identifier: Apache-2.0
"""Affine maps of states, S -> A S + B, with application, composition, transposition and slicing.

S and B are [b, h, d, w]. A is None (the identity), a factor for all of S [b, h], a factor per row
of S [b, h, d], or a matrix [b, h, d, d]. Stacked maps of a rank's pieces (runs of consecutive
positions of a document) have a leading dimension p. S = None means zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORMS = ("none", "scalar", "vector", "matrix")  # kinds of A, by its dimensions after b and h
LETTERS = {"scalar": "p, b, h", "vector": "p, b, h, d", "matrix": "p, b, h, d, d"}


class Map(NamedTuple):
    """Affine map S -> transition S + increment."""

    transition: torch.Tensor | None
    increment: torch.Tensor

    def __call__(self, state: torch.Tensor | None) -> torch.Tensor:
        moved = carry(self.transition, state)
        return self.increment if moved is None else moved + self.increment

    def after(self, first: Map) -> Map:
        """Return the map that applies `first` and then this map."""
        if self.transition is None or first.transition is None:
            transition = None
        elif self.transition.dim() == first.transition.dim() == first.increment.dim():
            transition = self.transition @ first.transition
        else:
            transition = self.transition * first.transition
        return Map(transition, self(first.increment))

    def part(self, slices: tuple[slice, slice, slice]) -> Map:
        """Return the map for a block of the states: some heads, rows and columns."""
        heads, rows, columns = slices
        transition = self.transition
        if transition is not None:
            index = (heads, rows) if transition.dim() == 3 else (heads,)
            transition = transition[(slice(None), *index)]
        return Map(transition, self.increment[:, heads, rows, columns])


def carry(transition: torch.Tensor | None, state: torch.Tensor | None) -> torch.Tensor | None:
    """Return A S, with or without the dimension p.

    Zeros of S stay zero even if A has overflowed to inf, because the recurrence, computed token by
    token, never multiplies zeros by inf.
    """
    if transition is None or state is None:
        return state
    if transition.dim() == state.dim():
        return (transition @ state).masked_fill((state == 0).all(-2, keepdim=True), 0)
    factor = transition[(...,) + (None,) * (state.dim() - transition.dim())]
    return (factor * state).masked_fill((state == 0) & factor.isinf(), 0)


def transposed(transition: torch.Tensor | None, states: int) -> torch.Tensor | None:
    """Return A^T, the transposed transition of a map.

    Args:
        transition: A, or None for the identity.
        states: Number of dimensions of the states.
    """
    if transition is None or transition.dim() < states:
        return transition
    return transition.mT


def gradient(
    transition: torch.Tensor, leaving: torch.Tensor, entering: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of A, the transition of a map.

    Args:
        transition: A.
        leaving: Gradient of the states after the map.
        entering: States before the map.
    """
    if transition.dim() == entering.dim():
        return leaving @ entering.mT
    product = leaving * entering
    return product.sum((-2, -1) if transition.dim() == entering.dim() - 2 else -1)


def shape_of(form: str, batch: int, sizes: tuple[int, int, int]) -> tuple[int, ...] | None:
    """Return the shape of A, the transition of one map; None if the form has no A.

    Args:
        form: One of `FORMS`.
        batch: Batch size b.
        sizes: Sizes (h, d, w) of a state.
    """
    heads, rows, _ = sizes
    beyond = {"scalar": (), "vector": (rows,), "matrix": (rows, rows)}
    return None if form == "none" else (batch, heads, *beyond[form])
