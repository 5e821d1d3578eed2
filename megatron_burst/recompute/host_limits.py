# SPDX-License-Identifier: Apache-2.0
"""Limit of host memory, and the fraction of a layer's saved tensors to offload.

The limit is derived from the available memory of the machine and the memory cgroup. Both are read
from files in /proc and /sys; without these files, the installed memory is the limit.

The fraction follows the rule of MEMO (arXiv 2407.12117, section 4): offload as many bytes as can be
copied during the forward of a layer and fit into host memory. The other rows are recomputed, which
costs at most another forward per layer. Waiting for copies would cost more per byte than
recomputation. Flags with the value `auto`, the memory report and the benchmark use this rule. The
module does not import torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, NamedTuple

USABLE_SHARE = 0.8  # of the available memory; processes need the other 20 % for other purposes
_UNLIMITED = 1 << 60  # cgroup v1 writes a number of about 2**63 for "no limit"


def host_limit(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that all ranks of this node may use together.

    The limit is 80 % of the available memory, or of the memory that the memory cgroup (v1 or v2)
    has left if that is less. The memlock limit (`ulimit -l`) does not apply: it limits memory that
    a process locks with mlock, and CUDA's driver pins memory itself.

    Args:
        root: Directory that contains /proc and /sys.
    """
    return int(USABLE_SHARE * max(0, min([_available(root), *_cgroups(root)])))


def _available(root: Path) -> int:
    """Return the bytes that Linux estimates to be usable without swapping."""
    kibibytes = _table(root / "proc/meminfo").get("MemAvailable:")
    if kibibytes is not None:
        return kibibytes * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroups(root: Path) -> list[int]:
    """Return the free bytes of each memory cgroup of this process that has a limit."""
    free_bytes = []
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
        # A container may read the host's path of its group; the group is then mounted at `top`.
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if group == top or top in group.parents:
                free_bytes += _free(group, limit, usage)
    return free_bytes


def _free(group: Path, limit: str, usage: str) -> list[int]:
    """Return [free bytes] of a cgroup; an empty list if the cgroup has no limit.

    Free bytes are the limit minus the usage; file caches that the kernel can drop do not count as
    used.

    Args:
        group: Directory of the cgroup.
        limit: Name of the file with the limit.
        usage: Name of the file with the usage.
    """
    allowed = _text(group / limit).strip()
    if not allowed.isdigit() or int(allowed) >= _UNLIMITED:
        return []
    used, kinds = _text(group / usage).strip(), _table(group / "memory.stat")
    cached = kinds.get("total_inactive_file", kinds.get("inactive_file", 0))
    return [int(allowed) - max(0, int(used or 0) - cached)]


def _table(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines "name number ...", by name."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: Path) -> str:
    """Return the text of a file; an empty string if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


class OffloadFraction(NamedTuple):
    """Fraction of saved tensors to offload, and the resource that limits it.

    Attributes:
        fraction: Fraction from 0 to 1.
        bound: "link" or "host": the resource that limits the fraction. "none" if the fraction is 1.
        link: Fraction that the link alone allows, at most 1.
        host: Fraction that the memory of the host alone allows, at most 1.
    """

    fraction: float
    bound: Literal["none", "link", "host"]
    link: float
    host: float


def choose_fraction(
    bytes_per_layer: float,
    seconds_per_layer: float,
    rate: float,
    limit: float,
    in_flight: float,
    ranks_per_node: int = 1,
) -> OffloadFraction:
    """Return the fraction of the saved tensors of layers that is offloaded to the host.

    Fractions are rounded down to thousandths, so that reports show the exact fraction.

    Args:
        bytes_per_layer: Bytes that a layer saves for one micro-batch on one rank: the input and the
            attention outputs in the store.
        seconds_per_layer: Time of the forward of a layer in seconds.
        rate: Copy rate of a rank in bytes/s in one direction, while all ranks of the node copy.
        limit: Host memory of a node in bytes.
        in_flight: Number of layers whose tensors a rank holds at once: layers per rank times
            micro-batches in flight on the pipeline stage.
        ranks_per_node: Number of ranks that share the limit.

    Raises:
        ValueError: An argument is negative or not a number.

    Source: MEMO (arXiv 2407.12117), section 4.
    """
    named = {
        "bytes_per_layer": bytes_per_layer, "seconds_per_layer": seconds_per_layer, "rate": rate,
        "limit": limit, "in_flight": in_flight, "ranks_per_node": ranks_per_node,
    }  # fmt: skip
    for name, value in named.items():
        if not (isinstance(value, (int, float)) and value >= 0) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    link = _share(seconds_per_layer * rate, bytes_per_layer)
    host = _share(limit, bytes_per_layer * in_flight * ranks_per_node)
    fraction = min(link, host)
    bound = "none" if fraction == 1 else "link" if link <= host else "host"
    return OffloadFraction(fraction, bound, link, host)


def _share(available: float, required: float) -> float:
    """Return available / required, at most 1, rounded down to thousandths."""
    if required <= available:
        return 1.0
    return math.floor(1000 * (available / required)) / 1000
