# SPDX-License-Identifier: Apache-2.0
"""The table of kernels: `make` turns a name into a kernel that can serve the given tensors.

`KERNELS` has one line per kernel. This module decides which kernel "auto" takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..masks import Causal, Mask
from . import torch_features
from .aten import AtenKernel
from .base import Kernel
from .operators import CpuFlash

# What a run may do without is imported by the calls that ask for it.


def _aten(device: torch.device, beside_rings: bool) -> Kernel:
    if device.type != "cuda":
        return AtenKernel("aten", CpuFlash())
    from .operators_cuda import CudaFlash

    return AtenKernel("aten", CudaFlash())


def _cudnn(device: torch.device, beside_rings: bool) -> Kernel:
    from .operators_cuda import CudaCudnn

    return AtenKernel("aten_cudnn", CudaCudnn())


def _flash(name: str) -> Callable[[torch.device, bool], Kernel]:
    def make(device: torch.device, beside_rings: bool) -> Kernel:
        from . import flash

        return flash.kernel(name, beside_rings)

    return make


def _triton(device: torch.device, beside_rings: bool) -> Kernel:
    from .triton_kernel import TritonKernel

    return TritonKernel()


def _reference(device: torch.device, beside_rings: bool) -> Kernel:
    from .reference import ReferenceKernel

    return ReferenceKernel()


# name -> the kernel for a device, and whether it runs while tensors travel
KERNELS: dict[str, Callable[[torch.device, bool], Kernel]] = {
    "aten": _aten,
    "aten_cudnn": _cudnn,
    "flash3": _flash("flash3"),
    "flash4": _flash("flash4"),
    "triton": _triton,
    "reference": _reference,
}


# compute capability -> the package whose kernel is the fastest there, by published figures
FASTEST = {(9, 0): "flash3", (10, 0): "flash4", (10, 3): "flash4"}


def automatic(device: torch.device, mask: Mask) -> tuple[str, ...]:
    """The kernels that "auto" tries, in this order.

    Flash attention comes first where a few of its tiles describe the mask: on Hopper and Blackwell
    that of the package made for them, where it is installed, then torch's own, which is always
    there. Other masks go to the Triton kernel, which takes any mask in one launch, and
    so do calls with a softcap. cuDNN compiles for every shape, so it is left out where a mask has
    other shapes in every batch.
    """
    if device.type == "cpu":
        return "aten", "triton"
    if not mask.flash_compatible:
        return "triton", "aten"
    from .operators_cuda import prefers_cudnn

    fastest = FASTEST.get(torch.cuda.get_device_capability(device))
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
    """The kernel called `name` for tensors like q, k, v; "auto": the first of `automatic` that
    can, for this mask (default: causal). `beside_rings`: it will run while tensors travel, and may
    leave a part of the device to them. `maximum`: it has to tell the largest scores.

    Raises ValueError if there is no such kernel, it cannot serve these tensors, or torch is too
    old.
    """
    if not isinstance(name, str) or (name != "auto" and name not in KERNELS):
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {name!r}")
    refused = torch_features.refusal(torch_features.PACKAGE)
    if refused is not None:
        raise ValueError(f"{torch_features.PACKAGE} {refused}")
    auto = name == "auto"
    names = automatic(q.device, Causal() if mask is None else mask) if auto else (name,)
    reasons: list[str] = []
    for each in names:
        try:
            kernel = KERNELS[each](q.device, beside_rings)
        except ValueError as error:  # a package that is not installed, or that cannot be used
            if not auto:
                raise
            reasons.append(str(error).split(";")[0])
            continue
        reason = _refusal(kernel, q, k, v, softcap, maximum)
        if reason is None:
            kernel.passed_over = tuple(reasons)
            return kernel
        reasons.append(f"kernel {each} {reason}")
    raise ValueError("; ".join([*reasons, "kernel='reference' takes anything"]))


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
        return f"has no softcap, got softcap={softcap}"
    if maximum and not kernel.maximum:
        return "returns log-sum-exps alone, and max_logits asks for the largest scores"
    reason = kernel.refusal(q, k, v)
    if reason is None and kernel.name == "aten" and q.is_cpu and q.shape[2] != k.shape[2]:
        return torch_features.refusal(torch_features.SHARED_HEADS)
    return reason
