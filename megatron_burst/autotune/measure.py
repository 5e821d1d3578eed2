"""Measures rates: links by sending messages, kernels by running them, once per grid.

Collective, with the same answer on all ranks: their measurements are gathered, and the slowest
link and the median device count. Takes about a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from ..comm.consensus import Facts, agree
from ..comm.groups import Groups, InProcessGroups
from ..comm.transport import Channel, Endpoint, Receive, Send
from ..kernels import registry
from ..kernels.base import Kernel, Rows, Scoring
from ..kernels.online_softmax import accumulation_dtype, empty_result
from ..layout import Span
from ..masks import Full, Mask
from .known import known
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

Neighbours = tuple[Endpoint, Channel, int, int]  # whom to send to, whom to receive from


def measure_rates(
    groups: Groups | InProcessGroups,
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
    if isinstance(groups, InProcessGroups):
        measure = partial(measure_rates, like=like, kernel=kernel, mask=mask)
        return groups.run(measure, groups.ranks)[0]
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
    """Rates without `compute`, of messages of this kind of device; kept for `groups`. Ranks in one
    process have no links."""
    if groups.size == 1 or groups.backend == "in_process":
        known(groups.cache).rates = rates = Rates(math.inf, math.inf)
        return rates
    groups.connect([FLAT, ULYSSES], device)
    counters = groups.counters
    before = counters.intra, counters.inter
    both = "intra", "inter"
    latencies, speeds = zip(*(_link(groups, name, device) for name in both), strict=True)
    posting = max(_posting(groups, name, device) for name in both)
    counters.intra, counters.inter = before
    known(groups.cache).rates = rates = Rates(*speeds, latency=max(latencies), posting=posting)
    return rates


def _link(groups: Groups, name: str, device: torch.device) -> tuple[float, float]:
    """(seconds per message, bytes per second) of a link class, all ranks sending at once; the
    slowest rank's. (0, inf) where the grid has no such link."""
    neighbours = _neighbours(groups, name)

    def seconds(size: int, times: int) -> float:
        """Each rank's best, because what else a machine does can only slow it."""
        out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        _slowest(groups, 0.0)  # all start together
        if neighbours is None:
            return _slowest(groups, 0.0)
        return _slowest(groups, min(_transfer(neighbours, out, into) for _ in range(times)))

    seconds(SMALL, 1)  # makes the connections
    latency = seconds(SMALL, 16)
    if latency == 0.0:
        return 0.0, math.inf
    size, took = FIRST, seconds(FIRST, 2)
    while took < LONG / 2 and size < LARGEST:
        size = min(LARGEST, max(2 * size, int(size * LONG / took)))
        took = seconds(size, 2)
    return latency, size / max(took - latency, took / 2)


def _posting(groups: Groups, name: str, device: torch.device) -> float:
    """Seconds until `exchange` has returned, all ranks exchanging over a link class: the middle of
    each rank's, and of the ranks the slowest. On a GPU the host does it while the device works."""
    neighbours = _neighbours(groups, name)
    if device.type == "cuda":
        return 0.0
    out, into = (torch.zeros(FIRST, dtype=torch.uint8) for _ in range(2))
    _slowest(groups, 0.0)
    if neighbours is None:
        return _slowest(groups, 0.0)
    return _slowest(groups, median(_started(neighbours, out, into)[0] for _ in range(POSTS)))


def _slowest(groups: Groups, value: float) -> float:
    """The largest of all ranks' values; waits for all of them."""
    found = groups.gather(torch.tensor([value], dtype=torch.float64))
    return max(each.item() for each in found)


