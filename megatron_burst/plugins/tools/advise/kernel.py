# SPDX-License-Identifier: Apache-2.0
"""Attention kernel that a forecast assumes, and whether it is installed on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....autotune.clusters import Cluster
from ....autotune.gpus import assumed_kernel, other_kernels, with_kernel
from ....kernels.flash_packages import PACKAGES
from ....units import duration

TITLES = {
    "aten": "FlashAttention 2 of torch",
    "aten_cudnn": "cuDNN of torch",
    **{name: package.title for name, package in PACKAGES.items()},
}
NO_GPU = "not checked: no GPU here"
# Device files of NVIDIA's driver, on Linux and in WSL. If there is none, torch is not imported.
DRIVER = Path("/dev/nvidiactl"), Path("/dev/dxg")


@dataclass(frozen=True)
class AssumedKernel:
    """Attention kernel whose rate a forecast uses.

    Attributes:
        name: Name as in `--burst-kernel`; None if the rate was measured, or if the cluster states
            a rate without naming a kernel.
        measured: Whether `calibrate` measured the rate.
        here: Text that says whether the kernel can be used on this machine; "" if this is unknown.
        seconds: Kernel name -> predicted seconds of a step, for other kernels with a published
            rate.
    """

    name: str | None
    measured: bool
    here: str
    seconds: Mapping[str, float]

    @property
    def described(self) -> str:
        """Line for the terminal: the kernel, and predicted times of a step with other kernels."""
        if self.measured:
            return "attention kernel: measured by calibrate; `auto` selects it on this cluster"
        if self.name is None:
            return "attention kernel: unknown; its rate is set in the cluster's description"
        here = f"; {self.here}" if self.here else ""
        text = f"attention kernel: {titled(self.name)} is assumed{here}"
        if self.seconds:
            times = [
                f"{duration(seconds)} with {titled(name)}" for name, seconds in self.seconds.items()
            ]
            text += f". The same step takes {', '.join(times)}"
        return text

    def facts(self) -> dict[str, Any]:
        """Return the attributes as a dict for JSON."""
        return {
            "assumed": self.name,
            "title": TITLES.get(self.name or ""),
            "measured": self.measured,
            "here": self.here,
            "seconds_with": dict(self.seconds),
        }


def titled(name: str) -> str:
    """Return the name and the title of a kernel, such as "flash3 (FlashAttention 3)"."""
    return f"{name} ({TITLES[name]})" if name in TITLES else name


def of_forecast(
    cluster: Cluster, seconds_on: Callable[[Cluster], float], documents: bool = False
) -> AssumedKernel:
    """Return the attention kernel that forecasts for a cluster assume.

    Args:
        cluster: Cluster of GPUs.
        seconds_on: Function that returns the predicted seconds of a step on a cluster.
        documents: Whether documents are packed.
    """
    if cluster.kernels_measured:
        return AssumedKernel(None, True, "", {})
    name = assumed_kernel(cluster.gpu, documents)
    seconds = {
        kernel_name: seconds_on(replace(cluster, gpu=with_kernel(cluster.gpu, kernel_name)))
        for kernel_name in other_kernels(cluster.gpu, documents)
    }
    return AssumedKernel(name, False, installed_here(name), seconds)


def installed_here(name: str | None) -> str:
    """Return a text that says whether a kernel can be used on this machine.

    The text is "" for kernels that this module does not know.
    """
    if name not in TITLES:
        return ""
    if not any(path.exists() for path in DRIVER) or importlib.util.find_spec("torch") is None:
        return NO_GPU
    from ....kernels import presence  # imports torch, which takes seconds

    return presence.kernel_here(name) or NO_GPU
