# SPDX-License-Identifier: Apache-2.0
"""Synchronized measurements on several ranks, and figures with their spread.

A figure is the median of repeated measurements. Its spread is half the interquartile range, divided
by the median. The time of a collective operation is the time of the slowest rank. If one rank
fails, all ranks raise the same error.
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
# Figures that are short times. They vary more and matter less than rates, so the spread in the file
# excludes them.
TIMES = ("gpu.launch", "links.latency", "links.posting", "links.exchange_start", "host.call",
         "host.exchange", "host.start", "host.layer", "host.plan")  # fmt: skip
REPEATS = 5, 25  # minimum and maximum number of repeats of a figure


class Measurement(NamedTuple):
    """Measured figure.

    Attributes:
        value: Median of repeated measurements, or a value computed from several figures.
        spread: Spread as a fraction of the value; None if it is not known.
        method: Description of the measurement.
    """

    value: float
    spread: float | None
    method: str

    @property
    def note(self) -> str:
        """Comment on the figure in the cluster file."""
        return self.method if self.spread is None else f"{self.method}; spread {self.spread:.1%}"


def repeated(samples: Sequence[float], method: str) -> Measurement:
    """Return the measurement with median and spread of `samples`; `method` describes it."""
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return Measurement(middle, (high - low) / 2 / middle, f"{method}; median of {len(samples)}")


@dataclass
class Figures:
    """Content of a cluster file: values and comments by "section.key", and spreads."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)

    def add(self, key: str, measurement: Measurement, detail: str = "") -> None:
        self.values[key] = float(f"{measurement.value:.4g}")
        self.notes[key] = f"{measurement.note}; {detail}" if detail else measurement.note
        if measurement.spread is not None and key not in TIMES:
            self.spreads.append(measurement.spread)

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
    """All ranks of a synchronized measurement, as seen from this rank.

    Attributes:
        groups: Groups of all ranks, with `groups.topology.intra_size` ranks per node.
        device: Device of this rank.
        seconds: Time limit in seconds for repeating one measurement.
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
        """Index of this rank's node."""
        return self.groups.rank // self.per_node

    @property
    def local(self) -> int:
        """Index of this rank on its node."""
        return self.groups.rank % self.per_node

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def report(self, line: str) -> None:
        """Print a line about the progress on rank 0."""
        if self.groups.rank == 0:
            print(f"calibrate: {line}", file=sys.stderr, flush=True)

    def gathered(self, value: float) -> list[float]:
        """Return the values of all ranks, by rank. A collective call."""
        own = torch.tensor([value], dtype=torch.float64)
        return [gathered.item() for gathered in self.groups.gather(own)]

    def rounds(self, once: Callable[[], float]) -> list[float]:
        """Repeat a measurement that all ranks begin together. A collective call.

        Args:
            once: Function that measures once and returns seconds; 0 on an idle rank.

        Returns:
            The slowest rank's seconds of each repeat, equal on all ranks. The first repeat is a
            warm-up
                and is not returned.
        """
        return self.times(lambda: self._together(once))

    def slowest(self, call: Callable[[], object]) -> float:
        """Return the slowest rank's seconds of a call, which all ranks begin together."""
        return self._together(lambda: seconds(call, self.device))

    def repeats(self, call: Callable[[], object]) -> list[float]:
        """Return this rank's seconds of repeated calls, without the first, which may compile."""
        return self.times(lambda: seconds(call, self.device))

    def _together(self, once: Callable[[], float]) -> float:
        self.gathered(0.0)
        return max(self.gathered(once()))

    def times(self, once: Callable[[], float]) -> list[float]:
        """Call `once` repeatedly and return its results in seconds, without the first result."""
        once()
        samples: list[float] = []
        while len(samples) < REPEATS[0] or (
            sum(samples) < self.seconds and len(samples) < REPEATS[1]
        ):
            samples.append(once())
        return samples

    def locally(self, name: str, measure: Callable[[], Sequence[float]]) -> list[list[float]]:
        """Measure on every rank independently, and return the figures of all ranks.

        Args:
            name: Name of the measurement, for errors.
            measure: Function that returns the figures of this rank, equally many on all ranks.

        Raises:
            ValueError: The measurement fails on a rank. All ranks raise the same error.
        """
        fault: ValueError | None = None
        figures: Sequence[float] = ()
        self.gathered(0.0)
        try:
            figures = measure()
        except Exception as error:
            fault = ValueError(f"{name}: {first_line(error)}")
        self.agree(fault or {"figures": len(figures)})
        own = torch.tensor(figures, dtype=torch.float64)
        return [gathered.tolist() for gathered in self.groups.gather(own)]

    def agree(self, facts: Facts | ValueError) -> None:
        """Raise the same ValueError on all ranks if `facts` differ or if a rank passes an error."""
        agree(facts, self.groups.gather)


def middle(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over ranks of each figure. `of_ranks` has a list of figures per rank."""
    return [median(values) for values in zip(*of_ranks, strict=True)]


def worst(of_ranks: Sequence[Sequence[float]]) -> float:
    """Return the largest relative deviation of any rank's figure from its median over ranks."""
    return max(
        (abs(value / mid - 1) for figures in of_ranks
         for value, mid in zip(figures, middle(of_ranks), strict=True) if mid),
        default=0.0,
    )  # fmt: skip


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


@contextmanager
def joined(per_node: int | None, budget: float, device: torch.device) -> Iterator[Ranks]:
    """Join the ranks of this torchrun job; without torchrun, this process is the only rank.

    The context manager creates the default process group, and destroys it at the end.

    Args:
        per_node: Ranks per node; None if the ranks on one host form a node.
        budget: Time limit in seconds for repeating one measurement.
        device: Device of this rank.

    Yields:
        The ranks.

    Raises:
        ValueError: Nodes have different numbers of ranks. All ranks raise the same error.
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
    """Raise ValueError if --per-node differs among ranks or does not divide the number of ranks."""
    size = dist.get_world_size()
    of_ranks: list[int | None] = [per_node] * size
    dist.all_gather_object(of_ranks, per_node)
    if len(set(of_ranks)) > 1:
        raise ValueError(f"--per-node differs among ranks: {of_ranks}; set the same on all ranks")
    if per_node is not None and (per_node < 1 or size % per_node):
        raise ValueError(
            f"--per-node {per_node} does not divide the {size} ranks of this job; use one of "
            f"{', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
        )
