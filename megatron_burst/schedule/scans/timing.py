# SPDX-License-Identifier: Apache-2.0
"""How long a scan takes: a table of hops, played over plain numbers of the links.

Every rank has one NIC per link class, which sends and receives at once. The hops of a round between
two ranks are one message; the messages of a rank follow one another on its NIC. A rank starts a
round as soon as it has finished the one before: has sent, received, and folded in what came. Ranks
that have nothing to do in a round do not wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..topology import Topology
from .hops import Hops
from .sizes import ScanSizes


class Links(NamedTuple):
    """What a rank's links carry; all ranks are alike.

    intra, inter: bytes per second that a rank sends within its node and between nodes, while it
    receives as many. intra_latency, inter_latency: seconds that each message takes besides its
    bytes. combine: bytes of states and maps per second that a rank folds in; inf where that takes
    no time. posting: seconds of a rank's own time that each round takes to start.
    """

    intra: float
    inter: float
    intra_latency: float = 0.0
    inter_latency: float = 0.0
    combine: float = float("inf")
    posting: float = 0.0


# A GPU's share of NVLink, and of an InfiniBand with one NIC of 200 Gbit/s per GPU; folding in reads
# two states and writes one, at a third of 1.5 TB/s.
NOMINAL = Links(200e9, 25e9, 5e-6, 10e-6, 500e9)


class Messages(NamedTuple):
    """The messages of a table, sorted by round and receiver; arrays [messages].

    leaves: seconds after its sender's start of the round when it has left; lasts: seconds on its
    NIC, fold: of its receiver's own time.
    """

    round: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    far: np.ndarray
    leaves: np.ndarray
    lasts: np.ndarray
    fold: np.ndarray


def scan_seconds(
    hops: Hops, topology: Topology, sizes: ScanSizes, blocks: int, links: Links
) -> np.ndarray:
    """Float [ranks]: when each has all that it receives, and has sent all, if all start at 0."""
    clock = np.zeros(topology.size)
    if not len(hops):
        return clock
    found = _messages(hops, topology, sizes, blocks, links)

    opens = np.append(
        True,
        (found.round[1:] != found.round[:-1]) | (found.destination[1:] != found.destination[:-1]),
    )
    begin = np.flatnonzero(opens)
    near = np.add.reduceat(np.where(found.far, 0.0, found.lasts), begin)
    over = np.maximum(near, np.add.reduceat(np.where(found.far, found.lasts, 0.0), begin))
    fold = np.add.reduceat(found.fold, begin)
    to = found.destination[begin]
    rounds = np.arange(found.round[-1] + 2)
    cuts = np.searchsorted(found.round, rounds).tolist()
    groups = np.searchsorted(found.round[begin], rounds).tolist()
    for count in range(len(rounds) - 1):
        a, b, g, h = cuts[count], cuts[count + 1], groups[count], groups[count + 1]
        source, inner = found.source[a:b], begin[g:h] - a
        start = clock[source] + links.posting
        left = start + found.leaves[a:b]
        came = np.maximum.reduceat(left, inner)
        came = np.maximum(came, np.minimum.reduceat(start, inner) + over[g:h])
        after = np.maximum(clock[to[g:h]] + links.posting, came) + fold[g:h]
        np.maximum.at(clock, source, left)
        clock[to[g:h]] = np.maximum(clock[to[g:h]], after)
    return clock


def _messages(
    hops: Hops, topology: Topology, sizes: ScanSizes, blocks: int, links: Links
) -> Messages:
    ranks = topology.size
    key = (hops.round * ranks + hops.source) * ranks + hops.destination
    key, message = np.unique(key, return_inverse=True)
    size = np.bincount(message.ravel(), sizes.of(hops, blocks))
    rest, destination = np.divmod(key, ranks)
    count, source = np.divmod(rest, ranks)
    far = source // topology.per_node != destination // topology.per_node
    lasts = np.where(
        far, links.inter_latency + size / links.inter, links.intra_latency + size / links.intra
    )
    leaves = _running(lasts, far, rest)
    order = np.argsort(count * ranks + destination, kind="stable")
    columns = (count, source, destination, far, leaves, lasts, size / links.combine)
    return Messages(*(column[order] for column in columns))


def _running(lasts: np.ndarray, far: np.ndarray, sender: np.ndarray) -> np.ndarray:
    """Running sums over the messages of a sender, each link class for itself; sorted by sender."""
    found = np.empty(len(lasts))
    for link in (~far, far):
        mine, who = np.cumsum(lasts[link]), sender[link]
        opens = np.append(True, who[1:] != who[:-1])[: len(who)]
        before = (mine - lasts[link])[opens]
        found[link] = mine - before[np.cumsum(opens) - 1]
    return found
