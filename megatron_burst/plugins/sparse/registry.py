# SPDX-License-Identifier: Apache-2.0
"""Table of the kernels that compute attention to selected keys, and the choice of "auto"."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .kernels import SelectedAten, SelectedKernel, SelectedReference
from .selection import Selection


def _triton(selection: Selection, latent: bool) -> SelectedKernel:
    from .selected_triton import SelectedTriton  # Triton may not be installed

    return SelectedTriton(selection, latent)


# name -> function that makes the kernel from (selection, latent); see `SelectedKernel`
KERNELS: dict[str, Callable[[Selection, bool], SelectedKernel]] = {
    "aten": SelectedAten,
    "triton": _triton,
    "reference": SelectedReference,
}


def kernel_name(kernel: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Return the name of the kernel for q, k and v: `kernel`, or the choice of "auto".

    "auto" is "triton" on CUDA if this kernel supports the tensors, and otherwise "aten".

    Raises:
        ValueError: The kernel does not exist, or does not support these tensors.
    """
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {kernel!r}")
    if kernel == "auto" and not q.is_cuda:
        return "aten"
    if kernel not in ("auto", "triton"):
        return kernel
    from .selected_triton import SelectedTriton

    reason = SelectedTriton.refusal(q, k, v)
    if reason is None:
        return "triton"
    if kernel == "auto":
        return "aten"
    raise ValueError(f"kernel triton {reason}; use kernel='aten', which supports all tensors")
