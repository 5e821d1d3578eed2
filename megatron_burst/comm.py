"""Moving tensors between the ranks of a grid, and counting what moved.

Two transports behind one small protocol (`Endpoint`): torch.distributed process groups, one
per ring and kind of traffic (activations and gradients on one communicator give wrong results,
BurstEngine section 3.1), and an in-process one, where one process holds every rank of the
grid. This module decides how groups are made and what an error says. It must not know what
the tensors mean, nor who computes what when.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]


class Channel(NamedTuple):
    """A ring ("flat", "intra", "inter") and whether it carries gradients: one process group."""

    ring: str
    gradient: bool


class Send(NamedTuple):
    """Contiguous tensors for rank `peer` of the grid, over `link` ("intra" or "inter")."""

    peer: int
    link: str
    tensors: Tensors


class Receive(NamedTuple):
    """Contiguous tensors to be filled from rank `peer` of the grid."""

    peer: int
    tensors: Tensors


class Pending(Protocol):
    """A started exchange: `wait` returns when all it sends may be reused and all arrived."""

    def wait(self) -> None: ...


@dataclass
class Counters:
    """Payload bytes sent by one rank, by link class."""

    intra: int = 0
    inter: int = 0

    def add(self, sends: Iterable[Send]) -> None:
        for send in sends:
            size = sum(t.numel() * t.element_size() for t in send.tensors)
            setattr(self, send.link, getattr(self, send.link) + size)

    def reset(self) -> None:
        self.intra = self.inter = 0


class Endpoint(Protocol):
    """One rank's end of a transport. `exchange` starts transfers and does not block."""

    rank: int
    counters: Counters

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending: ...


# --- torch.distributed ---------------------------------------------------------------------


@dataclass
class _Works:
    works: list[dist.Work]
    label: str

    def wait(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"exchange failed: {self.label}: {error}") from error


@dataclass
class _ProcessEndpoint:
    rank: int
    ranks: Sequence[int]  # grid rank -> global rank
    channels: dict[Channel, dist.ProcessGroup]
    counters: Counters = field(default_factory=Counters)

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending:
        group = self.channels[channel]
        ops = [
            dist.P2POp(call, tensor, self.ranks[message.peer], group)
            for call, messages in ((dist.irecv, receives), (dist.isend, sends))
            for message in messages
            for tensor in message.tensors
        ]
        self.counters.add(sends)
        try:
            return _Works(dist.batch_isend_irecv(ops), label)
        except RuntimeError as error:
            raise RuntimeError(f"exchange failed: {label}: {error}") from error


# --- in one process ------------------------------------------------------------------------


@dataclass
class _Mail:
    """One message from rank to rank; whoever posts first creates it, the other completes it."""

    label: str
    source: Tensors | None = None
    target: Tensors | None = None
    versions: list[int] = field(default_factory=list)
    delivered: bool = False

    def deliver(self) -> None:
        """Copy, late on purpose: what was overwritten in flight shows in its version counter."""
        if self.delivered:
            return
        if self.source is None or self.target is None:
            raise RuntimeError(f"deadlock: exchange has only one end: {self.label}")
        if [t._version for t in self.source] != self.versions:
            raise RuntimeError(f"overwritten while in flight: {self.label}")
        for target, source in zip(self.target, self.source, strict=True):
            if target.shape != source.shape or target.dtype != source.dtype:
                raise RuntimeError(f"sent {source.shape} into {target.shape}: {self.label}")
            target.copy_(source)
        self.delivered = True


@dataclass
class _Delivery:
    mails: list[_Mail]

    def wait(self) -> None:
        for mail in self.mails:
            mail.deliver()


@dataclass
class _LocalEndpoint:
    """An end of the in-process transport; all ranks share `boxes` (sender, receiver -> mail)."""

    rank: int
    boxes: dict[tuple[Channel, int, int], deque[_Mail]]
    counters: Counters = field(default_factory=Counters)

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending:
        mails = []
        for send in sends:
            mail = self._mail((channel, self.rank, send.peer), "source", label)
            mail.source, mail.versions = send.tensors, [t._version for t in send.tensors]
            mails.append(mail)
        for receive in receives:
            mail = self._mail((channel, receive.peer, self.rank), "target", label)
            mail.target = receive.tensors
            mails.append(mail)
        self.counters.add(sends)
        return _Delivery(mails)

    def _mail(self, key: tuple[Channel, int, int], end: str, label: str) -> _Mail:
        """The oldest mail of this box that lacks `end`, or a new one."""
        box = self.boxes.setdefault(key, deque())
        if box and getattr(box[0], end) is None:
            return box.popleft()
        box.append(_Mail(label))
        return box[-1]


# --- the grid of ranks ---------------------------------------------------------------------


