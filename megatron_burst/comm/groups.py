"""The grid of ranks and the process groups of its rings.

Decides how groups are made: collectively, once, with the parent's backend and timeout, and
only among the ranks concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..schedule.topology import Topology
from .calls import CALLS, Calls
from .consensus import Facts, agree
from .local import LocalEndpoint, RankSwitch
from .process_groups import (
    agreed,
    alive,
    device_of,
    introduce,
    join,
    process_group,
    ranks_per_host,
    ring_groups,
    timeout_of,
)
from .transport import Counters, Endpoint, ProcessEndpoint

T = TypeVar("T")


class _Uncopied:
    """Process groups, and mailboxes that ranks share, have no copies."""

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")

    def __reduce__(self):
        raise TypeError("mb.Groups holds process groups and cannot be copied or pickled")


class Groups(_Uncopied):
    """An ordered grid rank -> (head, intra, inter), and the process groups of its rings.

    The ranks are numbered 0 .. size - 1, node by node: in that order a layout deals out
    positions. With `ulysses` = 1 they form one ring of nodes. With `ulysses` = p every p of them
    share heads by all-to-all and the rings run over the other size / p; `placement` says whether
    these p are neighbours ("head_first") or the ranks of a ring are ("context_first").

    Make it once, on every rank of the grid alike and before the first attention: making the
    process groups of the rings is collective. It cannot be copied or pickled, so it must not
    be stored on a Megatron config. Its process groups live as long as the process: torch names
    groups so that one made after another was destroyed may find the dead one's addresses.

    `mb.Groups(intra=pg, inter=pg)` takes the two process groups of this rank's node and of its
    index across nodes (index 0 and 1 of Megatron's hierarchical groups). Raises ValueError, as the
    other ways to make groups do, if the ranks do not form a grid or were asked for different ones.

    Attributes: `topology`; `rank`; `backend`; `ring` and `ulysses`, the endpoints of this rank's
    ring and of the ranks that share heads with it (`ulysses_links`: link class to each of these);
    `cache`, what planning found out about this grid (nothing here reads it); `calls`, how many
    calls were made on it.
    """

    topology: Topology
    rank: int
    backend: str
    ring: Endpoint  # its rank is the index in the ring
    ulysses: Endpoint  # its rank is the index among those that share heads
    ulysses_links: tuple[str, ...]
    cache: dict[str, Any]
    calls: Calls
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
    ) -> Groups:
        """`intra` consecutive ranks of `group` form a node; `ulysses`, `placement`: as in
        `Groups`."""
        asked = f"intra={intra!r}, ulysses={ulysses!r}, placement={placement!r}"
        ranks = agreed(introduce(process_group(group), asked))
        self = cls.__new__(cls)
        self._connect(ranks, Topology(len(ranks), intra, ulysses, placement), group)
        return self

    @classmethod
    def by_host(
        cls, group: dist.ProcessGroup, *, ulysses: int = 1, placement: str = "head_first"
    ) -> Groups:
        """Ranks of `group` that share a host name form a node (a collective over `group`).

        `ulysses`, `placement`: as in `Groups`. Raises ValueError if hosts hold different numbers of
        ranks, or the ranks of a host do not follow one another.
        """
        intra = ranks_per_host(process_group(group))
        return cls.from_topology(group, intra=intra, ulysses=ulysses, placement=placement)

    @classmethod
    def in_process(
        cls, *, inter: int = 1, intra: int, ulysses: int = 1, placement: str = "head_first"
    ) -> InProcessGroups:
        """`inter` nodes of `intra` ranks that all live in this process, without torch.distributed.

        For tests, and to check the numerics of a large grid on one device; one call at a time.
        `ulysses`, `placement`: as in `Groups`.
        """
        return InProcessGroups(Topology.of_nodes(inter, intra, ulysses, placement))

    @property
    def size(self) -> int:
        """How many ranks the grid has."""
        return self.topology.size

    @property
    def counters(self) -> Counters:
        """Bytes sent by this rank, over all rings and to those that share heads with it."""
        return self.ring.counters

    def gather(self, header: torch.Tensor) -> list[torch.Tensor]:
        """The headers (CPU tensors, same shape and dtype everywhere) of all ranks, in order.

        header: this rank's. The one collective of the package; on the host. Raises RuntimeError if
        a rank does not take part.
        """
        if self.size == 1:
            return [header]
        gathered = [torch.empty_like(header) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, header, group=self._control)
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
        agree(so_far, self.gather)

    def expect(self, message: int) -> None:
        """From now on a `message` of so many bytes may come."""
        for end in (self.ring, self.ulysses):
            end.room = max(end.room, message)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a call on these groups: if an error ends it half-way, `check` refuses the next
        one, because no rank knows how far the others are."""
        try:
            yield
        except BaseException as error:
            if self.size > 1:
                self._failure = f"{type(error).__name__}: {error}"
            raise

    def check(self) -> None:
        """Raise ValueError if a call on these groups has failed half-way, or they are no more."""
        if not alive(self._control):
            raise ValueError(
                "groups: the process groups they were made of were destroyed "
                "(torch.distributed.destroy_process_group); make new mb.Groups"
            )
        if self._failure is not None:
            raise ValueError(
                f"groups: an earlier call on them failed half-way ({self._failure:.200}), so the "
                "ranks may be out of step; make new mb.Groups on every rank, or start again"
            )

    def _connect(self, ranks: list[int], topology: Topology, parent: dist.ProcessGroup) -> None:
        """Make every ring's process groups; `ranks` are the global ranks, node by node."""
        self.topology, self.rank = topology, ranks.index(dist.get_rank())
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
        channels = ring_groups(topology, self.rank, lambda members: new(members, self.backend))
        join(channels.values(), device_of(parent))
        counters = Counters()

        def end(members: list[int]) -> Endpoint:
            peers = [ranks[member] for member in members]
            return ProcessEndpoint(members.index(self.rank), peers, channels, counters)

        self._place(end)

    def _place(self, end: Callable[[list[int]], Endpoint]) -> None:
        """Make the endpoints of this rank; end: members of a ring -> this rank's end of it."""
        topology = self.topology
        sharing = topology.ulysses_group(self.rank)
        self.ring, self.ulysses = end(topology.ring(self.rank)), end(sharing)
        self.ulysses_links = tuple(topology.link(self.rank, other) for other in sharing)


class _LocalRank(Groups):
    """One rank of `InProcessGroups`, as its attention calls see it."""

    def __init__(self, topology: Topology, rank: int, switch: RankSwitch):
        self.topology, self.rank, self._switch = topology, rank, switch
        self.backend, self.cache, self.calls = "in_process", {}, Calls()
        counters = Counters()
        self._place(lambda members: LocalEndpoint(members.index(rank), members, switch, counters))

    def gather(self, header: torch.Tensor) -> list[torch.Tensor]:
        return self._switch.all_gather(self.rank, self.size, header)

    def expect(self, message: int) -> None:
        pass  # nothing is received into a buffer

    @contextmanager
    def running(self) -> Iterator[None]:
        yield  # what a failed call leaves is thrown away

    def check(self) -> None:
        pass


class InProcessGroups(_Uncopied):
    """All ranks of a grid in this process, made by `Groups.in_process`; `ranks` are `Groups`."""

    def __init__(self, topology: Topology):
        self.topology, self._switch = topology, RankSwitch()
        self.backend = "in_process"
        self.ranks = tuple(
            _LocalRank(topology, rank, self._switch) for rank in range(topology.size)
        )

    @property
    def size(self) -> int:
        return self.topology.size

    @property
    def counters(self) -> Counters:
        """Those of the first rank; every rank has its own."""
        return self.ranks[0].counters

    @property
    def cache(self) -> dict[str, Any]:
        """That of the first rank; every rank has its own."""
        return self.ranks[0].cache

    def compare_calls(self) -> None:
        """As `Groups.compare_calls`, of all ranks."""
        self.run(Groups.compare_calls, self.ranks)

    def run(self, function: Callable[..., T], *of_each: Sequence[Any]) -> list[T]:
        """The results of `function` on all ranks at once; of_each: its arguments, one per rank."""
        arguments = zip(*of_each, strict=True)
        return self._switch.run([partial(function, *given) for given in arguments])
