"""All measurements of `calibrate`, one after another, and the cluster that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ...advisor import cluster_file
from ...advisor.clusters import Cluster
from ...advisor.gpus import GPUS, Gpu
from ...advisor.shapes import models
from ...recompute.host.limits import host_limit
from . import beside, device, host, kernels, layer, links
from .ranks import Found, Ranks, joined

FIGURES = 60  # repeated quantities, all in all, among which --minutes are shared out
TIMES = ("launch", "latency", "posting", "exchange_start")  # short, so they vary, and matter less


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    out: Path
    minutes: float
    gpu: str | None
    model: str
    per_node: int | None


@dataclass
class Figures:
    """Found so far, by "section.key" of a cluster file."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)

    def add(self, key: str, one: Found, more: str = "") -> None:
        self.values[key] = float(f"{one.value:.4g}")
        self.notes[key] = f"{one.note}; {more}" if more else one.note
        if one.spread is not None and key.split(".")[1] not in TIMES:
            self.spreads.append(one.spread)

    def state(self, key: str, value: Any, note: str) -> None:
        self.values[key], self.notes[key] = value, note

    def cluster(self) -> Cluster:
        nested: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            section, name = key.split(".")
            nested.setdefault(section, {})[name] = value
        return cluster_file.made(nested)


def calibrate(wanted: Wanted) -> int:
    """Measure on all ranks, write on the first. Raises the same ValueError on all of them."""
    if not wanted.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {wanted.minutes}")
    with joined(wanted.per_node, 60 * wanted.minutes / FIGURES) as ranks:
        ranks.agree(_fault(wanted) or {"--model": wanted.model, "--minutes": wanted.minutes,
                                       "--gpu": wanted.gpu})  # fmt: skip
        model = models.named(wanted.model)
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
    return 0


def _fault(wanted: Wanted) -> ValueError | None:
    """What is wrong with the flags, before anything is measured."""
    try:
        models.named(wanted.model)
        if wanted.gpu is not None and wanted.gpu.lower() not in GPUS:
            raise ValueError(f"--gpu {wanted.gpu}: unknown; one of {', '.join(GPUS)}")
        if wanted.gpu is not None and not torch.cuda.is_available():
            raise ValueError(f"--gpu {wanted.gpu}: torch sees no GPU here; leave it out")
        if not wanted.out.absolute().parent.is_dir():
            raise ValueError(f"--out {wanted.out}: its folder does not exist")
    except ValueError as error:
        return error
    return None


def missing(ranks: Ranks) -> str:
    """What these ranks cannot tell; empty if nothing."""
    lacks = []
    if ranks.per_node < 2:
        lacks.append("links within a node (start a rank on every GPU)")
    if ranks.nodes < 2:
        lacks.append("links between nodes (start it on two nodes)")
    if not ranks.cuda:
        lacks.append("the memory of a layer's attention (needs a GPU)")
    return "; ".join(lacks)


def measured(
    ranks: Ranks, model: models.Model, wanted: Wanted
) -> tuple[Cluster, Mapping[str, str]]:
    """The cluster, and how each figure was found; collective."""
    figures = Figures()
    chunks = kernels.CHUNKS[ranks.device.type]
    ranks.say(f"attention of {chunks[0]} to {chunks[-1]} rows")
    attention = kernels.attention(ranks, model)
    compute = attention["compute"]
    ranks.say("matrix products and memory")
    linear, small = kernels.products(ranks, model)
    rate, cutting = kernels.memory(ranks, model)
    stated = device.gpu(ranks, wanted.gpu, max(linear.value, compute.value))
    for key, (value, note) in device.figures(stated, ranks).items():
        figures.state(key, value, note)
    peak = figures.values["gpu.peak"]
    figures.add("gpu.memory_rate", rate)
    figures.add("links.copying", cutting)
    figures.add("gpu.linear", linear._replace(value=min(1.0, linear.value / peak)))
    figures.add("gpu.small", small)
    for name, one in attention.items():
        figures.add(f"gpu.{name}", one)
    figures.add("gpu.attention", Found(min(1.0, compute.value / peak), None, "compute / peak"))
    _links(figures, ranks, model, stated)
    figures.notes["gpu.reserve"] = layer.compared(ranks, model) or figures.notes["gpu.reserve"]
    ranks.say("copies to the host and back")
    together, alone = host.links(ranks)
    figures.add("host.rate", together)
    figures.add("host.link", alone)
    limit = host_limit(pinned=ranks.cuda)
    figures.state("host.memory", int(min(ranks.each(limit))), "80 % of what is there")
    what = "GPUs" if ranks.cuda else "CPU ranks"
    source = f"{wanted.out.name} of {date.today()}, {ranks.nodes} x {ranks.per_node} {what}"
    figures.state("cluster.source", source, "")
    figures.state("cluster.gpus", ranks.size, "those that measured")
    figures.state("cluster.per_node", ranks.per_node, "")
    figures.state("cluster.spread", float(f"{max(figures.spreads):.3g}"), "")
    return figures.cluster(), figures.notes


def _links(figures: Figures, ranks: Ranks, model: models.Model, gpu: Gpu) -> None:
    """Links that were measured, and what stands in for the others; collective."""
    found = links.links(ranks)
    for name, one in found.figures.items():
        figures.add(f"links.{name}", one, found.words.get(name, ""))
    if found.nics is not None and found.alone is not None:
        figures.add("links.nics", found.nics)
        figures.values["links.nics"] = round(found.nics.value)
        figures.add("links.nic_rate", found.alone._replace(how="`inter`"))
    if ranks.size > 1:
        ranks.say("attention while links carry something")
        figures.add("links.slowdown", beside.slowdown(ranks, model, found))
    for name, value in device.stand_ins(gpu, ranks).items():
        if f"links.{name}" not in figures.values:
            figures.state(f"links.{name}", value, device.NOT_MEASURED)
    if gpu.name not in GPUS:  # nothing is published of its links
        figures.state("links.nvlink", figures.values["links.intra"], "`intra`")
        figures.state("links.nic", figures.values["links.inter"], "`inter`")
