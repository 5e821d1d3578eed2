"""What kernels of installed packages have in common: their table, and a `Run` of their functions.

Functions of packages sweep over whole pieces, from states that enter to states that leave. The map
of a delta rule is what a sweep makes of the state [I | 0] and the values [0 | V]: one call finds
transition and increment. Other transitions are sums of decays. The autograd of the package makes
the gradients.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.online_softmax import accumulation_dtype
from ...kernels.packages import FittedFunction, Package, Signature, function_of
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


def installed(name: str) -> bool:
    """Is there such a package? Whether its functions fit is seen when one is called."""
    return importlib.util.find_spec(name) is not None


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
        self.inputs, self.cut, self.sweep = inputs, cut, sweep
        self.dtype = accumulation_dtype(inputs.v.dtype)
        self.maps = no_maps(form, inputs, len(cut.lengths), self.dtype)
        if any(cut.mapped):
            self.maps = self._maps(form)

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        out, _ = self.sweep(self.inputs, self.cut.lengths, entering.to(self.dtype), False)
        return out.to(self.inputs.v.dtype)

    def _maps(self, form: Form) -> Maps:
        """Maps of the pieces that need one; zeros for the others."""
        lengths = [n for n, mapped in zip(self.cut.lengths, self.cut.mapped, strict=True) if mapped]
        chosen = mapped_rows(self.inputs, self.cut)
        if form.delta:
            transition, increment = self._matrices(chosen, lengths)
        else:
            transition = None
            if chosen.decay is not None:
                parts = chosen.decay.to(self.dtype).split(lengths)
                transition = torch.stack([part.sum(0) for part in parts]).exp()
            _, increment = self.sweep(chosen, lengths, None, True)
            assert increment is not None
        at = np.flatnonzero(self.cut.mapped)

        def spread(zeros: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            if len(lengths) == len(self.cut.lengths):
                return rows
            return zeros.index_copy(0, to_device(at, zeros.device), rows)

        kept = self.maps.transition
        return Maps(
            None if kept is None or transition is None else spread(kept, transition),
            spread(self.maps.increment, increment),
        )

    def _matrices(
        self, chosen: LinearInputs, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, b, h, w = chosen.v.shape
        d = chosen.k.shape[-1]
        unit = torch.eye(d, dtype=self.dtype, device=chosen.v.device)
        start = unit.expand(len(lengths), b, h, d, d)
        start = torch.nn.functional.pad(start, (0, w))
        wide = chosen._replace(v=torch.nn.functional.pad(chosen.v, (d, 0)))
        _, end = self.sweep(wide, lengths, start, True)
        assert end is not None
        return end[..., :d], end[..., d:]


def mapped_rows(inputs: LinearInputs, cut: RankPieces) -> LinearInputs:
    """The rows of the pieces that need a map."""

    def cropped(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or all(cut.mapped):
            return x
        parts = zip(x.split(cut.lengths), cut.mapped, strict=True)
        return torch.cat([part for part, mapped in parts if mapped])

    q, k, v = (cropped(x) for x in inputs[:3])
    assert q is not None
    assert k is not None
    assert v is not None
    return LinearInputs(q, k, v, cropped(inputs.decay), cropped(inputs.beta), inputs.scale)
