# SPDX-License-Identifier: Apache-2.0
"""Interface of kernels of linear attention, which compute the rows of one rank piece by piece.

A piece is a run of consecutive positions of one document on one rank.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values, p pieces of this rank.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..forms import Form


class LinearInputs(NamedTuple):
    """Inputs of a kernel.

    Attributes:
        q: Queries [s, b, g, d]; g divides h.
        k: Keys [s, b, g, d].
        v: Values [s, b, h, w].
        decay: Logarithms of the decay [s, b, h] or [s, b, h, d], or None.
        beta: Write strengths [s, b, h] of delta rules, or None.
        scale: Factor of the queries.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    beta: torch.Tensor | None
    scale: float


class RankPieces(NamedTuple):
    """Pieces of this rank, in the order of the rows; together they contain all rows.

    Attributes:
        lengths: Number of rows of each piece.
        mapped: True for each piece that needs a map, because another piece or the caller uses the
            state after the piece.
    """

    lengths: tuple[int, ...]
    mapped: tuple[bool, ...]


class Maps(NamedTuple):
    """Maps of pieces: a piece changes a state S [d, w] to transition S + increment.

    Both tensors are differentiable and have the accumulation dtype.

    Attributes:
        transition: None for the identity, factors of S [p, b, h] or of its rows [p, b, h, d], or
            matrices [p, b, h, d, d].
        increment: Increments [p, b, h, d, w].
    """

    transition: torch.Tensor | None
    increment: torch.Tensor


class PieceRun(Protocol):
    """Computation of one rank, in two parts: the maps of pieces, and then the outputs.

    The outputs need the states that enter the pieces. The scan computes these states from the maps.
    """

    @property
    def maps(self) -> Maps: ...

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        """Return the outputs [s, b, h, w] of this rank's rows, in the dtype of v.

        Args:
            entering: State before each piece [p, b, h, d, w].
        """
        ...


class LinearKernel(Protocol):
    """Interface of a kernel of linear attention.

    Attributes:
        name: Name of the kernel, a key of `registry.KERNELS`.
    """

    name: str

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        """Return why the kernel cannot compute this form for these tensors; None if it can.

        The reason contains the name of the kernel. Only shapes, dtypes and devices are read.

        Raises:
            ValueError: The kernel's package is installed but not compatible.
        """
        ...

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> PieceRun:
        """Return an object that computes linear attention for the pieces of this rank."""
        ...


def no_maps(form: Form, inputs: LinearInputs, pieces: int, dtype: torch.dtype) -> Maps:
    """Return maps of zeros for `pieces` pieces; pieces that need no map keep them."""
    _, b, h, w = inputs.v.shape
    d = inputs.k.shape[-1]
    zeros = inputs.v.new_zeros((pieces, b, h, d, w), dtype=dtype)
    if form.delta:
        return Maps(zeros.new_zeros((pieces, b, h, d, d)), zeros)
    rows = {"none": None, "scalar": (), "vector": (d,)}[form.decay]
    return Maps(None if rows is None else zeros.new_zeros((pieces, b, h, *rows)), zeros)
