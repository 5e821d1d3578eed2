"""The table of kernels of linear attention: `make` turns a name into one that can serve a call.

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
from .sequences import installed

KERNELS: dict[str, Callable[[], LinearKernel]] = {
    "torch": ChunkwiseKernel,
    "fla": FlaKernel,
    "mamba_ssm": MambaKernel,
    "reference": RecurrenceKernel,
}


def automatic(device: torch.device) -> tuple[str, ...]:
    """The kernels that "auto" tries, in this order: on CUDA flash-linear-attention comes first
    where it is installed."""
    return ("fla", "torch") if device.type == "cuda" and installed("fla") else ("torch",)


def make(name: str, form: Form, inputs: LinearInputs) -> LinearKernel:
    """The kernel called `name` for this form and tensors like `inputs`; "auto": the first of
    `automatic` that can.

    Raises ValueError if there is no such kernel, or it cannot serve these tensors.
    """
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {name!r}")
    reasons = []
    for each in (name,) if name != "auto" else automatic(inputs.v.device):
        kernel = KERNELS[each]()
        reason = kernel.refusal(form, inputs)
        if reason is None:
            return kernel
        reasons.append(f"kernel {each} {reason}")
    raise ValueError("; ".join([*reasons, "kernel='torch' takes anything"]))


def run(form: Form, kernel: str, inputs: LinearInputs, cut: RankPieces) -> Run:
    """One rank's rows under the kernel called `kernel` ("auto": see `automatic`).

    The result's maps and outputs are differentiable (once), with respect to every tensor of
    `inputs` and to the states that enter. Raises ValueError as `make`. Warns (once, as
    Python shows a warning once) if a decay on the CPU makes states grow.
    """
    chosen = make(kernel, form, inputs)
    _warn_if_growing(inputs.decay)
    return chosen.run(form, inputs, cut)


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
