"""Work of one rank: load a setting, prepare a rival, run it timed, check its results.

`load`, `rates`, `prepare` and `timed` are called on all ranks (`benchmarks.cluster.ranks`). A run
is a forward and a backward, each after a barrier. Only work that belongs to communication is
computed: sums of states, and reordering of rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import megatron_burst as mb
from benchmarks.cluster import emulated
from benchmarks.cluster.mail import LINKS, PASSES
from benchmarks.cluster.record import Run, Work

from . import exchange, ours, ways
from .settings import ALL_TO_ALL, CONVOLUTION, GATHER, Setting

TOLERANCE = 1e-4  # relative to the largest entry: fp32 states after 15 products of maps
LONG, ROW_STEP = 1000, 61  # rows
LATER = 0.02  # seconds from a barrier to the start of the timed call
State = dict[str, Any]


def load(state: State, setting: Setting) -> None:
    """Load a setting and drop the previous setting."""
    state["setting"], state["ways"] = setting, {}
    if "module" not in state:
        state["module"] = exchange.megatron()


def rates(state: State) -> mb.Rates:
    """Return the rates of `mb.measure_rates` for the choice of `auto`."""
    with emulated.urgent(True):  # as in all timed calls
        return mb.measure_rates(groups(state))


def groups(state: State) -> mb.Groups:
    """Return one grid, created once per rank."""
    if "grid" not in state:
        intra = state["network"].per_node
        state["grid"] = mb.Groups.from_topology(dist.group.WORLD, intra=intra)
    return state["grid"]


def prepare(state: State, rival: str, measured: mb.Rates | None = None) -> Work:
    """Prepare a rival, run it once to warm up and check it. Collective."""
    setting, rank = state["setting"], state["rank"]
    way = ways.make(setting, rival, rank, state["module"])
    if way is None and rival == CONVOLUTION:
        way = ours.convolution(setting, groups(state))
    if way is None:
        way = ours.way(setting, rival, groups(state), measured)
    state["ways"][rival] = way
    run = timed(state, rival, row_step=1)
    if not run.error <= TOLERANCE:
        raise ArithmeticError(f"{rival} is off by {run.error:.3g} of the largest entry")
    network, size = state["network"], len(way.sent[PASSES[0]])
    peers = {link: [r for r in range(size) if r != rank and network.link(rank, r) == link]
             for link in LINKS}  # fmt: skip
    by_link = {
        p: {link: sum(sent[peer] for peer in peers[link]) for link in LINKS}
        for p, sent in way.sent.items()
    }
    return Work(by_link, way.sent, way.says)


def timed(state: State, rival: str, row_step: int = ROW_STEP) -> Run:
    """Run one forward and backward; compare every `row_step`-th row of long results."""
    way, network, me = state["ways"][rival], state["network"], state["rank"]
    counters = state["grid"].counters if "grid" in state else None
    if counters is not None:
        counters.reset()
    dist.barrier()
    sent_before = network.sent_from_here(me)
    with emulated.urgent(True):
        begin, own = together(), time.thread_time()
        leaves, outputs = ways.reach(way)
        forward, busy = (begin, time.perf_counter()), time.thread_time() - own
        begin, own = together(), time.thread_time()
        grads = torch.autograd.grad(outputs, leaves, way.upstream)
        backward, busy = (begin, time.perf_counter()), busy + time.thread_time() - own
        dist.barrier()
    kernel = {link: n - sent_before[link] for link, n in network.sent_from_here(me).items()}
    pairs = zip((*outputs, *grads), way.truth, strict=True)
    compared = [(x[::row_step], y[::row_step]) if len(x) > LONG else (x, y) for x, y in pairs]
    error = worst_error(*zip(*compared, strict=True))
    counted = None
    if counters is not None and rival not in (ALL_TO_ALL, GATHER):
        counted = {"intra": counters.intra, "inter": counters.inter}
    clock = dict(zip(PASSES, (forward, backward), strict=True))
    return Run(clock, kernel, counted, error, TOLERANCE, busy)


def together() -> float:
    """Return at the same time on all ranks, which share a clock; the result is this time.

    A barrier releases some ranks milliseconds earlier, and a small state takes only milliseconds.
    """
    dist.barrier()
    begin = torch.tensor(time.perf_counter() + LATER, dtype=torch.float64)
    dist.broadcast(begin, 0)
    time.sleep(max(0.0, begin.item() - time.perf_counter()))
    return begin.item()


def worst_error(results: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Return the largest difference relative to the largest entry of its tensor.

    It is relative to 1 if all entries are 0, because no state enters the first piece.
    """
    worst = []
    for x, y in zip(results, truth, strict=True):
        largest = y.abs().max().item() or 1.0
        worst.append((x.detach() - y).abs().max() / largest)
    return torch.stack(worst).max().item()  # NaN is not skipped
