# SPDX-License-Identifier: Apache-2.0
"""Availability of attention kernels on this machine, for `megatron-burst doctor` and forecasts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .flash_packages import PACKAGES, load
from .operators_cuda import prefers_cudnn
from .packages import NotInstalled


class Presence(NamedTuple):
    """Availability of a kernel.

    Attributes:
        usable: True or False for an installed package; None if the package is not installed.
        text: Description of the installed release, or of the problem, for reports.
    """

    usable: bool | None
    text: str


def package_presence(name: str) -> Presence:
    """Return whether the FlashAttention package of a kernel is installed and usable."""
    try:
        load(name)
    except NotInstalled:
        return Presence(None, "not installed")
    except ValueError as error:
        reason = str(error).split(";")[0].removeprefix(f"kernel {name}: ")
        return Presence(False, f"not usable: {reason}")
    release = PACKAGES[name].version or "of unknown version"
    return Presence(True, f"{release}; its functions fit --burst-kernel {name}")


def kernel_here(name: str) -> str | None:
    """Describe the availability of an attention kernel on this machine; None without a GPU.

    Args:
        name: Name of a kernel of torch or of a FlashAttention package, such as "aten_cudnn" or
            "flash3".
    """
    if not torch.cuda.is_available():
        return None
    if name in PACKAGES:
        presence = package_presence(name)
        return f"installed here: {presence.text}" if presence.usable else f"{presence.text} here"
    if name == "aten_cudnn" and not prefers_cudnn(torch.device("cuda")):
        return f"`auto` does not choose it here (cuDNN {torch.backends.cudnn.version()})"
    return f"part of torch {torch.__version__} here"
