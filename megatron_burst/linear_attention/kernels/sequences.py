# SPDX-License-Identifier: Apache-2.0
"""Table of the packages with kernels, and the `PieceRun` that all of these kernels use.

A function of a package sweeps over whole pieces, from the states before them to the states after
them, and computes the outputs of every row. For pieces that need a map, one sweep computes map and
outputs. Outputs and states are affine in the entering state, so the sweep starts from zero. For
delta rules the sweep starts from the state [I | 0] with the values [0 | V]. The outputs for I are
then the queries, transformed back to the beginning of the piece. When the entering state is known,
the product of these queries and the state is added to the outputs.

Pieces without a map are computed when their entering states are known. Logarithms of the
transitions of additive forms are sums of decays. The autograd of the package computes the
gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from ...kernels.online_softmax import accumulation_dtype
from ...kernels.packages import (
    FittedFunction,
    NotInstalled,
    Package,
    Signature,
    function_of,
)
from ...layout.sharding import to_device
from ..forms import Form
from .base import LinearInputs, Maps, RankPieces, no_maps

# (inputs, lengths of pieces, entering states [p, b, h, d, x] or None for zeros, True if leaving
# states are needed) -> outputs [s, b, h, x], leaving states [p, b, h, d, x] or None
Sweep = Callable[
    [LinearInputs, Sequence[int], "torch.Tensor | None", bool],
    "tuple[torch.Tensor, torch.Tensor | None]",
]


class LinearPackage(NamedTuple):
    """Package with kernels of linear attention.

    Attributes:
        package: Name and distribution of the package.
        constants: Constant arguments by name, passed to each function that has this parameter.
    """

    package: Package
    constants: Mapping[str, Any]


PACKAGES = {
    # Early releases need head_first=False for tensors [b, s, h, .].
    "fla": LinearPackage(
        Package(
            "flash-linear-attention",
            "flash-linear-attention",
            "flash-linear-attention 0.4 or newer",
        ),
        {"head_first": False},
    ),
    "mamba_ssm": LinearPackage(Package("Mamba", "mamba-ssm", "mamba-ssm 2.2 or newer"), {}),
}


def missing(load: Callable[[], object]) -> str | None:
    """Return the error message of `load` if its package is not installed, otherwise None.

    Other errors of `load` are raised, such as for an incompatible package.
    """
    try:
        load()
    except NotInstalled as error:
        return str(error)
    return None


def load(
    name: str, path: str, names: Sequence[str], optional: Sequence[str] = ()
) -> FittedFunction:
    """Load the function of a package at a dotted path.

    Args:
        name: Key in `PACKAGES`.
        path: Dotted path of the function.
        names: Names of the arguments that the function must accept.
        optional: Names of arguments that are passed if the function accepts them.

    Raises:
        ValueError: The package is not installed (`NotInstalled`), cannot be imported, or its
            function has other parameters. The message names the package and a remedy.
    """
    package, constants = PACKAGES[name]
    module, _, function = path.rpartition(".")
    with package.blamed(name, "kernel='torch'"):
        code = function_of(package.module(module, root=module.partition(".")[0]), function)
        return fit(path, code, names, optional, constants)


def fit(
    place: str,
    function: Callable | inspect.Signature,
    names: Sequence[str],
    optional: Sequence[str] = (),
    constants: Mapping[str, Any] | None = None,
) -> FittedFunction:
    """Return a function together with the mapping from our arguments to its parameters.

    Args:
        place: Path of the function, for messages.
        function: The function or its signature.
        names: Names of the arguments that the function must accept.
        optional: Names of arguments that are passed if the function accepts them.
        constants: Constant arguments that are passed if the function accepts them.

    Raises:
        ValueError: The function lacks a parameter, or requires one that is unknown.
    """
    shown = Signature(place, function)
    taken = (*names, *(name for name in optional if name in shown.named))
    accepted = {name: value for name, value in (constants or {}).items() if name in shown.named}
    shown.check([*taken, *accepted])
    return FittedFunction(function, {name: name for name in taken}, accepted)  # pyright: ignore


class SequencesRun:
    """`base.PieceRun` that calls the function of a package."""

    def __init__(self, form: Form, inputs: LinearInputs, cut: RankPieces, sweep: Sweep):
        self.cut, self.sweep = cut, sweep
        self.dtype = accumulation_dtype(inputs.v.dtype)
        self.inputs, self.queries, self.from_zero = inputs, (), ()
        self.maps = no_maps(form, inputs, len(cut.lengths), self.dtype)
        self.mapped = [i for i, mapped in enumerate(cut.mapped) if mapped]
        if self.mapped:
            self._sweep_mapped(form)

    def _sweep_mapped(self, form: Form) -> None:
        """Compute the pieces that need a map: their maps, and their outputs for a zero state."""
        rows, lengths = self._rows(self.mapped)
        d = rows.k.shape[-1]
        if form.delta:
            unit = torch.eye(d, dtype=self.dtype, device=rows.v.device)
            start = unit.expand(len(lengths), *rows.v.shape[1:3], d, d)
            start = torch.nn.functional.pad(start, (0, rows.v.shape[-1]))
            wide = rows._replace(v=torch.nn.functional.pad(rows.v, (d, 0)))
            out, end = self.sweep(wide, lengths, start, True)
            assert end is not None
            queries, out = out[..., :d], out[..., d:]
            transition, increment = end[..., :d], end[..., d:]
            self.queries = queries.split(lengths)
        else:
            out, increment = self.sweep(rows, lengths, None, True)
            assert increment is not None
            transition = None
            if rows.decay is not None:
                sums = [part.to(self.dtype).sum(0) for part in rows.decay.split(lengths)]
                transition = torch.stack(sums).exp()
        self.from_zero = out.split(lengths)
        at = to_device(np.array(self.mapped), rows.v.device)

        def spread(zeros: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            if len(self.mapped) == len(self.cut.lengths):
                return rows
            return zeros.index_copy(0, at, rows)

        zeros = self.maps.transition
        self.maps = Maps(
            None if zeros is None or transition is None else spread(zeros, transition),
            spread(self.maps.increment, increment),
        )

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        states = entering.to(self.dtype).unbind()
        outs: list[torch.Tensor] = [self.inputs.v[:0]] * len(states)
        for at, i in enumerate(self.mapped):
            if self.queries:
                contribution = state_outputs(self.queries[at], states[i])
            else:
                part = [x if x is None else x.split(self.cut.lengths)[i] for x in self.inputs[:4]]
                scaled = partial(decayed_state_outputs, scale=self.inputs.scale)
                # Recompute the decayed queries in backward to save memory.
                contribution = checkpoint(scaled, part[0], part[3], states[i], use_reentrant=False)
            outs[i] = self.from_zero[at] + contribution
        unmapped = [i for i, mapped in enumerate(self.cut.mapped) if not mapped]
        if unmapped:
            rows, lengths = self._rows(unmapped)
            out, _ = self.sweep(rows, lengths, torch.stack([states[i] for i in unmapped]), False)
            for i, part in zip(unmapped, out.split(lengths), strict=True):
                outs[i] = part
        return torch.cat([self.inputs.v[:0], *(out.to(self.inputs.v.dtype) for out in outs)])

    def _rows(self, pieces: Sequence[int]) -> tuple[LinearInputs, list[int]]:
        """Return the rows of these pieces, and the length of each piece."""

        def chosen(x: torch.Tensor | None) -> Any:
            if x is None or len(pieces) == len(self.cut.lengths):
                return x
            parts = x.split(self.cut.lengths)
            return torch.cat([parts[i] for i in pieces])

        *tensors, scale = self.inputs
        rows = LinearInputs(*map(chosen, tensors), scale)  # pyright: ignore[reportCallIssue]
        return rows, [self.cut.lengths[i] for i in pieces]


def state_outputs(queries: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the outputs [s, b, h, w] of queries [s, b, h, d] for a state [b, h, d, w]."""
    return torch.einsum("sbhd,bhdw->sbhw", queries, state.to(queries.dtype))


def decayed_state_outputs(
    q: torch.Tensor, decay: torch.Tensor | None, state: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the outputs of queries [s, b, g, d] for a state [b, h, d, w] that decays per row.

    `decay` has the logarithms of the decay of each row, [s, b, h] or [s, b, h, d].
    """
    queries = q.repeat_interleave(state.shape[1] // q.shape[2], 2).to(state.dtype) * scale
    if decay is not None:
        factors = decay.to(state.dtype).cumsum(0).exp()
        queries = queries * (factors if factors.dim() == 4 else factors.unsqueeze(-1))
    return state_outputs(queries.to(q.dtype), state)
