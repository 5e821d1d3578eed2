# SPDX-License-Identifier: Apache-2.0
"""What a kernel of linear attention computes, and of what: one rank's rows, cut into pieces.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values, p pieces of this rank.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..forms import Form


class LinearInputs(NamedTuple):
    """q, k [s, b, g, d] (g divides h), v [s, b, h, w]; decay: the logarithm of what a token keeps
    of the state before it, [s, b, h] or [s, b, h, d], or None; beta [s, b, h], how much of its
    value a token writes, for delta rules, or None. scale: of the queries.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    beta: torch.Tensor | None
    scale: float


class RankPieces(NamedTuple):
    """The pieces of this rank in the order of its rows, which they fill: `lengths` of each, and
    which of them need a map: those whose state another piece, or the caller, waits for.
    """

    lengths: tuple[int, ...]
    mapped: tuple[bool, ...]


class Maps(NamedTuple):
    """What each piece does to a state [d, w]: S -> transition S + increment.

    transition: None (it keeps S), [p, b, h] or [p, b, h, d] (factors, of all S or of its rows) or
    [p, b, h, d, d]; increment [p, b, h, d, w]. In the accumulation dtype; differentiable.
    """

    transition: torch.Tensor | None
    increment: torch.Tensor


class Run(Protocol):
    """One rank's rows, summed up piece by piece before the states that enter are known."""

    @property
    def maps(self) -> Maps: ...

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        """[s, b, h, w] in the dtype of v; entering [p, b, h, d, w]: the state before each piece."""
        ...


class LinearKernel(Protocol):
    """name: its entry in `registry.KERNELS`."""

    name: str

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        """Why these tensors cannot be served here, naming the kernel, or None. Only shape, dtype
        and device are read. ValueError where a package is installed and does not fit.
        """
        ...

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> Run:
        """The maps of the pieces, and what makes outputs of the states that enter them."""
        ...


def no_maps(form: Form, inputs: LinearInputs, pieces: int, dtype: torch.dtype) -> Maps:
    """Maps of `pieces` pieces that nobody asks for: zeros."""
    _, b, h, w = inputs.v.shape
    d = inputs.k.shape[-1]
    zeros = inputs.v.new_zeros((pieces, b, h, d, w), dtype=dtype)
    if form.delta:
        return Maps(zeros.new_zeros((pieces, b, h, d, d)), zeros)
    rows = {"none": None, "scalar": (), "vector": (d,)}[form.decay]
    return Maps(None if rows is None else zeros.new_zeros((pieces, b, h, *rows)), zeros)
