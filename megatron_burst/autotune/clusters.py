# SPDX-License-Identifier: Apache-2.0
"""Clusters: nodes of equal GPUs, and the rates that a run of them gets.

Decides what stands in for a figure that nobody measured: `Cluster.rank_rates` makes rates from
published ones, or takes those of a cluster file (`cluster_file`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ..units import byte_size
from .bands import ForecastBand, band_of
from .gpus import (
    DOCUMENTS,
    GB,
    GIB,
    GPUS,
    SLOWER,
    Gpu,
    gpu,
    is_finite,
    is_hopper,
    with_kernel,
)
from .host_time import ASSUMED, HostTime
from .places import NIC_OF, Nodes
from .rates import BACKWARD, Rates

# What a published rate becomes in a run where nothing was measured. NVLINK: nccl-tests report a bus
# bandwidth of 230 to 250 of 300 GB/s on eight A100. NIC, SHARED: of a NIC's rate, by a rank alone
# and by several; these, HALF_ROWS and SLOWDOWN are those that fit LoongTrain's table 4 (64 A100).
NVLINK, NIC, SHARED, HALF_ROWS, SLOWDOWN = 0.8, 0.82, 0.91, 488.0, 0.088
# Assumed; `megatron-burst calibrate` measures them. Seconds, seconds, fraction.
LATENCY, LAUNCH, EXCHANGE = 15e-6, 30e-6, 0.8
SOURCE = "published rates"


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    gpu: or its name. gpus: of all nodes; per_node: of one. nics: of one node, shared evenly by its
    GPUs, 0: one for each GPU; nic_rate: bytes per second of one, one way, 0: those of the vendor's
    node; nic_of: which GPUs share one, as `Nodes` has it. rates: measured, of a rank that sends
    alone on its NIC; None takes published ones. source: where the rates come from; spread: of
    measured rates, the largest: half the range of the middle half of the repeats, over their
    median. host_memory: bytes of one node that may be taken. reserve: bytes of a GPU that are not
    for tensors: CUDA's context, NCCL's buffers, cuBLAS's workspaces, and what the allocator cannot
    use. host_rate: bytes per second that one GPU gets of its link to the host while all copy.
    host_update: bytes per second of a node's host memory that an optimizer on the host reads and
    writes. host_time: what launching takes of a GPU's processor. overlap: fraction of a reduction
    of gradients, or of a gathering of parameters, that can hide behind computing.

    Raises ValueError for numbers that no cluster has.
    """

    gpu: Gpu
    gpus: int
    per_node: int = 8
    nics: int = 0
    nic_rate: float = 0.0
    rates: Rates | None = None
    source: str = SOURCE
    host_memory: int = int(0.8 * 2e12)
    reserve: int = 4 * GIB
    host_rate: float = 0.0
    spread: float = 0.0
    host_update: float = 200 * GB
    overlap: float = 0.9
    host_time: HostTime = ASSUMED
    nic_of: str = "neighbours"

    def __post_init__(self) -> None:
        if isinstance(self.gpu, str):
            object.__setattr__(self, "gpu", gpu(self.gpu))
        if not all(type(n) is int and n >= 1 for n in (self.gpus, self.per_node)):
            raise ValueError(f"--gpus {self.gpus} --per-node {self.per_node}: whole numbers from 1")
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ValueError(
                f"--gpus {self.gpus} is not a multiple of --per-node {self.per_node}: give a "
                f"multiple, such as {-(-self.gpus // self.per_node) * self.per_node}"
            )
        if wrong := self._wrong():
            raise ValueError(f"cluster: {'; '.join(wrong)}")
        if self.room <= 0:
            raise ValueError(
                f"--gpu-memory {byte_size(self.gpu.memory)}: --reserve {byte_size(self.reserve)} "
                "leaves none of it for tensors: take more memory, or a smaller reserve"
            )
        object.__setattr__(self, "nics", self.nics or self.per_node)
        object.__setattr__(self, "nic_rate", self.nic_rate or self.gpu.nic)

    def _wrong(self) -> list[str]:
        """Figures that no cluster has, in words."""
        wrong = []
        if type(self.nics) is not int or self.nics < 0:
            wrong.append(f"nics {self.nics!r} must be a whole number from 0")
        if self.nic_of not in NIC_OF:
            wrong.append(f"nic_of {self.nic_of!r} must be one of {', '.join(NIC_OF)}")
        # infinite where nodes have no links
        if not is_finite(self.nic_rate) and self.nic_rate != math.inf:
            wrong.append(f"nic_rate {self.nic_rate!r} must be a number from 0")
        for name in ("host_rate", "host_memory", "reserve", "spread"):
            value = getattr(self, name)
            if not is_finite(value):
                wrong.append(f"{name} {value!r} must be a finite number from 0")
        if not is_finite(self.host_update) or self.host_update == 0:
            wrong.append(f"host_update {self.host_update!r} must be a finite number above 0")
        if not is_finite(self.overlap) or self.overlap > 1:
            wrong.append(f"overlap {self.overlap!r} must be a fraction from 0 to 1")
        return wrong

    @property
    def ranks_per_node(self) -> int:
        """GPUs that share the memory of a node."""
        return min(self.gpus, self.per_node)

    def cp_per_node(self, tp: int, cp: int) -> int:
        """How many of `cp` context-parallel ranks, each of `tp` neighbours, are on one node."""
        return min(cp, max(1, self.ranks_per_node // tp))

    @property
    def room(self) -> int:
        """Bytes of a GPU for tensors."""
        return self.gpu.memory - self.reserve

    @property
    def host_per_rank(self) -> float:
        """Bytes of host memory for each GPU."""
        return self.host_memory / self.ranks_per_node

    @property
    def link(self) -> float:
        """Bytes per second between one GPU and the host, one way: half the bus while all copy,
        as two GPUs often share a switch, where no rate was measured.
        """
        return self.host_rate or self.gpu.host_link / 2

    def nodes(self, tp: int = 1) -> Nodes:
        """Who shares NICs, with `tp` tensor-parallel neighbours."""
        ranks = self.ranks_per_node
        return Nodes(ranks, min(self.nics, ranks), tp, self.nic_of)

    @property
    def measured(self) -> bool:
        """Whether the rates were measured."""
        return self.rates is not None

    @property
    def kernels_measured(self) -> bool:
        """Whether those of attention kernels were, and not those of links alone."""
        return self.rates is not None and self.rates.compute is not None

    @property
    def band(self) -> ForecastBand:
        """How much longer steps may take than their forecast."""
        return band_of(self.gpu.name, self.kernels_measured)

    @property
    def described(self) -> str:
        """Where the rates come from, and how far that can be off, on one line."""
        if self.measured:
            return f"measured: {self.source}; repeats vary by up to {self.spread:.0%}"
        band, kernel = self.band, self.gpu.kernel
        source = f"{self.source} of kernel {kernel}" if kernel else self.source
        return (
            f"{source}, not measured here: nine in ten of {band.cells} published runs on "
            f"{band.gpus} took {band} times their forecast{band.provided}; `megatron-burst "
            "calibrate` measures them"
        )

    def rank_rates(self, documents: bool = False) -> Rates:
        """The rates of one rank: what was measured, or else what published ones become in a run.

        `inter` is that of a rank alone on its NIC: who shares it is told to the simulator apart.
        documents: of attention to packs of them, which kernels on Hopper compute more slowly.
        """
        found, gpu, kernel = self._rank_rates, self.gpu, self.gpu.kernel or "flash3"
        known = is_hopper(gpu) and kernel in DOCUMENTS
        if not documents or self.kernels_measured or not known:
            return found
        forward, backward = DOCUMENTS[kernel]
        # A rate that was stated in place of the published one is as much slower on documents.
        published = with_kernel(GPUS.get(gpu.name, GPUS["h100"]), gpu.kernel).attention
        compute = gpu.peak / GPUS["h100"].peak * forward * gpu.attention / published
        return replace(found, compute=compute, backward=BACKWARD * forward / backward)

    @cached_property
    def _rank_rates(self) -> Rates:
        compute = self.gpu.peak * self.gpu.attention
        if self.rates is not None:
            found, most = self.rates, self.gpu.memory_rate
            memory = min(found.memory, most)
            # Not stated, it is part of half_rows; stated, it is memory that is read and written.
            adding = found.adding if math.isinf(found.adding) else min(found.adding, most)
            return replace(found, compute=found.compute or compute, memory=memory, adding=adding,
                           host=self.host_time)  # fmt: skip
        # `adding` stays math.inf: HALF_ROWS fits whole runs of a ring (LoongTrain's table 4), whose
        # calls added their results, so that it would count them twice.
        return Rates(
            intra=self.gpu.nvlink * NVLINK,
            inter=self.nic_rate * NIC,
            nic=self.nic_rate * SHARED,
            latency=LATENCY,
            compute=compute,
            launch=LAUNCH,
            backward=BACKWARD / SLOWER,
            half_rows=HALF_ROWS,
            slowdown=SLOWDOWN,
            exchange=EXCHANGE,
            memory=self.gpu.memory_rate,
            host=self.host_time,
        )

    def run_rates(self, per_node: int) -> Rates:
        """What `prepare` takes: with the NICs that ranks share, which a run does not see, and the
        memory of a GPU, of which an estimate knows what else is in it.

        per_node: context-parallel ranks of a group on each node, between tensor-parallel ones.
        """
        alone, ranks = replace(self.rank_rates(), room=float(self.room)), self.ranks_per_node
        if self.nics >= ranks:
            return alone
        return replace(alone, shared=self.nodes(max(1, ranks // per_node)))


__all__ = ["GB", "GIB", "GPUS", "Cluster", "Gpu", "gpu"]
