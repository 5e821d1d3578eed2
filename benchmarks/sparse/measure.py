"""Work of one rank of the emulated cluster: unchanged operations; computing a pair only sleeps.

A pair sleeps for its FLOPs / speed of the device. The indexer has FLOPs for all visible keys of a
query, and attention for min(top_k, visible keys), spread evenly over the visible keys. Bytes are
from the plans. Tests check results.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_burst as mb
from benchmarks.cluster import emulated
from benchmarks.cluster.emulated import BACKWARD
from benchmarks.cluster.mail import LINKS, PASSES
from benchmarks.cluster.record import Run, Work
from megatron_burst.plugins.sparse import indexer, kernels, registry
from megatron_burst.plugins.sparse.pairs import SelectedPairs

from .gathered import Gathering
from .settings import GATHERS, Layer

State = dict[str, Any]
KERNEL = "sleeping"


class Device:
    """Emulated device of this rank; speed in FLOP/s, math.inf if compute takes no time."""

    def __init__(self, layer: Layer):
        self.layer, self.speed = layer, math.inf
        self.counts: dict[int, tuple[SelectedPairs, float, float]] = {}

    def flops(self, work: SelectedPairs) -> tuple[float, float]:
        """Return FLOPs of the indexer, and of attention in forward."""
        counted = self.counts.get(id(work))
        if counted is None or counted[0] is not work:
            seen = np.searchsorted(work.keys, work.queries, side="right").astype(float)
            selected = seen * np.minimum(1.0, self.layer.top_k / (work.queries + 1))
            counted = work, float(seen.sum()), float(selected.sum())
            self.counts[id(work)] = counted
        return counted[1] * self.layer.index_flops, counted[2] * self.layer.attention_flops

    def take(self, flops: float) -> None:
        if flops / self.speed > 0:
            time.sleep(flops / self.speed)


def load(state: State, layer: Layer) -> None:
    """Create this rank's tensors, and let pairs sleep from now on."""
    device = Device(layer)

    class Sleeping(kernels.SelectedKernel):
        def forward(self, *arguments: Any) -> None:
            device.take(device.flops(arguments[3])[1])

        def backward(self, *arguments: Any) -> None:
            device.take(BACKWARD * device.flops(arguments[3])[1])

    def score(_: Any, call: Any, *__: Any) -> None:
        device.take(device.flops(call.work)[0])

    registry.KERNELS[KERNEL] = Sleeping
    indexer.UnitSelector.pair = score  # pyright: ignore[reportAttributeAccessIssue]
    network, rank = state["network"], state["rank"]
    sizes = (layer.index_heads, layer.index_width), (1, layer.index_width), (layer.index_heads,)
    index = [torch.zeros(layer.rows, 1, *size) for size in sizes]
    q, k = (torch.zeros(layer.rows, 1, h, layer.latent) for h in (layer.heads, 1))
    world: Any = dist.group.WORLD
    groups = mb.Groups.from_topology(world, intra=network.per_node)
    layout = mb.layout.make(layer.layout, cp_size=network.size)
    length = layer.rows * network.size
    spans = [layout.spans(r, length) for r in range(network.size)]
    whole = SelectedPairs(mb.masks.Causal(), spans[rank], [s for shard in spans for s in shard])
    state.update(
        device=device, groups=groups, layout=layout, index=index, whole=whole, plans={},
        q=q.requires_grad_(), k=k.requires_grad_(), dout=torch.zeros(*q.shape[:3], layer.values),
    )  # fmt: skip


def rates(state: State, speed: float) -> mb.Rates:
    """Return measured rates of links, with the emulated speed and the excess sleep of this rank."""
    measured = mb.measure_rates(state["groups"])
    launch = emulated.oversleep() if speed != math.inf else 0.0
    return dataclasses.replace(measured, compute=speed, launch=launch)


