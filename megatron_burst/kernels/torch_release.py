"""What older releases of torch cannot do on CUDA, in one table.

Decides from which release on a part of this package is served there. The door of each part asks
`refusal`; `limits` is for reports. A development build counts as the release before it: it may
have been made before the change it is judged by.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

Release = tuple[int, int]


class Limit(NamedTuple):
    """part: of this package; since: the first release that is as it should be; before: what is so
    in older ones; refused: whether the door refuses the part there."""

    part: str
    since: Release
    before: str
    refused: bool

    @property
    def remedy(self) -> str:
        """What would work."""
        return f"torch {'.'.join(map(str, self.since))} or newer"


CUDNN = "kernel aten_cudnn"
HEAD = "linear_cross_entropy in bfloat16"
WIDE_SUMS = "the weight gradient of linear_cross_entropy in bfloat16"

# What the operators of 2.6.0, 2.7.1, 2.8.0, 2.9.1 and 2.10.0 take was asked of their wheels; the
# rest was read in torch's sources, and nothing of it was run.
LIMITS = (
    Limit(HEAD, (2, 8), "no product of bfloat16 matrices comes out in float32", True),
    Limit(CUDNN, (2, 9), "torch's cuDNN attention wants statistics of another shape", True),
    Limit(
        WIDE_SUMS,
        (2, 10),
        "no product of bfloat16 is added to a float32 matrix, so that it takes a second step and "
        "256 MiB",
        False,
    ),
    Limit(
        "memory of travelling tensors under NCCL",
        (2, 8),
        "torch keeps what was sent and received until the device has caught up, more than one ring "
        "step needs",
        False,
    ),
)


def release(version: str | None = None) -> Release:
    """(major, minor) of a version such as "2.9.1+cu128"; None: of the torch that is imported."""
    version = str(torch.__version__) if version is None else version
    found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(a|b|\.dev)?", version)
    assert found is not None, version
    major, minor, unfinished = found.groups()
    return int(major), int(minor) - bool(unfinished)


def limits(version: str | None = None) -> list[Limit]:
    """What concerns a version (None: the torch that is imported), if it runs on CUDA."""
    return [limit for limit in LIMITS if release(version) < limit.since]


def concerns(part: str) -> bool:
    """Is the torch that is imported older than the part's release?"""
    return any(limit.part == part for limit in limits())


def refusal(part: str) -> str | None:
    """Why the torch that is imported cannot serve this part on CUDA, or None."""
    for limit in limits():
        if limit.part == part and limit.refused:
            return (
                f"needs {limit.remedy} on CUDA, found {torch.__version__}: before, {limit.before}"
            )
    return None
