# SPDX-License-Identifier: Apache-2.0
"""The process groups that a grid's rings travel on: which are given, which are made, and when.

Decides that a communicator is made when a plan first names its channel, on all ranks in the same
order; that activations travel on a given group that has just the ranks of their ring; and that
gradients, which must overlap with activations, never share a communicator with them.

Process groups are referenced weakly. `torch.distributed` owns them until
`destroy_process_group()`, which joins a group's threads only if nothing else references the group.
gloo's threads need the interpreter's lock to free the tensors of their last collective. If they
do this while the interpreter ends, they abort the process (pytorch issue 190489). Plans and
autograd graphs, which reference `Groups`, often live until then.
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
    agreed,
    backends,
    introduce,
    join,
    new_group,
    process_group,
    timeout_of,
)
from .transport import Channel


class GridPlace(NamedTuple):
    """A rank in its grid. ranks: the global rank of each, node by node."""

    topology: Topology
    rank: int
    ranks: Sequence[int]

    def members(self, channel: Channel) -> tuple[int, ...]:
        """The global ranks of the ring, ulysses group or grid that this rank's channel joins."""
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
    """Those of one rank. `groups`: (channel, device type) -> the process group that carries it.

    parent: a process group with the backends and the timeout of those that are made. name: of the
    control group, a new one. given: process groups that activations may travel on. max_ctas: of
    NCCL's kernels on those that are made; None for NCCL's own choice. Making it is collective over
    the grid.

    Attributes: `backend`, of the parent in torch's words; `moves`, device type -> backend; `used`,
    weak references to the process groups that are in use.
    """

    def __init__(
        self,
        place: GridPlace,
        parent: dist.ProcessGroup,
        name: str,
        given: Sequence[dist.ProcessGroup] = (),
        max_ctas: int | None = None,
    ):
        self.place, self.moves, self._timeout = place, backends(parent), timeout_of(parent)
        self.backend = dist.get_backend(parent)
        if self.backend == "undefined":  # torch's word for a group that was made without one
            self.backend = dist.get_backend_config(parent)
        self._max_ctas = self._checked(max_ctas)
        self.groups: MutableMapping[tuple[Channel, str], dist.ProcessGroup] = WeakValueDictionary()
        if not isinstance(given, (list, tuple)):
            raise ValueError(f"reuse: give a list of process groups, got {type(given).__name__}")
        self._given = WeakValueDictionary(
            {
                _key(dist.get_process_group_ranks(process_group(group, "reuse"))): group
                for group in reversed(given)  # of two the first
            }
        )
        self._made: MutableMapping[tuple[tuple[int, ...], bool, str], dist.ProcessGroup] = (
            WeakValueDictionary()
        )
        self._taken: int | None = None  # bytes of device memory
        self._control = ref(new_group(place.ranks, "gloo", self._timeout, name))
        self.used = {self._control}

    @property
    def control(self) -> dist.ProcessGroup:
        """A process group of all ranks of the grid on the host."""
        control = self._control()
        assert control is not None, "the process groups were destroyed"
        return control

    def _checked(self, max_ctas: int | None) -> int | None:
        if max_ctas is None:
            return None
        if type(max_ctas) is not int or max_ctas < 1:
            raise ValueError(
                f"nccl_max_ctas must be an integer from 1 on, or None, got {max_ctas!r}"
            )
        if "nccl" not in self.moves.values():
            raise ValueError(
                f"nccl_max_ctas={max_ctas} limits kernels of NCCL, and these groups are on "
                f"{self.backend}; leave it out"
            )
        return max_ctas

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Give each channel that lacks it a group for tensors of this kind of device. Collective,
        if any does; ValueError, on all ranks, if they do not mean the same.
        """
        wanted = dict.fromkeys(channels)
        missing = [
            channel
            for channel in wanted
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
        """A name for what will be made; ValueError, on all ranks, unless all lack the same and were
        given the same.
        """
        reused = {channel: self._reused(channel, device) for channel in missing}
        given = {self.place.members(c): g.group_name for c, g in reused.items() if g is not None}
        words = f"{_words(missing)}, given groups for {_words(c for c in missing if reused[c])}"
        said = introduce(self.control, words, tuple(given.items()))
        agreed(said)
        names: dict[tuple[int, ...], tuple[str, int]] = {}
        for one in said:
            for members, name in one.given:
                other, rank = names.setdefault(members, (name, one.rank))
                if other != name:
                    raise ValueError(
                        f"reuse: over the ranks {list(members)}, rank {one.rank} was given another "
                        f"process group than rank {rank}; give every rank the same"
                    )
        return said[0].name

    def describe(self) -> str:
        """What the rings travel on, and the memory it took where a device has its own."""
        own = set(self._made.values())
        made, given = (
            list(dict.fromkeys(c for (c, _), g in self.groups.items() if (g in own) == mine))
            for mine in (True, False)
        )
        parts = [f"{len(own)} made ({_words(made)})"] if made else []
        parts += [f"given groups for {_words(given)}"] if given else []
        line = "communicators: " + (", ".join(parts) or "none")
        if self._taken is None:
            return line
        return f"{line}, {byte_size(max(0, self._taken))} of device memory before any message"

    def _reused(self, channel: Channel, device: torch.device) -> dist.ProcessGroup | None:
        """The given group with just the ranks of the channel, if it moves tensors of the device."""
        if channel.gradient:
            return None
        group = self._given.get(_key(self.place.members(channel)))
        return group if group is not None and device.type in backends(group) else None

    def _own(self, channel: Channel, device: torch.device, name: str) -> dist.ProcessGroup:
        """The group made for rings over these ranks; two rings over the same ranks share it. Rings
        of the other ranks of the grid have the same name, and other first members.
        """
        members, backend = self.place.members(channel), self.moves[device.type]
        key = _key(members), channel.gradient, backend
        if key not in self._made:
            options = nccl_options(self._timeout, self._max_ctas) if backend == "nccl" else None
            name = f"{name}-{min(members)}"
            self._made[key] = new_group(members, backend, self._timeout, name, options)
        return self._made[key]


def nccl_options(timeout: Any, max_ctas: int | None) -> Any:
    """Options of a communicator whose kernels run beside attention's.

    Its stream has high priority: where launches wait in one queue per priority, NCCL's kernels
    would start only when a grid of attention that fills the device has drained.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def memory_taken(device: torch.device) -> int | None:
    """The bytes of a GPU in use outside torch's allocator, where NCCL's buffers are; None for the
    CPU.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _key(members: Iterable[int]) -> tuple[int, ...]:
    """Which ranks; in what order a process group holds them does not matter between two of them."""
    return tuple(sorted(members))


def _words(channels: Iterable[Channel]) -> str:
    return ", ".join(f"{c.ring} gradients" if c.gradient else c.ring for c in channels) or "none"
