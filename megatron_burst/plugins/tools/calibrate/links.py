# SPDX-License-Identifier: Apache-2.0
"""What links carry: hops of each link class, alone and all at once, all-to-all, NICs, and how much
slower a device computes beside them.

Messages go through the endpoints of the rings. Every rank that takes part sends as much as it
receives. Where all ranks of a node together get less per rank than one rank alone, they share NICs:
their number follows from the ratio, and who shares one from hops of two ranks at once.
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
from .ranks import Figures, Measured, Ranks, repeated

LARGEST = {"cuda": 2**28, "cpu": 2**22}  # bytes of a message
LONG = 0.05  # seconds that a message should take
CHAIN = 8  # small messages in a row, of which latency is the mean
SHARED = 1.4  # a hop that takes so many times as long beside another shares its NIC
PAIRS = 7  # of ranks of a node that are tried
UNLIKE = 1.25  # times as fast or slow as forecast: NICs are not shared as the file says
LONGER = 2.0  # times as long as computing a message beside it is to take

Pairs = Sequence[tuple[int, int]]  # ranks to send to and to receive from; empty where a rank rests


class Carried(NamedTuple):
    """What one link class was measured with: seconds of a message without bytes, this rank's pairs
    with all ranks sending, and their bytes per second.
    """

    latency: Measured
    pairs: Pairs
    rate: float


def links(ranks: Ranks, figures: Figures) -> Carried | None:
    """Add all of it to the figures of [links]; collective. A link class that these ranks do not
    have is left out. Returns that within nodes, or else between; None without links.
    """
    if ranks.size < 2:
        return None
    ranks.groups.connect([FLAT], ranks.device)
    carried = []
    if ranks.nodes > 1:
        ranks.say("hops between nodes, alone and all at once")
        carried.append(_between(ranks, figures))
    if ranks.per_node > 1:
        ranks.say("hops within nodes, alone and all at once")
        carried.append(_within(ranks, figures))
    slow = max((each.latency for each in carried), key=lambda each: each.value)
    how = f"{CHAIN} messages of {SMALL} bytes in a row, the slower link class"
    figures.add("links.latency", slow._replace(how=how + slow.how))
    if not ranks.cuda:
        pairs = carried[-1].pairs
        posting = repeated(ranks.rounds(lambda: _exchange(ranks, pairs, FIRST)[0]), "")
        figures.add("links.posting", posting._replace(how=f"{FIRST} bytes{posting.how}"))
    return carried[-1]


def _within(ranks: Ranks, figures: Figures) -> Carried:
    """Adds what links within nodes carry."""
    ring = around(ranks, "intra")
    latency, size = _sized(ranks, ring)
    other = 1 - ranks.groups.rank
    first_two = [(other, other)] if ranks.groups.rank < 2 else []
    one = _rate(ranks, "", first_two, size, latency)
    every = _rate(ranks, "all ranks at once", ring, size, latency)
    figures.add("links.intra", every, f"two ranks alone {one.value:.3g}")
    first = ranks.node * ranks.per_node
    others = [first + index for index in range(ranks.per_node) if index != ranks.local]
    pairs = [(rank, rank) for rank in others]
    shared = _all_to_all(ranks, "the ranks of a node", pairs, every.value, latency)
    _add_exchange(figures, shared)
    return Carried(latency, ring, every.value)


def _add_exchange(figures: Figures, shared: tuple[Measured, Measured]) -> None:
    figures.add("links.exchange", shared[0])
    figures.add("links.exchange_start", shared[1])


def _between(ranks: Ranks, figures: Figures) -> Carried:
    """Adds what links between nodes carry, and how many NICs a node has."""
    ring = around(ranks, "inter")
    latency, size = _sized(ranks, ring)
    alone = _rate(ranks, "one rank of each node", around(ranks, "inter", [0]), size, latency)
    every = _rate(ranks, "all ranks at once", ring, size, latency)
    nics, nic_of = _nics(ranks, min(1.0, every.value / alone.value), size, alone.value, latency)
    figures.state("links.nics", round(nics.value), nics.note)
    figures.add("links.nic_rate", alone._replace(how="`inter`"))
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
    more = f"all ranks at once {every.value:.3g} each, in an all-to-all {shared[0].value:.2f} of it"
    figures.add("links.inter", alone, more)
    return Carried(latency, ring, every.value)


def _nics(
    ranks: Ranks, share: float, size: int, alone: float, latency: Measured
) -> tuple[Measured, str]:
    """NICs of a node: so many that all ranks together get what was measured; and which of `NIC_OF`
    says best with whom the first rank shares.
    """
    count = max(1, round(share * ranks.per_node))
    with_first = []
    for other in range(1, min(ranks.per_node, 1 + PAIRS)):
        two = _rate(ranks, "", around(ranks, "inter", [0, other]), size, latency)
        if alone / two.value > SHARED:
            with_first.append(other)
    shares = f"local rank 0 shares its NIC with {', '.join(map(str, with_first)) or 'none'}"
    tried = min(ranks.per_node - 1, PAIRS)
    how = (
        f"all ranks of a node get {share:.2f} of what one gets alone; {shares} of {tried} tried in "
        "pairs"
    )

    def wrong(nic_of: str) -> int:
        nic = Nodes(ranks.per_node, count, nic_of=nic_of).nic(np.arange(1 + tried))
        return len({*with_first} ^ {*np.flatnonzero(nic[1:] == nic[0]) + 1})

    return Measured(count, None, how), min(NIC_OF, key=wrong)


def _by_inner_size(ranks: Ranks, size: int, latency: Measured, nodes: Nodes, rates: Rates) -> str:
    """What ranks get that cross from inner rings of 2, 4, ... ranks, the last ones of a node, and
    what forecasts take there with these figures; the first rank says where that is far off.
    """
    said, inner = [], 2
    while inner < ranks.per_node:
        last = range(ranks.per_node - inner, ranks.per_node)
        rate = _rate(ranks, "", around(ranks, "inter", last), size, latency).value
        taken = float(rates.between(np.bincount(nodes.nic(np.array(last))).max()))
        there = f"the last {inner} ranks of a node get {rate:.3g} each (forecasts: {taken:.3g})"
        said.append(there)
        if not 1 / UNLIKE < rate / taken < UNLIKE:
            ranks.say(f"{there}: forecasts of inner rings of {inner} ranks are off by as much")
        inner *= 2
    return ", ".join(said)


def _all_to_all(
    ranks: Ranks, who: str, pairs: Pairs, rate: float, latency: Measured
) -> tuple[Measured, Measured]:
    """(the fraction of a link's rate that an all-to-all gets, its seconds without bytes)."""
    many = len(pairs)
    if many == 1:
        return (
            Measured(1.0, None, "two ranks: as a hop"),
            Measured(0.0, None, "two ranks: as a hop"),
        )
    empty = repeated(_rounds(ranks, pairs, SMALL), f"all-to-all of {who}, {SMALL} bytes to each")
    begin = max(0.0, empty.value - many * latency.value)
    size = max(SMALL, min(LARGEST[ranks.device.type], round(rate * LONG / many)))
    took = repeated(_rounds(ranks, pairs, size), f"all-to-all of {who}, {size} bytes to each")
    carried = measure.rate_of(many * size, took.value, many * latency.value + begin)
    return took._replace(value=carried / rate), empty._replace(value=begin)


def _sized(ranks: Ranks, pairs: Pairs) -> tuple[Measured, int]:
    """(seconds of a message without bytes, bytes of one that takes long enough)."""
    _rounds(ranks, pairs, SMALL)  # makes the connections
    small = repeated(_rounds(ranks, pairs, SMALL, CHAIN), "")
    latency = small._replace(value=small.value / CHAIN)
    largest = LARGEST[ranks.device.type]
    size, _ = measure.long_enough(
        lambda n: ranks.each(_exchange(ranks, pairs, n)[1]), LONG, largest
    )
    return latency, size


def _rate(ranks: Ranks, what: str, pairs: Pairs, size: int, latency: Measured) -> Measured:
    """Bytes per second that each rank which takes part sends, and receives."""
    took = repeated(_rounds(ranks, pairs, size), f"{what}, {size} bytes a message")
    return took._replace(value=measure.rate_of(size, took.value, latency.value))


def _rounds(ranks: Ranks, pairs: Pairs, size: int, times: int = 1) -> list[float]:
    """Seconds of exchanges that all ranks begin together, `times` in a row."""
    _exchange(ranks, pairs, size)
    return ranks.rounds(lambda: _exchange(ranks, pairs, size, times)[1])


def _exchange(ranks: Ranks, pairs: Pairs, size: int, times: int = 1) -> tuple[float, float]:
    """Seconds of this rank until exchanges are started, and until they are done; 0 where it
    rests.
    """
    if not pairs:
        return 0.0, 0.0
    return measure.exchange_seconds(_starter(ranks, pairs, size), ranks.device, times)


def _starter(ranks: Ranks, pairs: Pairs, size: int) -> Callable[[], Pending]:
    route = measure.Peers(ranks.groups.ring, FLAT, tuple(pairs))
    return measure.starter(route, size, ranks.device)


def around(ranks: Ranks, link: str, members: Sequence[int] | None = None) -> Pairs:
    """This rank's next and last rank over a link class; none if it is not among the local ranks
    `members` (default: all of a node).
    """
    if members is not None and ranks.local not in members:
        return []
    route = measure.peers(ranks.groups, link)
    return [] if route is None else route.pairs


def slowdown(ranks: Ranks, model: Model, carried: Carried) -> Measured:
    """The fraction of `Rates`: local attention beside an exchange that outlasts it, over the same
    alone, less 1. The exchange is within nodes where there are such links. Collective.
    """
    _, pairs, rate = carried
    rows = CHUNKS[ranks.device.type][-2]
    calls = tile(ranks, model, rows)
    once = max(ranks.each(measure.seconds(calls.forward, ranks.device)))
    most = LARGEST[ranks.device.type]
    # Long enough that clocks and the start do not show, short enough for one message.
    times = max(1, min(100, round(most / rate / LONGER / once)))
    size = int(max(2**16, min(most, LONGER * times * once * rate)))

    def compute() -> None:
        for _ in range(times):
            calls.forward()

    start = _starter(ranks, pairs, size)

    def beside() -> float:
        pending = []
        took = measure.seconds(compute, ranks.device, before=lambda: pending.append(start()))
        pending[0].wait()
        measure.settle(ranks.device)
        return took

    with_traffic = repeated(ranks.rounds(beside), "")
    alone = repeated(ranks.rounds(lambda: measure.seconds(compute, ranks.device)), "")
    how = (
        f"{times} forwards of {rows} rows beside a message of {size} bytes, over the same alone; "
        f"either varies by {max(with_traffic.spread or 0, alone.spread or 0):.1%}"
    )
    return Measured(max(0.0, with_traffic.value / alone.value - 1), None, how)
