# SPDX-License-Identifier: Apache-2.0
"""Measures links by sending messages and kernels by running them.

`measure_rates`, `links` and `kernel_speed` are collective and return the same on all ranks: their
measurements are gathered, and the slowest link and the median device count. That takes about a
second, once per grid. `calibrate`, the doctor and its GPU report build on the parts: `peers`,
`ring_peers`, `starter`, `exchange_seconds`, `long_enough`, `rate_of`, `link_speeds`, `local_calls`
and `seconds`.
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

SMALL = 64  # bytes of a message that is all latency
FIRST = 2**18  # bytes of the first guess
LONG = 0.2  # seconds that a transfer should take, so that bursts and latency do not show
LARGEST = 2**27  # bytes
POSTS = 9  # exchanges whose start is timed
TILE = 0.01  # seconds that a kernel should run
ROWS = 64, 8192  # of a tile, at least and at most
FLAT, ULYSSES = Channel("flat", False), Channel("ulysses", False)  # they reach all neighbours
SHORT = 8  # rows of a tile that is all launching
TIMES = 2  # that a size is timed
COPIED = 2**25  # bytes of a copy on the device


class Peers(NamedTuple):
    """The members of a channel with which a rank exchanges messages at the same time: of each pair
    it sends to the first and receives from the second.
    """

    endpoint: Endpoint
    channel: Channel
    pairs: tuple[tuple[int, int], ...]


class LocalCalls(NamedTuple):
    """A forward and a backward of the local attention on one tile, each run once already."""

    forward: Callable[[], None]
    backward: Callable[[], None]


def measure_rates(
    groups: Groups,
    *,
    like: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    kernel: str = "auto",
    mask: Mask | None = None,
) -> Rates:
    """What the links of `groups` carry, measured now; collective, the same on all ranks.

    like: (q, k, v) as for `attention`, of which only shapes, dtype and device are read: the
    kernel's speed is measured too, on a tile that shows all, and `compute` is stated. mask, as for
    `attention` (default: causal), decides what kernel "auto" takes, as `prepare` does.
    `prepare(algorithm="auto")` uses what was measured last. Raises the same ValueError on every
    rank.
    """
    if not isinstance(groups, Groups):
        raise ValueError(f"groups: make them with mb.Groups, got {groups!r:.100}")
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
    """Rates without `compute`, of messages of this kind of device; kept for `groups`."""
    if groups.size == 1:
        groups.cache["rates"] = rates = Rates(math.inf, math.inf)
        return rates
    groups.connect([FLAT, ULYSSES], device)
    counters = groups.counters
    before = counters.intra, counters.inter
    both = [peers(groups, link) for link in ("intra", "inter")]
    latencies, speeds = zip(*(link_speeds(groups, each, device) for each in both), strict=True)
    posting = max(_posting(groups, each, device) for each in both)
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
        host=ASSUMED if device.type == "cuda" else None,  # else in `posting` and `launch`
    )
    return rates


def peers(groups: Groups, link: str) -> Peers | None:
    """The next and the last rank over one link class, in this rank's ring or its ulysses group;
    None where it has no such link.
    """
    rank, topology = groups.rank, groups.topology
    for endpoint, channel, ranks in (
        (groups.ring, FLAT, topology.ring(rank)),
        (groups.ulysses, ULYSSES, topology.ulysses_group(rank)),
    ):
        nodes = [each // topology.per_node for each in ranks]
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
    """`peers` on the channel that a ring's own messages take, connected. Collective."""
    found = peers(groups, ring)
    if found is None:
        return None
    found = found._replace(channel=Channel(ring, False))
    groups.connect([found.channel], device)
    return found


def starter(peers: Peers, size: int, device: torch.device) -> Callable[[], Pending]:
    """A function that starts an exchange of `size` bytes with each of the peers, and returns what
    waits for its end. The channel must be connected.
    """
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    into = [torch.empty_like(out) for _ in peers.pairs]
    # "intra" is where the bytes are counted, whatever link they take
    sends = [Send(to, "intra", [out]) for to, _ in peers.pairs]
    receives = [Receive(source, [x]) for (_, source), x in zip(peers.pairs, into, strict=True)]
    return lambda: peers.endpoint.exchange(peers.channel, sends, receives, "measuring a link")


