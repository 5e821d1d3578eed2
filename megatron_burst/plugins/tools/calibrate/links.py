# SPDX-License-Identifier: Apache-2.0
"""Measurements of links: messages, all-to-all, sharing of NICs, and slowdown of compute.

A hop is one message to the next rank, sent as in rings. Hops are measured while one rank of a node
sends and while all ranks send. If the rate per rank is lower while all ranks send, ranks share
NICs. The ratio of the two rates gives the number of NICs of a node. Simultaneous hops of two ranks
show whether these ranks share a NIC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ....autotune import measure
from ....autotune.measure import FIRST, FLAT, SMALL
from ....autotune.places import NIC_OF, Nodes
from ....autotune.rates import Rates
from ....comm.transport import Pending
from ..advise.shapes.models import Model
from .kernels import CHUNKS, tile
from .ranks import Figures, Measurement, Ranks, repeated

LARGEST = {"cuda": 2**28, "cpu": 2**22}  # maximum bytes of a message
LONG = 0.05  # target seconds of a message
CHAIN = 8  # number of consecutive small messages, whose mean time is the latency
SHARED = 1.4  # two ranks share a NIC if simultaneous hops are slower by this factor
PAIRS = 7  # maximum number of ranks of a node that are measured in pairs with the first rank
UNLIKE = 1.25  # factor between measurement and forecast above which a warning is printed
LONGER = 2.0  # time of a message, divided by the time of the compute with which it overlaps

# Pairs of ranks: one to send to, and one to receive from. Empty if this rank is idle.
Pairs = Sequence[tuple[int, int]]


class LinkMeasurement(NamedTuple):
    """Measurement of one link class: within nodes, or between nodes.

    Attributes:
        latency: Seconds of a very small message.
        pairs: (receiver, sender) pairs of this rank in the ring of all ranks: the rank to which it
            sends, and the rank from which it receives.
        rate: Bytes per second of each rank while all ranks send.
    """

    latency: Measurement
    pairs: Pairs
    rate: float


def links(ranks: Ranks, figures: Figures) -> LinkMeasurement | None:
    """Measure links within and between nodes, and add the figures of the file's section [links].

    A collective call.

    Returns:
        The measurement within nodes, or between nodes if a node has one rank; None for one rank.
    """
    if ranks.size < 2:
        return None
    ranks.groups.connect([FLAT], ranks.device)
    classes = []
    if ranks.nodes > 1:
        ranks.report("hops between nodes, alone and all at once")
        classes.append(_between(ranks, figures))
    if ranks.per_node > 1:
        ranks.report("hops within nodes, alone and all at once")
        classes.append(_within(ranks, figures))
    slow = max((link_class.latency for link_class in classes), key=lambda latency: latency.value)
    method = f"{CHAIN} consecutive messages of {SMALL} bytes, the slower link class"
    figures.add("links.latency", slow._replace(method=method + slow.method))
    if not ranks.cuda:
        pairs = classes[-1].pairs
        posting = repeated(ranks.rounds(lambda: _exchange(ranks, pairs, FIRST)[0]), "")
        figures.add("links.posting", posting._replace(method=f"{FIRST} bytes{posting.method}"))
    return classes[-1]


def _within(ranks: Ranks, figures: Figures) -> LinkMeasurement:
    """Measure links within nodes, and add their figures."""
    ring = around(ranks, "intra")
    latency, size = _sized(ranks, ring)
    peer = 1 - ranks.groups.rank
    first_two = [(peer, peer)] if ranks.groups.rank < 2 else []
    alone = _rate(ranks, "", first_two, size, latency)
    every = _rate(ranks, "all ranks at once", ring, size, latency)
    figures.add("links.intra", every, f"two ranks alone {alone.value:.3g}")
    first = ranks.node * ranks.per_node
    peers = [first + index for index in range(ranks.per_node) if index != ranks.local]
    pairs = [(rank, rank) for rank in peers]
    shared = _all_to_all(ranks, "the ranks of a node", pairs, every.value, latency)
    _add_exchange(figures, shared)
    return LinkMeasurement(latency, ring, every.value)


def _add_exchange(figures: Figures, shared: tuple[Measurement, Measurement]) -> None:
    figures.add("links.exchange", shared[0])
    figures.add("links.exchange_start", shared[1])


def _between(ranks: Ranks, figures: Figures) -> LinkMeasurement:
    """Measure links between nodes, and add the figures of these links and of the NICs."""
    ring = around(ranks, "inter")
    latency, size = _sized(ranks, ring)
    alone = _rate(ranks, "one rank of each node", around(ranks, "inter", [0]), size, latency)
    every = _rate(ranks, "all ranks at once", ring, size, latency)
    nics, nic_of = _nics(ranks, min(1.0, every.value / alone.value), size, alone.value, latency)
    figures.state("links.nics", round(nics.value), nics.note)
    figures.add("links.nic_rate", alone._replace(method="`inter`"))
    rates = Rates(math.inf, alone.value)
    if nics.value < ranks.per_node:
        together = every.value * ranks.per_node / nics.value
        figures.add("links.nic_shared", every._replace(value=together))
        rates = replace(rates, nic=together)
    nodes = Nodes(ranks.per_node, round(nics.value), nic_of=nic_of)
    figures.state("links.nic_of", nic_of, _by_inner_size(ranks, size, latency, nodes, rates))
    rank, size_ = ranks.groups.rank, ranks.size
    steps = range(ranks.per_node, size_, ranks.per_node)
    pairs = [((rank + step) % size_, (rank - step) % size_) for step in steps]
    shared = _all_to_all(ranks, "one rank of each node", pairs, every.value, latency)
    if ranks.per_node == 1:
        _add_exchange(figures, shared)
    fraction = f"in an all-to-all {shared[0].value:.2f} of this rate"
    figures.add("links.inter", alone, f"all ranks at once {every.value:.3g} each, {fraction}")
    return LinkMeasurement(latency, ring, every.value)


def _nics(
    ranks: Ranks, share: float, size: int, alone: float, latency: Measurement
) -> tuple[Measurement, str]:
    """Return the number of NICs of a node, and the assignment of ranks to NICs that fits best.

    Pairs of ranks send at the same time. Their rates show which ranks share a NIC with local rank
    0. The returned assignment is the entry of `NIC_OF` that is wrong for the fewest of these ranks.

    Args:
        ranks: Ranks that measure.
        share: Rate of a rank while all ranks of its node send, divided by `alone`. It gives the
            number of NICs.
        size: Bytes of a message.
        alone: Bytes per second of a rank while no other rank of its node sends.
        latency: Seconds of a very small message.
    """
    count = max(1, round(share * ranks.per_node))
    with_first = []
    for local in range(1, min(ranks.per_node, 1 + PAIRS)):
        pair = _rate(ranks, "", around(ranks, "inter", [0, local]), size, latency)
        if alone / pair.value > SHARED:
            with_first.append(local)
    shares = f"local rank 0 shares its NIC with {', '.join(map(str, with_first)) or 'none'}"
    tried = min(ranks.per_node - 1, PAIRS)
    method = (
        f"while all ranks of a node send, a rank gets {share:.2f} of its rate alone; {shares} of "
        f"{tried} ranks that were tried"
    )

    def wrong(nic_of: str) -> int:
        nic = Nodes(ranks.per_node, count, nic_of=nic_of).nic(np.arange(1 + tried))
        return len({*with_first} ^ {*np.flatnonzero(nic[1:] == nic[0]) + 1})

    return Measurement(count, None, method), min(NIC_OF, key=wrong)


def _by_inner_size(
    ranks: Ranks, size: int, latency: Measurement, nodes: Nodes, rates: Rates
) -> str:
    """Measure rates between nodes, and return a comment that compares them with the forecast.

    The last 2, 4, ... ranks of each node send at once, as in two-level rings with inner rings of
    this size. Rank 0 prints a warning if a rate differs from its forecast by more than the factor
    `UNLIKE`.

    Args:
        ranks: Ranks that measure.
        size: Bytes of a message.
        latency: Seconds of a very small message.
        nodes: Assignment of ranks to NICs.
        rates: Rates from which forecasts are computed.
    """
    lines, inner = [], 2
    while inner < ranks.per_node:
        last = range(ranks.per_node - inner, ranks.per_node)
        rate = _rate(ranks, "", around(ranks, "inter", last), size, latency).value
        forecast = float(rates.between(np.bincount(nodes.nic(np.array(last))).max()))
        line = f"the last {inner} ranks of a node get {rate:.3g} each (forecasts: {forecast:.3g})"
        lines.append(line)
        if not 1 / UNLIKE < rate / forecast < UNLIKE:
            ranks.report(f"{line}: forecasts of inner rings of {inner} ranks have this error")
        inner *= 2
    return ", ".join(lines)


def _all_to_all(
    ranks: Ranks, members: str, pairs: Pairs, rate: float, latency: Measurement
) -> tuple[Measurement, Measurement]:
    """Measure an all-to-all.

    Args:
        ranks: Ranks that measure.
        members: Description of the ranks that take part, for the comment.
        pairs: Ranks to send to and receive from.
        rate: Bytes per second of a message to the next rank.
        latency: Seconds of a very small message.

    Returns:
        The rate of the all-to-all divided by `rate`, and the startup time in seconds.
    """
    peers = len(pairs)
    if peers == 1:
        return (
            Measurement(1.0, None, "two ranks: same as a hop"),
            Measurement(0.0, None, "two ranks: same as a hop"),
        )
    name = f"all-to-all of {members}"
    empty = repeated(_rounds(ranks, pairs, SMALL), f"{name}, {SMALL} bytes to each")
    begin = max(0.0, empty.value - peers * latency.value)
    size = max(SMALL, min(LARGEST[ranks.device.type], round(rate * LONG / peers)))
    exchange = repeated(_rounds(ranks, pairs, size), f"{name}, {size} bytes to each")
    achieved = measure.rate_of(peers * size, exchange.value, peers * latency.value + begin)
    return exchange._replace(value=achieved / rate), empty._replace(value=begin)


def _sized(ranks: Ranks, pairs: Pairs) -> tuple[Measurement, int]:
    """Return the latency of messages, and the size of a message that needs about `LONG` seconds."""
    _rounds(ranks, pairs, SMALL)  # opens the connections
    small = repeated(_rounds(ranks, pairs, SMALL, CHAIN), "")
    latency = small._replace(value=small.value / CHAIN)
    largest = LARGEST[ranks.device.type]
    size, _ = measure.long_enough(
        lambda n: ranks.gathered(_exchange(ranks, pairs, n)[1]), LONG, largest
    )
    return latency, size


def _rate(ranks: Ranks, senders: str, pairs: Pairs, size: int, latency: Measurement) -> Measurement:
    """Measure the bytes per second of the slowest sending rank, in one direction.

    Args:
        ranks: Ranks that measure.
        senders: Description of the ranks that send, for the comment.
        pairs: Ranks to send to and receive from; empty if this rank is idle.
        size: Bytes of a message.
        latency: Seconds of a very small message, which are subtracted.
    """
    seconds = repeated(_rounds(ranks, pairs, size), f"{senders}, {size} bytes a message")
    return seconds._replace(value=measure.rate_of(size, seconds.value, latency.value))


def _rounds(ranks: Ranks, pairs: Pairs, size: int, times: int = 1) -> list[float]:
    """Measure `times` consecutive exchanges, and repeat the measurement.

    Args:
        ranks: Ranks that measure.
        pairs: Ranks to send to and receive from; empty if this rank is idle.
        size: Bytes of a message.
        times: Number of consecutive exchanges in one repeat.

    Returns:
        Seconds of each repeat, on the slowest rank.
    """
    _exchange(ranks, pairs, size)
    return ranks.rounds(lambda: _exchange(ranks, pairs, size, times)[1])


def _exchange(ranks: Ranks, pairs: Pairs, size: int, times: int = 1) -> tuple[float, float]:
    """Return this rank's seconds until `times` exchanges have started, and until all are done."""
    if not pairs:
        return 0.0, 0.0
    return measure.exchange_seconds(_starter(ranks, pairs, size), ranks.device, times)


