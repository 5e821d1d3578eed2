# SPDX-License-Identifier: Apache-2.0
"""Interface of kernels of linear attention, which compute the rows of one rank piece by piece.

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
    """Pieces of this rank, in the order of its rows; together they contain all rows.

    Attributes:
        lengths: Rows of each piece.
        mapped: True for each piece that needs a map, because another piece or the caller uses its
            state.
    """

    lengths: tuple[int, ...]
    mapped: tuple[bool, ...]


class Maps(NamedTuple):
    """Map of each piece, S -> transition S + increment for a state S [d, w].

    Both are differentiable, in the accumulation dtype.

    Attributes:
        transition: None for the identity, factors of S [p, b, h] or of its rows [p, b, h, d], or
            matrices [p, b, h, d, d].
        increment: Increments [p, b, h, d, w].
    """

    transition: torch.Tensor | None
    increment: torch.Tensor


class PieceRun(Protocol):
    """Computation of one rank: maps of pieces first, and outputs once entering states are known."""

    @property
    def maps(self) -> Maps: ...

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        """Return the outputs [s, b, h, w] in the dtype of v.

        Args:
            entering: State before each piece [p, b, h, d, w].
        """
        ...


class LinearKernel(Protocol):
    """Kernel of linear attention.

    Attributes:
        name: Key in `registry.KERNELS`.
    """

    name: str

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        """Return the reason why the kernel cannot compute these tensors; None if it can.

        The reason contains the name of the kernel. Only shapes, dtypes and devices are read.

        Raises:
            ValueError: The kernel's package is installed but not compatible.
        """
        ...

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> PieceRun:
        """Return an object that computes linear attention of the rank's pieces of documents."""
        ...


def no_maps(form: Form, inputs: LinearInputs, pieces: int, dtype: torch.dtype) -> Maps:
    """Return zero maps of `pieces` pieces, for pieces that need none."""
    _, b, h, w = inputs.v.shape
    d = inputs.k.shape[-1]
    zeros = inputs.v.new_zeros((pieces, b, h, d, w), dtype=dtype)
    if form.delta:
        return Maps(zeros.new_zeros((pieces, b, h, d, d)), zeros)
    rows = {"none": None, "scalar": (), "vector": (d,)}[form.decay]
    return Maps(None if rows is None else zeros.new_zeros((pieces, b, h, *rows)), zeros)
