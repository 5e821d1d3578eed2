# SPDX-License-Identifier: Apache-2.0
"""What this package needs of torch, asked of torch itself.

Versions do not say it: the containers of NVIDIA carry development builds, and "2.9.0a0" may have
been made before or after a change. So each need is a question to the torch that is imported, and
the release that has it for certain is named only as a remedy. The doors ask `refusal`; `lacking` is
for reports.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes


class Feature(NamedTuple):
    """part: of this package, or all of it; present: asks torch; since: the first release that has
    it; without: what is so where it is absent; refused: whether the door refuses the part there.
    """

    part: str
    present: Callable[[], bool]
    since: str
    without: str
    refused: bool = True

    @property
    def remedy(self) -> str:
        """What would work."""
        return f"torch {self.since} or newer"


PACKAGE = "megatron-burst"
SHARED_HEADS = "kernel aten on a CPU where query heads share keys"
WIDE_SUMS = "the weight gradient of linear_cross_entropy in bfloat16 on CUDA"


def _wide_products() -> bool:
    return "dtype_out" in torch.ops.aten.mm.overloads()


@functools.cache
def _shares_heads() -> bool:
    """Does torch hand query heads that share keys to its flash attention for CPUs? The operator
    itself cannot be tried: without support it writes outside its memory.
    """
    with (
        _disable_current_modes(),
        warnings.catch_warnings(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        warnings.simplefilter("ignore")
        q, k = (torch.zeros(1, heads, 8, 16, device="cpu") for heads in (2, 1))
        try:
            taken = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)
        except RuntimeError:  # no backend that is allowed here takes them
            return False
    return taken == SDPBackend.FLASH_ATTENTION.value


@functools.cache
def adds_wide(device: torch.device) -> bool:
    """Does this device add a product of bfloat16 matrices to a float32 one? Tried on small ones."""
    total = torch.zeros(16, 16, device=device)
    factor = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)  # pyright: ignore[reportCallIssue]
    except (RuntimeError, TypeError):
        return False
    return True


def _adds_wide_here() -> bool:
    return not torch.cuda.is_available() or adds_wide(torch.device("cuda"))


FEATURES = (
    Feature(
        PACKAGE,
        _wide_products,
        "2.8",
        "no product of bfloat16 matrices comes out in float32, and what was sent or received "
        "under NCCL is freed late",
    ),
    Feature(
        SHARED_HEADS,
        _shares_heads,
        "2.9",
        "torch's operator writes outside its memory",
    ),
    Feature(
        WIDE_SUMS,
        _adds_wide_here,
        "2.10",
        "no product of bfloat16 matrices is added to a float32 one: it takes a second step and "
        "256 MiB",
        refused=False,
    ),
)


def lacking() -> list[Feature]:
    """What the torch that is imported cannot do, asked anew."""
    return [feature for feature in FEATURES if not feature.present()]


def refusal(part: str) -> str | None:
    """Why the torch that is imported cannot serve this part, without the part's name; or None."""
    for feature in FEATURES:
        if feature.part == part and feature.refused and not feature.present():
            return f"needs {feature.remedy}, found {torch.__version__}: before, {feature.without}"
    return None
