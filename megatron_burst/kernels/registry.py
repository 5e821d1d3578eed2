# SPDX-License-Identifier: Apache-2.0
"""The table of kernels, and `make`, which returns a kernel by name or chooses one.

`KERNELS` has one line per kernel. `automatic` defines the order in which "auto" tries kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..masks import Causal, Mask
from . import torch_features
from .aten import AtenKernel
from .base import Kernel
from .operators import CpuFlash

# Optional modules are imported by the functions that need them.


def _aten(device: torch.device, beside_rings: bool) -> Kernel:
    if device.type != "cuda":
        return AtenKernel("aten", CpuFlash())
    from .operators_cuda import CudaFlash

    return AtenKernel("aten", CudaFlash())


def _cudnn(device: torch.device, beside_rings: bool) -> Kernel:
    from .operators_cuda import CudaCudnn

    return AtenKernel("aten_cudnn", CudaCudnn(device))


def _flash(name: str) -> Callable[[torch.device, bool], Kernel]:
    def make(device: torch.device, beside_rings: bool) -> Kernel:
        from . import flash

        return flash.kernel(name, beside_rings, device)

    return make


def _flex(device: torch.device, beside_rings: bool) -> Kernel:
    from .flex import FlexKernel

    return FlexKernel()


def _triton(device: torch.device, beside_rings: bool) -> Kernel:
    from .triton_kernel import TritonKernel

    return TritonKernel()


def _reference(device: torch.device, beside_rings: bool) -> Kernel:
    from .reference import ReferenceKernel

    return ReferenceKernel()


# name -> function of (device, whether tensors are sent while the kernel runs)
KERNELS: dict[str, Callable[[torch.device, bool], Kernel]] = {
    "aten": _aten,
    "aten_cudnn": _cudnn,
    "flash3": _flash("flash3"),
    "flash4": _flash("flash4"),
    "flex": _flex,
    "triton": _triton,
    "reference": _reference,
}


# compute capability -> package with the fastest kernel, by published figures
FASTEST = {(9, 0): "flash3", (10, 0): "flash4", (10, 3): "flash4"}


def automatic(device: torch.device, mask: Mask) -> tuple[str, ...]:
    """Return the names of the kernels that "auto" tries, in this order.

    If few flash attention calls can compute the mask, flash attention kernels are first. On Hopper
    and Blackwell, the first one is the installed FlashAttention package for the device, followed by
    torch's operators. Other masks, and calls with a softcap, use the Triton kernel, which supports
    any mask. cuDNN compiles a graph for every shape, so it is omitted if shapes of the mask change
    with the batch. `flash4` is omitted for masks for which it uses lists of blocks, because its
    kernels for lists never ran on a GPU.

    Args:
        device: Device of the tensors.
        mask: Mask of the call.
    """
    if device.type == "cpu":
        return "aten", "triton"
    if not mask.flash_compatible:
        return "triton", "aten"
    from .flash import of_few_tiles
    from .operators_cuda import prefers_cudnn

    fastest = FASTEST.get(torch.cuda.get_device_capability(device))
    if fastest == "flash4" and not of_few_tiles(mask):
        fastest = None
    names = (fastest,) if fastest else ()
    names += ("aten_cudnn",) if mask.cacheable and prefers_cudnn(device) else ()
    return *names, "aten", "triton"


def make(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None = None,
    mask: Mask | None = None,
    beside_rings: bool = False,
    maximum: bool = False,
) -> Kernel:
    """Return a kernel for tensors with the shapes, dtype and device of q, k and v.

    Args:
        name: A name in `KERNELS`, or "auto" for the first kernel of `automatic` that supports the
            call.
        q: Queries.
        k: Keys.
        v: Values.
        softcap: Softcap of the call, or None.
        mask: Mask of the call. Default: causal.
        beside_rings: True if tensors are sent while the kernel runs. The kernel may then leave
            multiprocessors free.
        maximum: True if the kernel must return the largest score of each head.

    Raises:
        ValueError: There is no kernel of this name, the kernel does not support the call, or torch
            is too old.
    """
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {name!r}")
    refused = torch_features.refusal(torch_features.PACKAGE)
    if refused is not None:
        raise ValueError(f"{torch_features.PACKAGE} {refused}")
    auto = name == "auto"
    names = automatic(q.device, Causal() if mask is None else mask) if auto else (name,)
    reasons: list[str] = []
    for candidate in names:
        try:
            kernel = KERNELS[candidate](q.device, beside_rings)
        except ValueError as error:  # the package is not installed or has unknown functions
            if not auto:
                raise
            reasons.append(str(error).split(";")[0])
            continue
        reason = _refusal(kernel, q, k, v, softcap, maximum)
        if reason is None:
            separate = getattr(getattr(kernel, "operator", None), "separate", None)
            if separate is not None and mask is not None and not mask.cacheable:
                reasons.append(f"kernel {candidate} calls cuDNN for each document: {separate}")
            kernel.passed_over = tuple(reasons)
            return kernel
        reasons.append(f"kernel {candidate} {reason}")
    raise ValueError("; ".join([*reasons, "kernel='reference' supports every call"]))


def _refusal(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None,
    maximum: bool,
) -> str | None:
    if torch.are_deterministic_algorithms_enabled() and not kernel.deterministic:
        return "is not deterministic, and torch.use_deterministic_algorithms(True) was called"
    if softcap is not None and not kernel.softcaps:
        return f"does not support a softcap, got softcap={softcap}"
    if maximum and not kernel.maximum:
        return "does not return the largest scores, which max_logits needs"
    reason = kernel.refusal(q, k, v)
    if reason is None and kernel.name == "aten" and q.is_cpu and q.shape[2] != k.shape[2]:
        return torch_features.refusal(torch_features.SHARED_HEADS)
    return reason
