# SPDX-License-Identifier: Apache-2.0
"""The grid of ranks, as a user makes it from process groups.

Decides which ranks form a grid, and that they agree on it before anything else; the process groups
of its rings are `communicators`', and come when plans need them. Counts the calls made on a grid:
ranks that leave a call out, or make theirs in another order or with another plan, exchange the
wrong tensors. On the CPU every message bears the call's number and says so at once; everywhere the
ranks compare their counts when they make a plan, which needs no device.
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
    agreed,
    asked,
    introduce,
    introduce_nodes,
    process_group,
    unbind_default_arguments,
)
from .recent import Recent
from .transport import Channel, Counters, Endpoint, ProcessEndpoint

INNER = __name__.partition(".")[0] + ".", "torch."  # modules that stand between a call and us
CALLS = "calls so far"  # the name of the fact that ranks compare


@dataclass
class Calls:
    """How far a rank has come. order: digest of all its calls, with plan, label and direction."""

    forwards: int = 0
    backwards: int = 0
    order: int = 0
    warns: bool = False  # of calls that ranks cannot tell apart
    _unlabelled: set[tuple[int, str]] = field(default_factory=set)  # since the last backward

    def forward(self, plan: int, label: object, sink: bool, host: bool = False) -> CallTag:
        """The next call begins; what its messages and those of its backward bear. Without a label
        that is the line of the caller's which makes the call. sink, host: whether the call has a
        sink, and host memory for keys, which a plan does not contain. Raises ValueError for a label
        (`check_label`).
        """
        if label is None:
            label = self._calling_line(plan)
        else:
            check_label(label)
        self.forwards += 1
        tag = CallTag(plan, self.forwards, crc32(repr((label, sink, host)).encode()))
        self.order = crc32(f"forward {tag}".encode(), self.order)
        return tag

    def backward(self, tag: CallTag) -> None:
        """The backward of a call begins."""
        self.backwards += 1
        self._unlabelled.clear()
        self.order = crc32(f"backward {tag}".encode(), self.order)

    def _calling_line(self, plan: int) -> str:
        """Where the code outside of this package and torch is, the same on every rank; warns, once,
        of a line that calls a plan a second time before any backward, as a loop over layers does:
        ranks that leave out different turns of it would exchange the wrong tensors. An evaluation
        has no backward, and may call from one line again and again.
        """
        frame = sys._getframe(2)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(INNER):
            frame = frame.f_back
        file, number = frame.f_code.co_filename, frame.f_lineno
        if file.startswith("<"):  # code made by a program, which each rank may number its own way
            file = "<made>"
        line = f"{file.replace(os.sep, '/').rpartition('/')[2]}:{number}"
        if not (self.warns and torch.is_grad_enabled()):
            return line
        if (plan, line) in self._unlabelled:
            self.warns = False
            words = (
                "this line calls one plan several times without label=, and ranks that skip "
                "different ones of these calls would not notice; pass a label, such as the number "
                "of the layer"
            )
            warnings.warn_explicit(words, UserWarning, file, number)
        self._unlabelled.add((plan, line))
        return line

    def __repr__(self) -> str:
        return f"{self.forwards} forward, {self.backwards} backward, order {self.order:08x}"


def check_label(label: object) -> None:
    """Raise ValueError unless `label` is one that reads alike on all ranks."""
    if not _plain(label):
        raise ValueError(
            "label must be a string, an integer or a tuple of them, which are the same on all "
            f"ranks, or None; got {label!r:.100}, of type {type(label).__name__}"
        )


def _plain(label: object) -> bool:
    """Is its repr the same in every process?"""
    if isinstance(label, tuple):
        return all(map(_plain, label))
    return label is None or isinstance(label, (str, int))


def check_groups(groups: object) -> None:
    """Raise ValueError unless these were made by `mb.Groups`."""
    if not isinstance(groups, Groups):
        raise ValueError(f"groups: make them with mb.Groups, got {groups!r:.100}")


class Groups:
    """The context-parallel ranks as nodes x ranks per node, with the process groups of their rings.

    Make it once, on every rank and before the first attention, usually by `by_host`,
    `from_topology` or `flat`. Ranks are numbered 0 to size - 1, node by node; `rank` is this one's
    number. It cannot be copied or pickled. The process groups of its rings are made, collectively,
    when a plan first needs them, and freed by `torch.distributed.destroy_process_group()`.

    `mb.Groups(intra=pg, inter=pg)` takes the process groups of this rank's node and of the ranks
    with its index on all nodes (index 0 and 1 of Megatron's hierarchical groups). ulysses: so many
    ranks share heads by all-to-all, with rings over the others; placement: whether ranks that share
    heads are neighbours ("head_first") or the ranks of a ring are ("context_first"). reuse: process
    groups, the same on every rank, that may carry the activations of a ring with exactly their
    ranks; all ranks must use them in the same order. nccl_max_ctas: the largest number of thread
    blocks of a kernel on the NCCL communicators that are made; each takes a multiprocessor from
    attention. Raises ValueError if the ranks form no grid or were given different arguments.
    """

    topology: Topology
    rank: int
    backend: str
    devices: tuple[str, ...]  # whose tensors `backend` moves; empty without process groups
    ring: Endpoint  # its rank is the index in the ring
    ulysses: Endpoint  # its rank is the index among those that share heads
    grid: Endpoint  # its rank is this rank
    ulysses_links: tuple[str, ...]  # link class to each of these
    cache: dict[str, Any]  # filled by planning; nothing here reads it
    calls: Calls
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
        given = asked(ulysses, placement, reuse, nccl_max_ctas)
        said = introduce_nodes(intra, inter, given)
        ranks = agreed(said)
        topology = Topology(len(ranks), intra.size(), ulysses, placement)
        self._begin(ranks, said[0].name, topology, intra, reuse, nccl_max_ctas)

    @classmethod
    def flat(cls, group: dist.ProcessGroup, *, ulysses: int = 1) -> Groups:
        """All ranks of `group` as one node; `ulysses` as in `Groups`."""
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
        """`intra` consecutive ranks of `group` form a node; `ulysses`, `placement`, `reuse`,
        `nccl_max_ctas`: as in `Groups`.
        """
        given = f"{intra=}, {asked(ulysses, placement, reuse, nccl_max_ctas)}"
        ranks = agreed(said := introduce(process_group(group), given))
        self = cls.__new__(cls)
        topology = Topology(len(ranks), intra, ulysses, placement)
        self._begin(ranks, said[0].name, topology, group, reuse, nccl_max_ctas)
        return self

    @classmethod
    def by_host(cls, group: dist.ProcessGroup, **options: Any) -> Groups:
        """Ranks of `group` on one host form a node (a collective over `group`).

        A host is a host name and a boot id: machines whose containers have the same host name are
        different nodes. Warns if the launcher's LOCAL_WORLD_SIZE describes other nodes. options: as
        of `from_topology`, without `intra`. Raises ValueError if hosts hold different numbers of
        ranks, or the ranks of a host do not follow one another.
        """
        from .hosts import ranks_per_host  # which other ways to make groups do not need

        return cls.from_topology(group, intra=ranks_per_host(process_group(group)), **options)

    @classmethod
    def single(cls) -> Groups:
        """A grid of one rank, this process, without torch.distributed.

        Attention, the LM head and linear attention then run on one device; nothing is sent.
        """
        return _SingleRank()

    @property
    def size(self) -> int:
        """How many ranks the grid has."""
        return self.topology.size

    @property
    def counters(self) -> Counters:
        """Bytes sent by this rank."""
        return self.ring.counters

    def gather(self, header: torch.Tensor) -> list[torch.Tensor]:
        """The headers (CPU tensors, same shape and dtype everywhere) of all ranks, in order; this
        rank's is `header`. A collective on the host; RuntimeError if a rank does not take part.
        """
        if self.size == 1:
            return [header]
        gathered = [torch.empty_like(header) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, header, group=self._communicators.control)
        except RuntimeError as error:
            raise RuntimeError(f"exchange failed: header of attention: {error}") from error
        return gathered

    def compare_calls(self) -> None:
        """Raise the same ValueError on every rank unless all made the same calls in the same order.

        A small collective on the host, part of `prepare`. For one plan that serves many steps on
        CUDA, where messages are not checked one by one: call it every few steps.
        """
        self.compare({})

    def compare(self, facts: Facts) -> None:
        """As `compare_calls`, and all ranks must state the same `facts`, name -> value."""
        self.agree(attempt(self.check) or facts)

    def agree(self, facts: Facts | ValueError) -> None:
        """Raise the same ValueError on every rank unless all ranks state the same facts and made
        the same calls. facts: of this rank, or an error, which then all ranks raise.
        """
        here = facts if isinstance(facts, ValueError) else facts | {CALLS: self.calls}
        agree(here, self.gather)

    def recent(self, name: str, most: int) -> Recent:
        """Return the cache of this name on this rank, which keeps at most so many values."""
        return self.cache.setdefault(name, Recent(most))

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Make the process groups that these channels lack for tensors of such a device; collective
        if any does. Raises ValueError, on all ranks alike, if they cannot be made or differ.
        """
        self._communicators.connect(channels, device)

    @property
    def communicators(self) -> str:
        """The communicators of the rings so far, in words; empty without any."""
        return self._communicators.describe() if self.devices and self.size > 1 else ""

    @property
    def carriers(self) -> Mapping[tuple[Channel, str], dist.ProcessGroup]:
        """What the rings travel on so far: (channel, type of device) -> process group."""
        return self._communicators.groups if self.devices and self.size > 1 else {}

    def expect(self, message: int) -> None:
        """From now on a `message` of so many bytes may come."""
        for end in (self.ring, self.ulysses, self.grid):
            end.room = max(end.room, message)

    @contextmanager
    def running(self, device: str = "cpu") -> Iterator[None]:
        """Around a call on these groups: if an error ends it half-way, `check` refuses the next
        one, because no rank knows how far the others are. In it autocast is off for tensors of this
        type of device: precision is the plan's business.
        """
        on = torch.is_autocast_enabled(device)  # where it is off already nothing is done
        try:
            with torch.autocast(device, enabled=False) if on else nullcontext():
                yield
        except BaseException as error:
            if self.size > 1:
                self._failure = f"{type(error).__name__}: {error}"
            raise

    def check(self) -> None:
        """Raise ValueError if a call on these groups has failed half-way, or they are no more."""
        existing = dist.distributed_c10d._world.pg_map
        if not all(used() in existing for used in self._communicators.used):
            raise ValueError(
                "groups: the process groups they were made of were destroyed "
                "(torch.distributed.destroy_process_group); make new mb.Groups"
            )
        if self._failure is not None:
            raise ValueError(
                f"groups: an earlier call on them failed half-way ({self._failure:.200}), so the "
                "ranks may be out of step; make new mb.Groups on every rank, or start again"
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
        """Take this rank's place in the grid of the global `ranks`, node by node; `name`: of it."""
        unbind_default_arguments()
        self.topology, self.rank = topology, ranks.index(dist.get_rank())
        self.cache, self.calls, counters = {}, Calls(warns=len(ranks) > 1), Counters()
        made = Communicators(GridPlace(topology, self.rank, ranks), parent, name, reuse, max_ctas)
        self.backend, self.devices, self._communicators = made.backend, tuple(made.moves), made

        def end(members: list[int]) -> Endpoint:
            peers = [ranks[member] for member in members]
            return ProcessEndpoint(members.index(self.rank), peers, made.groups, counters)

        self._place(end)

    def _place(self, end: Callable[[list[int]], Endpoint]) -> None:
        """Make this rank's endpoints; end: the members of one -> this rank's end of it."""
        topology, me = self.topology, self.rank
        sharing = topology.ulysses_group(me)
        self.ring, self.ulysses = end(topology.ring(me)), end(sharing)
        self.grid = end(list(range(self.size)))
        self.ulysses_links = tuple(topology.link(me, other) for other in sharing)


class _SingleRank(Groups):
    """A grid of one rank, without process groups."""

    def __init__(self) -> None:
        self.topology, self.rank = Topology.of_nodes(1, 1, 1, "head_first"), 0
        self.backend, self.devices, self.cache, self.calls = "none", (), {}, Calls()
        counters = Counters()
        self._place(lambda members: ProcessEndpoint(0, members, {}, counters))

    def connect(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Do nothing: no message is sent."""

    def check(self) -> None:
        """Do nothing: there are no process groups and no other ranks."""
