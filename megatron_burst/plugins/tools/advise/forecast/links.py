# SPDX-License-Identifier: Apache-2.0
"""Predicted time of collectives, within a node and between nodes.

The time is computed from the link rates of a cluster. `autotune.simulator` simulates the messages
of attention rings instead.
"""

from __future__ import annotations

from .....autotune.clusters import Cluster


def rates_of(cluster: Cluster) -> tuple[float, float]:
    """Return the bytes/s that a rank sends to ranks of its node, and to ranks of other nodes.

    All ranks of the node send at the same time and share the NICs.
    """
    rates = cluster.rank_rates()
    return rates.intra, float(rates.between(cluster.nodes().per_nic))


def in_node(cluster: Cluster, size: int, stride: int) -> int:
    """Return the number of ranks of a group that are on one node.

    Args:
        cluster: Cluster of GPUs.
        size: Number of ranks of the group.
        stride: Difference between adjacent global ranks of the group.
    """
    return max(1, min(size, cluster.ranks_per_node // stride))


def ring_seconds(cluster: Cluster, size: int, stride: int, total: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter that all groups run at the same time.

    Each node sends the tensor once to other nodes, over the NICs of the group's ranks on this node.
    Within a node each rank sends it.

    Args:
        cluster: Cluster of GPUs.
        size: Number of ranks of the group.
        stride: Difference between adjacent global ranks of the group.
        total: Bytes of the gathered tensor.
    """
    if size < 2:
        return 0.0
    moved = total * (size - 1) / size
    here, (intra, inter) = in_node(cluster, size, stride), rates_of(cluster)
    return moved / (intra if here == size else min(here * inter, intra))


def all_to_all_seconds(cluster: Cluster, size: int, stride: int, sent: float) -> float:
    """Return the seconds of an all-to-all.

    Links within a node and links between nodes are used at the same time.

    Args:
        cluster: Cluster of GPUs.
        size: Number of ranks of the group.
        stride: Difference between adjacent global ranks of the group.
        sent: Bytes of the tensor that each rank sends in equal parts to all ranks of the group,
            including itself.
    """
    if size < 2:
        return 0.0
    here, (intra, inter) = in_node(cluster, size, stride), rates_of(cluster)
    within, beyond = sent * (here - 1) / size, sent * (size - here) / size
    return max(within / intra, beyond / inter) / cluster.rank_rates().exchange


def send_seconds(cluster: Cluster, stride: int, size: float) -> float:
    """Return the seconds of one message of `size` bytes while all ranks send at the same time.

    The receiver is the rank `stride` ranks away.
    """
    return size / rates_of(cluster)[stride >= cluster.ranks_per_node]
