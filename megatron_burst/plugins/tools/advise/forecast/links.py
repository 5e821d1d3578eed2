# SPDX-License-Identifier: Apache-2.0
"""Rates of a rank's collectives: within a node, between nodes, to the host.

They are computed from the rates of a cluster. The rings of attention are simulated message by
message elsewhere.
"""

from __future__ import annotations

from .....autotune.clusters import Cluster


def rates_of(cluster: Cluster) -> tuple[float, float]:
    """Return the bytes per second that a rank sends one way, within its node and to other nodes.

    All ranks of the node send at the same time.
    """
    rates = cluster.rank_rates()
    return rates.intra, float(rates.between(cluster.nodes().per_nic))


def in_node(cluster: Cluster, size: int, stride: int) -> int:
    """Return the ranks of a group on one node; the group has `size` ranks, `stride` apart."""
    return max(1, min(size, cluster.ranks_per_node // stride))


def ring_seconds(cluster: Cluster, size: int, stride: int, total: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter over a group, all groups at once.

    Each node sends the data once, over the NICs of the group's ranks there. Within a node each rank
    sends it.

    Args:
        cluster: The cluster.
        size: Ranks of the group.
        stride: Distance of the group's ranks.
        total: Bytes of the whole tensor.
    """
    if size < 2:
        return 0.0
    moved = total * (size - 1) / size
    here, (intra, inter) = in_node(cluster, size, stride), rates_of(cluster)
    return moved / (intra if here == size else min(here * inter, intra))


def all_to_all_seconds(cluster: Cluster, size: int, stride: int, sent: float) -> float:
    """Return the seconds of an all-to-all. Both link classes are used at the same time.

    Args:
        cluster: The cluster.
        size: Ranks of the group.
        stride: Distance of the group's ranks.
        sent: Bytes of each rank for all ranks of the group, itself included.
    """
    if size < 2:
        return 0.0
    here, (intra, inter) = in_node(cluster, size, stride), rates_of(cluster)
    within, beyond = sent * (here - 1) / size, sent * (size - here) / size
    return max(within / intra, beyond / inter) / cluster.rank_rates().exchange


def send_seconds(cluster: Cluster, stride: int, size: float) -> float:
    """Return the seconds of one message to the rank `stride` ranks away, while all ranks send."""
    return size / rates_of(cluster)[stride >= cluster.ranks_per_node]
