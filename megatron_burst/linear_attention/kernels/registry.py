"""The table of kernels of linear attention: `make` turns a name into one that can serve a call.

`KERNELS` has one line per kernel. This module decides which kernel "auto" takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..form import Form
from ..inputs import Inputs
from .base import LinearKernel
from .chunkwise import ChunkwiseKernel
from .fla import FlaKernel
from .mamba import MambaKernel
from .packages import installed
from .reference import ReferenceKernel

KERNELS: dict[str, Callable[[], LinearKernel]] = {
    "torch": ChunkwiseKernel,
    "fla": FlaKernel,
    "mamba_ssm": MambaKernel,
    "reference": ReferenceKernel,
}


def automatic(device: torch.device) -> tuple[str, ...]:
    """The kernels that "auto" tries, in this order: on CUDA flash-linear-attention comes first
    where it is installed."""
    return ("fla", "torch") if device.type == "cuda" and installed("fla") else ("torch",)


def make(name: str, form: Form, inputs: Inputs) -> LinearKernel:
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