def _starter(ranks: Ranks, pairs: Pairs, size: int) -> Callable[[], Pending]:
    route = measure.Peers(ranks.groups.ring, FLAT, tuple(pairs))
    return measure.starter(route, size, ranks.device)


def around(ranks: Ranks, link: str, members: Sequence[int] | None = None) -> Pairs:
    """Return the neighbours of this rank in a ring over one link class, as [(next, previous)].

    The list is empty if there is no such ring, or if this rank is not in `members`.

    Args:
        ranks: Ranks that measure.
        link: "intra" or "inter".
        members: Indices, within a node, of the ranks that send; None for all ranks.
    """
    if members is not None and ranks.local not in members:
        return []
    route = measure.peers(ranks.groups, link)
    return [] if route is None else route.pairs


def slowdown(ranks: Ranks, model: Model, link: LinkMeasurement) -> Measurement:
    """Measure `Rates.slowdown`. A collective call.

    It is the time of local attention during an exchange, divided by its time without an exchange,
    minus 1. The exchange is within nodes if a node has several ranks.
    """
    _, pairs, rate = link
    rows = CHUNKS[ranks.device.type][-2]
    calls = tile(ranks, model, rows)
    once = max(ranks.gathered(measure.seconds(calls.forward, ranks.device)))
    most = LARGEST[ranks.device.type]
    # Long enough for the clock resolution, and short enough to overlap with one message.
    times = max(1, min(100, round(most / rate / LONGER / once)))
    size = int(max(2**16, min(most, LONGER * times * once * rate)))

    def compute() -> None:
        for _ in range(times):
            calls.forward()

    start = _starter(ranks, pairs, size)

    def overlapped() -> float:
        pending = []
        seconds = measure.seconds(compute, ranks.device, before=lambda: pending.append(start()))
        pending[0].wait()
        measure.settle(ranks.device)
        return seconds

    with_traffic = repeated(ranks.rounds(overlapped), "")
    alone = repeated(ranks.rounds(lambda: measure.seconds(compute, ranks.device)), "")
    method = (
        f"time of {times} forwards of {rows} rows during a message of {size} bytes, divided by "
        "their time without a message; the times vary by "
        f"{max(with_traffic.spread or 0, alone.spread or 0):.1%}"
    )
    return Measurement(max(0.0, with_traffic.value / alone.value - 1), None, method)
