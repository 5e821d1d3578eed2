# SPDX-License-Identifier: Apache-2.0
"""The features of torch that this package needs, and tests whether the imported torch has them.

Version numbers are not reliable: NVIDIA's containers have development builds, and a build "2.9.0a0"
may be older or newer than a change. So a function tests each feature. Error messages name the first
release that certainly has the feature. Public functions call `refusal` before they use a feature;
reports call `lacking`.
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
    """A feature of torch that a part of this package needs.

    Attributes:
        part: Name of the part of this package that needs the feature; `PACKAGE` for the whole
            package.
        present: Function that returns whether the imported torch has the feature.
        since: First release of torch with the feature.
        without: Text that describes the problem of a torch without the feature.
        refused: True if the part raises an error without the feature. False if it then only needs
            more time or memory.
    """

    part: str
    present: Callable[[], bool]
    since: str
    without: str
    refused: bool = True

    @property
    def remedy(self) -> str:
        """Required release of torch as text, such as "torch 2.8 or newer"."""
        return f"torch {self.since} or newer"


PACKAGE = "megatron-burst"
SHARED_HEADS = "kernel aten on a CPU if query heads share keys"
WIDE_SUMS = "the weight gradient of linear_cross_entropy in bfloat16 on CUDA"


def _wide_products() -> bool:
    return "dtype_out" in torch.ops.aten.mm.overloads()


@functools.cache
def _shares_heads() -> bool:
    """Return True if torch's flash attention for CPUs supports fewer key heads than query heads.

    This test does not call the operator, because without support it writes out of bounds.
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
        except RuntimeError:  # no allowed backend supports shared key heads
            return False
    return taken == SDPBackend.FLASH_ATTENTION.value


@functools.cache
def adds_wide(device: torch.device) -> bool:
    """Return True if this device can add a product of bfloat16 matrices to a float32 matrix.

    The test calls the operator with small matrices.
    """
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
        "products of bfloat16 matrices cannot be returned in float32, and buffers that NCCL sent "
        "or received are freed late",
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
        "products of bfloat16 matrices cannot be added to a float32 matrix, so a separate addition "
        "needs 256 MiB",
        refused=False,
    ),
)


def lacking() -> list[Feature]:
    """Return the features that the imported torch does not have."""
    return [feature for feature in FEATURES if not feature.present()]


def refusal(part: str) -> str | None:
    """Return why `part` cannot be used, such as "needs torch 2.8 or newer, ..."; None if it can."""
    for feature in FEATURES:
        if feature.part == part and feature.refused and not feature.present():
            return f"needs {feature.remedy}, got {torch.__version__}, in which {feature.without}"
    return None
