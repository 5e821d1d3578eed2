"""Which rings of a run faults disturb, and how: what is then simulated, ring by ring.

Ranks are numbered as Megatron numbers them: tensor-parallel ranks are neighbours, then come
context-parallel, data-parallel and pipeline ranks, and node n has the n-th run of GPUs. Rings that
nothing tells apart are simulated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...autotune.disturbance import Disturbance
from ...schedule.topology import Topology
from ..clusters import Cluster
from ..settings import Settings
from .faults import Faults

PASSES = 2  # forward, backward


class Disturbed(NamedTuple):
    """One ring in one draw: what disturbs its forward and its backward, and how many times as long
    the all-to-alls before and after each take."""

    passes: tuple[Disturbance | None, ...]
    exchange: tuple[float, ...]


UNDISTURBED = Disturbed((None, None), (1.0, 1.0))


class Group(NamedTuple):
    """The ranks of one stage of one replica of the model: tensor- and context-parallel ones."""

    dp: int
    pp: int

    def gpus(self, run: Settings, tp: int) -> range:
        """Of the context-parallel group of one tensor-parallel rank, in order."""
        first = tp + run.tp * run.cp * (self.dp + run.dp * self.pp)
        return range(first, first + run.tp * run.cp, run.tp)

    def members(self, run: Settings) -> range:
        """All its GPUs."""
        size = run.tp * run.cp
        first = size * (self.dp + run.dp * self.pp)
        return range(first, first + size)


def groups(run: Settings) -> list[Group]:
    """Of all replicas and stages."""
    return [Group(dp, pp) for pp in range(run.pp) for dp in range(run.dp)]


def draws(
    faults: Faults, cluster: Cluster, run: Settings, topology: Topology, group: Group | None = None
) -> list[list[Disturbed]]:
    """For each draw the rings to simulate, of which the slowest counts.

    group: whose rings; None: of all groups. Of rings that differ by their random numbers only, one
    is simulated. Raises ValueError for a GPU that the run does not have.
    """
    faults.check(cluster)
    chosen = groups(run) if group is None else [group]
    distinct: dict[tuple[bytes, ...], tuple[Sequence[int], Sequence[Sequence[int]]]] = {}
    for each in chosen:
        for ring, sharing in _rings(run, topology, each):
            touched = [ring, *sharing]
            key = tuple(
                part.tobytes()
                for gpus in touched
                for part in (faults.compute(gpus), faults.links(cluster, gpus))
            )
            distinct.setdefault(key, (ring, sharing))
    return [
        [
            _disturbed(faults, cluster, ring, sharing, (draw, number))
            for number, (ring, sharing) in enumerate(distinct.values())
        ]
        for draw in range(faults.passes)
    ]


def _rings(
    run: Settings, topology: Topology, group: Group
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """GPUs of each ring of a group, and of the ranks that share heads beside it."""
    for tp in range(run.tp):
        gpus = group.gpus(run, tp)
        sharing = [
            [gpus[rank] for rank in topology.ulysses_group(member)] for member in topology.ring(0)
        ]
        for first in topology.ulysses_group(0):
            yield [gpus[rank] for rank in topology.ring(first)], sharing


def _disturbed(
    faults: Faults, cluster: Cluster, ring: Sequence[int], sharing: Sequence[Sequence[int]],
    seed: tuple[int, int],
) -> Disturbed:  # fmt: skip
    passes = tuple(faults.disturbance(cluster, ring, (*seed, each)) for each in range(PASSES))
    exchange = []
    for each in range(PASSES):
        slowest = 1.0
        for number, gpus in enumerate(sharing if len(sharing[0]) > 1 else ()):
            found = faults.disturbance(cluster, gpus, (*seed, each, number))
            if found is not None:
                slowest = max(slowest, found.of_exchange())
        exchange.append(slowest)
    return Disturbed(passes, tuple(exchange))
