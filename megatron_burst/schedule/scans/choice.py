# SPDX-License-Identifier: Apache-2.0
"""Which algorithm carries the states, and in how many parts: the one predicted to take least time.

Decides what is tried. A ring is a scan in one part and is not; a table of all-gather that takes
longer to make than it could save is not either.
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
from .all_gather import count_wanted
from .hops import Task, runs_of
from .sizes import ScanSizes
from .timing import NOMINAL, Links, scan_seconds

MOST = 256  # blocks
LARGE = 1 << 18  # hops of an all-gather: tables of more are neither made nor tried


class ScanChoice(NamedTuple):
    """algorithm, and its number of blocks; seconds: predicted, when the last rank is done. tried:
    (algorithm, blocks, seconds) of all that were, the chosen one first.
    """

    algorithm: str
    blocks: int
    seconds: float
    tried: tuple[tuple[str, int, float], ...]

    def describe(self) -> str:
        """ "two_level in 8 blocks, 317 us predicted; scan 1.2 ms"."""
        parts = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        others = ", ".join(f"{name} {duration(seconds)}" for name, _, seconds in self.tried[1:])
        said = f"{self.algorithm}{parts}, {duration(self.seconds)} predicted"
        return f"{said}; {others}" if others else said


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
    """The links of measured or stated rates; None: `NOMINAL`."""
    if rates is None:
        return NOMINAL
    each = rates.intra, rates.inter, rates.latency, rates.latency
    return Links(*each, posting=rates.posting)


def choose(
    chains: Chains, topology: Topology, sizes: ScanSizes, links: Links = NOMINAL
) -> ScanChoice:
    """The algorithm with the fewest predicted seconds for these chains and states.

    Where nothing travels it is all-gather, which has no hops then either. Raises ValueError where
    the topology has other ranks than the chains.
    """
    trials = _Trials(chains, topology, sizes, links)
    if not trials.runs.follows.any():
        return ScanChoice("all_gather", 1, 0.0, (("all_gather", 1, 0.0),))
    tried = []
    for name in ("all_gather", "two_level", "scan"):
        if name != "all_gather" or count_wanted(trials.runs) <= LARGE:
            tried.append((name, *trials.best(name, min([s for *_, s in tried], default=math.inf))))
    tried.sort(key=lambda each: each[2])
    name, blocks, seconds = tried[0]
    return ScanChoice(name, blocks, seconds, tuple(tried))


def blocks_for(
    algorithm: str, chains: Chains, topology: Topology, sizes: ScanSizes, links: Links = NOMINAL
) -> int:
    """The number of blocks with which `algorithm`, a name of `SCANS`, is to run; arguments and
    errors as of `choose`.
    """
    return _Trials(chains, topology, sizes, links).best(algorithm)[0]


class _Trials:
    """Predictions for one case, as many as the search for a number of blocks asks for."""

    def __init__(self, chains: Chains, topology: Topology, sizes: ScanSizes, links: Links):
        if topology.size != chains.ranks:
            raise ValueError(
                f"topology: it has {topology.size} ranks, and the chains {chains.ranks}; give both "
                "of the same grid"
            )
        self.chains, self.topology, self.sizes, self.links = chains, topology, sizes, links
        self.runs = runs_of(chains)
        self.numbers = np.array(sizes.numbers(MOST))

    def seconds(self, name: str, blocks: int) -> float:
        """Until the last rank is done."""
        hops = SCANS[name](Task(self.chains, self.topology, blocks))
        return float(scan_seconds(hops, self.topology, self.sizes, blocks, self.links).max())

    def best(self, name: str, other: float = math.inf) -> tuple[int, float]:
        """(blocks, seconds): from a first guess to half or twice as many while that is quicker. The
        guess is all where it says that `other` seconds are not to be reached.
        """
        if name not in ("scan", "two_level") or not self.runs.follows.any():
            return 1, self.seconds(name, 1)
        about = self._two_level() if name == "two_level" else self._scan()
        found = int(self.numbers[np.argmin(about)])
        best = self.seconds(name, found)
        if name == "scan" and about.min() >= other:
            return found, best
        for factor in (0.5, 2.0):
            while True:
                near = np.abs(np.log(self.numbers / (found * factor)))
                blocks = int(self.numbers[np.argmin(near)])
                seconds = best if blocks == found else self.seconds(name, blocks)
                if seconds >= best:
                    break
                found, best = blocks, seconds
        return found, best

    @cached_property
    def _crosses(self) -> np.ndarray:
        """Bool [runs]: does the state come from another node?"""
        node = self.runs.rank // self.topology.per_node
        return (self.runs.nth > 0) & np.append(False, node[1:] != node[:-1])

    def _scan(self) -> np.ndarray:
        """Seconds by number of blocks, if no two hops want the same NIC at once: all hops of the
        longest chain for the first block, and the slowest hop for each of the others.
        """
        links, far = self.links, self._crosses
        latency = np.where(far, links.inter_latency, links.intra_latency) + links.posting
        byte = 1 / np.where(far, links.inter, links.intra) + 1 / links.combine
        hop = self.runs.nth > 0
        weight = hop * (latency + self.sizes.state * byte)
        longest = self.runs.document == np.argmax(np.bincount(self.runs.document, weight))
        at = hop & longest
        each = latency[at] + self.sizes.state / self.numbers[:, None] * byte[at]
        return each.sum(axis=1) + (self.numbers - 1) * each.max(axis=1)

    def _two_level(self) -> np.ndarray:
        """Roughly the same: a round takes the longer of a message to the next node and those to all
        others of this node.
        """
        links, lanes = self.links, self.topology.per_node
        size = self.sizes.state / self.numbers
        crossings = np.bincount(self.runs.document, self._crosses).max()
        near = (lanes - 1) * (links.intra_latency + size / links.intra)
        over = (links.inter_latency + size / links.inter) * bool(crossings)
        waves = -(-self.numbers // lanes)
        return (crossings + waves) * (np.maximum(near, over) + size / links.combine)
