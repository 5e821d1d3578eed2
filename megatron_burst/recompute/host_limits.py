# SPDX-License-Identifier: Apache-2.0
"""How much host memory there is, and how much of what a layer leaves should go there. No torch.

The limit is what the machine, its cgroup and its limits allow: read from Linux' files under /proc
and /sys, or the installed memory where there are none. The fraction is MEMO's rule (arXiv
2407.12117, section 4): as much as the link hides behind a layer's forward, and no more than the
host holds; the rest is computed again, which costs a layer at most another forward, and a link that
is slower than the layers costs more than that for each byte. `auto` of the flags, the memory
account and the benchmark share it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, NamedTuple

SHARE = 0.8  # of what is there: the rest is for the processes themselves
_UNLIMITED = 1 << 60  # cgroup v1 writes a number of about 2**63 for "no limit"


def host_limit(root: Path = Path("/")) -> int:
    """Bytes of host memory that all ranks of this node may take together: 80 % of the available
    memory, or of what the memory cgroup (v1 or v2) has left if that is less.

    The memlock limit (`ulimit -l`) does not count: CUDA's driver pins memory itself, and that limit
    is for what a process locks with mlock.

    root: where /proc and /sys are.
    """
    return int(SHARE * max(0, min([_available(root), *_cgroups(root)])))


def _available(root: Path) -> int:
    """What the kernel says could be used without swapping, in bytes."""
    found = _table(root / "proc/meminfo").get("MemAvailable:")
    if found is not None:
        return found * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups(root: Path) -> list[int]:
    """What is left of the limit of each memory cgroup that this process is in."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        top = root / mount
        # In a container the path may be the host's: then its own group is at the top.
        own = top / path.lstrip("/")
        for place in (own, *own.parents):
            if place == top or top in place.parents:
                found += _left(place, limit, usage)
    return found


def _left(place: Path, limit: str, usage: str) -> list[int]:
    """The limit of a cgroup, if it has one, less what is in use and cannot be dropped."""
    allowed = _text(place / limit).strip()
    if not allowed.isdigit() or int(allowed) >= _UNLIMITED:
        return []
    used, kinds = _text(place / usage).strip(), _table(place / "memory.stat")
    cached = kinds.get("total_inactive_file", kinds.get("inactive_file", 0))
    return [int(allowed) - max(0, int(used or 0) - cached)]


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file of lines "name number ..."."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: Path) -> str:
    """What a file says, or nothing where it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


class Chosen(NamedTuple):
    """A fraction from 0 to 1, and what keeps it from being larger: the "link" or the "host"'s
    memory; "none" where all goes.
    """

    fraction: float
    bound: Literal["none", "link", "host"]
    link: float  # the fraction that the link alone would allow, at most 1
    host: float  # the fraction that the host's memory alone would allow, at most 1


def choose_fraction(
    bytes_per_layer: float,
    seconds_per_layer: float,
    rate: float,
    limit: float,
    in_flight: float,
    ranks_per_node: int = 1,
) -> Chosen:
    """The fraction of what layers leave that is moved to the host.

    bytes_per_layer: what a layer leaves for one micro-batch on one rank: its input and what its
    attention keeps. seconds_per_layer: of its forward. rate: bytes per second that one rank copies
    in one direction while all ranks of its node do. limit: bytes of host memory of a node.
    in_flight: how many such leavings a rank holds at once: its layers times the micro-batches of
    its pipeline stage that are in flight. ranks_per_node: how many ranks share the limit.

    Rounded down to thousandths, so that what is stated is what was taken. Raises ValueError for a
    number that is negative, or not one.
    """
    named = {
        "bytes_per_layer": bytes_per_layer, "seconds_per_layer": seconds_per_layer, "rate": rate,
        "limit": limit, "in_flight": in_flight, "ranks_per_node": ranks_per_node,
    }  # fmt: skip
    for name, value in named.items():
        if not (isinstance(value, (int, float)) and value >= 0) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
    link = _share(seconds_per_layer * rate, bytes_per_layer)
    host = _share(limit, bytes_per_layer * in_flight * ranks_per_node)
    fraction = min(link, host)
    bound = "none" if fraction == 1 else "link" if link <= host else "host"
    return Chosen(fraction, bound, link, host)


def _share(there: float, wanted: float) -> float:
    """The part of what is wanted that is there, in thousandths."""
    if wanted <= there:
        return 1.0
    return math.floor(1000 * (there / wanted)) / 1000
