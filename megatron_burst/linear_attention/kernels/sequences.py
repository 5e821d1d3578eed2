"""A `Run` made of calls that sweep over whole pieces, from states that enter to states that leave.

This is what the functions of packages offer. The map of a delta rule is what a sweep makes of the
state [I | 0] and the values [0 | V]: one call finds transition and increment. Other transitions are
sums of decays. The autograd of the package makes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...kernels.online_softmax import accumulation_dtype
from ...layout.sharding import to_device
from ..form import Form
from ..inputs import Cut, Inputs, Maps
from .base import no_maps

# (inputs, lengths of pieces, states [p, b, h, d, x] that enter or None for zeros, wants the states
# behind) -> outputs [s, b, h, x], states [p, b, h, d, x] behind or None
Sweep = Callable[
    [Inputs, Sequence[int], "torch.Tensor | None", bool],
    "tuple[torch.Tensor, torch.Tensor | None]",
]


class SequencesRun:
    """An `inputs.Run`."""

    def __init__(self, form: Form, inputs: Inputs, cut: Cut, sweep: Sweep):
        self.inputs, self.cut, self.sweep = inputs, cut, sweep
        self.dtype = accumulation_dtype(inputs.v.dtype)
        self.maps = no_maps(form, inputs, len(cut.lengths), self.dtype)
        if any(cut.mapped):
            self.maps = self._maps(form)

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        out, _ = self.sweep(self.inputs, self.cut.lengths, entering.to(self.dtype), False)
        return out.to(self.inputs.v.dtype)

    def _maps(self, form: Form) -> Maps:
        """Of the pieces that need one; zeros of the others."""
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

        def spread(zeros: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
            if len(lengths) == len(self.cut.lengths):
                return found
            return zeros.index_copy(0, to_device(at, zeros.device), found)

        kept = self.maps.transition
        return Maps(
            None if kept is None or transition is None else spread(kept, transition),
            spread(self.maps.increment, increment),
        )

    def _matrices(
        self, chosen: Inputs, lengths: Sequence[int]
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


def mapped_rows(inputs: Inputs, cut: Cut) -> Inputs:
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
    return Inputs(q, k, v, cropped(inputs.decay), cropped(inputs.beta), inputs.scale)
