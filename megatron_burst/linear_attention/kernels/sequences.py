# SPDX-License-Identifier: Apache-2.0
"""What kernels of installed packages have in common: their table, and a `Run` of their functions.

Functions of packages sweep over whole pieces, from states that enter to states that leave, and make
outputs of every row on the way. Of pieces that need a map one sweep finds both: outputs and states
are affine in the state that enters, so that it is made from zero and, for delta rules, from the
state [I | 0] and the values [0 | V], whose outputs are what a query becomes on its way back to the
piece's begin. What the state adds to the outputs is a product, once it is known. Other pieces are
swept over once their states are known. Transitions of additive forms are sums of decays. The
autograd of the package makes the gradients.
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

# (inputs, lengths of pieces, states [p, b, h, d, x] that enter or None for zeros, wants the states
# behind) -> outputs [s, b, h, x], states [p, b, h, d, x] behind or None
Sweep = Callable[
    [LinearInputs, Sequence[int], "torch.Tensor | None", bool],
    "tuple[torch.Tensor, torch.Tensor | None]",
]


class LinearPackage(NamedTuple):
    """package: what it is; constants: passed to every function that has such a parameter."""

    package: Package
    constants: Mapping[str, Any]


PACKAGES = {
    # Heads behind rows, which early releases take only where they are told to.
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
    """Why a function cannot be loaded because its package is not installed, or None. One that is
    there and does not fit stays an error.
    """
    try:
        load()
    except NotInstalled as error:
        return str(error)
    return None


def load(
    name: str, path: str, names: Sequence[str], optional: Sequence[str] = ()
) -> FittedFunction:
    """The function of a package at the dotted `path`, to be called with arguments of these names.

    Raises ValueError naming the package and what would work: `NotInstalled` if it is not there,
    else because it cannot be imported or its function has other parameters.
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
    """How a function is called with arguments of these names, which it must have, and of `optional`
    ones and constants, which it may.

    Raises ValueError, naming `place`, if it has no parameter for one of them, or wants one that we
    do not know.
    """
    shown = Signature(place, function)
    taken = (*names, *(name for name in optional if name in shown.named))
    known = {name: value for name, value in (constants or {}).items() if name in shown.named}
    shown.check([*taken, *known])
    return FittedFunction(function, {name: name for name in taken}, known)  # pyright: ignore


class SequencesRun:
    """An `base.Run`."""

    def __init__(self, form: Form, inputs: LinearInputs, cut: RankPieces, sweep: Sweep):
        self.cut, self.sweep = cut, sweep
        self.dtype = accumulation_dtype(inputs.v.dtype)
        self.inputs, self.queries, self.from_zero = inputs, (), ()
        self.maps = no_maps(form, inputs, len(cut.lengths), self.dtype)
        self.mapped = [i for i, mapped in enumerate(cut.mapped) if mapped]
        if self.mapped:
            self._first(form)

    def _first(self, form: Form) -> None:
        """Maps, and outputs as far as no state that enters is needed, of the pieces with a map."""
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

        kept = self.maps.transition
        self.maps = Maps(
            None if kept is None or transition is None else spread(kept, transition),
            spread(self.maps.increment, increment),
        )

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        states = entering.to(self.dtype).unbind()
        outs: list[torch.Tensor] = [self.inputs.v[:0]] * len(states)
        for at, i in enumerate(self.mapped):
            if self.queries:
                found = answers(self.queries[at], states[i])
            else:
                part = [x if x is None else x.split(self.cut.lengths)[i] for x in self.inputs[:4]]
                scaled = partial(answers_of_decayed, scale=self.inputs.scale)
                # What it makes of the queries is not kept for backward.
                found = checkpoint(scaled, part[0], part[3], states[i], use_reentrant=False)
            outs[i] = self.from_zero[at] + found
        others = [i for i, mapped in enumerate(self.cut.mapped) if not mapped]
        if others:
            rows, lengths = self._rows(others)
            out, _ = self.sweep(rows, lengths, torch.stack([states[i] for i in others]), False)
            for i, part in zip(others, out.split(lengths), strict=True):
                outs[i] = part
        return torch.cat([self.inputs.v[:0], *(out.to(self.inputs.v.dtype) for out in outs)])

    def _rows(self, pieces: Sequence[int]) -> tuple[LinearInputs, list[int]]:
        """The rows of these pieces, and their lengths."""

        def chosen(x: torch.Tensor | None) -> Any:
            if x is None or len(pieces) == len(self.cut.lengths):
                return x
            parts = x.split(self.cut.lengths)
            return torch.cat([parts[i] for i in pieces])

        *tensors, scale = self.inputs
        rows = LinearInputs(*map(chosen, tensors), scale)  # pyright: ignore[reportCallIssue]
        return rows, [self.cut.lengths[i] for i in pieces]


def answers(queries: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[s, b, h, w] in the dtype of queries [s, b, h, d], of a state [b, h, d, w]."""
    return torch.einsum("sbhd,bhdw->sbhw", queries, state.to(queries.dtype))


def answers_of_decayed(
    q: torch.Tensor, decay: torch.Tensor | None, state: torch.Tensor, scale: float
) -> torch.Tensor:
    """What queries [s, b, g, d] find of a state [b, h, d, w] that decays from row to row."""
    queries = q.repeat_interleave(state.shape[1] // q.shape[2], 2).to(state.dtype) * scale
    if decay is not None:
        kept = decay.to(state.dtype).cumsum(0).exp()
        queries = queries * (kept if kept.dim() == 4 else kept.unsqueeze(-1))
    return answers(queries.to(q.dtype), state)
