# SPDX-License-Identifier: Apache-2.0
"""Kernel "fla": the chunk functions of flash-linear-attention, if it is installed.

This module converts our tensors to the arguments of these functions. The functions were never run
for this project, because there was no GPU. Tests compare the arguments with the signatures of the
releases (`tests/linear_attention/linear_signatures.json`). In tests, stand-ins implement the
meaning of the arguments, which is taken from the sources.

The functions take tensors [b, s, h, .], decays as natural logarithms in float32, and states
[sequences, h, d, w] in float32. If there are several sequences per batch entry, b is 1 and
cu_seqlens contains the bounds of all sequences. Keys and queries are repeated if value heads share
them, because not all functions support sharing.
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
ON_THE_HOST = "cu_seqlens_cpu"  # optional in some releases; it avoids a synchronization
WIDEST = 256  # largest width of keys


class FlaKernel:
    """Kernel "fla": linear attention by functions of flash-linear-attention."""

    name = "fla"

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        if not inputs.v.is_cuda:
            return f"kernel fla runs on CUDA devices, got tensors on {inputs.v.device.type}"
        return unfit(inputs) or missing(lambda: function(form))

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> SequencesRun:
        return run(function(form), form, inputs, cut)


def function(form: Form) -> FittedFunction:
    """Return the function that computes this form. Raise the same errors as `load`."""
    return load("fla", form.fla, names(form), (ON_THE_HOST,))


def names(form: Form) -> tuple[str, ...]:
    """Return the names of the arguments that the function for this form must accept."""
    own = [] if form.decay == "none" else ["g"]
    return (*ALWAYS, *own, *(["beta"] if form.delta else []))


def unfit(inputs: LinearInputs) -> str | None:
    """Return why flash-linear-attention does not support these tensors; None if it does."""
    dtypes = {x.dtype for x in (inputs.q, inputs.k, inputs.v)}
    if len(dtypes) > 1 or inputs.v.dtype not in (torch.bfloat16, torch.float16):
        return (
            "kernel fla requires q, k and v all in bfloat16 or all in float16, got "
            f"{', '.join(str(x.dtype).removeprefix('torch.') for x in inputs[:3])}"
        )
    d = inputs.k.shape[-1]
    return f"kernel fla supports key widths up to {WIDEST}, got {d}" if d > WIDEST else None


def run(loaded: FittedFunction, form: Form, inputs: LinearInputs, cut: RankPieces) -> SequencesRun:
    """Return an object that computes the pieces with the function `loaded`."""
    shared = shares_heads(form, loaded)

    def sweep(
        inputs: LinearInputs, lengths: Sequence[int], states: torch.Tensor | None, behind: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        call_arguments = arguments(inputs, lengths, states, behind, shared)
        out, end = loaded(call_arguments)
        b = inputs.v.shape[1]
        out = out.reshape(b, -1, *out.shape[2:]).transpose(0, 1)
        return out, None if end is None else end.unflatten(0, (b, -1)).transpose(0, 1)

    return SequencesRun(form, inputs, cut, sweep)


def shares_heads(form: Form, loaded: FittedFunction) -> bool:
    """Return True if value heads can share keys and queries in this function.

    The functions of the gated delta rule and of KDA support shared heads since 0.5.0. Their
    signatures show this support only since 0.5.1.
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
    """Return the arguments for the function of a form.

    A sequence of the function is one piece of one batch entry. The pieces of the first batch entry
    come first.

    Args:
        inputs: Tensors of the call.
        lengths: Number of rows of each piece.
        states: States before the pieces [p, b, h, d, x], or None for zeros.
        behind: True if the states after the pieces are needed.
        shared: True if the function supports shared heads, see `shares_heads`. Otherwise queries
            and keys are repeated.
    """
    b, h = inputs.v.shape[1:3]
    wide = accumulation_dtype(inputs.v.dtype)
    several = len(lengths) > 1

    def arranged(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        x = x.transpose(0, 1)
        return x.flatten(0, 1).unsqueeze(0) if several else x

    q, k = inputs.q, inputs.k
    if q.shape[2] != h and not shared:
        q, k = (x.repeat_interleave(h // x.shape[2], 2) for x in (q, k))
    bounds = np.array([0, *accumulate(list(lengths) * b)]) if several else None
    return {
        "q": arranged(q),
        "k": arranged(k),
        "v": arranged(inputs.v),
        "g": arranged(None if inputs.decay is None else inputs.decay.to(wide)),
        "beta": arranged(inputs.beta),
        "scale": inputs.scale,
        "initial_state": None if states is None else states.transpose(0, 1).flatten(0, 1),
        "output_final_state": behind,
        "cu_seqlens": None if bounds is None else to_device(bounds, inputs.v.device),
        ON_THE_HOST: None if bounds is None else torch.from_numpy(bounds),
    }