def exchange_seconds(
    start: Callable[[], Pending], device: torch.device, times: int = 1
) -> tuple[float, float]:
    """Seconds until the first of `times` exchanges in a row had been started, and until all were
    done.
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
    """(seconds per message, by the slowest rank; bytes per second of every rank), all ranks sending
    to their peers at once. (0, inf) where no rank has such peers. Collective.
    """

    def of_ranks(size: int, times: int) -> list[float]:
        """Each rank's best, because what else a machine does can only slow it."""
        start = None if peers is None else starter(peers, size, device)
        _of_ranks(groups, 0.0)  # all start together
        if start is None:
            return _of_ranks(groups, 0.0)
        return _of_ranks(groups, min(exchange_seconds(start, device)[1] for _ in range(times)))

    of_ranks(SMALL, 1)  # makes the connections
    latency = max(of_ranks(SMALL, 16))
    if latency == 0.0:
        return 0.0, [math.inf] * groups.size
    size, took = long_enough(lambda size: of_ranks(size, 2), LONG, LARGEST)
    return latency, [rate_of(size, each, latency) if each else math.inf for each in took]


def long_enough(
    took: Callable[[int], list[float]], long: float, largest: int
) -> tuple[int, list[float]]:
    """(bytes of a message that takes about `long` seconds, or `largest`; what it took).

    took: seconds of a message of so many bytes, of every rank; the slowest counts.
    """
    size, of_ranks = FIRST, took(FIRST)
    while max(of_ranks) < long / 2 and size < largest:
        size = min(largest, max(2 * size, int(size * long / max(of_ranks))))
        of_ranks = took(size)
    return size, of_ranks


def rate_of(size: float, took: float, latency: float) -> float:
    """Bytes per second of what took so many seconds, `latency` of them without bytes."""
    return size / max(took - latency, took / 2)


def _posting(groups: Groups, peers: Peers | None, device: torch.device) -> float:
    """Seconds until `exchange` has returned, all ranks exchanging with their peers: the middle of
    each rank's, and of the ranks the slowest. On a GPU the host does it while the device works.
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
    """Bytes per second that a copy on the device reads and writes."""
    x = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    there = x.clone()
    return 2 * COPIED / min(seconds(lambda: there.copy_(x), device) for _ in range(TIMES))


def _room(device: torch.device) -> float:
    """Bytes of a GPU that no tensor holds; of a CPU, whose memory ranks share, nobody knows."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _of_ranks(groups: Groups, value: float) -> list[float]:
    """The value of every rank; waits for all of them."""
    gathered = groups.gather(torch.tensor([value], dtype=torch.float64))
    return [each.item() for each in gathered]


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(
    call: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """Seconds of one call: on a GPU by events on its own time line, on a CPU by the wall clock.

    before: begins what is to run beside it, on a device that is idle.
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
    """(FLOP/s, seconds per call) of a kernel on a square tile of the heads of q, k, v, which are
    only read for shape, dtype and device; kept for `groups`. The middle rank's. Collective.
    """
    key = kernel.name, scoring.softcap, q.dtype, q.shape[2:], k.shape[2:], v.shape[3], q.device.type
    speeds: dict[Any, tuple[float, float]] = groups.cache.setdefault("speeds", {})
    if key not in speeds:
        own = _speed(kernel, scoring, q, k, v)
        of_ranks = groups.gather(torch.tensor(own, dtype=torch.float64))
        speed, launch = (median(each[i].item() for each in of_ranks) for i in range(2))
        speeds[key] = speed, launch
    return speeds[key]


def _speed(
    kernel: Kernel, scoring: Scoring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[float, float]:
    """Every size runs once untimed: kernels are compiled, or planned, for sizes they have not seen.
    What is timed is the best of `TIMES`.
    """

    def took(rows: int) -> float:
        calls = local_calls(kernel, scoring, Full(), (q, k, v), rows)

        def both() -> None:
            calls.forward()
            calls.backward()

        return min(seconds(both, q.device) for _ in range(TIMES))

    launch = took(SHORT) / 2  # forward and backward
    rows = ROWS[0]
    most = took(rows)
    while most < TILE and rows < ROWS[1]:
        rows *= 2
        most = took(rows)
    flops = (1 + BACKWARD) * 2.0 * q.shape[2] * (q.shape[3] + v.shape[3]) * rows**2
    return flops / max(most - 2 * launch, most / 10), launch


@torch.no_grad()
def local_calls(
    kernel: Kernel,
    scoring: Scoring,
    mask: Mask,
    like: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: int,
    knows_out: bool = False,
) -> LocalCalls:
    """The calls of one pair of random numbers, `rows` queries with as many keys and values at the
    same positions.

    like: q, k, v, of which only heads, widths, dtype and device are read; knows_out: backward gets
    the output, as where queries stay. Raises what the kernel raises.
    """
    q, k, v = (torch.rand((rows, 1, *t.shape[2:]), device=t.device).to(t.dtype) for t in like)
    spans = [Span(0, 1, rows)]
    work = kernel.work_for(mask, spans, spans)
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
