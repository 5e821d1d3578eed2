# SPDX-License-Identifier: Apache-2.0
"""Measurement of the rates of links and kernels.

`measure_rates`, `links` and `kernel_speed` are collective (all ranks must call them) and return
equal results on all ranks: they gather the measurements of all ranks, and return the slowest link
and the median device. A measurement needs about a second, once per grid. `calibrate`, the doctor
and its GPU report use the lower-level functions: `peers`, `ring_peers`, `starter`,
`exchange_seconds`, `long_enough`, `rate_of`, `link_speeds`, `local_calls` and `seconds`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from ..comm.consensus import Facts, agree
from ..comm.groups import Groups
from ..comm.transport import Channel, Endpoint, Pending, Receive, Send
from ..kernels import registry
from ..kernels.base import Kernel, Rows, Scoring
from ..kernels.online_softmax import empty_result
from ..layout import Span
from ..masks import Full, Mask
from .host_time import ASSUMED
from .rates import BACKWARD, Rates

SMALL = 64  # bytes of a message whose time is latency
FIRST = 2**18  # bytes of the first message of a search
LONG = 0.2  # seconds of a transfer, long enough that bursts and latency do not change its rate
LARGEST = 2**27  # bytes of the largest message
POSTS = 9  # exchanges whose start is timed
TILE = 0.01  # seconds that a kernel should run
ROWS = 64, 8192  # smallest and largest number of rows of a tile
FLAT, ULYSSES = Channel("flat", False), Channel("ulysses", False)  # reach all neighbours
SHORT = 8  # rows of a tile whose time is the launch
TIMES = 2  # repeats of each size
COPIED = 2**25  # bytes of a copy on the device


class Peers(NamedTuple):
    """The ranks with which this rank exchanges messages in a measurement.

    Attributes:
        endpoint: This rank's endpoint, which sends and receives.
        channel: Channel that carries the messages.
        pairs: (destination, source) of each pair of messages that are sent and received at once.
    """

    endpoint: Endpoint
    channel: Channel
    pairs: tuple[tuple[int, int], ...]


class LocalCalls(NamedTuple):
    """Functions that run forward and backward of local attention on one tile."""

    forward: Callable[[], None]
    backward: Callable[[], None]


def measure_rates(
    groups: Groups,
    *,
    like: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    kernel: str = "auto",
    mask: Mask | None = None,
) -> Rates:
    """Measure and return the rates of the links of `groups`, and of a kernel if `like` is given.

    All ranks must call it, and get the same result. `mb.prepare(algorithm="auto")` uses the latest
    measurement.

    Args:
        groups: Process groups whose links are measured.
        like: (q, k, v) as for `attention`, each [s, b, heads, width]; only shapes, dtype and device
            are read. If given, the kernel's speed is measured too, on a tile without hidden pairs.
            The result then has `compute`.
        kernel: Argument `kernel` of `attention`.
        mask: Argument `mask` of `attention`; default: causal. Kernel "auto" depends on it.

    Returns:
        The rates of the slowest link and the median device.

    Raises:
        ValueError: An argument is invalid. Every rank raises the same error.

    Example:
        >>> rates = mb.measure_rates(groups, like=(q, k, v))
        >>> plan = mb.prepare(q, k, v, groups=groups, algorithm="auto")
    """
    if not isinstance(groups, Groups):
        raise ValueError(f"groups must be made by mb.Groups, got {groups!r:.100}")
    local: Kernel | None = None
    fault: ValueError | None = None
    try:
        groups.check()
        if like is not None:
            if mask is not None and not isinstance(mask, Mask):
                raise ValueError(f"mask must be one of mb.masks, got {mask!r:.100}")
            q, k, v = _like(like)
            local = registry.make(kernel, q, k, v, mask=mask, beside_rings=groups.size > 1)
    except ValueError as error:
        fault = error
    facts: Facts = {
        "like": None if like is None or fault else [tuple(t.shape) for t in like],
        "kernel": None if local is None else local.name,
    }
    agree(fault or facts, groups.gather)
    with groups.running():
        gpu = "cuda" in groups.devices and torch.cuda.is_available()
        rates = links(groups, like[0].device if like else torch.device("cuda" if gpu else "cpu"))
        if like is not None and local is not None:
            speed = kernel_speed(groups, local, Scoring(like[0].shape[-1] ** -0.5), *like)
            rates = replace(rates, compute=speed[0], launch=speed[1])
    return rates


def _like(like: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = like if isinstance(like, (tuple, list)) else ()
    if len(tensors) != 3 or not all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in tensors):
        raise ValueError(f"like must be q, k, v, each [s, b, heads, width], got {like!r:.100}")
    q, k, v = tensors
    return q, k, v


def links(groups: Groups, device: torch.device) -> Rates:
    """Measure the links for messages on `device`. All ranks must call it.

    The rates have no `compute`. They are also stored in `groups.cache`.
    """
    if groups.size == 1:
        groups.cache["rates"] = rates = Rates(math.inf, math.inf)
        return rates
    groups.connect([FLAT, ULYSSES], device)
    counters = groups.counters
    before = counters.intra, counters.inter
    link_peers = [peers(groups, link) for link in ("intra", "inter")]
    latencies, speeds = zip(
        *(link_speeds(groups, peer, device) for peer in link_peers), strict=True
    )
    posting = max(_posting(groups, peer, device) for peer in link_peers)
    memory = median(_of_ranks(groups, _memory_rate(device)))
    room = min(_of_ranks(groups, _room(device)))
    counters.intra, counters.inter = before
    groups.cache["rates"] = rates = Rates(
        *(min(of_ranks) for of_ranks in speeds),
        latency=max(latencies),
        posting=posting,
        memory=memory,
        adding=memory,
        room=max(room, 1.0),
        host=ASSUMED if device.type == "cuda" else None,  # on a CPU, part of `posting` and `launch`
    )
    return rates


def peers(groups: Groups, link: str) -> Peers | None:
    """Return this rank's neighbours over link class `link`; None without such links.

    The neighbours are the next and the previous rank of this rank's ring. If the ring has no such
    links, they are ranks of this rank's ulysses group.
    """
    rank, topology = groups.rank, groups.topology
    for endpoint, channel, ranks in (
        (groups.ring, FLAT, topology.ring(rank)),
        (groups.ulysses, ULYSSES, topology.ulysses_group(rank)),
    ):
        nodes = [member // topology.per_node for member in ranks]
        width, me = nodes.count(nodes[0]), ranks.index(rank)
        node, index = divmod(me, width)
        if link == "intra" and width > 1:
            after, before = ((index + step) % width + node * width for step in (1, -1))
            return Peers(endpoint, channel, ((after, before),))
        if link == "inter" and width < len(ranks):
            after, before = ((me + step) % len(ranks) for step in (width, -width))
            return Peers(endpoint, channel, ((after, before),))
    return None


def ring_peers(groups: Groups, ring: str, device: torch.device) -> Peers | None:
    """Connect the channel of a ring's messages, and return `peers` on this channel.

    All ranks must call it.
    """
    neighbours = peers(groups, ring)
    if neighbours is None:
        return None
    neighbours = neighbours._replace(channel=Channel(ring, False))
    groups.connect([neighbours.channel], device)
    return neighbours


def starter(peers: Peers, size: int, device: torch.device) -> Callable[[], Pending]:
    """Return a function that starts an exchange with all peers and returns its pending handle.

    Args:
        peers: The peers, on a connected channel.
        size: Bytes of each message.
        device: Device of the messages.
    """
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    into = [torch.empty_like(out) for _ in peers.pairs]
    # "intra" only selects the byte counter; it is independent of the link.
    sends = [Send(to, "intra", [out]) for to, _ in peers.pairs]
    receives = [Receive(source, [x]) for (_, source), x in zip(peers.pairs, into, strict=True)]
    return lambda: peers.endpoint.exchange(peers.channel, sends, receives, "measuring a link")


def exchange_seconds(
    start: Callable[[], Pending], device: torch.device, times: int = 1
) -> tuple[float, float]:
    """Run `times` exchanges; return the seconds to start the first one, and to finish all.

    Args:
        start: Starts one exchange.
        device: Device of the messages.
        times: Number of exchanges.
    """
    settle(device)
    begin, started = time.perf_counter(), 0.0
    for _ in range(times):
        pending = start()
        started = started or time.perf_counter() - begin
        pending.wait()
    settle(device)
    return started, time.perf_counter() - begin


def link_speeds(
    groups: Groups, peers: Peers | None, device: torch.device
) -> tuple[float, list[float]]:
    """Measure the links of all ranks to their peers, all used at the same time.

    All ranks must call it.

    Returns:
        A pair: the latency in seconds of the slowest rank, and a list with the bytes per second of
        every rank. If no rank has peers, the latency is 0.0 and all rates are math.inf.
    """

    def of_ranks(size: int, times: int) -> list[float]:
        """Return each rank's shortest time; other load of the machine can only add time."""
        start = None if peers is None else starter(peers, size, device)
        _of_ranks(groups, 0.0)  # a barrier, so that all ranks start together
        if start is None:
            return _of_ranks(groups, 0.0)
        return _of_ranks(groups, min(exchange_seconds(start, device)[1] for _ in range(times)))

    of_ranks(SMALL, 1)  # opens the connections
    latency = max(of_ranks(SMALL, 16))
    if latency == 0.0:
        return 0.0, [math.inf] * groups.size
    size, seconds_of_ranks = long_enough(lambda size: of_ranks(size, 2), LONG, LARGEST)
    return latency, [
        rate_of(size, taken, latency) if taken else math.inf for taken in seconds_of_ranks
    ]


