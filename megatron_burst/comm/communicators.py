# SPDX-License-Identifier: Apache-2.0
"""Process groups for the channels of a grid: reuse of existing groups, creation of new groups.

A channel is a ring (or another group of ranks) and a kind of traffic: activations or gradients. Its
process group is made when a plan first needs the channel, on all ranks in the same order. An
existing group (argument `reuse`) carries the activations of a ring if it has exactly the ranks of
the ring. Gradients overlap with activations, so they always have a separate communicator.

Process groups are referenced weakly. `torch.distributed` owns them until `destroy_process_group()`,
which joins the threads of a group only if nothing else references the group. gloo's threads need
the interpreter lock to free the tensors of their last collective. If they do this while the
interpreter exits, they abort the process (pytorch issue 190489). Plans and autograd graphs often
live until the exit, so they must not hold strong references to process groups.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist

from ..schedule.topology import Topology
from ..units import byte_size
from .process_groups import (
    agreed_ranks,
    backends,
    gather_arguments,
    join,
    new_group,
    process_group,
    timeout_of,
)
from .transport import Channel


class GridPlace(NamedTuple):
    """Position of this rank in the grid.

    Attributes:
        topology: Topology of the grid.
        rank: Index of this rank in the grid.
        ranks: Global rank of each index, node by node.
    """

    topology: Topology
    rank: int
    ranks: Sequence[int]

    def members(self, channel: Channel) -> tuple[int, ...]:
        """Return the global ranks of this rank's ring, ulysses group or grid for a channel."""
        topology = self.topology
        ring, width = topology.ring(self.rank), topology.intra_size
        node, index = divmod(ring.index(self.rank), width)
        members = {
            "flat": ring,
            "intra": ring[node * width : (node + 1) * width],
            "inter": ring[index::width],
            "ulysses": topology.ulysses_group(self.rank),
            "grid": range(topology.size),
        }
        return tuple(self.ranks[member] for member in members[channel.ring])


