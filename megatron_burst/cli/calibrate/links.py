"""What links carry: hops of each link class, alone and all at once, all-to-all, NICs.

Through the endpoints on which rings travel. Every rank that takes part sends as much as it
receives. Decides which ranks rest, and what follows about NICs: where all ranks of a node get less
than one alone gets, they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...autotune.measure import SMALL
from ...comm.transport import Channel, Pending, Receive, Send
from .ranks import Found, Ranks, found

FLAT = Channel("flat", False)
FIRST = 2**18  # bytes of the first guess
LARGEST = {"cuda": 2**28, "cpu": 2**22}  # bytes of a message
LONG = 0.05  # seconds that a message should take
CHAIN = 8  # small messages in a row, of which latency is the mean
SHARED = 1.4  # a hop that takes so many times as long beside another shares its NIC
PAIRS = 7  # of ranks of a node that are tried


class Hop(NamedTuple):
    """Whom a rank sends to and receives from, in an exchange."""

    there: int
    back: int


@dataclass
class Links:
    """Figures of `Rates` by name, those that were measured; nics: of a node; alone: bytes per
    second of one rank's NIC; words: about what else was seen. busiest: this rank's hops with all
    ranks sending, and their rate."""

    figures: dict[str, Found] = field(default_factory=dict)
    nics: Found | None = None
    alone: Found | None = None
    words: dict[str, str] = field(default_factory=dict)
    busiest: tuple[list[Hop], float] = ([], 1.0)


def links(ranks: Ranks) -> Links:
    """All of it; collective. A link class that these ranks do not have is left out."""
    seen = Links()
    if ranks.size < 2:
        return seen
    ranks.groups.connect([FLAT], ranks.device)
    latencies = []
    if ranks.nodes > 1:
        ranks.say("hops between nodes, alone and all at once")
        latencies.append(_between(ranks, seen))
    if ranks.per_node > 1:
        ranks.say("hops within nodes, alone and all at once")
        latencies.append(_within(ranks, seen))
    slow = max(latencies, key=lambda each: each.value)
    how = f"{CHAIN} messages of {SMALL} bytes in a row, the slower link class"
    seen.figures["latency"] = slow._replace(how=how + slow.how)
    if not ranks.cuda:
        hops = seen.busiest[0]
        posting = found(ranks.rounds(lambda: _exchange(ranks, hops, FIRST, 1, until="begun")), "")
        seen.figures["posting"] = posting._replace(how=f"{FIRST} bytes{posting.how}")
    return seen


def _within(ranks: Ranks, seen: Links) -> Found:
    """Adds what links within nodes carry; their latency."""
    ring, pair = _ring(ranks, range(ranks.per_node)), _pair(ranks, 0, 1)
    latency, size = _sized(ranks, ring)
    one = _rate(ranks, "", pair, size, latency)
    seen.figures["intra"] = every = _rate(ranks, "all ranks at once", ring, size, latency)
    seen.words["intra"] = f"two ranks alone {one.value:.3g}"
    seen.busiest = ring, every.value
    peers = [hop for hop in range(ranks.per_node) if hop != ranks.local]
    first = ranks.node * ranks.per_node
    hops = [Hop(first + peer, first + peer) for peer in peers]
    shared = _all_to_all(ranks, "the ranks of a node", hops, every.value, latency)
    seen.figures["exchange"], seen.figures["exchange_start"] = shared
    return latency


def _between(ranks: Ranks, seen: Links) -> Found:
    """Adds what links between nodes carry; their latency."""
    ring = _across(ranks, range(ranks.per_node))
    latency, size = _sized(ranks, ring)
    alone = _rate(ranks, "one rank of each node", _across(ranks, [0]), size, latency)
    every = _rate(ranks, "all ranks at once", ring, size, latency)
    seen.nics = _nics(ranks, min(1.0, every.value / alone.value), size, alone.value, latency)
    seen.alone = seen.figures["inter"] = alone
    if seen.nics.value < ranks.per_node:
        together = every.value * ranks.per_node / seen.nics.value
        seen.figures["nic_shared"] = every._replace(value=together)
    seen.busiest = ring, every.value
    steps = range(ranks.per_node, ranks.size, ranks.per_node)
    rank, all_ = ranks.groups.rank, ranks.size
    hops = [Hop((rank + step) % all_, (rank - step) % all_) for step in steps]
    shared = _all_to_all(ranks, "one rank of each node", hops, every.value, latency)
    if ranks.per_node == 1:
        seen.figures["exchange"], seen.figures["exchange_start"] = shared
    seen.words["inter"] = (
        f"all ranks at once {every.value:.3g} each, in an all-to-all {shared[0].value:.2f} of it"
    )
    return latency


def _nics(ranks: Ranks, share: float, size: int, alone: float, latency: Found) -> Found:
    """NICs of a node: so many that all ranks together get what was measured."""
    count = max(1, round(share * ranks.per_node))
    with_first = []
    for other in range(1, min(ranks.per_node, 1 + PAIRS)):
        two = _rate(ranks, "", _across(ranks, [0, other]), size, latency)
        if alone / two.value > SHARED:
            with_first.append(other)
    told = f"local rank 0 shares its NIC with {', '.join(map(str, with_first)) or 'none'}"
    tried = min(ranks.per_node - 1, PAIRS)
    how = (
        f"all ranks of a node get {share:.2f} of what one gets alone; {told} of {tried} tried in "
        "pairs"
    )
    return Found(count, None, how)


def _all_to_all(
    ranks: Ranks, who: str, hops: Sequence[Hop], rate: float, latency: Found
) -> tuple[Found, Found]:
    """(the fraction of a link's rate that an all-to-all gets, its seconds without bytes)."""
    many = len(hops)
    if many == 1:
        return Found(1.0, None, "two ranks: as a hop"), Found(0.0, None, "two ranks: as a hop")
    empty = found(_seconds(ranks, hops, SMALL), f"all-to-all of {who}, {SMALL} bytes to each")
    begin = max(0.0, empty.value - many * latency.value)
    size = max(SMALL, min(LARGEST[ranks.device.type], round(rate * LONG / many)))
    took = found(_seconds(ranks, hops, size), f"all-to-all of {who}, {size} bytes to each")
    carrying = max(took.value - many * latency.value - begin, took.value / 2)
    return took._replace(value=many * size / rate / carrying), empty._replace(value=begin)


def _sized(ranks: Ranks, hops: Sequence[Hop]) -> tuple[Found, int]:
    """(seconds of a message without bytes, bytes of one that takes long enough)."""
    _seconds(ranks, hops, SMALL)  # makes the connections
    small = found(_seconds(ranks, hops, SMALL, CHAIN), "")
    latency = small._replace(value=small.value / CHAIN)
    size, most = FIRST, LARGEST[ranks.device.type]
    while size < most:
        took = max(ranks.each(_exchange(ranks, hops, size, 1)))
        if took > LONG / 2:
            break
        size = min(most, max(2 * size, round(size * LONG / took)))
    return latency, size


def _rate(ranks: Ranks, what: str, hops: Sequence[Hop], size: int, latency: Found) -> Found:
    """Bytes per second that each rank which takes part sends, and receives."""
    took = found(_seconds(ranks, hops, size), f"{what}, {size} bytes a message")
    return took._replace(value=size / max(took.value - latency.value, took.value / 2))


def _seconds(ranks: Ranks, hops: Sequence[Hop], size: int, times: int = 1) -> list[float]:
    """Of exchanges that all ranks begin together, `times` in a row."""
    _exchange(ranks, hops, size, 1)
    return ranks.rounds(lambda: _exchange(ranks, hops, size, times))


def begin(ranks: Ranks, hops: Sequence[Hop], size: int) -> Callable[[], Pending]:
    """What begins an exchange of `size` bytes with each of these ranks."""
    out = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    into = [torch.empty_like(out) for _ in hops]
    # "intra" is where bytes are counted, which nobody reads here
    sends = [Send(hop.there, "intra", [out]) for hop in hops]
    receives = [Receive(hop.back, [x]) for hop, x in zip(hops, into, strict=True)]
    return lambda: ranks.groups.ring.exchange(FLAT, sends, receives, "measuring a link")


def _exchange(ranks: Ranks, hops: Sequence[Hop], size: int, times: int, until="done") -> float:
    """Seconds of this rank, until exchanges are "done" or "begun"; 0 where it rests."""
    if not hops:
        return 0.0
    start = begin(ranks, hops, size)
    ranks.settle()
    at = time.perf_counter()
    begun = 0.0
    for _ in range(times):
        pending = start()
        begun = begun or time.perf_counter() - at
        pending.wait()
    ranks.settle()
    return begun if until == "begun" else time.perf_counter() - at


def _ring(ranks: Ranks, members: Sequence[int]) -> list[Hop]:
    """To the next of these ranks of a node, from the last one; on every node."""
    if ranks.local not in members:
        return []
    at, count = members.index(ranks.local), len(members)
    first = ranks.node * ranks.per_node
    return [Hop(first + members[(at + 1) % count], first + members[(at - 1) % count])]


def _pair(ranks: Ranks, one: int, other: int) -> list[Hop]:
    """Two ranks of the first node."""
    return _ring(ranks, [one, other]) if ranks.node == 0 else []


def _across(ranks: Ranks, members: Sequence[int]) -> list[Hop]:
    """Of these local ranks: to the same one of the next node, from that of the last one."""
    if ranks.local not in members:
        return []
    rank, step, size = ranks.groups.rank, ranks.per_node, ranks.size
    return [Hop((rank + step) % size, (rank - step) % size)]