def long_enough(
    seconds_of_ranks: Callable[[int], list[float]], long: float, largest: int
) -> tuple[int, list[float]]:
    """Return the bytes of a message that takes about `long` seconds, and the seconds of each rank.

    Args:
        seconds_of_ranks: Function that returns the seconds that every rank needs for a message of
            the given number of bytes.
        long: Seconds that the slowest rank should need.
        largest: Maximum bytes of the message.
    """
    size, of_ranks = FIRST, seconds_of_ranks(FIRST)
    while max(of_ranks) < long / 2 and size < largest:
        size = min(largest, max(2 * size, int(size * long / max(of_ranks))))
        of_ranks = seconds_of_ranks(size)
    return size, of_ranks


def rate_of(size: float, total: float, latency: float) -> float:
    """Return the bytes per second of a transfer.

    Args:
        size: Bytes of the transfer.
        total: Seconds of the transfer.
        latency: Seconds of an empty transfer.
    """
    return size / max(total - latency, total / 2)


def _posting(groups: Groups, peers: Peers | None, device: torch.device) -> float:
    """Return the seconds that a rank needs to start an exchange with its peers.

    All ranks must call it. Each rank computes a median, and the result is the largest median. On a
    GPU the result is 0, because the host starts exchanges while the device works.
    """
    if device.type == "cuda":
        return 0.0
    start = None if peers is None else starter(peers, FIRST, device)
    _of_ranks(groups, 0.0)
    if start is None:
        return max(_of_ranks(groups, 0.0))
    posted = median(exchange_seconds(start, device)[0] for _ in range(POSTS))
    return max(_of_ranks(groups, posted))