class Communicators:
    """The process groups of one rank. The constructor is a collective call of all ranks.

    Args:
        place: Position of this rank in the grid.
        parent: Process group. New groups have the same backends and the same timeout.
        name: Unique name of the new group for collectives on the host.
        reuse: Existing process groups that may carry activations.
        max_ctas: Maximum number of thread blocks of NCCL's kernels on new groups; None for NCCL's
            choice.

    Attributes:
        groups: Process group by (channel, device type).
        backend: Backend of the parent, in torch's notation.
        moves: Device type -> backend that sends tensors of this device type.
        used: Weak references to the process groups that are in use.
    """

    def __init__(
        self,
        place: GridPlace,
        parent: dist.ProcessGroup,
        name: str,
        reuse: Sequence[dist.ProcessGroup] = (),
        max_ctas: int | None = None,
    ):
        self.place, self.moves, self._timeout = place, backends(parent), timeout_of(parent)
        self.backend = dist.get_backend(parent)
        if self.backend == "undefined":  # torch's value for a group made without a backend
            self.backend = dist.get_backend_config(parent)
        self._max_ctas = self._checked(max_ctas)
        self.groups: MutableMapping[tuple[Channel, str], dist.ProcessGroup] = WeakValueDictionary()
        if not isinstance(reuse, (list, tuple)):
            raise ValueError(f"reuse must be a list of process groups, got {type(reuse).__name__}")
        self._reusable = WeakValueDictionary(
            {
                _key(dist.get_process_group_ranks(process_group(group, "reuse"))): group
                for group in reversed(reuse)  # the first of several groups with equal ranks remains
            }
        )
        self._made: MutableMapping[tuple[tuple[int, ...], bool, str], dist.ProcessGroup] = (
            WeakValueDictionary()
        )
        self._taken: int | None = None  # bytes of device memory that new communicators use
        self._control = ref(new_group(place.ranks, "gloo", self._timeout, name))
        self.used = {self._control}

    @property
    def control(self) -> dist.ProcessGroup:
        """Return a gloo process group of all ranks of the grid, for collectives on the host."""
        control = self._control()
        assert control is not None, "the process groups were destroyed"
        return control

    def _checked(self, max_ctas: int | None) -> int | None:
        if max_ctas is None:
            return None
        if type(max_ctas) is not int or max_ctas < 1:
            raise ValueError(f"nccl_max_ctas must be an integer >= 1 or None, got {max_ctas!r}")
        if "nccl" not in self.moves.values():
            raise ValueError(
                f"nccl_max_ctas={max_ctas} requires NCCL, but the backend of these groups is "
                f"{self.backend}; remove it"
            )
        return max_ctas

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Make the missing process groups of channels. A collective call if any group is missing.

        Args:
            channels: Channels that a plan needs.
            device: Device of the tensors to send.

        Raises:
            ValueError: Channels or reused groups differ between ranks. All ranks raise the error.
        """
        needed = dict.fromkeys(channels)
        missing = [
            channel
            for channel in needed
            if (channel, device.type) not in self.groups and len(self.place.members(channel)) > 1
        ]
        if not missing:
            return
        name = self._agree(missing, device)
        before = memory_taken(device)
        for number, channel in enumerate(missing):
            group = self._reused(channel, device)
            group = group or self._own(channel, device, f"{name}-{number}")
            join(group, device)
            self.groups[channel, device.type] = group
            self.used.add(ref(group))
        after = memory_taken(device)
        if before is not None and after is not None:
            self._taken = (self._taken or 0) + after - before

    def _agree(self, missing: list[Channel], device: torch.device) -> str:
        """Return a name for new groups, equal on all ranks.

        A collective call. Raises ValueError on all ranks if the missing channels or the reused
        groups differ between ranks.
        """
        reused = {channel: self._reused(channel, device) for channel in missing}
        groups = {self.place.members(c): g.group_name for c, g in reused.items() if g is not None}
        text = f"{_names(missing)}, reused groups for {_names(c for c in missing if reused[c])}"
        rank_arguments = gather_arguments(self.control, text, tuple(groups.items()))
        agreed_ranks(rank_arguments)
        names: dict[tuple[int, ...], tuple[str, int]] = {}
        for arguments in rank_arguments:
            for members, name in arguments.reused:
                first_name, rank = names.setdefault(members, (name, arguments.rank))
                if first_name != name:
                    raise ValueError(
                        f"reuse: for the ranks {list(members)}, rank {arguments.rank} and rank "
                        f"{rank} pass different process groups; pass the same group on every rank"
                    )
        return rank_arguments[0].name

    def describe(self) -> str:
        """Return a line that lists new and reused groups; for a GPU, also their memory."""
        own = set(self._made.values())
        made, reused = (
            list(dict.fromkeys(c for (c, _), g in self.groups.items() if (g in own) == is_own))
            for is_own in (True, False)
        )
        parts = [f"{len(own)} made ({_names(made)})"] if made else []
        parts += [f"reused groups for {_names(reused)}"] if reused else []
        line = "communicators: " + (", ".join(parts) or "none")
        if self._taken is None:
            return line
        return f"{line}, {byte_size(max(0, self._taken))} of device memory before any message"

    def _reused(self, channel: Channel, device: torch.device) -> dist.ProcessGroup | None:
        """Return the reusable group with exactly the ranks of the channel, or None.

        None if there is no such group, if it has no backend for `device`, or for gradients.
        """
        if channel.gradient:
            return None
        group = self._reusable.get(_key(self.place.members(channel)))
        return group if group is not None and device.type in backends(group) else None

    def _own(self, channel: Channel, device: torch.device, name: str) -> dist.ProcessGroup:
        """Return the group made for a channel; make it on first use.

        Channels with the same ranks and the same kind of traffic share a group. Ranks of different
        rings pass the same `name`, so the lowest rank of the ring is appended.
        """
        members, backend = self.place.members(channel), self.moves[device.type]
        key = _key(members), channel.gradient, backend
        if key not in self._made:
            options = nccl_options(self._timeout, self._max_ctas) if backend == "nccl" else None
            name = f"{name}-{min(members)}"
            self._made[key] = new_group(members, backend, self._timeout, name, options)
        return self._made[key]


def nccl_options(timeout: Any, max_ctas: int | None) -> Any:
    """Return NCCL's options for a communicator whose kernels run beside attention kernels.

    The stream has high priority. With equal priority, NCCL's kernels could start only after an
    attention kernel that fills the device, because kernels of one priority are scheduled in order.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def memory_taken(device: torch.device) -> int | None:
    """Return the bytes of a GPU in use outside torch's allocator; None for the CPU.

    NCCL's buffers are part of these bytes.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _key(members: Iterable[int]) -> tuple[int, ...]:
    # A process group for point-to-point messages does not depend on the order of its ranks.
    return tuple(sorted(members))


def _names(channels: Iterable[Channel]) -> str:
    return ", ".join(f"{c.ring} gradients" if c.gradient else c.ring for c in channels) or "none"
