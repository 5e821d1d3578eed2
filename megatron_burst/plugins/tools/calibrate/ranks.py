# SPDX-License-Identifier: Apache-2.0
"""The ranks that measure together, and how repeats become a figure.

A figure is the median of its repeats; its spread is half the interquartile range over the median.
What all ranks do at once counts by the slowest of them; an error of one rank is raised on all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ....autotune import cluster_file
from ....autotune.clusters import Cluster
from ....autotune.measure import seconds
from ....cli.doctor import machine
from ....comm.consensus import Facts, agree
from ....comm.groups import Groups

LIMIT = timedelta(seconds=120)
# Short times, which vary, and matter less.
TIMES = ("gpu.launch", "links.latency", "links.posting", "links.exchange_start", "host.call",
         "host.exchange", "host.start", "host.layer", "host.plan")  # fmt: skip
REPEATS = 5, 25  # of a figure, at least and at most


class Measured(NamedTuple):
    """A figure: its value, its spread as a fraction, and how it was found; spread is None where
    nothing was repeated.
    """

    value: float
    spread: float | None
    how: str

    @property
    def note(self) -> str:
        """For a comment."""
        return self.how if self.spread is None else f"{self.how}; spread {self.spread:.1%}"


def repeated(samples: Sequence[float], how: str) -> Measured:
    """The figure of repeats of one quantity."""
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return Measured(middle, (high - low) / 2 / middle, f"{how}; median of {len(samples)}")


@dataclass
class Figures:
    """What is known so far, by "section.key" of a cluster file."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)

    def add(self, key: str, one: Measured, more: str = "") -> None:
        self.values[key] = float(f"{one.value:.4g}")
        self.notes[key] = f"{one.note}; {more}" if more else one.note
        if one.spread is not None and key not in TIMES:
            self.spreads.append(one.spread)

    def state(self, key: str, value: Any, note: str) -> None:
        self.values[key], self.notes[key] = value, note

    def cluster(self) -> Cluster:
        nested: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            section, name = key.split(".")
            nested.setdefault(section, {})[name] = value
        return cluster_file.made(nested)


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, `groups.topology.intra_size` to a node; device: of this one; seconds:
    that the repeats of one figure may take.
    """

    groups: Groups
    device: torch.device
    seconds: float

    @property
    def size(self) -> int:
        return self.groups.size

    @property
    def per_node(self) -> int:
        return self.groups.topology.intra_size

    @property
    def nodes(self) -> int:
        return self.groups.topology.inter_size

    @property
    def node(self) -> int:
        """Which node this rank is on."""
        return self.groups.rank // self.per_node

    @property
    def local(self) -> int:
        """This rank's place on its node."""
        return self.groups.rank % self.per_node

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, words: str) -> None:
        """Progress, from the first rank."""
        if self.groups.rank == 0:
            print(f"calibrate: {words}", file=sys.stderr, flush=True)

    def each(self, value: float) -> list[float]:
        """The value of every rank; waits for all of them."""
        own = torch.tensor([value], dtype=torch.float64)
        return [one.item() for one in self.groups.gather(own)]

    def rounds(self, once: Callable[[], float]) -> list[float]:
        """Seconds of repeats that all ranks begin together, by the slowest rank; the first repeat
        does not count. The same on every rank. once: seconds of one, 0 on a rank that rests.
        """
        return self.times(lambda: self._together(once))

    def slowest(self, call: Callable[[], object]) -> float:
        """Seconds of a call that all ranks begin together, by the slowest rank."""
        return self._together(lambda: seconds(call, self.device))

    def repeats(self, call: Callable[[], object]) -> list[float]:
        """Seconds of repeats on this rank alone; the first one, which may compile, does not
        count.
        """
        return self.times(lambda: seconds(call, self.device))

    def _together(self, once: Callable[[], float]) -> float:
        self.each(0.0)
        return max(self.each(once()))

    def times(self, once: Callable[[], float]) -> list[float]:
        """Seconds of repeats of `once`, which times itself; the first one does not count."""
        once()
        took: list[float] = []
        while len(took) < REPEATS[0] or (sum(took) < self.seconds and len(took) < REPEATS[1]):
            took.append(once())
        return took

    def locally(self, what: str, measure: Callable[[], Sequence[float]]) -> list[list[float]]:
        """What every rank measures by itself, all at the same time. Raises the same ValueError on
        all ranks where one of them cannot.
        """
        fault: ValueError | None = None
        figures: Sequence[float] = ()
        self.each(0.0)
        try:
            figures = measure()
        except Exception as error:
            fault = ValueError(f"{what}: {first_line(error)}")
        self.agree(fault or {"figures": len(figures)})
        header = torch.tensor(figures, dtype=torch.float64)
        return [one.tolist() for one in self.groups.gather(header)]

    def agree(self, facts: Facts | ValueError) -> None:
        """Raise the same ValueError on every rank unless all state the same facts."""
        agree(facts, self.groups.gather)


def middle(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """The middle rank's value of every figure that all ranks measured."""
    return [median(values) for values in zip(*of_ranks, strict=True)]


def worst(of_ranks: Sequence[Sequence[float]]) -> float:
    """The largest difference of a rank from the middle rank, as a fraction of it."""
    return max(
        (abs(value / mid - 1) for figures in of_ranks
         for value, mid in zip(figures, middle(of_ranks), strict=True) if mid),
        default=0.0,
    )  # fmt: skip


def first_line(error: Exception) -> str:
    """An error with the beginning of what it says."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


@contextmanager
def joined(per_node: int | None, budget: float, device: torch.device) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone.

    per_node: ranks of a node, None for those that share a host; budget: seconds that one figure may
    take; device: of this rank. Raises ValueError on all ranks alike where they are no nodes of
    equal size.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if machine.launched():
        dist.init_process_group(backend, timeout=LIMIT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        _check(per_node)
        groups = (
            Groups.by_host(world)
            if per_node is None
            else Groups.from_topology(world, intra=per_node)
        )
        yield Ranks(groups, device, budget)
    finally:
        dist.destroy_process_group()


def _check(per_node: int | None) -> None:
    """All ranks got the same --per-node, and it divides them."""
    size = dist.get_world_size()
    given: list[int | None] = [per_node] * size
    dist.all_gather_object(given, per_node)
    if len(set(given)) > 1:
        raise ValueError(f"--per-node differs among ranks: {given}; start all of them alike")
    if per_node is not None and (per_node < 1 or size % per_node):
        raise ValueError(
            f"--per-node {per_node} does not divide the {size} ranks that were started; one of "
            f"{', '.join(str(n) for n in range(1, size + 1) if size % n == 0)} would"
        )
