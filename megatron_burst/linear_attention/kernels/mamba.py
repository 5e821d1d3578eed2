# SPDX-License-Identifier: Apache-2.0
"""Kernel "mamba_ssm": mamba_chunk_scan_combined of Mamba, if it is installed.

This module converts our tensors to the arguments of the function. The function was never run for
this project, because there was no GPU. Tests compare the arguments with the signatures of the
releases (`tests/linear_attention/linear_signatures.json`). In tests, a stand-in implements the
meaning of the arguments, which is taken from the sources.

The function computes S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T with one A per head, so dt
determines both the decay and the write strength. This module passes A = -1, dt = -decay and x = v /
dt. A decay closer to 0 than `SMALLEST` is replaced by -`SMALLEST`. Small decays lose digits in
their gradients, because x is then large. Therefore "auto" does not select this kernel. The states
of the function are [b, h, w, d]. This module calls the function once per piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.online_softmax import accumulation_dtype
from ..forms import Form
from .base import LinearInputs, RankPieces
from .sequences import FittedFunction, SequencesRun, load, missing

FUNCTION = "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"
NAMES = ("x", "dt", "A", "B", "C", "chunk_size", "initial_states", "return_final_states")
CHUNK = 256  # rows of a chunk, as in Mamba's own layers
SMALLEST = 1e-6


class MambaKernel:
    """Kernel "mamba_ssm": linear attention with scalar decay, by `mamba_chunk_scan_combined`."""

    name = "mamba_ssm"

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        if not form.mamba:
            return (
                "kernel mamba_ssm supports only scalar decays without delta rule, got form "
                f"{form.name}"
            )
        if not inputs.v.is_cuda:
            return f"kernel mamba_ssm runs on CUDA devices, got tensors on {inputs.v.device.type}"
        return missing(function)

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> SequencesRun:
        return run(function(), form, inputs, cut)


def function() -> FittedFunction:
    """Load `mamba_chunk_scan_combined`. Raise the same errors as `load`."""
    return load("mamba_ssm", FUNCTION, NAMES)


def run(loaded: FittedFunction, form: Form, inputs: LinearInputs, cut: RankPieces) -> SequencesRun:
    """Return an object that computes the pieces with the function `loaded`."""

    def sweep(
        inputs: LinearInputs, lengths: Sequence[int], states: torch.Tensor | None, behind: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        entering = [None] * len(lengths) if states is None else list(states.unbind())
        outs, ends = [], []
        for piece, state in zip(_pieces(inputs, lengths), entering, strict=True):
            out, end = loaded(arguments(piece, state))
            outs.append(out.transpose(0, 1))
            ends.append(end.transpose(-1, -2))
        return torch.cat(outs), torch.stack(ends) if behind else None

    return SequencesRun(form, inputs, cut, sweep)


def arguments(piece: LinearInputs, state: torch.Tensor | None) -> dict[str, Any]:
    """Return the arguments of the function for one piece and the state before it, [b, h, d, w].

    The scale is applied to the queries.
    """
    assert piece.decay is not None
    wide = accumulation_dtype(piece.v.dtype)
    dt = (-piece.decay.to(wide)).clamp(min=SMALLEST)
    x = (piece.v / dt.unsqueeze(-1)).to(piece.v.dtype)
    heads = piece.v.shape[2]
    return {
        "x": x.transpose(0, 1),
        "dt": dt.transpose(0, 1),
        "A": -torch.ones(heads, dtype=wide, device=x.device),
        "B": piece.k.transpose(0, 1),
        "C": (piece.q * piece.scale).transpose(0, 1),
        "chunk_size": CHUNK,
        "initial_states": None if state is None else state.transpose(-1, -2),
        "return_final_states": True,
    }


def _pieces(inputs: LinearInputs, lengths: Sequence[int]) -> list[LinearInputs]:
    assert inputs.decay is not None
    tensors = (inputs.q, inputs.k, inputs.v, inputs.decay)
    parts = zip(*(x.split(list(lengths)) for x in tensors), strict=True)
    return [LinearInputs(q, k, v, decay, None, inputs.scale) for q, k, v, decay in parts]
