"""What one rank does: gets a setting, makes a rival's way, runs it timed, checks its results.

`load`, `rates`, `prepare` and `timed` are called on all ranks alike (`benchmarks.cluster.ranks`). A
run is a forward and a backward, each after a barrier; nothing is computed but what belongs to the
communication: the sums of states, the order of rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import megatron_burst as mb
from benchmarks.cluster import emulated
from benchmarks.cluster.mail import PASSES

from . import exchange, ours, ways
from .settings import CONVOLUTION, Setting

TOLERANCE = 1e-4  # of the largest entry: fp32 states after 15 products of maps
LONG, SOME = 1000, 61  # rows
State = dict[str, Any]


class Work(NamedTuple):
    """What a rival costs this rank, by pass: payload bytes to every rank; what it is made of, or
    what "auto" chose."""

    sent: dict[str, list[int]]
    says: str


class Run(NamedTuple):
    """One timed run on one rank: clock readings by pass, bytes by link as the kernel counted them
    and, of ours, as the transport did, and the worst relative error."""

    clock: dict[str, tuple[float, float]]
    kernel: dict[str, int]
    counted: dict[str, int] | None
    error: float


def load(state: State, setting: Setting) -> None:
    """Forget the setting before."""
    state["setting"], state["ways"] = setting, {}
    if "module" not in state:
        state["module"] = exchange.megatron()


def rates(state: State) -> mb.Rates:
    """What `mb.measure_rates` finds: `auto` chooses by it."""
    return mb.measure_rates(groups(state))


def groups(state: State) -> mb.Groups:
    """One grid for a rank's life."""
    if "grid" not in state:
        intra = state["network"].per_node
        state["grid"] = mb.Groups.from_topology(dist.group.WORLD, intra=intra)
    return state["grid"]


def prepare(state: State, rival: str, measured: mb.Rates | None = None) -> Work:
    """Make the way of a rival, run it once to warm up and check it. Collective."""
    setting, rank = state["setting"], state["rank"]
    way = ways.make(setting, rival, rank, state["module"])
    if way is None and rival == CONVOLUTION:
        way = ours.convolution(setting, groups(state))
    if way is None:
        way = ours.way(setting, rival, groups(state), measured)
    state["ways"][rival] = way
    run = timed(state, rival, every=1)
    if not run.error <= TOLERANCE:
        raise ArithmeticError(f"{rival} is off by {run.error:.3g} of the largest entry")
    return Work(way.sent, way.says)


def timed(state: State, rival: str, every: int = SOME) -> Run:
    """One forward and backward; of long results one row in `every` is compared."""
    way, network, me = state["ways"][rival], state["network"], state["rank"]
    counters = state["grid"].counters if "grid" in state else None
    if counters is not None:
        counters.reset()
    dist.barrier()
    before = network.sent_from_here(me)
    with emulated.urgent(True):
        dist.barrier()
        begin = time.perf_counter()
        leaves, outputs = ways.reach(way)
        forward = begin, time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        grads = torch.autograd.grad(outputs, leaves, way.upstream)
        backward = begin, time.perf_counter()
        dist.barrier()
    kernel = {link: n - before[link] for link, n in network.sent_from_here(me).items()}
    found = zip((*outputs, *grads), way.truth, strict=True)
    some = [(x[::every], y[::every]) if len(x) > LONG else (x, y) for x, y in found]
    error = worst_error(*zip(*some, strict=True))
    counted = {"intra": counters.intra, "inter": counters.inter} if counters is not None else None
    return Run(dict(zip(PASSES, (forward, backward), strict=True)), kernel, counted, error)


def worst_error(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor, or to 1 where all of
    them are 0: no state enters the first piece."""
    worst = []
    for x, y in zip(got, truth, strict=True):
        largest = y.abs().max().item() or 1.0
        worst.append((x.detach() - y).abs().max() / largest)
    return torch.stack(worst).max().item()  # what is no number is not skipped
