# SPDX-License-Identifier: Apache-2.0
"""The kernel "fla": the chunk functions of flash-linear-attention, where it is installed.

Decides how our tensors become their arguments. None of these functions was run for this project:
there was no GPU. That the arguments fit is tested against the signatures of their releases
(`tests/linear_attention/linear_signatures.json`); what becomes of them was read in the sources, and
is played by stand-ins in the tests: tensors are [b, s, h, .], decays natural logarithms in float32,
states [sequences, h, d, w] in float32; where sequences differ in length, b is 1 and cu_seqlens
their bounds. Keys and queries are repeated where value heads share them: not all functions do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ...kernels.online_softmax import accumulation_dtype
from ...kernels.packages import Signature
from ...layout.sharding import to_device
from ..forms import Form
from .base import LinearInputs, RankPieces
from .sequences import FittedFunction, SequencesRun, load, missing

ALWAYS = ("q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens")
ON_THE_HOST = "cu_seqlens_cpu"  # which a release may take, and then waits for no GPU
WIDEST = 256  # keys


class FlaKernel:
    """The kernel "fla"."""

    name = "fla"

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        if not inputs.v.is_cuda:
            return f"kernel fla runs on CUDA devices, got tensors on {inputs.v.device.type}"
        return unfit(inputs) or missing(lambda: function(form))

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> SequencesRun:
        return run(function(form), form, inputs, cut)


def function(form: Form) -> FittedFunction:
    """The function that computes this form. Raises ValueError as `load`."""
    return load("fla", form.fla, names(form), (ON_THE_HOST,))


def names(form: Form) -> tuple[str, ...]:
    """What the function of this form is given."""
    own = [] if form.decay == "none" else ["g"]
    return (*ALWAYS, *own, *(["beta"] if form.delta else []))


def unfit(inputs: LinearInputs) -> str | None:
    """Why tensors like these cannot be served, or None. From the checks in their sources."""
    dtypes = {x.dtype for x in (inputs.q, inputs.k, inputs.v)}
    if len(dtypes) > 1 or inputs.v.dtype not in (torch.bfloat16, torch.float16):
        return (
            "kernel fla takes q, k and v all in bfloat16 or all in float16, got "
            f"{', '.join(str(x.dtype).removeprefix('torch.') for x in inputs[:3])}"
        )
    d = inputs.k.shape[-1]
    return f"kernel fla takes keys of width up to {WIDEST}, got {d}" if d > WIDEST else None


def run(loaded: FittedFunction, form: Form, inputs: LinearInputs, cut: RankPieces) -> SequencesRun:
    """The run of this function; pieces without rows are not known to it."""
    shared = shares_heads(form, loaded)

    def sweep(
        inputs: LinearInputs, lengths: Sequence[int], states: torch.Tensor | None, behind: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = arguments(inputs, lengths, states, behind, shared)
        out, end = loaded(given)
        b = inputs.v.shape[1]
        out = out.reshape(b, -1, *out.shape[2:]).transpose(0, 1)
        return out, None if end is None else end.unflatten(0, (b, -1)).transpose(0, 1)

    return SequencesRun(form, inputs, cut, sweep)


def shares_heads(form: Form, loaded: FittedFunction) -> bool:
    """Do value heads share keys and queries in this function as they are? Those of the gated delta
    rule and KDA can since 0.5.0; the first release whose signature tells is 0.5.1.
    """
    gated = form.delta and form.decay != "none"
    return gated and "state_v_first" in Signature(form.fla, loaded.function).named


def arguments(
    inputs: LinearInputs,
    lengths: Sequence[int],
    states: torch.Tensor | None,
    behind: bool,
    shared: bool = False,
) -> dict[str, Any]:
    """What the function of a form is given: sequences are the pieces of the first batch, those of
    the second, and so on. shared: see `shares_heads`; else queries and keys are repeated.
    """
    b, h = inputs.v.shape[1:3]
    wide = accumulation_dtype(inputs.v.dtype)
    several = len(lengths) > 1

    def laid(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        x = x.transpose(0, 1)
        return x.flatten(0, 1).unsqueeze(0) if several else x

    q, k = inputs.q, inputs.k
    if q.shape[2] != h and not shared:
        q, k = (x.repeat_interleave(h // x.shape[2], 2) for x in (q, k))
    bounds = np.array([0, *accumulate(list(lengths) * b)]) if several else None
    return {
        "q": laid(q),
        "k": laid(k),
        "v": laid(inputs.v),
        "g": laid(None if inputs.decay is None else inputs.decay.to(wide)),
        "beta": laid(inputs.beta),
        "scale": inputs.scale,
        "initial_state": None if states is None else states.transpose(0, 1).flatten(0, 1),
        "output_final_state": behind,
        "cu_seqlens": None if bounds is None else to_device(bounds, inputs.v.device),
        ON_THE_HOST: None if bounds is None else torch.from_numpy(bounds),
    }
