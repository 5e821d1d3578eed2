# SPDX-License-Identifier: Apache-2.0
"""The table of kernels over a selection: one line each, and which of them "auto" takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .kernels import Selected, SelectedAten, SelectedReference
from .selection import Selection


def _triton(selection: Selection, latent: bool) -> Selected:
    from .selected_triton import SelectedTriton  # Triton is not everywhere

    return SelectedTriton(selection, latent)


# name -> the kernel for a selection; latent: are values columns of the keys?
KERNELS: dict[str, Callable[[Selection, bool], Selected]] = {
    "aten": SelectedAten,
    "triton": _triton,
    "reference": SelectedReference,
}


def named(kernel: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """The kernel that is meant for q, k and v as they travel: "auto" is "triton" on CUDA where it
    serves them, else "aten". ValueError for a name that none has, or one that does not serve.
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
    raise ValueError(f"kernel triton {reason}; kernel='aten' takes anything")