def prepare(state: State, name: str, rates: mb.Rates | None = None) -> Work:
    """Prepare a rival, run it once, and return its costs. Collective."""
    plan: Any
    by_pass: Any
    layer, groups = state["device"].layer, state["groups"]
    if name in GATHERS:
        state["plans"][name] = plan = Gathering(
            name, state["network"].nodes, groups.topology.per_node
        )
    else:
        q, k, w = state["q"], state["k"], layer.values
        state["plans"][name] = plan = mb.prepare(
            q[..., w:], k[..., w:], k[..., :w], groups=groups, layout=state["layout"],
            algorithm=name, kernel="reference", side="kv", rates=rates,
        )  # fmt: skip
    run: Any = timed(state, name, math.inf)
    scores, attention = state["device"].flops(state["whole"])
    flops = {"forward": scores + attention, "backward": BACKWARD * attention}
    if name in GATHERS:  # this rival counts both passes together
        return Work({"forward": run.counted, "backward": dict.fromkeys(LINKS, 0)}, {}, "", flops)
    plans = [p for p in groups.cache["sparse"].values() if p.facts["plan"] == plan.identity]
    sent = [[sum(getattr(p.traffic()[n], link) for p in plans if n == 0 or any(p.needs_grad))
             for link in LINKS] for n in (0, 1)]  # fmt: skip
    by_pass = {p: dict(zip(LINKS, x, strict=True)) for p, x in zip(PASSES, sent, strict=True)}
    chosen = " and ".join(p.algorithm for p in plans)
    return Work(by_pass, {}, chosen if name == "auto" else "", flops)


def predicted(state: State, name: str) -> dict[str, float]:
    """Return seconds of selection and attention for each algorithm, as compared by "auto"."""
    plan: Any = state["plans"][name]
    seconds: dict[str, float] = {}
    for sparse_plan in state["groups"].cache["sparse"].values():
        if sparse_plan.facts["plan"] == plan.identity:
            for option in (sparse_plan.choice.taken, *sparse_plan.choice.others):
                seconds[option.algorithm] = seconds.get(option.algorithm, 0.0) + option.seconds
    return seconds


def timed(state: State, name: str, speed: float) -> Run:
    """Run a forward, selection and attention, and a backward, each after a barrier."""
    device, plan, network = state["device"], state["plans"][name], state["network"]
    device.speed, me, groups = speed, state["rank"], state["groups"]
    call = _gathered if name in GATHERS else _ours
    counters = plan.sent if name in GATHERS else None
    if counters is None:
        groups.counters.reset()
    else:
        counters.update(dict.fromkeys(counters, 0))
    dist.barrier()
    before = network.sent_from_here(me)
    with emulated.urgent(True):
        dist.barrier()
        begin = time.perf_counter()
        backward = call(state, plan)
        forward = begin, time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        backward()
        back = begin, time.perf_counter()
        dist.barrier()
    kernel = {link: n - before[link] for link, n in network.sent_from_here(me).items()}
    counted = counters or {"intra": groups.counters.intra, "inter": groups.counters.inter}
    return Run({"forward": forward, "backward": back}, kernel, dict(counted), 0.0, 0.0)


def _ours(state: State, plan: mb.Plan) -> Any:
    layer, q, k = state["device"].layer, state["q"], state["k"]
    chosen = mb.select(*state["index"], rule="dsa", top_k=layer.top_k, plan=plan, label=0)
    out = mb.sparse_attention(
        q, k, None, chosen, value_width=layer.values, kernel=KERNEL, plan=plan, label=0
    )
    return lambda: torch.autograd.grad(out, (q, k), state["dout"])


def _gathered(state: State, gathering: Gathering) -> Any:
    device = state["device"]
    scores, attention = device.flops(state["whole"])
    gathering.gather(state["index"][1])
    device.take(scores)
    keys = gathering.gather(state["k"].detach())
    device.take(attention)

    def backward() -> None:
        grads = [torch.zeros_like(x) for x in keys]
        device.take(BACKWARD * attention)
        gathering.scatter(grads)

    return backward
