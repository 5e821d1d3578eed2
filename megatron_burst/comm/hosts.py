# SPDX-License-Identifier: Apache-2.0
"""Detection of hosts, and the number of ranks per host.

A host is identified by host name and boot id of the kernel. Machines whose containers have the same
host name are different hosts, and so are containers with different host names on one machine. NCCL
has the same rule: it connects ranks over NVLink or shared memory only if name and boot id are
equal.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .process_groups import gather_objects

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HostIdentity(NamedTuple):
    """Identity of a host.

    Attributes:
        name: Host name.
        boot_id: Boot id of the kernel; empty if the operating system has none.
    """

    name: str
    boot_id: str


def this_host() -> HostIdentity:
    """Return the identity of the host of this process."""
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return HostIdentity(socket.gethostname(), boot_id)


def host_labels(hosts: Sequence[HostIdentity]) -> list[str]:
    """Return the name of each host, with the boot id if several hosts have the same name."""
    boots: dict[str, set[str]] = {}
    for host in hosts:
        boots.setdefault(host.name, set()).add(host.boot_id)
    return [
        host.name if len(boots[host.name]) == 1 else f"{host.name} (boot id {host.boot_id})"
        for host in hosts
    ]


def ranks_per_host(group: dist.ProcessGroup) -> int:
    """Return the number of ranks of `group` per host. A collective call.

    Warns on the first rank if the launcher's LOCAL_WORLD_SIZE contradicts the hosts.

    Raises:
        ValueError: Hosts have different numbers of ranks, or the ranks of a host are not
            consecutive.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    gathered = gather_objects((this_host(), local_world_size), group)
    hosts = [host for host, _ in gathered]
    per_host = hosts.count(hosts[0])
    in_order = [host for host in hosts[::per_host] for _ in range(per_host)]
    if len(hosts) % per_host or hosts != in_order:
        raise ValueError(
            "hosts must have the same number of consecutive ranks, got "
            f"{host_labels(hosts)}; set the number of ranks per node (intra size) explicitly"
        )
    if group.rank() == 0:
        ranks = dist.get_process_group_ranks(group)
        warning = launcher_warning(ranks, hosts, [size for _, size in gathered])
        if warning is not None:
            warnings.warn(warning, stacklevel=3)  # the caller of `Groups.by_host`
    return per_host


def launcher_warning(
    ranks: Sequence[int], hosts: Sequence[HostIdentity], local_world_sizes: Sequence[str]
) -> str | None:
    """Return the text of a warning if hosts contradict LOCAL_WORLD_SIZE; otherwise None.

    Args:
        ranks: Global ranks. Launchers assign consecutive ranks to a node.
        hosts: The host of each rank.
        local_world_sizes: LOCAL_WORLD_SIZE of each rank, empty if the variable is not set.
    """
    sizes = set(local_world_sizes)
    if len(sizes) > 1 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        return None
    size = int(sizes.pop())
    nodes = [rank // size for rank in ranks]
    if len(set(zip(nodes, hosts, strict=True))) == len(set(nodes)) == len(set(hosts)):
        return None
    return (
        f"ranks {list(ranks)} have {len(set(hosts))} node(s) by host name and boot id "
        f"({', '.join(dict.fromkeys(host_labels(hosts)))}), but LOCAL_WORLD_SIZE={size} implies "
        f"{len(set(nodes))}; if the hosts are wrong, set the number of ranks per node: "
        "mb.Groups.from_topology(group, intra=N), or --burst-intra-size N"
    )
