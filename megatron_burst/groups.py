"""The grid of ranks and the process groups of its rings.

Decides how groups are made: collectively, once, with the parent's backend and timeout, and
only among the ranks concerned. It must not know what travels on a ring or when.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .comm import Channel, Counters, Endpoint, LocalEndpoint, Mail, ProcessEndpoint


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

    inter_size: int
    intra_size: int
    local_ranks: tuple[int, ...]
    backend: str
    endpoints: list[Endpoint]
    _made: list[dist.ProcessGroup]

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
        boxes: dict[tuple[Channel, int, int], deque[Mail]] = {}
        self.endpoints = [LocalEndpoint(rank, boxes) for rank in self.local_ranks]
        self._made = []
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
        if self.size == len(self.local_ranks):
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
            assert isinstance(group, dist.ProcessGroup)
            self._made.append(group)
            return group

        column = self.rank % self.intra_size
        rings = {
            "flat": ranks,
            "intra": rows[self.rank // self.intra_size],
            "inter": [row[column] for row in rows],
        }
        self._control = new(ranks, "gloo")
        made: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
        channels: dict[Channel, dist.ProcessGroup] = {}
        for ring, members in rings.items():
            for gradient in (False, True):
                # Rings over the same ranks share their groups; a ring of one needs none.
                key = (tuple(members), gradient)
                if len(members) > 1:
                    made[key] = made.get(key) or new(members, self.backend)
                    channels[Channel(ring, gradient)] = made[key]
        self.endpoints = [ProcessEndpoint(self.rank, ranks, channels)]


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
