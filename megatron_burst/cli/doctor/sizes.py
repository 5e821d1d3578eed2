# SPDX-License-Identifier: Apache-2.0
"""The hierarchical context-parallel sizes that fit a cluster.

Megatron divides consecutive ranks first into tensor-parallel groups, then into context-parallel
groups. So with tensor-parallel size T, a node of G GPUs has G / T consecutive ranks of a
context-parallel group.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class HierarchicalSizes(NamedTuple):
    """Hierarchical context-parallel sizes.

    Attributes:
        intra: Context-parallel ranks per node.
        inter: Number of nodes.
        reason: Explanation of the sizes.
    """

    intra: int
    inter: int
    reason: str

    @property
    def flat(self) -> bool:
        """Return True if the ring is flat: all ranks on one node, or one rank per node."""
        return 1 in (self.intra, self.inter)

    @property
    def flags(self) -> str:
        """Return the command-line flag that sets these sizes; empty for a flat ring."""
        return (
            "" if self.flat else f"--hierarchical-context-parallel-sizes {self.intra} {self.inter}"
        )


def hierarchical_sizes(tp: int, cp: int, gpus_per_node: int) -> HierarchicalSizes:
    """Return the hierarchical context-parallel sizes for nodes of `gpus_per_node` GPUs.

    Args:
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        gpus_per_node: GPUs per node.

    Raises:
        ValueError: Neither `tp` nor `gpus_per_node` divides the other, or a size is below 1.
    """
    for flag, value in (
        ("--tensor-model-parallel-size", tp),
        ("--context-parallel-size", cp),
        ("--gpus-per-node", gpus_per_node),
    ):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if gpus_per_node % tp and tp % gpus_per_node:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the {gpus_per_node} GPUs of a "
            "node, so tensor-parallel groups would span nodes; use a divisor"
        )
    if cp == 1:
        return HierarchicalSizes(1, 1, "no context parallelism")
    per_node = max(1, gpus_per_node // tp)
    # Context-parallel groups start at multiples of cp, and nodes at multiples of per_node. So the
    # greatest common divisor of the two is the number of consecutive ranks on one node.
    intra = math.gcd(cp, per_node)
    if per_node == 1:
        why = "tensor parallelism uses all GPUs of a node, so no ring is within a node"
    elif intra == cp:
        why = "each context-parallel group is within one node, so it needs no second level"
    elif intra == 1:
        why = f"context-parallel size {cp} and {per_node} ranks per node have no common divisor"
    elif intra < per_node:
        why = (
            f"on a node of {per_node} ranks, a context-parallel group of {cp} has only {intra} "
            "consecutive ranks"
        )
    else:
        why = f"a node holds {per_node} consecutive context-parallel ranks"
    return HierarchicalSizes(intra, cp // intra, why)