class Groups:
    """An ordered grid of ranks, `rank = inter_rank * intra_size + intra_rank`, and its rings.

    Make it once, on every rank of the grid alike and before the first attention: making the
    process groups of the rings is collective. It cannot be copied or pickled, so it must not
    be stored on a Megatron config. `mb.Groups(intra=pg, inter=pg)` takes the two process
    groups of this rank's node and of its index across nodes (index 0 and 1 of Megatron's
    hierarchical groups).

    Attributes: `size`, `inter_size`, `intra_size`; `local_ranks`, the grid ranks that live in
    this process (one, or all of them after `in_process`); `backend`; `endpoints`, one per
    local rank, each with its byte `counters`.
    """

    def __init__(self, *, intra: dist.ProcessGroup, inter: dist.ProcessGroup):
        mine = dist.get_process_group_ranks(intra)
        rows: list[list[int]] = [[] for _ in range(inter.size())]
        dist.all_gather_object(rows, mine, group=inter)
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"intra: nodes must hold equally many ranks, got {rows}")
        self._connect(rows, intra)

    @classmethod
    def flat(cls, group: dist.ProcessGroup) -> Groups:
        """All ranks of `group` as one node."""
        return cls.from_topology(group, intra=group.size())

    @classmethod
    def from_topology(cls, group: dist.ProcessGroup, *, intra: int) -> Groups:
        """`intra` consecutive ranks of `group` form a node."""
        size = group.size()
        if intra < 1 or size % intra:
            raise ValueError(f"intra: {size} ranks cannot be cut into nodes of {intra}")
        ranks = dist.get_process_group_ranks(group)
        self = cls.__new__(cls)
        self._connect([ranks[i : i + intra] for i in range(0, size, intra)], group)
        return self

    @classmethod
    def by_host(cls, group: dist.ProcessGroup) -> Groups:
        """Ranks of `group` that share a host name form a node (a collective over `group`)."""
        hosts: list[str] = [""] * group.size()
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        intra = hosts.count(hosts[0])
        starts = hosts[::intra]
        if len(hosts) % intra or hosts != [h for h in starts for _ in range(intra)]:
            raise ValueError(
                f"ranks are not placed evenly and in order on hosts: {hosts}; "
                "give the ranks per node yourself (intra size)"
            )
        return cls.from_topology(group, intra=intra)

    @classmethod
    def in_process(cls, *, inter: int = 1, intra: int) -> Groups:
        """A grid whose ranks all live in this process, without torch.distributed."""
        self = cls.__new__(cls)
        self.inter_size, self.intra_size = inter, intra
        self.local_ranks = tuple(range(inter * intra))
        self.backend = "in_process"
        boxes: dict[tuple[Channel, int, int], deque[_Mail]] = {}
        self.endpoints = [_LocalEndpoint(rank, boxes) for rank in self.local_ranks]
        self._made: list[dist.ProcessGroup] = []
        return self

    @property
    def size(self) -> int:
        return self.inter_size * self.intra_size

    @property
    def rank(self) -> int:
        """The grid rank of this process (the first one, if all ranks live in it)."""
        return self.local_ranks[0]

    @property
    def counters(self) -> Counters:
        return self.endpoints[0].counters

    def gather(self, headers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The headers (CPU tensors, same shape and dtype everywhere) of all ranks, in order.

        `headers` are those of the local ranks. The one collective of the package; on the host.
        """
        if self.backend == "in_process" or self.size == 1:
            return list(headers)
        gathered = [torch.empty_like(headers[0]) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, headers[0], group=self._control)
        except RuntimeError as error:
            raise RuntimeError(f"exchange failed: header of attention: {error}") from error
        return gathered

    def close(self) -> None:
        """Destroy the process groups that were made here."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []

    def __deepcopy__(self, memo: object) -> Groups:
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def __reduce__(self):
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def _connect(self, rows: list[list[int]], parent: dist.ProcessGroup) -> None:
        """Make every ring's process groups; `rows` are the global ranks, node by node."""
        ranks = [rank for row in rows for rank in row]
        here = dist.get_rank()
        self.inter_size, self.intra_size = len(rows), len(rows[0])
        self.local_ranks = (ranks.index(here),)
        self.backend = dist.get_backend(parent)
        self._made = []
        _check_group_counts(parent)
        timeout = _timeout(parent)

        def new(members: list[int], backend: str) -> dist.ProcessGroup:
            # Only the members take part, so the grids of other model-parallel groups stay free.
            group = dist.new_group(
                members, timeout=timeout, backend=backend, use_local_synchronization=True
            )
            self._made.append(group)
            return group

        column = self.rank % self.intra_size
        self._control = new(ranks, "gloo")
        rings = _rings(ranks, rows[self.rank // self.intra_size], [row[column] for row in rows])
        self.endpoints = [
            _ProcessEndpoint(self.rank, ranks, _channels(rings, lambda m: new(m, self.backend)))
        ]


def _rings(everyone: list[int], node: list[int], column: list[int]) -> dict[str, list[int]]:
    return {"flat": everyone, "intra": node, "inter": column}


def _channels(
    rings: dict[str, list[int]], new: Callable[[list[int]], dist.ProcessGroup]
) -> dict[Channel, dist.ProcessGroup]:
    """Two groups per ring; rings over the same ranks share theirs, rings of one have none."""
    made: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
    channels = {}
    for ring, members in rings.items():
        for gradient in (False, True):
            key = (tuple(members), gradient)
            if len(members) > 1:
                if key not in made:
                    made[key] = new(members)
                channels[Channel(ring, gradient)] = made[key]
    return channels


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of `group`, so that its rings fail as soon as it would."""
    options = getattr(group._get_backend(_device(group)), "options", None)
    return getattr(options, "_timeout", None)


def _device(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _check_group_counts(group: dist.ProcessGroup) -> None:
    """torch names a locally made group after the number of groups a rank is in; if that number
    differs between the ranks they would wait for each other until the timeout."""
    counts = [0] * group.size()
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(counts)) != 1:
        raise ValueError(
            f"the ranks of this grid are in different numbers of process groups ({counts}); "
            "make mb.Groups before making groups that only some of these ranks belong to"
        )
