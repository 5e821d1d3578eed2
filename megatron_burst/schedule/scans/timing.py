# SPDX-License-Identifier: Apache-2.0
"""Prediction of the time of a scan: a simulation of its table of hops over idealized links.

Every rank has one NIC per link class, which sends and receives at the same time. The hops of a
round between two ranks are one message, and the messages of a rank follow one another on its NIC. A
rank starts a round when it has finished the previous one: when it has sent, received, and combined
the received maps and states. Ranks that take no part in a round do not wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..topology import Topology
from .hops import Hops, messages_of
from .sizes import ScanSizes


class Links(NamedTuple):
    """Speed of the links of every rank.

    Attributes:
        intra: Bytes per second within a node, in one direction.
        inter: Bytes per second between nodes, in one direction.
        intra_latency: Seconds per message within a node, in addition to its bytes.
        inter_latency: Seconds per message between nodes, in addition to its bytes.
        combine: Bytes per second at which a rank combines received states and maps; inf if
            combining needs no time.
        posting: Seconds that a rank needs to start a round.
    """

    intra: float
    inter: float
    intra_latency: float = 0.0
    inter_latency: float = 0.0
    combine: float = float("inf")
    posting: float = 0.0


# One GPU's share of NVLink, and of InfiniBand with one NIC of 200 Gbit/s per GPU. Combining reads
# two states and writes one, so its rate is a third of 1.5 TB/s.
NOMINAL = Links(200e9, 25e9, 5e-6, 10e-6, 500e9)


class Messages(NamedTuple):
    """The messages of a scan, sorted by round and receiver; arrays [messages].

    Attributes:
        round: Round of the message. All states and maps that one rank sends to another in a round
            are one message.
        source: Rank that sends.
        destination: Rank that receives.
        far: True if the message crosses between nodes.
        leaves: Seconds from the start of the round on the sender until the message is sent.
        lasts: Seconds during which the message occupies a NIC.
        fold: Seconds that the receiver needs to combine the states and maps of the message.
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
    """Return the seconds until each rank has sent and received all messages, float [ranks]."""
    clock = np.zeros(topology.size)
    if not len(hops):
        return clock
    messages = _messages(hops, topology, sizes, blocks, links)

    opens = np.append(
        True,
        (messages.round[1:] != messages.round[:-1])
        | (messages.destination[1:] != messages.destination[:-1]),
    )
    begin = np.flatnonzero(opens)
    near = np.add.reduceat(np.where(messages.far, 0.0, messages.lasts), begin)
    over = np.maximum(near, np.add.reduceat(np.where(messages.far, messages.lasts, 0.0), begin))
    fold = np.add.reduceat(messages.fold, begin)
    to = messages.destination[begin]
    rounds = np.arange(messages.round[-1] + 2)
    cuts = np.searchsorted(messages.round, rounds).tolist()
    groups = np.searchsorted(messages.round[begin], rounds).tolist()
    for count in range(len(rounds) - 1):
        a, b, g, h = cuts[count], cuts[count + 1], groups[count], groups[count + 1]
        source, inner = messages.source[a:b], begin[g:h] - a
        start = clock[source] + links.posting
        left = start + messages.leaves[a:b]
        received = np.maximum.reduceat(left, inner)
        received = np.maximum(received, np.minimum.reduceat(start, inner) + over[g:h])
        after = np.maximum(clock[to[g:h]] + links.posting, received) + fold[g:h]
        np.maximum.at(clock, source, left)
        clock[to[g:h]] = np.maximum(clock[to[g:h]], after)
    return clock


def _messages(
    hops: Hops, topology: Topology, sizes: ScanSizes, blocks: int, links: Links
) -> Messages:
    (count, source, destination), message = messages_of(hops)
    size = np.bincount(message, sizes.of(hops, blocks))
    far = source // topology.per_node != destination // topology.per_node
    lasts = np.where(
        far, links.inter_latency + size / links.inter, links.intra_latency + size / links.intra
    )
    leaves = _running(lasts, far, count * topology.size + source)
    order = np.argsort(count * topology.size + destination, kind="stable")
    columns = (count, source, destination, far, leaves, lasts, size / links.combine)
    return Messages(*(column[order] for column in columns))


def _running(lasts: np.ndarray, far: np.ndarray, sender: np.ndarray) -> np.ndarray:
    """Return the cumulative sum of `lasts` over the messages of one sender on one link class.

    Args:
        lasts: Seconds that each message occupies a NIC.
        far: True for messages between nodes.
        sender: Sender of each message, sorted.
    """
    sums = np.empty(len(lasts))
    for link in (~far, far):
        total, senders = np.cumsum(lasts[link]), sender[link]
        opens = np.append(True, senders[1:] != senders[:-1])[: len(senders)]
        before = (total - lasts[link])[opens]
        sums[link] = total - before[np.cumsum(opens) - 1]
    return sums
