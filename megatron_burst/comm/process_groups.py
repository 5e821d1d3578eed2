# SPDX-License-Identifier: Apache-2.0
"""Comparison of arguments before process groups are made, and creation of a process group.

Making groups is collective. Ranks with different grids would wait for each other until the timeout.
So ranks first compare their arguments over an existing group, and an error on every rank names the
rank that differs. Only the members of a group take part in making it, under a name on which they
agree, because other ranks of the training job may be in another number of groups (for example if
every micro-batch has its own context-parallel groups).
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


class GridArguments(NamedTuple):
    """The arguments of a grid on one rank, which ranks compare before groups are made.

    Attributes:
        rank: Global rank.
        name: Name for the groups, used if this is the first rank of the grid; no other groups have
            it.
        arguments: Arguments as text.
        reused: Ranks and name of each process group that the rank may reuse.
    """

    rank: int
    name: str
    arguments: str
    reused: tuple[tuple[tuple[int, ...], str], ...]


def process_group(group: dist.ProcessGroup, name: str = "group") -> dist.ProcessGroup:
    """Return `group` if this rank can make a grid from it.

    Args:
        group: Value of an argument.
        name: Name of the argument, for the message.

    Raises:
        ValueError: `group` is no process group of this rank.
    """
    if not isinstance(group, dist.ProcessGroup):
        before = (
            "" if dist.is_initialized() else "; call torch.distributed.init_process_group first"
        )
        raise ValueError(
            f"{name} must be a process group that contains this rank{before}, got {group!r}"
        )
    return group


def arguments_text(ulysses: int, placement: str, reuse: object, nccl_max_ctas: int | None) -> str:
    """Return the arguments of a grid as text, the same on all ranks with the same arguments."""
    reuse_text = f"no list but {type(reuse).__name__}"
    if isinstance(reuse, (list, tuple)):
        sizes = [
            f"{group.size()} ranks" if isinstance(group, dist.ProcessGroup) else "other ranks"
            for group in reuse
        ]
        reuse_text = f"groups of {', '.join(sizes)}" if sizes else "no groups"
    return f"{ulysses=}, {placement=}, reuse={reuse_text}, {nccl_max_ctas=}"


def gather_arguments(
    group: dist.ProcessGroup, arguments: str, reused: tuple = ()
) -> list[GridArguments]:
    """Return the arguments of each rank of `group`. A collective call."""
    return gather_objects(
        GridArguments(dist.get_rank(), f"burst-{uuid.uuid4().hex}", arguments, reused), group
    )


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the `value` of every rank of `group`. A collective call.

    Raises:
        RuntimeError: A rank did not take part.
    """
    gathered = [value] * group.size()
    try:
        dist.all_gather_object(gathered, value, group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"groups: not all of the ranks {ranks} made them: a rank raised an error, died, or "
            f"passed another process group; {error}"
        ) from error
    return gathered


def gather_nodes(
    intra: dist.ProcessGroup, inter: dist.ProcessGroup, arguments: str
) -> list[GridArguments]:
    """Return the arguments of each rank of a grid, node by node. A collective call.

    Args:
        intra: Ranks of this rank's node.
        inter: Ranks with this rank's index on all nodes.
        arguments: Arguments as text.

    Raises:
        ValueError: Nodes have different numbers of ranks.
    """
    nodes = gather_objects(gather_arguments(intra, arguments), inter)
    rows = [[rank_arguments.rank for rank_arguments in node] for node in nodes]
    # With nodes of different sizes, some `inter` groups lack a node, so compare over `intra`.
    for ranks_by_node in gather_objects(rows, intra):
        if len({len(node) for node in ranks_by_node}) != 1:
            raise ValueError(
                f"intra: nodes must have the same number of ranks, got {ranks_by_node}"
            )
    return [rank_arguments for node in nodes for rank_arguments in node]


def agreed_ranks(arguments_of_ranks: list[GridArguments]) -> list[int]:
    """Return the global ranks of a grid.

    Raises:
        ValueError: Ranks have different arguments. All ranks raise it.
    """
    for rank, rank_arguments in enumerate(arguments_of_ranks):
        if rank_arguments.arguments != arguments_of_ranks[0].arguments:
            raise ValueError(
                f"groups: ranks disagree: rank 0 has {arguments_of_ranks[0].arguments}, "
                f"rank {rank} has {rank_arguments.arguments}; every rank must make the same grid"
            )
    return [rank_arguments.rank for rank_arguments in arguments_of_ranks]


def unbind_default_arguments() -> None:
    """Replace the default process group by None in the default arguments of torch.distributed.nn.

    None has the same meaning there. If `torch.distributed.nn` is imported after
    `init_process_group`, its functions reference the default process group even after
    `destroy_process_group`. They also keep gloo's threads alive, which can abort the process at its
    end (pytorch issue 190489). torch imports `torch.distributed.nn` when an optimizer is made. This
    function imports it first, so that a later import cannot bind the group.
    """
    from torch.distributed.nn import functional

    world = dist.distributed_c10d._get_default_group()
    for function in vars(functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(default is world for default in defaults):
            function.__defaults__ = tuple(None if value is world else value for value in defaults)


def join(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run a collective on a group, for tensors of this device type.

    NCCL makes a communicator in the first call of a group, in which all members must take part. Not
    all ranks have something to send at every boundary of every schedule, so the communicator and
    NCCL's buffers must exist before the first message.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return device type -> backend of `group` that sends tensors of this type between two ranks.

    A group made without a backend, or with "cpu:gloo,cuda:nccl", has one for each type. torch also
    registers gloo for CUDA, but gloo sends CPU tensors only.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: name for device, name in pairs if name != "gloo" or device == "cpu"}


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of `group`, so that rings have the same one."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def new_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta | None,
    name: str,
    options: Any = None,
) -> dist.ProcessGroup:
    """Make a process group of these global ranks. Only its members take part.

    Ranks of other model-parallel groups and pipeline stages without attention need not call it. If
    `init_process_group(device_id=...)` binds a device, torch would split the communicator off the
    world's communicator, which waits for every rank of the job. So the world has no bound device
    meanwhile.

    Args:
        ranks: Global ranks.
        backend: Backend.
        timeout: Timeout, or None for torch's default.
        name: Name that no other group of these ranks ever has, the same on all of them.
        options: Options of the backend.
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
    """Name the process group that is made meanwhile.

    torch names a locally made group after a count of groups that a rank has made or is in,
    depending on torch's version. Members with different counts would wait for each other until the
    timeout. Ranks that are no members would count one group less than the others when all of them
    make the next one.
    """
    home = dist.distributed_c10d
    stock = home._process_group_name
    home._process_group_name = lambda *ranks, **ways: name
    try:
        yield
    finally:
        home._process_group_name = stock
