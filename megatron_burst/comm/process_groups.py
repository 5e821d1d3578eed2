# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a grid tell each other before process groups are made, and how one is made.

Making groups is collective: ranks that mean different grids would wait for each other until the
timeout. So they first compare, over a group that they have, what they were asked for; a rank that
differs is named on every rank. Decides that only its members make a group, whatever the other
ranks of the job do, and under a name on which they agree: ranks may be in different numbers of
groups, as where every micro-batch has context-parallel groups of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Said(NamedTuple):
    """What a rank tells the others of its grid before groups are made."""

    rank: int  # global
    name: str  # for the groups, if it is the first rank: no other groups have it
    asked: str  # its arguments
    given: tuple[tuple[tuple[int, ...], str], ...]  # the ranks and the name of groups it was given


def process_group(group: dist.ProcessGroup, name: str = "group") -> dist.ProcessGroup:
    """`group`, the argument `name`, if it is one that this rank can make a grid of."""
    if not isinstance(group, dist.ProcessGroup):
        before = (
            "" if dist.is_initialized() else "; call torch.distributed.init_process_group before"
        )
        raise ValueError(
            f"{name} must be a process group that this rank is in{before}, got {group!r}"
        )
    return group


def asked(ulysses: int, placement: str, reuse: object, nccl_max_ctas: int | None) -> str:
    """The arguments of a grid, in words that are the same on every rank that means the same."""
    given = f"no list but {type(reuse).__name__}"
    if isinstance(reuse, (list, tuple)):
        sizes = [
            f"{each.size()} ranks" if isinstance(each, dist.ProcessGroup) else "which it is no part"
            for each in reuse
        ]
        given = f"groups of {', '.join(sizes)}" if sizes else "no groups"
    return f"{ulysses=}, {placement=}, reuse={given}, {nccl_max_ctas=}"


def introduce(group: dist.ProcessGroup, asked: str, given: tuple = ()) -> list[Said]:
    """What each rank of `group` says; a collective. asked, given: as in `Said`."""
    return gather_objects(Said(dist.get_rank(), f"burst-{uuid.uuid4().hex}", asked, given), group)


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the `value` of every rank of `group`; a collective."""
    gathered = [value] * group.size()
    try:
        dist.all_gather_object(gathered, value, group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"groups: of the ranks {ranks} some did not take part in making them: one raised an "
            f"error, died, or was given another process group; {error}"
        ) from error
    return gathered


def introduce_nodes(intra: dist.ProcessGroup, inter: dist.ProcessGroup, asked: str) -> list[Said]:
    """What each rank of a grid says, node by node; a collective. intra: the ranks of this rank's
    node, inter: those with its index on all nodes. ValueError where nodes differ in size.
    """
    nodes = gather_objects(introduce(intra, asked), inter)
    rows = [[one.rank for one in node] for node in nodes]
    for each in gather_objects(rows, intra):  # an index that a small node lacks sees no such node
        if len({len(node) for node in each}) != 1:
            raise ValueError(f"intra: nodes must hold equally many ranks, got {each}")
    return [one for node in nodes for one in node]


def agreed(said: list[Said]) -> list[int]:
    """The global ranks of a grid; ValueError, on all of them, if they do not mean the same one."""
    for rank, one in enumerate(said):
        if one.asked != said[0].asked:
            raise ValueError(
                f"groups: ranks disagree: rank 0 asked for {said[0].asked}, rank {rank} for "
                f"{one.asked}; every rank must make the same grid"
            )
    return [one.rank for one in said]


def unbind_default_arguments() -> None:
    """Replace the default process group by None in the default arguments of torch.distributed.nn.

    None has the same meaning there. When this module is imported after `init_process_group`, its
    functions keep the default process group beyond `destroy_process_group`, and gloo's threads with
    it, which can abort the process at its end (pytorch issue 190489). torch imports the module when
    an optimizer is made, and it is imported here, so that a later import cannot bind the group.
    """
    from torch.distributed.nn import functional

    world = dist.distributed_c10d._get_default_group()
    for function in vars(functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(default is world for default in defaults):
            function.__defaults__ = tuple(None if value is world else value for value in defaults)


def join(group: dist.ProcessGroup, device: torch.device) -> None:
    """A collective on a group, for tensors of this kind of device.

    NCCL makes a communicator at a group's first call, in which all of its members have to take
    part; but not all ranks have something to send in every boundary of every schedule. So a
    communicator exists, with NCCL's buffers for it, before the first message.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> the backend of `group` that moves its tensors between two ranks.

    A group made without a backend, or with "cpu:gloo,cuda:nccl", has one for each; gloo, which
    torch registers for CUDA too, sends those of the CPU only.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: name for device, name in pairs if name != "gloo" or device == "cpu"}


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of `group`, so that its rings fail as soon as it would."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def new_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta | None,
    name: str,
    options: Any = None,
) -> dist.ProcessGroup:
    """A new process group of these global ranks, which are all that take part in making it.

    The grids of other model-parallel groups, and pipeline stages without attention, stay free.
    Where `init_process_group(device_id=...)` binds a device, torch would split the communicator off
    that of the world, which waits for every rank of the job: so the world has none meanwhile.
    name: one that no other group of these ranks ever has, the same on all of them.
    """
    world = dist.distributed_c10d._get_default_group()
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        with _named(name):
            group = dist.new_group(
                list(ranks),
                timeout=timeout,
                backend=backend,
                pg_options=options,
                use_local_synchronization=True,
                device_id=None if backend == "gloo" else device,
            )
    finally:
        world.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Call the group that is made meanwhile so.

    torch names a locally made group after a count of the groups a rank has made or is in (which of
    these, depends on its version). Members whose counts differ would wait for each other until the
    timeout, and ranks that are no members would count one group less than the others when all of
    them make the next one.
    """
    home = dist.distributed_c10d
    stock = home._process_group_name
    home._process_group_name = lambda *ranks, **ways: name
    try:
        yield
    finally:
        home._process_group_name = stock
