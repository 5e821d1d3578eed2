"""The device that measures, and what is published of it where it could not be measured."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...advisor.clusters import EXCHANGE, LATENCY, NIC, NVLINK, SLOWDOWN, Cluster
from ...advisor.gpus import GPUS, Gpu, of_device
from ...recompute.host.limits import host_limit
from .ranks import Ranks

NOT_MEASURED = "NOT MEASURED: published or assumed"


def gpu(ranks: Ranks, name: str | None, best: float) -> Gpu:
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


def figures(gpu: Gpu, ranks: Ranks) -> dict[str, tuple[Any, str]]:
    """Of a cluster file, key -> (value, note): what is stated of a GPU and not timed."""
    known = gpu.name in GPUS
    found: dict[str, tuple[Any, str]] = {
        "gpu.name": (gpu.name, ""),
        "gpu.memory": (gpu.memory, "of the first rank"),
        "gpu.peak": (float(f"{gpu.peak:.4g}"), "published" if known else "as measured"),
        "gpu.source": (gpu.source, ""),
    }
    if known:
        found["links.nvlink"] = gpu.nvlink, "published"
        found["links.nic"] = gpu.nic, "published"
    found["gpu.reserve"] = (Cluster.reserve, "assumed") if ranks.cuda else (0, "none on a CPU")
    return found


def stand_ins(gpu: Gpu, ranks: Ranks) -> dict[str, float]:
    """Of [links], what is taken where nothing was measured: published rates, and no limit where
    there are none."""
    if gpu.name in GPUS:
        rates = {"intra": gpu.nvlink * NVLINK, "inter": gpu.nic * NIC}
    else:
        rates = {"intra": math.inf, "inter": math.inf}
    if not ranks.cuda:
        return rates
    return rates | {"latency": LATENCY, "exchange": EXCHANGE, "slowdown": SLOWDOWN}