def _memory_rate(device: torch.device) -> float:
    """Return the bytes per second (read plus written) of a copy on the device."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    copy = source.clone()
    return 2 * COPIED / min(seconds(lambda: copy.copy_(source), device) for _ in range(TIMES))


def _room(device: torch.device) -> float:
    """Return the free bytes of a GPU; math.inf on a CPU, because ranks share its memory."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _of_ranks(groups: Groups, value: float) -> list[float]:
    """Gather `value` of every rank. The call is also a barrier."""
    gathered = groups.gather(torch.tensor([value], dtype=torch.float64))
    return [rank_value.item() for rank_value in gathered]


def settle(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(
    call: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """Return the seconds of one call: by events on a GPU, by the wall clock on a CPU.

    Args:
        call: The call.
        device: The device.
        before: Function that starts other work on the idle device, which then runs at the same time
            as `call`.
    """
    settle(device)
    if device.type != "cuda":
        before()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    begin.record()
    call()
    end.record()
    settle(device)
    return begin.elapsed_time(end) / 1e3


def kernel_speed(
    groups: Groups,
    kernel: Kernel,
    scoring: Scoring,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[float, float]:
    """Measure the speed of a kernel on a square tile with the heads of q, k and v.

    All ranks must call it. The result is the median over the ranks, and is cached in `groups`. Only
    shape, dtype and device of q, k and v are read.

    Returns:
        FLOP/s, and seconds of a call in addition to its FLOPs.
    """
    key = kernel.name, scoring.softcap, q.dtype, q.shape[2:], k.shape[2:], v.shape[3], q.device.type
    speeds: dict[Any, tuple[float, float]] = groups.cache.setdefault("speeds", {})
    if key not in speeds:
        own = _speed(kernel, scoring, q, k, v)
        of_ranks = groups.gather(torch.tensor(own, dtype=torch.float64))
        speed, launch = (median(rank_speed[i].item() for rank_speed in of_ranks) for i in range(2))
        speeds[key] = speed, launch
    return speeds[key]


def _speed(
    kernel: Kernel, scoring: Scoring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[float, float]:
    """Return this rank's FLOP/s and seconds per call: the best of `TIMES` runs.

    Every size first runs once without timing, because a kernel may be compiled for a new size.
    """

    def best_time(rows: int) -> float:
        calls = local_calls(kernel, scoring, Full(), (q, k, v), rows)

        def forward_backward() -> None:
            calls.forward()
            calls.backward()

        return min(seconds(forward_backward, q.device) for _ in range(TIMES))

    launch = best_time(SHORT) / 2  # forward and backward are two calls
    rows = ROWS[0]
    longest = best_time(rows)
    while longest < TILE and rows < ROWS[1]:
        rows *= 2
        longest = best_time(rows)
    flops = (1 + BACKWARD) * 2.0 * q.shape[2] * (q.shape[3] + v.shape[3]) * rows**2
    return flops / max(longest - 2 * launch, longest / 10), launch


@torch.no_grad()
def local_calls(
    kernel: Kernel,
    scoring: Scoring,
    mask: Mask,
    like: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: int,
    knows_out: bool = False,
) -> LocalCalls:
    """Return functions that run forward and backward of a kernel on random q, k and v.

    Queries and keys have the same positions. Both functions have already run once.

    Args:
        kernel: The kernel.
        scoring: Scale and softcap.
        mask: The mask.
        like: q, k and v; only their heads, widths, dtype and device are read.
        rows: Rows of queries and of keys.
        knows_out: True if backward gets the output, which is the case if queries are not sent.

    Raises:
        Exception: The kernel failed.
    """
    q, k, v = (torch.rand((rows, 1, *t.shape[2:]), device=t.device).to(t.dtype) for t in like)
    spans = [Span(0, 1, rows)]
    (work,) = kernel.works_for(mask, [(spans, spans)])
    out, lse = empty_result(q, v.shape[-1])

    @torch.no_grad()
    def forward() -> None:
        kernel.forward(q, k, v, work, scoring, out, lse)

    forward()
    dout, known_out = torch.rand_like(out, dtype=q.dtype), out.to(q.dtype)
    delta = (dout.to(out.dtype) * known_out).sum(-1)
    queries = Rows(q, dout, lse.clone(), delta, known_out if knows_out else None)
    sums = [torch.zeros_like(t, dtype=out.dtype) for t in (q, k, v)]

    @torch.no_grad()
    def backward() -> None:
        kernel.backward(queries, k, v, work, scoring, *sums)

    backward()
    return LocalCalls(forward, backward)
