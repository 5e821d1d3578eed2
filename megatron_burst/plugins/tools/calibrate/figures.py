# SPDX-License-Identifier: Apache-2.0
"""The measurements of `calibrate`, in order, and the cluster file with their results.

A figure is one number of the file. A figure that cannot be measured gets the published value of the
device, or an assumed value. A comment in the file marks such figures.
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
from .ranks import Figures, Measurement, Ranks, joined, repeated

FIGURES = 60  # number of repeated measurements; each gets an equal share of --minutes
COPIES = {"cuda": 5, "cpu": 3}  # repeats of a copy to the host
NOT_MEASURED = "NOT MEASURED: published or assumed"


def calibrate(model: Model, arguments: Namespace) -> None:
    """Measure on all ranks, and write the cluster file on rank 0. A collective call.

    Args:
        model: Model whose shapes are measured.
        arguments: Arguments of the command.

    Raises:
        ValueError: Flags are invalid, or a measurement fails. All ranks raise the same error.
    """
    budget = 60 * arguments.minutes / FIGURES
    with joined(arguments.per_node, budget, machine.own_device()) as ranks:
        ranks.agree(_fault(arguments) or {
            "--model": arguments.model, "--minutes": arguments.minutes, "--gpu": arguments.gpu,
        })  # fmt: skip
        ranks.report(f"{ranks.nodes} nodes of {ranks.per_node} ranks on {ranks.device.type}")
        cluster, notes = measure_cluster(ranks, model, arguments)
        fault = None
        if ranks.groups.rank == 0:
            try:
                cluster_file.write(cluster, arguments.out, notes)
            except OSError as error:
                fault = ValueError(f"--out {arguments.out}: {error.strerror or error}")
        ranks.agree(fault or {"written": True})
        ranks.report(f"wrote {arguments.out}: {cluster.described}")
        if unmeasured := missing(ranks):
            ranks.report(f"not measured: {unmeasured}")


def _fault(arguments: Namespace) -> ValueError | None:
    """Return a ValueError for flags that are invalid on this machine; None if all are valid."""
    try:
        if arguments.gpu is not None and not torch.cuda.is_available():
            raise ValueError(
                f"--gpu {arguments.gpu}: torch finds no GPU on this machine; remove --gpu"
            )
        check_place(arguments.out, "--out")
    except ValueError as error:
        return error
    return None


def missing(ranks: Ranks) -> str:
    """Return a text that lists the links that these ranks cannot measure; "" if there are none."""
    lines = []
    if ranks.per_node < 2:
        lines.append("links within a node (start a rank on every GPU)")
    if ranks.nodes < 2:
        lines.append("links between nodes (start calibrate on two nodes)")
    return "; ".join(lines)


def measure_cluster(
    ranks: Ranks, model: Model, arguments: Namespace
) -> tuple[Cluster, Mapping[str, str]]:
    """Measure all figures. A collective call.

    Returns:
        The cluster; and a dict from the key of a figure, such as "links.intra", to its comment.
    """
    figures = Figures()
    chunks = kernels.CHUNKS[ranks.device.type]
    ranks.report("matrix products and memory")
    linear, small = kernels.products(ranks, model)
    rate, cutting, adds = kernels.memory(ranks, model)
    adds = adds._replace(value=min(adds.value, rate.value))
    ranks.report(f"attention of {chunks[0]} to {chunks[-1]} rows")
    attention = kernels.attention(ranks, model, adds.value)
    compute = attention["compute"]
    stated = stated_gpu(ranks, arguments.gpu, max(linear.value, compute.value))
    for key, (value, note) in stated_figures(stated, ranks).items():
        figures.state(key, value, note)
    peak = figures.values["gpu.peak"]
    figures.add("gpu.memory_rate", rate)
    figures.add("links.copying", cutting)
    figures.add("gpu.linear", linear._replace(value=min(1.0, linear.value / peak)))
    figures.add("gpu.small", small)
    for name, measurement in [*attention.items(), ("adding", adds)]:
        figures.add(f"gpu.{name}", measurement)
    figures.add(
        "gpu.attention", Measurement(min(1.0, compute.value / peak), None, "compute / peak")
    )
    _links(figures, ranks, model, stated)
    ranks.report("copies to the host and back")
    together, alone = host_links(ranks)
    figures.add("host.rate", together)
    figures.add("host.link", alone)
    ranks.report("time of the host per launch")
    for name, measurement in launches.launches(ranks, model).items():
        figures.add(f"host.{name}", measurement)
    if ranks.size == 1:
        figures.state("host.exchange", ASSUMED.exchange, NOT_MEASURED)
        figures.state("host.plan", ASSUMED.plan, NOT_MEASURED)
    limit = host_limit()
    figures.state("host.memory", int(min(ranks.gathered(limit))), "80 % of the available memory")
    devices = "GPUs" if ranks.cuda else "CPU ranks"
    grid = grid_of(ranks.per_node, ranks.nodes)
    source = f"{arguments.out.name} of {date.today()}, {devices}: {grid}"
    figures.state("cluster.source", source, "")
    figures.state("cluster.gpus", ranks.size, "the ranks that measured")
    figures.state("cluster.per_node", ranks.per_node, "")
    figures.state("cluster.spread", float(f"{max(figures.spreads):.3g}"), "")
    return figures.cluster(), figures.notes


def host_links(ranks: Ranks) -> tuple[Measurement, Measurement]:
    """Measure the bytes/s that a rank copies between device and host. A collective call.

    Returns:
        Two rates: while all ranks of a node copy, and while one rank of each node copies. Each is
            the rate of the slowest rank, in its slower direction.
    """
    longseq = registry.required("host_memory", "calibrate")
    # Host memory in bytes, at most the available memory. A copy uses `longseq.BYTES` of it.
    room = max(1, min(4 * longseq.BYTES, host_limit() // ranks.per_node))

    def rate() -> float:
        host = longseq.HostMemory(room, device=ranks.device, ranks=ranks.per_node)
        return longseq.copy_rate(host, lambda: None)

    together, alone = [], []
    for _ in range(COPIES[ranks.device.type]):
        ranks.gathered(0.0)
        together.append(min(ranks.gathered(rate())))
        ranks.gathered(0.0)
        alone.append(min(ranks.gathered(rate() if ranks.local == 0 else math.inf)))
    copy = f"{longseq.BYTES >> 20} MiB to {'pinned' if ranks.cuda else 'pageable'} memory and back"
    return (
        repeated(together, f"all ranks of a node, {copy}"),
        repeated(alone, f"one rank, {copy}"),
    )


def _links(figures: Figures, ranks: Ranks, model: Model, gpu: Gpu) -> None:
    """Add the figures of links. A figure that is not measured is published or assumed.

    A collective call.
    """
    measurement = links.links(ranks, figures)
    if measurement is not None:
        ranks.report("attention during transfers")
        figures.add("links.slowdown", links.slowdown(ranks, model, measurement))
    for name, value in unmeasured_links(gpu, ranks).items():
        if f"links.{name}" not in figures.values:
            figures.state(f"links.{name}", value, NOT_MEASURED)
    if gpu.name not in GPUS:  # no published link rates
        figures.state("links.nvlink", figures.values["links.intra"], "`intra`")
        figures.state("links.nic", figures.values["links.inter"], "`inter`")


def stated_gpu(ranks: Ranks, name: str | None, best: float) -> Gpu:
    """Return the published data of a GPU.

    The peak of a CPU or of a GPU without published data is the highest measured rate.

    Args:
        ranks: Ranks that measure.
        name: Value of `--gpu`; None to use the device name of torch.
        best: Highest measured FLOP/s.
    """
    if not ranks.cuda:
        memory = host_limit() // ranks.per_node
        return Gpu("cpu", max(1, memory), best, 1.0, "a CPU rank: its peak is the measured rate")
    title = torch.cuda.get_device_name(ranks.device)
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    gpu = GPUS[name.lower()] if name is not None else of_device(title)
    if gpu is None:
        return Gpu(title, memory, best, 1.0, "no published figures: its peak is the measured rate")
    return Gpu(**(vars(gpu) | {"memory": memory, "peak": max(gpu.peak, best)}))


def stated_figures(gpu: Gpu, ranks: Ranks) -> dict[str, tuple[Any, str]]:
    """Return the figures that are never measured: key -> (value, comment)."""
    published = gpu.name in GPUS
    stated: dict[str, tuple[Any, str]] = {
        "gpu.name": (gpu.name, ""),
        "gpu.memory": (gpu.memory, "of the first rank"),
        "gpu.peak": (float(f"{gpu.peak:.4g}"), "published" if published else "as measured"),
        "gpu.source": (gpu.source, ""),
    }
    if published:
        stated["links.nvlink"] = gpu.nvlink, "published"
        stated["links.nic"] = gpu.nic, "published"
    stated["gpu.reserve"] = (Cluster.reserve, "assumed") if ranks.cuda else (0, "none on a CPU")
    return stated


def unmeasured_links(gpu: Gpu, ranks: Ranks) -> dict[str, float]:
    """Return published or assumed values for the figures of section [links].

    They are used for figures that are not measured. Rates that are not published are infinite.
    """
    if gpu.name in GPUS:
        rates = {"intra": gpu.nvlink * NVLINK, "inter": gpu.nic * NIC}
    else:
        rates = {"intra": math.inf, "inter": math.inf}
    if not ranks.cuda:
        return rates
    return rates | {"latency": LATENCY, "exchange": EXCHANGE, "slowdown": SLOWDOWN}
