# SPDX-License-Identifier: Apache-2.0
"""`Groups`: the grid of context-parallel ranks, which a user makes from process groups.

Ranks first agree on the grid. `communicators` makes the process groups of rings when plans need
them.

This module also counts the calls (of functions such as `mb.attention`) on a grid. If ranks make
different calls, or the same calls in different orders, they would exchange wrong tensors. On the
CPU every message contains the number of its call, so a wrong message raises an error. On every
device, ranks compare the calls so far when they make a plan.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from ..schedule.topology import Topology
from .communicators import Communicators, GridPlace
from .consensus import Facts, agree, attempt
from .packing import CallTag
from .process_groups import (
    agreed_ranks,
    arguments_text,
    gather_arguments,
    gather_nodes,
    process_group,
    unbind_default_arguments,
)
from .recent import RecentCache
from .transport import Channel, Counters, Endpoint, ProcessEndpoint

INNER = __name__.partition(".")[0] + ".", "torch."  # frames of these modules are not user code
CALLS = "calls so far"  # name of the fact that ranks compare


@dataclass
class CallCounter:
    """Counts of the calls of one rank on a grid.

    Attributes:
        forwards: Number of forward calls.
        backwards: Number of backward calls.
        order: Digest of the sequence of all calls. It contains the plan, the label and the
            direction (forward or backward) of each call.
        warns: True if `forward` warns about calls that ranks cannot distinguish: a line that calls
            the same plan twice without a label.
    """

    forwards: int = 0
    backwards: int = 0
    order: int = 0
    warns: bool = False
    # (plan, line) of calls without a label since the last backward
    _unlabelled: set[tuple[int, str]] = field(default_factory=set)

    def forward(self, plan: int, label: object, sink: bool, host: bool = False) -> CallTag:
        """Count a forward call. Return the tag for the messages of the call and for its backward.

        Args:
            plan: Digest of the plan.
            label: Label of the call. If None, the label is the file and line of the calling code.
            sink: True if the call has a sink, which is not part of the plan.
            host: True if the call keeps keys in host memory, which is not part of the plan.

        Raises:
            ValueError: The label is invalid; see `check_label`.
        """
        if label is None:
            label = self._calling_line(plan)
        else:
            check_label(label)
        self.forwards += 1
        tag = CallTag(plan, self.forwards, crc32(repr((label, sink, host)).encode()))
        self.order = crc32(b"forward %d %d %d" % tag, self.order)
        return tag

    def backward(self, tag: CallTag) -> None:
        """Count the backward of the call with this tag."""
        self.backwards += 1
        self._unlabelled.clear()
        self.order = crc32(b"backward %d %d %d" % tag, self.order)

    def _calling_line(self, plan: int) -> str:
        """Return "file:line" of the innermost caller outside this package and torch.

        The method warns once if a line calls the same plan twice before any backward, as in a loop
        over layers. If ranks skipped different iterations of such a loop, they would exchange wrong
        tensors. Calls without gradients do not warn, because an evaluation has no backward.
        """
        frame = sys._getframe(2)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(INNER):
            frame = frame.f_back
        file, number = frame.f_code.co_filename, frame.f_lineno
        if file.startswith("<"):  # generated code may have a different file name on each rank
            file = "<made>"
        line = f"{file.replace(os.sep, '/').rpartition('/')[2]}:{number}"
        if not (self.warns and torch.is_grad_enabled()):
            return line
        if (plan, line) in self._unlabelled:
            self.warns = False
            words = (
                "this line calls one plan several times without label=, so ranks cannot detect if "
                "one of them skips a call; pass a label, such as the number of the layer"
            )
            warnings.warn_explicit(words, UserWarning, file, number)
        self._unlabelled.add((plan, line))
        return line

    def __repr__(self) -> str:
        return f"{self.forwards} forward, {self.backwards} backward, order {self.order:08x}"


def check_label(label: object) -> None:
    """Check that a label has a type whose `repr` is the same in all processes.

    Raises:
        ValueError: The label is not a string, an integer, a tuple of them, or None.
    """
    if not _plain(label):
        raise ValueError(
            "label must be a string, an integer, a tuple of them or None, the same on all ranks; "
            f"got {label!r:.100}, of type {type(label).__name__}"
        )


def _plain(label: object) -> bool:
    if isinstance(label, tuple):
        return all(map(_plain, label))
    return label is None or isinstance(label, (str, int))


def check_groups(groups: object) -> None:
    """Check that `groups` is a `mb.Groups`.

    Raises:
        ValueError: `groups` is not a `mb.Groups`.
    """
    if not isinstance(groups, Groups):
        raise ValueError(f"groups must be made with mb.Groups, got {groups!r:.100}")


class Groups:
    """A grid of the context-parallel ranks (ranks per node x nodes), with their process groups.

    Make the object once on every rank, before the first call of attention, usually with `by_host`,
    `from_topology` or `flat`. Ranks are numbered 0 to size - 1, node by node; `rank` is the number
    of this rank. The object cannot be copied or pickled. Process groups of rings are made by a
    collective call when a plan first needs them, and freed by
    `torch.distributed.destroy_process_group()`.

    Args:
        intra: Process group of the ranks of this rank's node; index 0 of Megatron's hierarchical
            groups.
        inter: Process group of the ranks with this rank's index on all nodes; index 1 of Megatron's
            hierarchical groups.
        ulysses: Size of the groups of ranks that share heads by all-to-all (head parallelism).
            Rings connect these groups.
        placement: "head_first" if neighbouring ranks share heads, "context_first" if they form a
            ring.
        reuse: Existing process groups of this rank, the same number and sizes on all ranks. A group
            with exactly the ranks of a ring carries the activations of the ring. The members of a
            group must start all their operations on it in the same order.
        nccl_max_ctas: Maximum number of thread blocks of a kernel on new NCCL communicators. Each
            block occupies a multiprocessor that attention could use. Default: NCCL's choice.

    Raises:
        ValueError: The ranks do not form a grid, or arguments differ between ranks.

    Example:
        >>> import megatron_burst as mb
        >>> mb.Groups.single().size
        1
    """

    topology: Topology
    rank: int
    backend: str
    devices: tuple[str, ...]  # device types whose tensors can be sent; empty for `single()`
    ring: Endpoint  # `ring.rank` is the index in the ring
    ulysses: Endpoint  # `ulysses.rank` is the index among the ranks that share heads
    grid: Endpoint  # `grid.rank` is `rank`
    ulysses_links: tuple[str, ...]  # link class to each rank of the ulysses group
    cache: dict[str, Any]  # used by planning only
    calls: CallCounter
    _failure: str | None = None

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def __reduce__(self):
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def __init__(
        self,
        *,
        intra: dist.ProcessGroup,
        inter: dist.ProcessGroup,
        ulysses: int = 1,
        placement: str = "head_first",
        reuse: Sequence[dist.ProcessGroup] = (),
        nccl_max_ctas: int | None = None,
    ):
        for name, group in (("intra", intra), ("inter", inter)):
            process_group(group, name)
        arguments = arguments_text(ulysses, placement, reuse, nccl_max_ctas)
        rank_arguments = gather_nodes(intra, inter, arguments)
        ranks = agreed_ranks(rank_arguments)
        topology = Topology(len(ranks), intra.size(), ulysses, placement)
        self._begin(ranks, rank_arguments[0].name, topology, intra, reuse, nccl_max_ctas)

    @classmethod
    def flat(cls, group: dist.ProcessGroup, *, ulysses: int = 1) -> Groups:
        """Make a grid with all ranks of `group` as one node. A collective call.

        Args:
            group: Process group of the context-parallel ranks.
            ulysses: Same as in `Groups`.

        Raises:
            ValueError: `group` is not a process group of this rank, or arguments differ between
                ranks.

        Example:
            >>> import torch.distributed as dist
            >>> import megatron_burst as mb
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> groups = mb.Groups.flat(dist.group.WORLD)
            >>> groups.size
            1
            >>> dist.destroy_process_group()
        """
        return cls.from_topology(group, intra=process_group(group).size(), ulysses=ulysses)

    @classmethod
    def from_topology(
        cls,
        group: dist.ProcessGroup,
        *,
        intra: int,
        ulysses: int = 1,
        placement: str = "head_first",
        reuse: Sequence[dist.ProcessGroup] = (),
        nccl_max_ctas: int | None = None,
    ) -> Groups:
        """Make a grid with `intra` consecutive ranks of `group` per node. A collective call.

        Args:
            group: Process group of the context-parallel ranks.
            intra: Number of ranks per node.
            ulysses: Same as in `Groups`.
            placement: Same as in `Groups`.
            reuse: Same as in `Groups`.
            nccl_max_ctas: Same as in `Groups`.

        Raises:
            ValueError: The ranks do not form a grid, or arguments differ between ranks.

        Example:
            >>> import torch.distributed as dist
            >>> import megatron_burst as mb
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> groups = mb.Groups.from_topology(dist.group.WORLD, intra=1)
            >>> groups.size
            1
            >>> dist.destroy_process_group()
        """
        arguments = f"{intra=}, {arguments_text(ulysses, placement, reuse, nccl_max_ctas)}"
        ranks = agreed_ranks(rank_arguments := gather_arguments(process_group(group), arguments))
        self = cls.__new__(cls)
        topology = Topology(len(ranks), intra, ulysses, placement)
        self._begin(ranks, rank_arguments[0].name, topology, group, reuse, nccl_max_ctas)
        return self

    @classmethod
    def by_host(cls, group: dist.ProcessGroup, **options: Any) -> Groups:
        """Make a grid in which the ranks of each host are a node. A collective call.

        A host is identified by host name and boot id, so machines whose containers have the same
        host name are different nodes. Warns if the launcher's LOCAL_WORLD_SIZE implies other nodes.

        Args:
            group: Process group of the context-parallel ranks.
            **options: Arguments of `from_topology`, except `intra`.

        Raises:
            ValueError: Hosts have different numbers of ranks, or the ranks of a host are not
                consecutive.

        Example:
            >>> import torch.distributed as dist
            >>> import megatron_burst as mb
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> groups = mb.Groups.by_host(dist.group.WORLD)
            >>> groups.size
            1
            >>> dist.destroy_process_group()
        """
        from .hosts import ranks_per_host

        return cls.from_topology(group, intra=ranks_per_host(process_group(group)), **options)

    @classmethod
    def single(cls) -> Groups:
        """Make a grid of one rank, this process, without torch.distributed.

        Attention, the LM head and linear attention then run on one device; nothing is sent.
        """
        return _SingleRank()

    @property
    def size(self) -> int:
        """Return the number of ranks of the grid."""
        return self.topology.size

    @property
    def counters(self) -> Counters:
        """Return the counters of bytes that this rank sent."""
        return self.ring.counters

    def gather(self, header: torch.Tensor) -> list[torch.Tensor]:
        """Return the headers of all ranks, in the order of ranks. A collective call on the host.

        Args:
            header: CPU tensor of this rank, with the same shape and dtype on all ranks.

        Raises:
            RuntimeError: A rank does not take part.
        """
        if self.size == 1:
            return [header]
        gathered = [torch.empty_like(header) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, header, group=self._communicators.control)
        except RuntimeError as error:
            raise RuntimeError(f"exchange failed: comparison of arguments: {error}") from error
        return gathered

    def compare_calls(self) -> None:
        """Raise the same ValueError on every rank unless all ranks made the same calls in order.

        This is a small collective call on the host; `mb.prepare` includes it. Messages are not
        checked on CUDA. If one plan is used for many training steps, call this method every few
        steps.

        Raises:
            ValueError: Ranks made different calls.
        """
        self.compare({})

    def compare(self, facts: Facts) -> None:
        """Compare facts, and the calls so far, of all ranks. A collective call on the host.

        Args:
            facts: Values by name, which must be equal on all ranks.

        Raises:
            ValueError: Facts or calls differ.
        """
        self.agree(attempt(self.check) or facts)

    def agree(self, facts: Facts | ValueError) -> None:
        """Compare facts, and the calls so far, of all ranks. A collective call on the host.

        Args:
            facts: Values by name, which must be equal on all ranks; or an error of this rank, which
                all ranks then raise.

        Raises:
            ValueError: Facts or calls differ, or a rank has an error.
        """
        facts_and_calls = facts if isinstance(facts, ValueError) else facts | {CALLS: self.calls}
        agree(facts_and_calls, self.gather)

    def recent(self, name: str, most: int) -> RecentCache:
        """Return the cache with the given name, which keeps at most `most` values."""
        return self.cache.setdefault(name, RecentCache(most))

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Make the missing process groups of channels. A collective call if any group is missing.

        Args:
            channels: Channels that a plan needs.
            device: Device of the tensors to send.

        Raises:
            ValueError: Channels or reused groups differ between ranks. All ranks raise the error.
        """
        self._communicators.connect(channels, device)

    @property
    def communicators(self) -> str:
        """Return a line that lists the process groups of rings; empty without process groups."""
        return self._communicators.describe() if self.devices and self.size > 1 else ""

    @property
    def carriers(self) -> Mapping[tuple[Channel, str], dist.ProcessGroup]:
        """Return the process groups of this rank, by (channel, device type)."""
        return self._communicators.groups if self.devices and self.size > 1 else {}

    def expect(self, message: int) -> None:
        """Increase the minimum size of receive buffers on the CPU to `message` bytes."""
        for end in (self.ring, self.ulysses, self.grid):
            end.room = max(end.room, message)

    @contextmanager
    def running(self, device: str = "cpu") -> Iterator[None]:
        """Return a context manager for a call on these groups.

        If the call raises an error, `check` raises an error before later calls, because ranks may
        be out of step. Autocast is disabled for the device type, because the plan defines the
        precision.
        """
        on = torch.is_autocast_enabled(device)
        try:
            with torch.autocast(device, enabled=False) if on else nullcontext():
                yield
        except BaseException as error:
            if self.size > 1:
                self._failure = f"{type(error).__name__}: {error}"
            raise

    def check(self) -> None:
        """Check that the groups can still be used for calls.

        Raises:
            ValueError: An earlier call failed, or the process groups were destroyed.
        """
        existing = dist.distributed_c10d._world.pg_map
        if not all(used() in existing for used in self._communicators.used):
            raise ValueError(
                "groups: the process groups of this mb.Groups were destroyed "
                "(torch.distributed.destroy_process_group); make new mb.Groups"
            )
        if self._failure is not None:
            raise ValueError(
                f"groups: an earlier call failed ({self._failure:.200}), so the ranks may be out "
                "of step; make new mb.Groups on every rank, or restart"
            )

    def _begin(
        self,
        ranks: list[int],
        name: str,
        topology: Topology,
        parent: dist.ProcessGroup,
        reuse: Sequence[dist.ProcessGroup],
        max_ctas: int | None,
    ) -> None:
        """Initialize the grid.

        Args:
            ranks: Global rank of each index, node by node.
            name: Name of the grid, the same on all ranks and unique in the job.
            topology: Topology of the grid.
            parent: Same as in `Communicators`.
            reuse: Same as in `Communicators`.
            max_ctas: Same as in `Communicators`.
        """
        unbind_default_arguments()
        self.topology, self.rank = topology, ranks.index(dist.get_rank())
        self.cache, self.calls, counters = {}, CallCounter(warns=len(ranks) > 1), Counters()
        communicators = Communicators(
            GridPlace(topology, self.rank, ranks), parent, name, reuse, max_ctas
        )
        self.backend, self.devices, self._communicators = (
            communicators.backend,
            tuple(communicators.moves),
            communicators,
        )

        def end(members: list[int]) -> Endpoint:
            peers = [ranks[member] for member in members]
            return ProcessEndpoint(members.index(self.rank), peers, communicators.groups, counters)

        self._place(end)

    def _place(self, end: Callable[[list[int]], Endpoint]) -> None:
        """Make this rank's endpoints; `end` makes an endpoint for a list of ranks of the grid."""
        topology, me = self.topology, self.rank
        sharing = topology.ulysses_group(me)
        self.ring, self.ulysses = end(topology.ring(me)), end(sharing)
        self.grid = end(list(range(self.size)))
        self.ulysses_links = tuple(topology.link(me, peer) for peer in sharing)


class _SingleRank(Groups):
    """A grid of one rank, without process groups."""

    def __init__(self) -> None:
        self.topology, self.rank = Topology.of_nodes(1, 1, 1, "head_first"), 0
        self.backend, self.devices, self.cache, self.calls = "none", (), {}, CallCounter()
        counters = Counters()
        self._place(lambda members: ProcessEndpoint(0, members, {}, counters))

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Do nothing, because no message is sent."""

    def check(self) -> None:
        """Do nothing, because there are no process groups and no other ranks."""
