"""What clusters are made of: GPUs by name, and the nodes around them.

Memory is what torch reports as total capacity of the device (less than the name says); rates are
the vendor's dense peaks. Host links are the rates that pinned copies reach, not those of the bus.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..autotune.rates import Rates

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Gpu:
    """memory: bytes; peak: dense bf16 operations per second; host_link: bytes per second between
    one GPU and host memory, one way; source: of the figures. nvlink: bytes per second to the other
    GPUs of the node, one way; memory_rate: of its own memory. attention, linear: fractions of the
    peak that long attention calls (forward) and large matrix products reach. small: a product of
    sizes m x k x n takes longer by small / m + small / k + small / n of its time."""

    name: str
    memory: int
    peak: float
    host_link: float
    source: str
    nvlink: float = 300 * GB
    memory_rate: float = 2.0e12
    attention: float = 0.6
    linear: float = 0.7
    small: float = 64.0


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 25 * GB, "A100 datasheet, SXM; PCIe 4.0 x16"),
        Gpu("a100", int(79.1 * GIB), 312e12, 25 * GB, "A100 datasheet, SXM; PCIe 4.0 x16"),
        Gpu("a800", int(79.1 * GIB), 312e12, 25 * GB, "A800 datasheet, SXM; PCIe 4.0 x16"),
        Gpu("h100", int(79.1 * GIB), 989e12, 50 * GB, "H100 datasheet, SXM; PCIe 5.0 x16"),
        Gpu("h200", int(139.8 * GIB), 989e12, 50 * GB, "H200 datasheet, SXM; PCIe 5.0 x16"),
        Gpu("b200", int(178.3 * GIB), 2250e12, 50 * GB, "DGX B200 datasheet; PCIe 5.0 x16"),
    )
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    gpus: of all nodes; per_node: of one; host_memory: bytes of one node that may be taken.
    reserve: bytes of a GPU that are not for tensors: CUDA's context, NCCL's buffers, cuBLAS's
    workspaces, and what the allocator cannot use.
    host_rate: bytes per second that one GPU gets of its link to the host while all copy.
    host_update: bytes per second of a node's host memory that an optimizer on the host reads and
    writes. overlap: fraction of a reduction of gradients, or of a gathering of parameters, that can
    hide behind computing.
    nics: of one node, shared evenly by its GPUs; nic_rate: bytes per second of one, one way.
    rates: measured ones; None takes published ones. source: where the rates come from.
    """

    gpu: Gpu
    gpus: int
    per_node: int = 8
    nics: int = 8
    nic_rate: float = 50 * GB
    rates: Rates | None = None
    source: str = "published rates"
    host_memory: int = int(0.8 * 2e12)
    reserve: int = 4 * GIB
    host_rate: float = 0.0
    host_update: float = 200 * GB
    overlap: float = 0.9

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_node < 1:
            raise ValueError(f"--gpus {self.gpus} --per-node {self.per_node}: both from 1")
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ValueError(
                f"--gpus {self.gpus} are no whole nodes of --per-node {self.per_node}: give a "
                f"multiple, such as {-(-self.gpus // self.per_node) * self.per_node}"
            )

    @property
    def ranks_per_node(self) -> int:
        """GPUs that share the memory of a node."""
        return min(self.gpus, self.per_node)

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
        as two GPUs often share a switch, where no rate was measured."""
        return self.host_rate or self.gpu.host_link / 2


def gpu(name: str) -> Gpu:
    """A GPU by its name. ValueError with the names that there are for any other."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ValueError(
            f"--gpu {name}: unknown; one of {', '.join(GPUS)}, with another --gpu-memory if need be"
        )
    return found
