# SPDX-License-Identifier: Apache-2.0
"""The ways of multicast, but all rows travel before anything waits for them, gradients at the end.

Where documents leave one rank more to compute at a step than another, a rank that exchanges rows
step by step waits for the slowest of every step, though all have as much in total. Here ranks meet
twice only: copies leave at the first boundaries, those passed on as soon as they are there, and a
rank that passes rows on computes nothing before. Then come its own chunk and, when all are there,
those of others: where keys travel, in one call (`execution.joined`). Gradients leave after that,
are summed on their way back, and are awaited after the own chunk, which in backward comes last. A
rank holds all rows of others that it sees, and their gradients: for masks that show it few.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..demand import Demand
from ..tables import Tables, Transfers
from .multicast import Ways, tables_of


def tables(demand: Demand) -> Tables:
    """Copies first, then all pairs, then gradients."""
    return tables_of(_Early(demand))


class _Early(Ways):
    """Every hop takes one boundary: those of copies first, those of gradients after the steps."""

    def _steps(self) -> np.ndarray:
        paths = self.paths
        hops, size = paths.hops, paths.grid.size
        land = self._arrivals
        ready = np.zeros((size, size), dtype=np.int32)
        np.maximum.at(ready, (paths.owner[hops.way], hops.dst), land)
        passes = ~hops.from_owner
        last = np.zeros(size, dtype=np.int32)  # boundary at which a rank passes something on
        np.maximum.at(last, hops.src[passes], land[passes] - 1)
        if self.demand.side == "kv" and self.demand.wanted.joined is not False:
            others = ~np.eye(size, dtype=bool)  # in one call, when all are there
            np.maximum(ready, ready.max(axis=0), out=ready, where=others)
        step = np.maximum(ready, last)
        if self.demand.gradients:  # the own chunk last: gradients travel meanwhile
            np.fill_diagonal(step, 0)
            np.fill_diagonal(step, step.max() + 1)
        return step

    @cached_property
    def _arrivals(self) -> np.ndarray:
        """At which boundary each hop of copies ends."""
        paths = self.paths
        hops = paths.hops
        to_peers = np.where(paths.served, paths.of_ranks(paths.depth) + 1, 1)
        both = to_peers.reshape(-1)[hops.peers], paths.depth.reshape(-1)[hops.gates]
        return np.concatenate(both).astype(np.int32)

    def copies(self) -> Transfers:
        hops, land = self.paths.hops, self._arrivals
        return self._transfers(False, hops, hops.src, hops.dst, land - 1, land)

    def gradients(self) -> Transfers:
        """The farthest gates send first; a gate that adds waits for them when it sends."""
        paths = self.paths
        hops, begin = paths.hops, int(self.step.max())
        end = begin + 1 + int(paths.depth.max(initial=0))
        depth = np.where(paths.served, paths.of_ranks(paths.depth), 0).reshape(-1)[hops.peers]
        way, above = (column[len(depth) :] for column in (hops.way, hops.above))
        to_gate = paths.gate[way, above] == hops.src[len(depth) :]
        before = np.where(to_gate, paths.depth[way, above], 0)
        post = np.concatenate(
            [np.full_like(depth, begin), end - paths.depth.reshape(-1)[hops.gates]]
        )
        land = end - np.concatenate([depth, before])
        return self._transfers(True, hops, hops.dst, hops.src, post, land)
