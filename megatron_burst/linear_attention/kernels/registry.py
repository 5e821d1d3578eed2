# SPDX-License-Identifier: Apache-2.0
"""The table of kernels of linear attention: `choose` turns a name into one that can serve a call.

`KERNELS` has one line per kernel. This module decides which kernel "auto" takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..forms import Form
from .base import LinearInputs, LinearKernel, RankPieces, Run
from .chunkwise import ChunkwiseKernel
from .fla import FlaKernel
from .mamba import MambaKernel
from .reference import RecurrenceKernel

KERNELS: dict[str, Callable[[], LinearKernel]] = {
    "torch": ChunkwiseKernel,
    "fla": FlaKernel,
    "mamba_ssm": MambaKernel,
    "reference": RecurrenceKernel,
}


def choose(name: str, form: Form, inputs: LinearInputs) -> tuple[str, str]:
    """The kernel called `name` for this form and tensors like `inputs`, and why a faster one does
    not run. "auto": on CUDA that of flash-linear-attention, if it is installed and can; else torch,
    with a warning on CUDA.

    Raises ValueError if there is no such kernel, or it cannot serve these tensors.
    """
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {name!r}")
    if name == "auto" and not inputs.v.is_cuda:
        return "torch", ""
    wanted = "fla" if name == "auto" else name
    reason = KERNELS[wanted]().refusal(form, inputs)
    if reason is None:
        return wanted, ""
    if name != "auto":
        raise ValueError(f"{reason}; kernel='torch' takes anything")
    warnings.warn(
        f"linear attention on CUDA: kernel 'torch' in place of 'fla', which needs fewer launches "
        f"and less memory: {reason}. kernel='torch' says that this is meant",
        stacklevel=2,
    )
    return "torch", reason


def run(form: Form, kernel: str, inputs: LinearInputs, cut: RankPieces) -> Run:
    """One rank's rows under the kernel called `kernel`, one of `KERNELS`.

    The result's maps and outputs are differentiable (once), with respect to every tensor of
    `inputs` and to the states that enter. Warns (once, as Python shows a warning once) if a decay
    on the CPU makes states grow.
    """
    _warn_if_growing(inputs.decay)
    return KERNELS[kernel]().run(form, inputs, cut)


def _warn_if_growing(decay: torch.Tensor | None) -> None:
    """Not on a GPU: reading the values there would make the host wait."""
    if decay is None or decay.is_cuda or decay.numel() == 0:
        return
    if bool(decay.detach().amax() > 0):
        warnings.warn(
            "decay has positive logarithms: states grow, and may overflow in long sequences; "
            "decay is the logarithm of what a token keeps, -0.1 and not exp(-0.1)",
            stacklevel=2,
        )
