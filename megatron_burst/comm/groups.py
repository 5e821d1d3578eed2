"""The grid of ranks and the process groups of its rings.

Decides how groups are made: collectively, once, with the parent's backend and timeout, and
only among the ranks concerned. It must not know what travels on a ring or when.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..schedule.topology import Topology
from .calls import CALLS, Calls
from .consensus import Facts, agree
from .process_groups import agreed, alive, device_of, introduce, join, process_group, timeout_of
from .transport import Channel, Counters, Endpoint, LocalEndpoint, Mail, ProcessEndpoint


@dataclass(frozen=True)
class Member:
    """One rank of the grid that lives in this process."""

    rank: int
    ring: Endpoint  # its rank is the index in the ring
    ulysses: Endpoint  # its rank is the index in the ulysses group
    ulysses_links: tuple[str, ...]  # link class to each rank of the ulysses group

    @property
    def counters(self) -> Counters:
        """Bytes sent by this rank, over all rings and the ulysses group."""
        return self.ring.counters


class Groups:
    """An ordered grid rank -> (head, intra, inter), and the process groups of its rings.

    The ranks are numbered 0 .. size - 1, node by node: in that order a layout deals out
    positions. Without `head` they form one ring of nodes. With `head` = p every p of them share
    the heads (`head_parallel`) and the rings run over the other size / p.

    Make it once, on every rank of the grid alike and before the first attention: making the
    process groups of the rings is collective. It cannot be copied or pickled, so it must not
    be stored on a Megatron config. Its process groups live as long as the process: torch names
    groups so that one made after another was destroyed may find the dead one's addresses.

    `mb.Groups(intra=pg, inter=pg)` takes the two process
    groups of this rank's node and of its index across nodes (index 0 and 1 of Megatron's
    hierarchical groups).

    Attributes: `topology`; `local_ranks`, the ranks that live in this process (one, or all of
    them after `in_process`); `backend`; `members`, one per local rank; `cache`, what
    planning found out about this grid (nothing here reads it); `calls`, how many calls were made
    on it.
    """

    topology: Topology
    local_ranks: tuple[int, ...]
    backend: str
    members: list[Member]
    cache: dict[str, Any]
    calls: Calls
    _boxes: dict[tuple[Channel, int, int], deque[Mail]] | None = None  # of `in_process`
    _failure: str | None = None

    def __init__(
        self,
        *,
        intra: dist.ProcessGroup,
        inter: dist.ProcessGroup,
        ulysses: int = 1,
        placement: str = "head_first",
    ):
        for name, group in (("intra", intra), ("inter", inter)):
            process_group(group, name)
        node = introduce(intra, f"ulysses={ulysses}, placement={placement!r}")
        nodes = [node] * inter.size()
        dist.all_gather_object(nodes, node, group=inter)
        if len({len(node) for node in nodes}) != 1:
            rows = [[one.rank for one in node] for node in nodes]
            raise ValueError(f"intra: nodes must hold equally many ranks, got {rows}")
        ranks = agreed([one for node in nodes for one in node])
        self._connect(ranks, Topology(len(ranks), len(node), ulysses, placement), intra)

    @classmethod
    def flat(cls, group: dist.ProcessGroup, *, ulysses: int = 1) -> Groups:
        """All ranks of `group` as one node."""
        return cls.from_topology(group, intra=process_group(group).size(), ulysses=ulysses)

    @classmethod
    def from_topology(
        cls,
        group: dist.ProcessGroup,
        *,
        intra: int,
        ulysses: int = 1,
        placement: str = "head_first",
    ) -> Groups:
        """`intra` consecutive ranks of `group` form a node; `head`, `placement`: see Topology."""
        asked = f"intra={intra!r}, ulysses={ulysses!r}, placement={placement!r}"
        ranks = agreed(introduce(process_group(group), asked))
        self = cls.__new__(cls)
        self._connect(ranks, Topology(len(ranks), intra, ulysses, placement), group)
        return self

    @classmethod
    def by_host(
        cls, group: dist.ProcessGroup, *, ulysses: int = 1, placement: str = "head_first"
    ) -> Groups:
        """Ranks of `group` that share a host name form a node (a collective over `group`)."""
        hosts: list[str] = [""] * process_group(group).size()
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        intra = hosts.count(hosts[0])
        starts = hosts[::intra]
        if len(hosts) % intra or hosts != [h for h in starts for _ in range(intra)]:
            raise ValueError(
                f"ranks are not placed evenly and in order on hosts: {hosts}; "
                "give the ranks per node yourself (intra size)"
            )
        return cls.from_topology(group, intra=intra, ulysses=ulysses, placement=placement)

    @classmethod
    def in_process(
        cls, *, inter: int = 1, intra: int, ulysses: int = 1, placement: str = "head_first"
    ) -> Groups:
        """`inter` nodes of `intra` ranks that all live in this process, without torch.distributed.

        For tests, and to check the numerics of a large grid on one device; one call at a time.
        """
        self = cls.__new__(cls)
        self.topology = topology = Topology.of_nodes(inter, intra, ulysses, placement)
        self.local_ranks = tuple(range(topology.size))
        self.backend, self.cache, self.calls = "in_process", {}, Calls()
        self._boxes = boxes = {}

        def end(members: list[int], rank: int, counters: Counters) -> Endpoint:
            return LocalEndpoint(members.index(rank), members, boxes, counters)

        self.members = [self._member(rank, end) for rank in self.local_ranks]
        return self

    @property
    def size(self) -> int:
        return self.topology.size

    @property
    def rank(self) -> int:
        """The rank of this process in the grid (the first one, if all ranks live in it)."""
        return self.local_ranks[0]

    @property
    def counters(self) -> Counters:
        """Bytes sent by `rank`."""
        return self.members[0].counters

    def gather(self, headers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The headers (CPU tensors, same shape and dtype everywhere) of all ranks, in order.

        `headers` are those of the local ranks. The one collective of the package; on the host.
        """
        if self.size == len(self.local_ranks):
            return list(headers)
        gathered = [torch.empty_like(headers[0]) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, headers[0], group=self._control)
        except RuntimeError as error:
            raise RuntimeError(f"exchange failed: header of attention: {error}") from error
        return gathered

    def compare_calls(self) -> None:
        """Raise the same ValueError on every rank unless all made the same calls in the same order.

        A collective on the host, which `prepare` makes too. For programs that use one plan for
        many steps on a device that cannot check every message (CUDA): call it every so many.
        """
        self.check()
        so_far: Facts = {CALLS: self.calls}
        agree([so_far] * len(self.local_ranks), self.gather)

    def expect(self, message: int) -> None:
        """From now on messages of so many bytes may come."""
        for end in (end for member in self.members for end in (member.ring, member.ulysses)):
            end.room = max(end.room, message) if self._boxes is None else 0

    def fail(self, error: BaseException) -> None:
        """A call on these groups ended half-way: what is under way must not reach the next one.

        In one process it is thrown away. Between processes nobody knows how far the others are,
        so `check` refuses from now on.
        """
        if self._boxes is not None:
            self._boxes.clear()
        elif self.size > 1:
            self._failure = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Raise ValueError if a call on these groups has failed half-way, or they are no more."""
        if self._boxes is None and not alive(self._control):
            raise ValueError(
                "groups: the process groups they were made of were destroyed "
                "(torch.distributed.destroy_process_group); make new mb.Groups"
            )
        if self._failure is not None:
            raise ValueError(
                f"groups: an earlier call on them failed half-way ({self._failure:.200}), so the "
                "ranks may be out of step; make new mb.Groups on every rank, or start again"
            )

    def __deepcopy__(self, memo: object) -> Groups:
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def __reduce__(self):
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def _member(self, rank: int, end: Callable[[list[int], int, Counters], Endpoint]) -> Member:
        topology, counters = self.topology, Counters()
        group = topology.ulysses_group(rank)
        return Member(
            rank=rank,
            ring=end(topology.ring(rank), rank, counters),
            ulysses=end(group, rank, counters),
            ulysses_links=tuple(topology.link(rank, other) for other in group),
        )

    def _connect(self, ranks: list[int], topology: Topology, parent: dist.ProcessGroup) -> None:
        """Make every ring's process groups; `ranks` are the global ranks, node by node."""
        self.topology = topology
        rank = ranks.index(dist.get_rank())
        self.local_ranks = (rank,)
        self.backend, self.cache, self.calls = dist.get_backend(parent), {}, Calls()
        timeout = timeout_of(parent)

        def new(members: list[int], backend: str) -> dist.ProcessGroup:
            # Only the members take part, so the grids of other model-parallel groups stay free.
            group = dist.new_group(
                [ranks[member] for member in members],
                timeout=timeout,
                backend=backend,
                use_local_synchronization=True,
            )
            assert isinstance(group, dist.ProcessGroup)
            return group

        self._control = new(list(range(topology.size)), "gloo")
        channels = self._channels(rank, lambda members: new(members, self.backend))
        join(channels.values(), device_of(parent))

        def end(members: list[int], rank: int, counters: Counters) -> Endpoint:
            peers = [ranks[member] for member in members]
            return ProcessEndpoint(members.index(rank), peers, channels, counters)

        self.members = [self._member(rank, end)]

    def _channels(
        self, rank: int, new: Callable[[list[int]], dist.ProcessGroup]
    ) -> dict[Channel, dist.ProcessGroup]:
        """Two groups per ring, one for ulysses. Rings over the same ranks share theirs."""
        ring, width = self.topology.ring(rank), self.topology.intra_size
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
        wanted[Channel("ulysses", False)] = self.topology.ulysses_group(rank)
        made: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
        channels = {}
        for channel, members in wanted.items():
            key = (tuple(members), channel.gradient)
            if len(members) > 1:
                made[key] = made.get(key) or new(members)
                channels[channel] = made[key]
        return channels
