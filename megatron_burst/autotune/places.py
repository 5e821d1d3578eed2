# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of rings are: on which node, behind which NIC, and who sends beside them.

Rings that share nothing but NICs run the same schedule at the same time: those of other members of
a ulysses group, and those of tensor-parallel neighbours. Decides how many messages cross a NIC
together; one ring is simulated for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedule.tables import Transfers
from ..schedule.topology import Topology


@dataclass(frozen=True, eq=False)
class Places:
    """node, nic: int [R, G], of the ranks of R rings; the first ring is the one simulated."""

    node: np.ndarray
    nic: np.ndarray

    def between(self, moved: Transfers) -> np.ndarray:
        """Which transfers cross between nodes?"""
        node = self.node[0]
        return node[moved.src] != node[moved.dst]

    def load(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """How many messages that start together in all rings share a NIC with each one of the first
        ring, itself included, at its busier end; 1 within a node.
        """
        crosses = self.node[:, src] != self.node[:, dst]
        found = np.ones(len(src))
        for end in (src, dst):
            nic = self.nic[:, end]
            count = np.bincount(nic[crosses], minlength=int(nic.max(initial=0)) + 1)
            found = np.maximum(found, np.where(crosses[0], count[nic[0]], 1))
        return found

    @property
    def shared(self) -> bool:
        """Do any two ranks share a NIC?"""
        return len(np.unique(self.nic)) < self.nic.size


NIC_OF = ("neighbours", "stride")


class Nodes(NamedTuple):
    """`per_node` GPUs that share `nics` NICs evenly; a GPU with several counts as one with one.

    tp: tensor-parallel neighbours of each rank of a grid, with consecutive numbers, each in a ring
    of its own. nic_of: who shares one: "neighbours", of 8 GPUs and 4 NICs 0 and 1, 2 and 3; with
    "stride" 0 and 4, 1 and 5.
    """

    per_node: int
    nics: int
    tp: int = 1
    nic_of: str = "neighbours"

    def nic(self, gpus: np.ndarray) -> np.ndarray:
        """int: the number of the NIC by which each GPU sends, over all nodes."""
        nics = min(self.nics, self.per_node)
        node, at = np.divmod(gpus, self.per_node)
        own = at % nics if self.nic_of == "stride" else at * nics // self.per_node
        return node * self.per_node + own

    @property
    def per_nic(self) -> int:
        """How many GPUs send by the busiest NIC while all of a node send."""
        return -(-self.per_node // self.nics)

    @property
    def said(self) -> str:
        """ "8 ranks of a node share 4 NICs (neighbours)"."""
        return f"{self.per_node} ranks of a node share {self.nics} NICs ({self.nic_of})"


def places(topology: Topology, nodes: Nodes) -> Places:
    """Where the ranks of the rings of a grid are."""
    rings = [topology.ring(topology.rank_at(index, 0)) for index in range(topology.ulysses)]
    gpus = np.array(rings)[:, None, :] * nodes.tp + np.arange(nodes.tp)[:, None]
    gpus = gpus.reshape(-1, topology.ring_size)
    return Places(gpus // nodes.per_node, nodes.nic(gpus))
