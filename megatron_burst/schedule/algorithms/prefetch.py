# SPDX-License-Identifier: Apache-2.0
"""Prefetch: a multicast that sends all rows before ranks use them, and all gradients at the end.

With packed documents, ranks have unequal work at each step, even if they have equal work in total.
With an exchange at every step, all ranks wait at each step for the slowest rank. With this
algorithm, ranks synchronize only twice. Copies are sent at the first boundaries (moments between
steps), and are relayed as soon as they arrive. Without a relay stream (`comm.relays`), a rank that
relays rows computes nothing before it has relayed them. Then it computes with its own chunk and,
when all copies have arrived, with the chunks of other ranks. If keys are sent, one kernel call
computes with all chunks of other ranks (`execution.joined`).

With a relay stream, a rank computes while it relays rows. If keys are sent, chunks that arrive at
the first boundary then have a kernel call of their own. During this call other copies are relayed.

Gradients leave after the computation with chunks of other ranks, and are summed on their way back:
on the relay stream beside the pair of the rank's own chunk, or after this pair. Ranks wait for
gradients after the pair of their own chunk, which is the last pair in backward. A rank holds all
rows of other ranks that it uses, and their gradients. So the algorithm is for masks with which
ranks use few rows of other ranks.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..demand import Demand
from ..tables import Tables, Transfers
from .multicast import MulticastTiming, tables_of


def tables(demand: Demand) -> Tables:
    """Return the pairs and transfers of `prefetch`: all copies, then pairs, then all gradients."""
    return tables_of(_PrefetchTiming(demand))


class _PrefetchTiming(MulticastTiming):
    """Times of a pass that sends copies first and gradients last; each transfer lasts one step."""

    def _steps(self) -> np.ndarray:
        paths = self.paths
        hops, size = paths.hops, paths.grid.size
        land = self._arrivals
        ready = np.zeros((size, size), dtype=np.int32)
        np.maximum.at(ready, (paths.owner[hops.way], hops.dst), land)
        relays = ~hops.from_owner
        last = np.zeros(size, dtype=np.int32)  # last boundary at which a rank relays rows
        if not self.demand.visibility.streams:
            np.maximum.at(last, hops.src[relays], land[relays] - 1)
        if self.demand.side == "kv" and self.demand.visibility.joined is not False:
            # One call when all copies have arrived. With a relay stream, chunks that arrive first
            # have their own call, which hides relays, unless a call must join all chunks.
            early = self.demand.visibility.streams and self.demand.visibility.joined is None
            together = ready > 1 if early else ~np.eye(size, dtype=bool)
            np.maximum(ready, ready.max(axis=0), out=ready, where=together)
        step = np.maximum(ready, last)
        if self.demand.gradients:  # the own chunk is last: gradients travel during its pair
            np.fill_diagonal(step, 0)
            np.fill_diagonal(step, step.max() + 1)
        return step

    @cached_property
    def _arrivals(self) -> np.ndarray:
        """Step before which each transfer of a copy ends."""
        paths = self.paths
        hops = paths.hops
        to_peers = np.where(paths.served, paths.of_ranks(paths.depth) + 1, 1)
        arrivals = to_peers.reshape(-1)[hops.peers], paths.depth.reshape(-1)[hops.gates]
        return np.concatenate(arrivals).astype(np.int32)

    def copies(self) -> Transfers:
        hops, land = self.paths.hops, self._arrivals
        return self._transfers(False, hops, hops.src, hops.dst, land - 1, land)

    def gradients(self) -> Transfers:
        """Return the transfers of gradients.

        The farthest gates (gateways of nodes) send first. A gate receives their gradients just
        before it sends its sum.
        """
        paths = self.paths
        hops, begin = paths.hops, int(self.step.max())
        # Hops from peers to gates come before the hops of gates.
        to_gates = paths.served.reshape(-1)[hops.peers].any()
        end = begin + max(1, int(to_gates) + int(paths.depth.max(initial=0)))
        depth = np.where(paths.served, paths.of_ranks(paths.depth), 0).reshape(-1)[hops.peers]
        way, above = (column[len(depth) :] for column in (hops.way, hops.above))
        to_gate = paths.gate[way, above] == hops.src[len(depth) :]
        before = np.where(to_gate, paths.depth[way, above], 0)
        post = np.concatenate(
            [np.full_like(depth, begin), end - paths.depth.reshape(-1)[hops.gates]]
        )
        land = end - np.concatenate([depth, before])
        return self._transfers(True, hops, hops.dst, hops.src, post, land)
