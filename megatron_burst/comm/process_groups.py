# SPDX-License-Identifier: Apache-2.0
"""Comparison of arguments before process groups are made, and creation of a process group.

Creating a group is a collective call. Ranks with different grids would wait for each other until
the timeout. So ranks first compare their arguments over an existing group. If they differ, all
ranks raise an error that names the first differing rank. Only the members of a group take part in
its creation, and they first agree on its name. The number of created groups may differ between
ranks of the job, for example if every micro-batch has its own context-parallel groups.
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
    """Arguments of one rank, which ranks compare before they make process groups.

    Attributes:
        rank: Global rank.
        name: Unique name made by this rank. New groups use the name that the first rank made.
        arguments: Text to compare: the `Groups` arguments of this rank (`arguments_text`), or the
            channels that the rank needs.
        reused: (ranks, name) of each process group that this rank will reuse.
    """

    rank: int
    name: str
    arguments: str
    reused: tuple[tuple[tuple[int, ...], str], ...]


def process_group(group: dist.ProcessGroup, name: str = "group") -> dist.ProcessGroup:
    """Check that `group` is a process group of this rank, and return it.

    Args:
        group: The value to check.
        name: Name of the argument with this value, for the error.

    Raises:
        ValueError: `group` is not a process group of this rank.
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
    """Return the arguments of `Groups` as text, for the comparison between ranks."""
    reuse_text = f"not a list but {type(reuse).__name__}"
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
    """All-gather the arguments of each rank of `group`. A collective call."""
    return gather_objects(
        GridArguments(dist.get_rank(), f"burst-{uuid.uuid4().hex}", arguments, reused), group
    )


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """All-gather a Python object from every rank of `group`. A collective call.

    Raises:
        RuntimeError: A rank did not take part in the call.
    """
    gathered = [value] * group.size()
    try:
        dist.all_gather_object(gathered, value, group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"groups: not all of the ranks {ranks} took part: a rank raised an error, died, or "
            f"passed another process group; {error}"
        ) from error
    return gathered


def gather_nodes(
    intra: dist.ProcessGroup, inter: dist.ProcessGroup, arguments: str
) -> list[GridArguments]:
    """All-gather the arguments of each rank of a grid, node by node. A collective call.

    Args:
        intra: Process group of the ranks of this rank's node.
        inter: Process group of the ranks with this rank's index on all nodes.
        arguments: `Groups` arguments of this rank as text (`arguments_text`).

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
    """Check that all ranks have equal arguments, and return their global ranks.

    Raises:
        ValueError: Arguments differ between ranks. All ranks raise the error.
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

    For these functions, None also means the default process group. If `torch.distributed.nn` is
    imported after `init_process_group`, its functions reference the default process group even
    after `destroy_process_group`. These references keep gloo's threads alive, which can abort the
    process at its end (pytorch issue 190489). torch imports `torch.distributed.nn` when an
    optimizer is made. `unbind_default_arguments` imports it first, so that no later import can bind
    the group.
    """
    from torch.distributed.nn import functional

    world = dist.distributed_c10d._get_default_group()
    for function in vars(functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(default is world for default in defaults):
            function.__defaults__ = tuple(None if value is world else value for value in defaults)


def join(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the communicator of a group by a small all-reduce on `device`.

    NCCL creates a communicator in the first call on a group, in which all members must take part.
    Some ranks of a schedule send nothing between some steps, so a message cannot serve as this
    first call. Therefore this all-reduce creates the communicator and NCCL's buffers.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return a dict from device type to the backend of `group` for point-to-point messages.

    A group made without a backend, or with "cpu:gloo,cuda:nccl", has one backend per device type.
    torch also registers gloo for CUDA, but gloo sends only CPU tensors.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: name for device, name in pairs if name != "gloo" or device == "cpu"}


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of `group`, for new groups; None if the backend has none."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def new_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta | None,
    name: str,
    options: Any = None,
) -> dist.ProcessGroup:
    """Make a process group of the given global ranks. A collective call of these ranks only.

    If `init_process_group(device_id=...)` has bound a device to the default process group, torch
    would make the communicator by a split of the default communicator. The split waits for every
    rank of the job. So the bound device of the default process group is unset during the call.

    Args:
        ranks: Global ranks of the members.
        backend: Backend, such as "nccl".
        timeout: Timeout, or None for torch's default.
        name: Unique name, the same on all members.
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
    """Return a context in which new process groups get the name `name`.

    By default, torch derives the name from the number of groups that the rank has made. This number
    may differ between the members. They would then wait for each other until the timeout.
    """
    c10d = dist.distributed_c10d
    original = c10d._process_group_name
    c10d._process_group_name = lambda *ranks, **options: name
    try:
        yield
    finally:
        c10d._process_group_name = original
