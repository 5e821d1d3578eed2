"""What older releases of torch cannot do, in one table.

Decides from which release on this package, and each of its parts that wants a newer one, is served.
The doors ask `refusal`; `limits` is for reports. A development build counts as the release before
it: it may have been made before the change it is judged by.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

Release = tuple[int, int]


class Limit(NamedTuple):
    """part: of this package, or all of it; since: the first release that is as it should be;
    before: what is so in older ones; refused: whether the door refuses the part there."""

    part: str
    since: Release
    before: str
    refused: bool = True

    @property
    def remedy(self) -> str:
        """What would work."""
        return f"torch {'.'.join(map(str, self.since))} or newer"


PACKAGE = "megatron-burst"
WIDE_SUMS = "the weight gradient of linear_cross_entropy in bfloat16 on CUDA"

# Seen in the wheels of 2.6.0, 2.7.1, 2.8.0 and 2.9.1: which operators there are, and what
# attention on the CPU does. What NCCL and cuDNN are given was read in torch's sources, not run.
LIMITS = (
    Limit(
        PACKAGE,
        (2, 9),
        "torch's attention on the CPU writes outside its memory where query heads share keys, and "
        "cuDNN's wants statistics of another shape; before 2.8 no product of bfloat16 matrices "
        "comes out in float32, and what was sent or received under NCCL is freed late",
    ),
    Limit(
        WIDE_SUMS,
        (2, 10),
        "no product of bfloat16 matrices is added to a float32 one: it takes a second step and "
        "256 MiB",
        refused=False,
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
    """What is to be said of a version; None: of the torch that is imported."""
    return [limit for limit in LIMITS if release(version) < limit.since]


def concerns(part: str) -> bool:
    """Is the torch that is imported older than the part's release?"""
    return any(limit.part == part for limit in limits())


def refusal(part: str) -> str | None:
    """Why the torch that is imported cannot serve this part, without the part's name; or None."""
    for limit in LIMITS:
        if limit.part == part and limit.refused and release() < limit.since:
            return f"needs {limit.remedy}, found {torch.__version__}: before, {limit.before}"
    return None
