# SPDX-License-Identifier: Apache-2.0
"""Nodes and NICs of ranks, and the number of messages that use a NIC at the same time.

Several rings run the same schedule at the same time: one ring per member of a ulysses group and per
rank of a tensor-parallel group. The simulator runs only one of these rings. This module counts how
many messages of all rings share a NIC with the messages of that ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedule.tables import Transfers
from ..schedule.topology import Topology


@dataclass(frozen=True, eq=False)
class RankPlaces:
    """Nodes and NICs of the ranks of R rings, of which the simulator runs the first.

    Attributes:
        node: int [R, G], node of each rank.
        nic: int [R, G], number of each rank's NIC in the whole cluster.
    """

    node: np.ndarray
    nic: np.ndarray

    def between(self, transfers: Transfers) -> np.ndarray:
        """Return a bool array that is true for transfers between nodes."""
        node = self.node[0]
        return node[transfers.src] != node[transfers.dst]

    def load(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return how many messages use the NIC of each message of the first ring.

        The messages of all rings that start together are counted, including the message itself. The
        sender's and the receiver's NIC are counted separately, and the larger number is returned.
        The number is 1 for a message within a node.
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
        per_node: Number of GPUs of a node.
        nics: Number of NICs of a node.
        tp: Tensor-parallel size. The ranks of a tensor-parallel group have consecutive numbers, and
            each is in a separate ring.
        nic_of: Pattern of the GPUs that share a NIC. With 8 GPUs and 4 NICs, "neighbours" means
            that GPUs 0 and 1, 2 and 3, ... share a NIC; "stride" means 0 and 4, 1 and 5, ...
    """

    per_node: int
    nics: int
    tp: int = 1
    nic_of: str = "neighbours"

    def nic(self, gpus: np.ndarray) -> np.ndarray:
        """Return the number of each GPU's NIC, unique over all nodes."""
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