def _neighbours(groups: Groups, link: str) -> Neighbours | None:
    """The next and the last rank over one link class, in this rank's ring or its ulysses group."""
    rank, topology = groups.rank, groups.topology
    for endpoint, channel, ranks in (
        (groups.ring, FLAT, topology.ring(rank)),
        (groups.ulysses, ULYSSES, topology.ulysses_group(rank)),
    ):
        nodes = [each // topology.per_node for each in ranks]
        width, me = nodes.count(nodes[0]), ranks.index(rank)
        block, index = divmod(me, width)
        if link == "intra" and width > 1:
            there, back = ((index + step) % width + block * width for step in (1, -1))
            return endpoint, channel, there, back
        if link == "inter" and width < len(ranks):
            there, back = ((me + step) % len(ranks) for step in (width, -width))
            return endpoint, channel, there, back
    return None


def _transfer(neighbours: Neighbours, out: torch.Tensor, into: torch.Tensor) -> float:
    """Seconds until `out` has gone to the next rank and `into` come from the last one."""
    return _started(neighbours, out, into)[1]


def _started(neighbours: Neighbours, out: torch.Tensor, into: torch.Tensor) -> tuple[float, float]:
    """Of one exchange: seconds until it was started, and until it was done."""
    endpoint, channel, there, back = neighbours
    _settle(out.device)
    begin = time.perf_counter()
    # "intra" is where the bytes are counted, for a moment: the counters are put back
    sends, receives = [Send(there, "intra", [out])], [Receive(back, [into])]
    pending = endpoint.exchange(channel, sends, receives, "measuring a link")
    posted = time.perf_counter()
    pending.wait()
    _settle(out.device)
    return posted - begin, time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_speed(
    groups: Groups,
    kernel: Kernel,
    scoring: Scoring,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[float, float]:
    """(FLOP/s, seconds per call) of a kernel on a square tile of the heads of q, k, v, which are
    only read for shape, dtype and device; kept for `groups`. The middle rank's. Collective."""
    key = kernel.name, scoring.softcap, q.dtype, q.shape[2:], k.shape[2:], v.shape[3], q.device.type
    speeds = known(groups.cache).speeds
    if key not in speeds:
        shared = groups.backend == "in_process"  # one device: its first rank measures for all
        mine = (0.0, 0.0) if shared and groups.rank else _speed(kernel, scoring, q, k, v)
        found = groups.gather(torch.tensor(mine, dtype=torch.float64))
        found = found[:1] if shared else found
        speed, launch = (median(each[i].item() for each in found) for i in range(2))
        speeds[key] = speed, launch
    return speeds[key]


def _speed(kernel: Kernel, scoring: Scoring, *like: torch.Tensor) -> tuple[float, float]:
    """Every size runs once untimed: kernels are compiled, or planned, for sizes they have not seen.
    What is timed is the best of `TIMES`."""
    q, _, v = like

    def seconds(rows: int) -> float:
        _tile(kernel, scoring, like, rows)
        return min(_tile(kernel, scoring, like, rows) for _ in range(TIMES))

    launch = seconds(SHORT) / 2  # forward and backward
    rows = ROWS[0]
    took = seconds(rows)
    while took < TILE and rows < ROWS[1]:
        rows *= 2
        took = seconds(rows)
    flops = (1 + BACKWARD) * 2.0 * q.shape[2] * (q.shape[3] + v.shape[3]) * rows**2
    return flops / max(took - 2 * launch, took / 10), launch


@torch.no_grad()
def _tile(kernel: Kernel, scoring: Scoring, like: Sequence[torch.Tensor], rows: int) -> float:
    """Seconds of a forward and a backward of `rows` queries and as many keys, batch 1."""
    q, k, v = (torch.rand((rows, 1, *t.shape[2:]), device=t.device).to(t.dtype) for t in like)
    work = kernel.work_for(Full(), [Span(0, 1, rows)], [Span(0, 1, rows)])
    total = accumulation_dtype(q.dtype)
    sums = [torch.zeros_like(t, dtype=total) for t in (q, k, v)]
    _settle(q.device)
    begin = time.perf_counter()
    out, lse = empty_result(q, v.shape[-1])
    kernel.forward(q, k, v, work, scoring, out, lse)
    dout = torch.ones_like(out, dtype=q.dtype)
    delta = (dout * out).sum(-1, dtype=total)
    kernel.backward(Rows(q, dout, lse, delta), k, v, work, scoring, *sums)
    _settle(q.device)
    return time.perf_counter() - begin
