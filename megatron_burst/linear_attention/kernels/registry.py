# SPDX-License-Identifier: Apache-2.0
"""Table of the kernels of linear attention, and the selection of a kernel for a call.

`KERNELS` has one entry per kernel. This module decides which kernel "auto" selects.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ..forms import Form
from .base import LinearInputs, LinearKernel, PieceRun, RankPieces
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
    """Return the name of the kernel for these tensors, and why "auto" selects no faster kernel.

    "auto" selects flash-linear-attention on CUDA if it is installed and supports the tensors.
    Otherwise it selects torch, and on CUDA warns with the reason. The reason is empty if
    there is no faster kernel.

    Args:
        name: Key in `KERNELS`, or "auto".
        form: Form of linear attention.
        inputs: Tensors of the call.

    Raises:
        ValueError: The kernel does not exist, or does not support these tensors.
    """
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {name!r}")
    if name == "auto" and not inputs.v.is_cuda:
        return "torch", ""
    candidate = "fla" if name == "auto" else name
    reason = KERNELS[candidate]().refusal(form, inputs)
    if reason is None:
        return candidate, ""
    if name != "auto":
        raise ValueError(f"{reason}; kernel='torch' supports all forms and dtypes")
    warnings.warn(
        f"linear attention on CUDA uses kernel 'torch', not 'fla', which needs fewer launches "
        f"and less memory: {reason}. kernel='torch' disables this warning",
        stacklevel=2,
    )
    return "torch", reason


def run(form: Form, kernel: str, inputs: LinearInputs, cut: RankPieces) -> PieceRun:
    """Run the kernel called `kernel` on the rows of one rank.

    The maps and outputs of the result are differentiable once, with respect to every tensor of
    `inputs` and to the entering states. On the CPU, a decay that makes states grow causes a
    warning.

    Args:
        form: Form of linear attention.
        kernel: Key in `KERNELS`.
        inputs: Tensors of the call.
        cut: Pieces of this rank.
    """
    _warn_if_growing(inputs.decay)
    return KERNELS[kernel]().run(form, inputs, cut)


def _warn_if_growing(decay: torch.Tensor | None) -> None:
    """Warn if a decay on the CPU has positive logarithms.

    A decay on a GPU is not checked, because reading the values would synchronize the host.
    """
    if decay is None or decay.is_cuda or decay.numel() == 0:
        return
    if bool(decay.detach().amax() > 0):
        warnings.warn(
            "decay has positive logarithms: states grow, and may overflow in long sequences; "
            "decay must be a logarithm, such as -0.1, and not exp(-0.1)",
            stacklevel=2,
        )
