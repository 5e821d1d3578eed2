# SPDX-License-Identifier: Apache-2.0
"""Nodes and NICs of the ranks of rings, and the number of messages that share a NIC.

Several rings run the same schedule at the same time and share only NICs. These rings belong to the
other members of a ulysses group and to tensor-parallel neighbours. This module decides how many
messages cross a NIC together. Only one ring is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedule.tables import Transfers
from ..schedule.topology import Topology


@dataclass(frozen=True, eq=False)
class RankPlaces:
    """Nodes and NICs of the ranks of R rings; the first ring is simulated.

    Attributes:
        node: int [R, G], node of each rank.
        nic: int [R, G], NIC of each rank.
    """

    node: np.ndarray
    nic: np.ndarray

    def between(self, transfers: Transfers) -> np.ndarray:
        """Return a bool array that is true for transfers between nodes."""
        node = self.node[0]
        return node[transfers.src] != node[transfers.dst]

    def load(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return, for each message of the first ring, the number of messages on its busier NIC.

        The number includes the messages of all rings that start together, and the message itself.
        It is 1 for a message within a node.
        """
        crosses = self.node[:, src] != self.node[:, dst]
        load = np.ones(len(src))
        for end in (src, dst):
            nic = self.nic[:, end]
            count = np.bincount(nic[crosses], minlength=int(nic.max(initial=0)) + 1)
            load = np.maximum(load, np.where(crosses[0], count[nic[0]], 1))
        return load

    @property
    def shared(self) -> bool:
        """True if any two ranks share a NIC."""
        return len(np.unique(self.nic)) < self.nic.size


NIC_OF = ("neighbours", "stride")


class Nodes(NamedTuple):
    """Nodes of `per_node` GPUs that share `nics` NICs evenly; at most one NIC per GPU is used.

    Attributes:
        per_node: GPUs of a node.
        nics: NICs of a node.
        tp: Tensor-parallel size. The ranks of a tensor-parallel group have consecutive numbers, and
            each is in a separate ring.
        nic_of: Pattern of the GPUs that share a NIC. With 8 GPUs and 4 NICs, "neighbours" means 0
            and 1, 2 and 3; "stride" means 0 and 4, 1 and 5.
    """

    per_node: int
    nics: int
    tp: int = 1
    nic_of: str = "neighbours"

    def nic(self, gpus: np.ndarray) -> np.ndarray:
        """Return the index of each GPU's NIC among the NICs of all nodes."""
        nics = min(self.nics, self.per_node)
        node, at = np.divmod(gpus, self.per_node)
        own = at % nics if self.nic_of == "stride" else at * nics // self.per_node
        return node * self.per_node + own

    @property
    def per_nic(self) -> int:
        """Number of GPUs that send on the busiest NIC while all GPUs of a node send."""
        return -(-self.per_node // self.nics)

    @property
    def description(self) -> str:
        """Text such as "8 ranks of a node share 4 NICs (neighbours)"."""
        return f"{self.per_node} ranks of a node share {self.nics} NICs ({self.nic_of})"


def places(topology: Topology, nodes: Nodes) -> RankPlaces:
    """Return the nodes and NICs of the ranks of all rings of a grid."""
    rings = [topology.ring(topology.rank_at(index, 0)) for index in range(topology.ulysses)]
    gpus = np.array(rings)[:, None, :] * nodes.tp + np.arange(nodes.tp)[:, None]
    gpus = gpus.reshape(-1, topology.ring_size)
    return RankPlaces(gpus // nodes.per_node, nodes.nic(gpus))
