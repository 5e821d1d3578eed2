# SPDX-License-Identifier: Apache-2.0
"""Faults of a cluster that a prediction can be made with: slow GPUs, slow links, jitter.

`Faults` states what is slow in terms of the cluster; `draws` finds the rings of a run that this
disturbs, and how, for the simulator. Ranks are numbered as Megatron numbers them: tensor-parallel
ranks are neighbours, then come context-parallel, data-parallel and pipeline ranks, and node n has
the n-th run of GPUs. Rings that nothing tells apart are simulated once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ....autotune.clusters import Cluster
from ....autotune.disturbance import Disturbance
from ....schedule.topology import Topology
from ..settings import Settings

Link = int | str | tuple[int, int]  # the NIC of a GPU, "node 3", messages from one GPU to another


@dataclass(frozen=True)
class Faults:
    """What is slower than `Cluster` says, and by how much; every factor says how many times as long
    a thing takes, so half the rate is 2.0.

    slow_ranks: GPU -> factor of all that it computes. slow_links: factor of bytes between nodes,
    under the number of a GPU (its NIC, in both directions, also for others that share it) or under
    "node 3" (all NICs of a node); under (source, destination), of the messages from one GPU to
    another, in a node too. jitter: standard deviation of the time of every computed pair and every
    message as a fraction of it, drawn from a log-normal distribution of mean 1. seed, draws: of how
    many passes the times are a mean, and where their random numbers start.

    Raises ValueError that names what cannot be.
    """

    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[Link, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0
    draws: int = 8

    def __post_init__(self) -> None:
        for name in ("slow_ranks", "slow_links"):
            for key, factor in getattr(self, name).items():
                if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
                    raise ValueError(
                        f"faults: {name}[{key!r}] must say how many times as long it takes, from "
                        f"1, got {factor!r}; half the rate is 2.0"
                    )
                _check_key(name, key)
        if not isinstance(self.jitter, (int, float)) or not 0 <= self.jitter < 1:
            raise ValueError(f"faults: jitter must be a fraction from 0, got {self.jitter!r}")
        for name, least in (("seed", 0), ("draws", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"faults: {name} must be a whole number from {least}: {value!r}")

    @property
    def passes(self) -> int:
        """How many draws a mean is over: one where nothing is drawn."""
        return self.draws if self.jitter else 1

    @property
    def slowest_nic(self) -> float:
        """How many times as long bytes take through the slowest NIC."""
        of_nics = [f for key, f in self.slow_links.items() if not isinstance(key, tuple)]
        return float(max(of_nics, default=1.0))

    def check(self, cluster: Cluster, run: Settings | None = None) -> None:
        """Raise ValueError for a GPU or a node that the cluster does not have, and for a GPU that
        is none of those of the run, the first ones."""
        nodes = cluster.gpus // cluster.ranks_per_node
        for key in (*self.slow_ranks, *self.slow_links):
            node, gpus = _ends(key)
            last = max(gpus, default=-1)
            if node is not None and node >= nodes:
                raise ValueError(f"faults: {key!r}: there are {nodes} nodes, numbered from 0")
            if last >= cluster.gpus:
                raise ValueError(f"faults: {key!r}: there are {cluster.gpus} GPUs, from 0")
            if run is not None and last >= run.gpus:
                raise ValueError(
                    f"faults: {key!r}: the run takes GPUs 0 to {run.gpus - 1}, so no other one "
                    "slows it"
                )

    def compute(self, gpus: Sequence[int]) -> np.ndarray:
        """float: how many times as long each of these GPUs (`gpus`) computes."""
        return np.array([float(self.slow_ranks.get(gpu, 1.0)) for gpu in gpus])

    def links(self, cluster: Cluster, gpus: Sequence[int]) -> np.ndarray:
        """float [G, G]: how many times as long bytes take between these `gpus` of a `cluster`."""
        numbers = np.array(gpus)
        shared = cluster.nodes()
        nodes, nics = numbers // shared.per_node, shared.nic(numbers)
        between = nodes[:, None] != nodes
        found = np.ones((len(gpus), len(gpus)))
        for key, factor in self.slow_links.items():
            if isinstance(key, tuple):
                slow = (numbers[:, None] == key[0]) & (numbers == key[1])
            else:
                node, gpus = _ends(key)
                ends = nodes == node if node is not None else nics == shared.nic(np.array(gpus))
                slow = between & (ends[:, None] | ends)
            found[slow] = np.maximum(found[slow], factor)
        return found

    def disturbance(
        self, cluster: Cluster, gpus: Sequence[int], seed: Sequence[int] = ()
    ) -> Disturbance | None:
        """For a ring of these `gpus` of a `cluster`, in its order; None where nothing disturbs it.

        seed: numbers that tell one draw from others, such as those of the draw and of the pass.
        """
        if not self.jitter and not self.slows(cluster, gpus):
            return None
        links = self.links(cluster, gpus)
        return Disturbance(self.compute(gpus), links, self.jitter, (self.seed, *seed))

    def slows(self, cluster: Cluster, gpus: Sequence[int]) -> bool:
        """Whether one of these `gpus` of a `cluster`, or a link between two of them, is slow."""
        return bool((self.compute(gpus) > 1).any() or (self.links(cluster, gpus) > 1).any())


def _ends(key: Link) -> tuple[int | None, tuple[int, ...]]:
    """The node that a key names, or else the GPUs."""
    if isinstance(key, str):
        return int(key.split()[1]), ()
    return None, key if isinstance(key, tuple) else (key,)


def _check_key(name: str, key: object) -> None:
    """Raise ValueError unless it names a GPU, or in `slow_links` a node or two GPUs."""
    gpus = (key,)
    if name == "slow_links" and isinstance(key, str):
        word, _, number = key.partition(" ")
        if word != "node" or not number.isdecimal():
            raise ValueError(f'faults: slow_links: {key!r} is no GPU, no pair and no "node 3"')
        return
    if name == "slow_links" and isinstance(key, tuple) and len(key) == 2:
        gpus = key
    for gpu in gpus:
        if type(gpu) is not int or gpu < 0:
            raise ValueError(f"faults: {name}: {gpu!r} is no number of a GPU")
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"faults: slow_links: {key!r} goes from a GPU to itself: name two")


PASSES = 2  # forward, backward


class DisturbedRing(NamedTuple):
    """One ring in one draw: what disturbs its forward and its backward, and how many times as long
    the all-to-alls before and after each take."""

    passes: tuple[Disturbance | None, ...]
    exchange: tuple[float, ...]


UNDISTURBED = DisturbedRing((None, None), (1.0, 1.0))


class Group(NamedTuple):
    """The ranks of one stage of one replica of the model: tensor- and context-parallel ones."""

    dp: int
    pp: int

    def members(self, run: Settings) -> range:
        """All its GPUs; every TP-th of them is a context-parallel group."""
        size = run.tp * run.cp
        first = size * (self.dp + run.dp * self.pp)
        return range(first, first + size)


def groups(run: Settings) -> list[Group]:
    """The groups of all replicas and stages."""
    return [Group(dp, pp) for pp in range(run.pp) for dp in range(run.dp)]


def draws(
    faults: Faults, cluster: Cluster, run: Settings, topology: Topology, group: Group | None = None
) -> list[list[DisturbedRing]]:
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
        gpus = group.members(run)[tp :: run.tp]
        sharing = [
            [gpus[rank] for rank in topology.ulysses_group(member)] for member in topology.ring(0)
        ]
        for first in topology.ulysses_group(0):
            yield [gpus[rank] for rank in topology.ring(first)], sharing


def _disturbed(
    faults: Faults, cluster: Cluster, ring: Sequence[int], sharing: Sequence[Sequence[int]],
    seed: tuple[int, int],
) -> DisturbedRing:  # fmt: skip
    passes = tuple(faults.disturbance(cluster, ring, (*seed, each)) for each in range(PASSES))
    exchange = []
    for each in range(PASSES):
        found = (
            faults.disturbance(cluster, gpus, (*seed, each, number))
            for number, gpus in enumerate(sharing if len(sharing[0]) > 1 else ())
        )
        exchange.append(max([1.0, *(one.of_exchange() for one in found if one is not None)]))
    return DisturbedRing(passes, tuple(exchange))
