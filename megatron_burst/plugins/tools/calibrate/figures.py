# SPDX-License-Identifier: Apache-2.0
"""All measurements of `calibrate`, one after another, and the cluster that they make.

Where something could not be measured, the published figure of the device or an assumption stands
in, and the file says so beside it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from datetime import date
from typing import Any

import torch

from .... import registry
from ....autotune import cluster_file
from ....autotune.clusters import EXCHANGE, LATENCY, NIC, NVLINK, SLOWDOWN, Cluster
from ....autotune.gpus import GPUS, Gpu, of_device
from ....autotune.host_time import ASSUMED
from ....cli.doctor import machine
from ....recompute.host_limits import host_limit
from ....units import grid_of
from ..advise.shapes.models import Model
from ..call_flags import check_place
from . import kernels, launches, links
from .ranks import Figures, Measured, Ranks, joined, repeated

FIGURES = 60  # repeated quantities, all in all, among which --minutes are shared out
COPIES = {"cuda": 5, "cpu": 3}  # repeats of a copy to the host
NOT_MEASURED = "NOT MEASURED: published or assumed"


def calibrate(model: Model, wanted: Namespace) -> None:
    """Measure on all ranks, write on the first; wanted: the command's arguments. Raises the same
    ValueError on all of them.
    """
    with joined(wanted.per_node, 60 * wanted.minutes / FIGURES, machine.own_device()) as ranks:
        ranks.agree(_fault(wanted) or {"--model": wanted.model, "--minutes": wanted.minutes,
                                       "--gpu": wanted.gpu})  # fmt: skip
        ranks.say(f"{ranks.nodes} nodes of {ranks.per_node} ranks on {ranks.device.type}")
        cluster, notes = measured(ranks, model, wanted)
        fault = None
        if ranks.groups.rank == 0:
            try:
                cluster_file.write(cluster, wanted.out, notes)
            except OSError as error:
                fault = ValueError(f"--out {wanted.out}: {error.strerror or error}")
        ranks.agree(fault or {"written": True})
        ranks.say(f"wrote {wanted.out}: {cluster.described}")
        if lacks := missing(ranks):
            ranks.say(f"not measured: {lacks}")


def _fault(wanted: Namespace) -> ValueError | None:
    """What is wrong with the flags on this machine, before anything is measured."""
    try:
        if wanted.gpu is not None and not torch.cuda.is_available():
            raise ValueError(f"--gpu {wanted.gpu}: torch sees no GPU here; leave it out")
        check_place(wanted.out, "--out")
    except ValueError as error:
        return error
    return None


def missing(ranks: Ranks) -> str:
    """What cannot be measured on these ranks; empty if nothing."""
    lacks = []
    if ranks.per_node < 2:
        lacks.append("links within a node (start a rank on every GPU)")
    if ranks.nodes < 2:
        lacks.append("links between nodes (start it on two nodes)")
    return "; ".join(lacks)


def measured(ranks: Ranks, model: Model, wanted: Namespace) -> tuple[Cluster, Mapping[str, str]]:
    """The cluster, and how each figure was found; collective."""
    figures = Figures()
    chunks = kernels.CHUNKS[ranks.device.type]
    ranks.say("matrix products and memory")
    linear, small = kernels.products(ranks, model)
    rate, cutting, adds = kernels.memory(ranks, model)
    adds = adds._replace(value=min(adds.value, rate.value))
    ranks.say(f"attention of {chunks[0]} to {chunks[-1]} rows")
    attention = kernels.attention(ranks, model, adds.value)
    compute = attention["compute"]
    stated = stated_gpu(ranks, wanted.gpu, max(linear.value, compute.value))
    for key, (value, note) in stated_figures(stated, ranks).items():
        figures.state(key, value, note)
    peak = figures.values["gpu.peak"]
    figures.add("gpu.memory_rate", rate)
    figures.add("links.copying", cutting)
    figures.add("gpu.linear", linear._replace(value=min(1.0, linear.value / peak)))
    figures.add("gpu.small", small)
    for name, one in [*attention.items(), ("adding", adds)]:
        figures.add(f"gpu.{name}", one)
    figures.add("gpu.attention", Measured(min(1.0, compute.value / peak), None, "compute / peak"))
    _links(figures, ranks, model, stated)
    ranks.say("copies to the host and back")
    together, alone = host_links(ranks)
    figures.add("host.rate", together)
    figures.add("host.link", alone)
    ranks.say("what launching takes of the processor")
    for name, one in launches.launches(ranks, model).items():
        figures.add(f"host.{name}", one)
    if ranks.size == 1:
        figures.state("host.exchange", ASSUMED.exchange, NOT_MEASURED)
        figures.state("host.plan", ASSUMED.plan, NOT_MEASURED)
    limit = host_limit()
    figures.state("host.memory", int(min(ranks.each(limit))), "80 % of what is there")
    what = "GPUs" if ranks.cuda else "CPU ranks"
    source = f"{wanted.out.name} of {date.today()}, {what}: {grid_of(ranks.per_node, ranks.nodes)}"
    figures.state("cluster.source", source, "")
    figures.state("cluster.gpus", ranks.size, "those that measured")
    figures.state("cluster.per_node", ranks.per_node, "")
    figures.state("cluster.spread", float(f"{max(figures.spreads):.3g}"), "")
    return figures.cluster(), figures.notes


def host_links(ranks: Ranks) -> tuple[Measured, Measured]:
    """Bytes per second between device and host, one way, of a rank (while all copy, alone); the
    slower direction, and of the ranks the slowest. Collective.
    """
    longseq = registry.required("host_memory", "calibrate")
    # Not more than is there; a copy takes BYTES of it.
    room = max(1, min(4 * longseq.BYTES, host_limit() // ranks.per_node))

    def rate() -> float:
        host = longseq.HostMemory(room, device=ranks.device, ranks=ranks.per_node)
        return longseq.copy_rate(host, lambda: None)

    together, alone = [], []
    for _ in range(COPIES[ranks.device.type]):
        ranks.each(0.0)
        together.append(min(ranks.each(rate())))
        ranks.each(0.0)
        alone.append(min(ranks.each(rate() if ranks.local == 0 else math.inf)))
    how = f"{longseq.BYTES >> 20} MiB to {'pinned' if ranks.cuda else 'pageable'} memory and back"
    return (
        repeated(together, f"all ranks of a node, {how}"),
        repeated(alone, f"one rank, {how}"),
    )


def _links(figures: Figures, ranks: Ranks, model: Model, gpu: Gpu) -> None:
    """Links that were measured, and what stands in for the others; collective."""
    carried = links.links(ranks, figures)
    if carried is not None:
        ranks.say("attention while links carry something")
        figures.add("links.slowdown", links.slowdown(ranks, model, carried))
    for name, value in stand_ins(gpu, ranks).items():
        if f"links.{name}" not in figures.values:
            figures.state(f"links.{name}", value, NOT_MEASURED)
    if gpu.name not in GPUS:  # nothing is published of its links
        figures.state("links.nvlink", figures.values["links.intra"], "`intra`")
        figures.state("links.nic", figures.values["links.inter"], "`inter`")


def stated_gpu(ranks: Ranks, name: str | None, best: float) -> Gpu:
    """The GPU of the table, by name or by what torch calls it; one without published figures
    otherwise, whose peak is the best that was measured.

    best: operations per second that anything reached.
    """
    if not ranks.cuda:
        memory = host_limit() // ranks.per_node
        return Gpu("cpu", max(1, memory), best, 1.0, "a CPU rank: its peak is what was measured")
    title = torch.cuda.get_device_name(ranks.device)
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    known = GPUS[name.lower()] if name is not None else of_device(title)
    if known is None:
        return Gpu(title, memory, best, 1.0, "no published figures: its peak is what was measured")
    return Gpu(**(vars(known) | {"memory": memory, "peak": max(known.peak, best)}))


def stated_figures(gpu: Gpu, ranks: Ranks) -> dict[str, tuple[Any, str]]:
    """Key of a cluster file -> (value, note), for what is stated of a GPU and not timed."""
    known = gpu.name in GPUS
    stated: dict[str, tuple[Any, str]] = {
        "gpu.name": (gpu.name, ""),
        "gpu.memory": (gpu.memory, "of the first rank"),
        "gpu.peak": (float(f"{gpu.peak:.4g}"), "published" if known else "as measured"),
        "gpu.source": (gpu.source, ""),
    }
    if known:
        stated["links.nvlink"] = gpu.nvlink, "published"
        stated["links.nic"] = gpu.nic, "published"
    stated["gpu.reserve"] = (Cluster.reserve, "assumed") if ranks.cuda else (0, "none on a CPU")
    return stated


def stand_ins(gpu: Gpu, ranks: Ranks) -> dict[str, float]:
    """What is taken for [links] where nothing was measured: published rates, and no limit where
    there are none.
    """
    if gpu.name in GPUS:
        rates = {"intra": gpu.nvlink * NVLINK, "inter": gpu.nic * NIC}
    else:
        rates = {"intra": math.inf, "inter": math.inf}
    if not ranks.cuda:
        return rates
    return rates | {"latency": LATENCY, "exchange": EXCHANGE, "slowdown": SLOWDOWN}
