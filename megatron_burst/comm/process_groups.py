"""What the ranks of a grid tell each other before any process group is made, and what is asked of
a group.

Making groups is collective: ranks that mean different grids would wait for each other until the
timeout. So they first compare, over the group they were given, what they were asked for; a rank
that differs is named on every rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..schedule.topology import Topology
from .transport import Channel


class Said(NamedTuple):
    """What a rank tells the others of its grid before groups are made."""

    rank: int  # global
    groups: int  # in how many process groups it is
    asked: str  # its arguments


def process_group(group: dist.ProcessGroup, name: str = "group") -> dist.ProcessGroup:
    """`group`, the argument `name`, if it is one that this rank can make a grid of."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{name} must be a process group that this rank is in; call torch.distributed."
            f"init_process_group before, got {group!r}"
        )
    return group


def introduce(group: dist.ProcessGroup, asked: str) -> list[Said]:
    """What each rank of `group` says; a collective."""
    size = group.size()
    mine = Said(dist.get_rank(), len(dist.distributed_c10d._world.pg_names), asked)
    said = [mine] * size
    dist.all_gather_object(said, mine, group=group)
    return said


def agreed(said: list[Said]) -> list[int]:
    """The global ranks of a grid; ValueError, on all of them, if they do not mean the same one.

    torch names a locally made group after the number of groups a rank is in; if that number, or
    the grid, differs between the ranks they would wait for each other until the timeout.
    """
    counts = [one.groups for one in said]
    if len(set(counts)) != 1:
        raise ValueError(
            f"the ranks of this grid are in different numbers of process groups ({counts}); "
            "make mb.Groups before making groups that only some of these ranks belong to"
        )
    for rank, one in enumerate(said):
        if one.asked != said[0].asked:
            raise ValueError(
                f"groups: ranks disagree: rank 0 asked for {said[0].asked}, rank {rank} for "
                f"{one.asked}; every rank must make the same grid"
            )
    return [one.rank for one in said]


def ranks_per_host(group: dist.ProcessGroup) -> int:
    """How many ranks of `group` share a host name (a collective); ValueError unless all hosts hold
    equally many, and the ranks of each follow one another."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    each = hosts.count(hosts[0])
    if len(hosts) % each or hosts != [host for host in hosts[::each] for _ in range(each)]:
        raise ValueError(
            f"ranks are not placed evenly and in order on hosts: {hosts}; "
            "give the ranks per node yourself (intra size)"
        )
    return each


def alive(group: dist.ProcessGroup) -> bool:
    """Has it not been destroyed?"""
    return group in dist.distributed_c10d._world.pg_map


def join(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """A collective on every group, in the same order everywhere.

    NCCL makes a communicator at a group's first call, in which all of its members have to take
    part; but not all ranks have something to send in every boundary of every schedule. So every
    communicator exists from the start, with NCCL's buffers for it.
    """
    for group in dict.fromkeys(groups):  # rings over the same ranks share theirs
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of `group`, so that its rings fail as soon as it would."""
    options = getattr(group._get_backend(device_of(group)), "options", None)
    return getattr(options, "_timeout", None)


def device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


def ring_groups(
    topology: Topology, rank: int, new: Callable[[list[int]], dist.ProcessGroup]
) -> dict[Channel, dist.ProcessGroup]:
    """The groups that carry the rings of `rank`: two per ring, one for ulysses; `new` makes one.

    Activations and gradients never share a communicator. Rings over the same ranks share theirs.
    """
    ring, width = topology.ring(rank), topology.intra_size
    node, index = divmod(ring.index(rank), width)
    wanted = {
        Channel(name, gradient): members
        for name, members in (
            ("flat", ring),
            ("intra", ring[node * width : (node + 1) * width]),
            ("inter", ring[index::width]),
        )
        for gradient in (False, True)
    }
    wanted[Channel("ulysses", False)] = topology.ulysses_group(rank)
    made: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
    channels = {}
    for channel, members in wanted.items():
        key = (tuple(members), channel.gradient)
        if len(members) > 1:
            made[key] = made.get(key) or new(members)
            channels[channel] = made[key]
    return channels
