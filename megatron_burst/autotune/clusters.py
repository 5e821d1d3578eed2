# SPDX-License-Identifier: Apache-2.0
"""Descriptions of clusters with equal GPUs, and the rates of links and kernels on them.

`Cluster.rank_rates` uses the measured rates of a cluster file (`cluster_file`). Without measured
rates, it computes rates from published ones.
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

# Rates in a run / published rates, used if nothing is measured. NVLINK: nccl-tests report a bus
# bandwidth of 230 to 250 of 300 GB/s on eight A100. NIC and SHARED: fraction of a NIC's rate that
# one rank and several ranks reach. NIC, SHARED, HALF_ROWS and SLOWDOWN fit LoongTrain's table 4 (64
# A100).
NVLINK, NIC, SHARED, HALF_ROWS, SLOWDOWN = 0.8, 0.82, 0.91, 488.0, 0.088
# Assumed values, which `megatron-burst calibrate` measures: seconds, seconds, fraction.
LATENCY, LAUNCH, EXCHANGE = 15e-6, 30e-6, 0.8
SOURCE = "published rates"


@dataclass(frozen=True)
class Cluster:
    """A cluster of nodes with equal GPUs.

    Attributes:
        gpu: The GPU, or its name in `gpus.GPUS`.
        gpus: Number of GPUs of the whole cluster.
        per_node: Number of GPUs of a node.
        nics: Number of NICs of a node, which its GPUs share evenly; 0 for one NIC per GPU.
        nic_rate: Bytes per second of a NIC; 0 for the NIC of the vendor's node.
        rates: Measured rates of a rank that sends alone on its NIC; None for published rates.
        source: Text for messages that names the origin of the rates.
        host_memory: Bytes of a node's host memory that may be used.
        reserve: Bytes of a GPU that tensors cannot use: CUDA's context, NCCL's buffers, cuBLAS's
            workspaces, and memory that the allocator cannot use.
        host_rate: Bytes per second of the link between a GPU and the host while all GPUs copy.
        spread: Largest spread of the measured rates: half the interquartile range of the repeats
            over their median.
        host_update: Bytes per second of a node's host memory that an optimizer on the host reads
            and writes.
        overlap: Largest fraction of the gradient reduction or the parameter all-gather that
            computation can hide.
        host_time: CPU times of kernel launches.
        nic_of: Pattern of the GPUs that share a NIC; see `Nodes`.

    Raises:
        ValueError: A value is impossible for a cluster. The message names all such values.
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
            raise ValueError(
                f"--gpus {self.gpus} --per-node {self.per_node}: both must be integers >= 1"
            )
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ValueError(
                f"--gpus {self.gpus} is not a multiple of --per-node {self.per_node}; use a "
                f"multiple, such as {-(-self.gpus // self.per_node) * self.per_node}"
            )
        if wrong := self._wrong():
            raise ValueError(f"cluster: {'; '.join(wrong)}")
        if self.room <= 0:
            raise ValueError(
                f"--gpu-memory {byte_size(self.gpu.memory)}: --reserve {byte_size(self.reserve)} "
                "leaves no memory for tensors; use more memory or a smaller reserve"
            )
        object.__setattr__(self, "nics", self.nics or self.per_node)
        object.__setattr__(self, "nic_rate", self.nic_rate or self.gpu.nic)

    def _wrong(self) -> list[str]:
        """Return an error message for each impossible value."""
        wrong = []
        if type(self.nics) is not int or self.nics < 0:
            wrong.append(f"nics {self.nics!r} must be an integer >= 0")
        if self.nic_of not in NIC_OF:
            wrong.append(f"nic_of {self.nic_of!r} must be one of {', '.join(NIC_OF)}")
        # infinite if nodes have no links
        if not is_finite(self.nic_rate) and self.nic_rate != math.inf:
            wrong.append(f"nic_rate {self.nic_rate!r} must be a number >= 0")
        for name in ("host_rate", "host_memory", "reserve", "spread"):
            value = getattr(self, name)
            if not is_finite(value):
                wrong.append(f"{name} {value!r} must be a finite number >= 0")
        if not is_finite(self.host_update) or self.host_update == 0:
            wrong.append(f"host_update {self.host_update!r} must be a finite number > 0")
        if not is_finite(self.overlap) or self.overlap > 1:
            wrong.append(f"overlap {self.overlap!r} must be a fraction from 0 to 1")
        return wrong

    @property
    def ranks_per_node(self) -> int:
        """Number of GPUs that share the memory of a node."""
        return min(self.gpus, self.per_node)

    def cp_per_node(self, tp: int, cp: int) -> int:
        """Return how many ranks of one context-parallel group are on one node.

        Args:
            tp: Tensor-parallel size. The ranks of a tensor-parallel group are on one node.
            cp: Context-parallel size.
        """
        return min(cp, max(1, self.ranks_per_node // tp))

    @property
    def room(self) -> int:
        """Bytes of a GPU's memory that tensors can use."""
        return self.gpu.memory - self.reserve

    @property
    def host_per_rank(self) -> float:
        """Bytes of host memory per GPU."""
        return self.host_memory / self.ranks_per_node

    @property
    def link(self) -> float:
        """Bytes per second between one GPU and the host, in one direction.

        If the rate was not measured, it is half of `gpu.host_link`: all GPUs copy at the same time,
        and two GPUs often share a switch.
        """
        return self.host_rate or self.gpu.host_link / 2

    def nodes(self, tp: int = 1) -> Nodes:
        """Return the nodes and their NICs for tensor-parallel groups of `tp` ranks."""
        ranks = self.ranks_per_node
        return Nodes(ranks, min(self.nics, ranks), tp, self.nic_of)

    @property
    def measured(self) -> bool:
        """True if the rates were measured."""
        return self.rates is not None

    @property
    def kernels_measured(self) -> bool:
        """True if the rates of attention kernels were measured, and not only links."""
        return self.rates is not None and self.rates.compute is not None

    @property
    def band(self) -> ForecastBand:
        """Range of published step times, as multiples of their forecasts."""
        return band_of(self.gpu.name, self.kernels_measured)

    @property
    def described(self) -> str:
        """One-line text with the origin of the rates and the accuracy of forecasts."""
        if self.measured:
            return f"measured: {self.source}; repeats vary by up to {self.spread:.0%}"
        band, kernel = self.band, self.gpu.kernel
        source = f"{self.source} of kernel {kernel}" if kernel else self.source
        return (
            f"{source}, not measured here: 90 % of {band.cells} published runs on {band.gpus} "
            f"took {band} times their forecast{band.provided}; `megatron-burst calibrate` "
            "measures the rates"
        )

    def rank_rates(self, documents: bool = False) -> Rates:
        """Return the measured rates of one rank, or the part of published rates that runs reach.

        `inter` is the rate of a rank that is alone on its NIC. The simulator has a separate
        argument for shared NICs.

        Args:
            documents: True for attention over packed documents, which kernels on Hopper compute
                more slowly.
        """
        rates, gpu, kernel = self._rank_rates, self.gpu, self.gpu.kernel or "flash3"
        slower = is_hopper(gpu) and kernel in DOCUMENTS
        if not documents or self.kernels_measured or not slower:
            return rates
        forward, backward = DOCUMENTS[kernel]
        # A stated rate is slower on documents by the same factor as the published rate.
        published = with_kernel(GPUS.get(gpu.name, GPUS["h100"]), gpu.kernel).attention
        compute = gpu.peak / GPUS["h100"].peak * forward * gpu.attention / published
        return replace(rates, compute=compute, backward=BACKWARD * forward / backward)

    @cached_property
    def _rank_rates(self) -> Rates:
        compute = self.gpu.peak * self.gpu.attention
        if self.rates is not None:
            rates, memory_rate = self.rates, self.gpu.memory_rate
            memory = min(rates.memory, memory_rate)
            # If `adding` is not stated, `half_rows` includes its time. If stated, it is separate
            # memory traffic.
            adding = rates.adding if math.isinf(rates.adding) else min(rates.adding, memory_rate)
            return replace(rates, compute=rates.compute or compute, memory=memory, adding=adding,
                           host=self.host_time)  # fmt: skip
        # `adding` stays math.inf. HALF_ROWS fits whole runs of a ring (LoongTrain's table 4), whose
        # calls add their results, so a finite `adding` would count them twice.
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
        """Return the rates that a run passes to `prepare`, with `shared` and `room` set.

        A run cannot detect which ranks share a NIC, and a forecast cannot measure free memory. So
        both values are computed from this description of the cluster.

        Args:
            per_node: Number of ranks of one context-parallel group on each node.
        """
        alone, ranks = replace(self.rank_rates(), room=float(self.room)), self.ranks_per_node
        if self.nics >= ranks:
            return alone
        return replace(alone, shared=self.nodes(max(1, ranks // per_node)))


__all__ = ["GB", "GIB", "GPUS", "Cluster", "Gpu", "gpu"]
