"""How much host memory a process may take: what the machine, its cgroup and its limits allow.

Reads Linux' files under /proc and /sys; where there are none, the installed memory counts.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

SHARE = 0.8  # of what is there: the rest is for the processes themselves
_UNLIMITED = 1 << 60  # cgroup v1 writes a number of about 2**63 for "no limit"


def host_limit(*, pinned: bool = False, root: Path = Path("/")) -> int:
    """Bytes of host memory that all ranks of this node may take together: 80 % of the smallest of
    the available memory, what the memory cgroup (v1 or v2) has left and, if it is `pinned`, the
    memlock limit, which counts per process.

    root: where /proc and /sys are.
    """
    found = [_available(root), *_cgroups(root)]
    if pinned:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        found += [] if soft == resource.RLIM_INFINITY else [soft]
    return int(SHARE * max(0, min(found)))


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
