# SPDX-License-Identifier: Apache-2.0
"""The choice of the scan algorithm and its number of blocks, by predicted time.

The candidates are "all_gather", "two_level" and "scan". "ring" is not tried, because it equals
"scan" with one block. An all-gather with more than `LARGE` hops is not tried, because making its
table needs more time than the algorithm could save.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from ...layout.pieces import Chains
from ...units import duration
from ..topology import Topology
from . import SCANS
from .all_gather import count_users
from .hops import Task, runs_of
from .sizes import ScanSizes
from .timing import NOMINAL, Links, scan_seconds

MOST = 256  # largest number of blocks
LARGE = 1 << 18  # all-gathers with more hops are not tried


class ScanChoice(NamedTuple):
    """The chosen scan algorithm, with its predicted time.

    Attributes:
        algorithm: Name of the algorithm.
        blocks: Number of blocks of a state.
        seconds: Predicted seconds until the last rank has finished.
        tried: (algorithm, blocks, seconds) of all candidates, the chosen candidate first.
    """

    algorithm: str
    blocks: int
    seconds: float
    tried: tuple[tuple[str, int, float], ...]

    def describe(self) -> str:
        """Return a text such as "two_level in 8 blocks, 317 us predicted; scan 1.2 ms"."""
        parts = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        alternatives = ", ".join(
            f"{name} {duration(seconds)}" for name, _, seconds in self.tried[1:]
        )
        chosen = f"{self.algorithm}{parts}, {duration(self.seconds)} predicted"
        return f"{chosen}; {alternatives}" if alternatives else chosen


class LinkRates(Protocol):
    """The fields of `mb.Rates` that the choice of a scan reads."""

    @property
    def intra(self) -> float: ...
    @property
    def inter(self) -> float: ...
    @property
    def latency(self) -> float: ...
    @property
    def posting(self) -> float: ...


def links_of(rates: LinkRates | None) -> Links:
    """Return `Links` with the speeds in `rates`, or `NOMINAL` if `rates` is None."""
    if rates is None:
        return NOMINAL
    values = rates.intra, rates.inter, rates.latency, rates.latency
    return Links(*values, posting=rates.posting)


def choose(
    chains: Chains, topology: Topology, sizes: ScanSizes, links: Links = NOMINAL
) -> ScanChoice:
    """Return the algorithm with the shortest predicted time for these chains and states.

    If no state needs to be sent, the result is "all_gather" with zero seconds.

    Args:
        chains: Chains of pieces.
        topology: Placement of the ranks.
        sizes: Sizes of the states.
        links: Speed of the links.

    Raises:
        ValueError: The topology and the chains have different numbers of ranks.
    """
    trials = _Trials(chains, topology, sizes, links)
    if not trials.runs.follows.any():
        return ScanChoice("all_gather", 1, 0.0, (("all_gather", 1, 0.0),))
    tried = []
    for name in ("all_gather", "two_level", "scan"):
        if name != "all_gather" or count_users(trials.runs) <= LARGE:
            tried.append((name, *trials.best(name, min([s for *_, s in tried], default=math.inf))))
    tried.sort(key=lambda trial: trial[2])
    name, blocks, seconds = tried[0]
    return ScanChoice(name, blocks, seconds, tuple(tried))


def blocks_for(
    algorithm: str, chains: Chains, topology: Topology, sizes: ScanSizes, links: Links = NOMINAL
) -> int:
    """Return the number of blocks with the shortest predicted time of an algorithm.

    `algorithm` is a name in `SCANS`. The other arguments and the errors are the same as in
    `choose`.
    """
    return _Trials(chains, topology, sizes, links).best(algorithm)[0]


class _Trials:
    """Predictions of scan times for the pieces of a sequence, a topology, state sizes and links."""

    def __init__(self, chains: Chains, topology: Topology, sizes: ScanSizes, links: Links):
        if topology.size != chains.ranks:
            raise ValueError(
                f"topology has {topology.size} ranks, but chains has {chains.ranks}; use the same "
                "grid for both"
            )
        self.chains, self.topology, self.sizes, self.links = chains, topology, sizes, links
        self.runs = runs_of(chains)
        self.numbers = np.array(sizes.numbers(MOST))

    def seconds(self, name: str, blocks: int) -> float:
        """Return the predicted seconds of algorithm `name` until the last rank has finished."""
        hops = SCANS[name](Task(self.chains, self.topology, blocks))
        return float(scan_seconds(hops, self.topology, self.sizes, blocks, self.links).max())

    def best(self, name: str, limit: float = math.inf) -> tuple[int, float]:
        """Return the fastest number of blocks for algorithm `name`, and its predicted seconds.

        The search starts at an estimate, and halves or doubles the number as long as the time
        decreases. For "scan", it ends at the estimate if no estimated time is below `limit`
        seconds.
        """
        if name not in ("scan", "two_level") or not self.runs.follows.any():
            return 1, self.seconds(name, 1)
        about = self._two_level() if name == "two_level" else self._scan()
        best_blocks = int(self.numbers[np.argmin(about)])
        best_seconds = self.seconds(name, best_blocks)
        if name == "scan" and about.min() >= limit:
            return best_blocks, best_seconds
        for factor in (0.5, 2.0):
            while True:
                near = np.abs(np.log(self.numbers / (best_blocks * factor)))
                blocks = int(self.numbers[np.argmin(near)])
                seconds = best_seconds if blocks == best_blocks else self.seconds(name, blocks)
                if seconds >= best_seconds:
                    break
                best_blocks, best_seconds = blocks, seconds
        return best_blocks, best_seconds

    @cached_property
    def _crosses(self) -> np.ndarray:
        """Bool [runs], true for runs of pieces that receive their state from another node.

        A run is a sequence of consecutive pieces of a document on one rank.
        """
        node = self.runs.rank // self.topology.per_node
        return (self.runs.nth > 0) & np.append(False, node[1:] != node[:-1])

    def _scan(self) -> np.ndarray:
        """Estimate the seconds of algorithm `scan` for each number of blocks.

        Contention for NICs is ignored. The algorithm sends states of linear attention from rank to
        rank, cut into blocks. The estimate is the time of all hops of the slowest document for the
        first block, plus the time of its slowest hop for each other block.

        Returns:
            float array, one entry per number in `self.numbers`.
        """
        links, far = self.links, self._crosses
        latency = np.where(far, links.inter_latency, links.intra_latency) + links.posting
        byte = 1 / np.where(far, links.inter, links.intra) + 1 / links.combine
        hop = self.runs.nth > 0
        weight = hop * (latency + self.sizes.state * byte)
        longest = self.runs.document == np.argmax(np.bincount(self.runs.document, weight))
        used = hop & longest
        seconds = latency[used] + self.sizes.state / self.numbers[:, None] * byte[used]
        return seconds.sum(axis=1) + (self.numbers - 1) * seconds.max(axis=1)

    def _two_level(self) -> np.ndarray:
        """Estimate the seconds of algorithm `two_level` for each number of blocks.

        A two-level scan sends states of linear attention from node to node, cut into blocks. A
        round takes the longer of two times: one message to the next node, or the messages to all
        other ranks of this node.

        Returns:
            float array, one entry per number in `self.numbers`.
        """
        links, lanes = self.links, self.topology.per_node
        size = self.sizes.state / self.numbers
        crossings = np.bincount(self.runs.document, self._crosses).max()
        near = (lanes - 1) * (links.intra_latency + size / links.intra)
        over = (links.inter_latency + size / links.inter) * bool(crossings)
        waves = -(-self.numbers // lanes)
        return (crossings + waves) * (np.maximum(near, over) + size / links.combine)
