# SPDX-License-Identifier: Apache-2.0
"""Rates at which a rank's collectives move bytes: within a node, between nodes, to the host.

Plain arithmetic on a cluster. The rings of attention are simulated message by message elsewhere.
"""

from __future__ import annotations

from .....autotune.clusters import Cluster


def rates_of(cluster: Cluster) -> tuple[float, float]:
    """Bytes per second that a rank sends, one way, while all ranks of its node do: within its node,
    and to other nodes.
    """
    rates = cluster.rank_rates()
    return rates.intra, float(rates.between(cluster.nodes().per_nic))


def in_node(cluster: Cluster, size: int, stride: int) -> int:
    """Ranks of a group on one node; the group has `size` ranks, `stride` apart."""
    return max(1, min(size, cluster.ranks_per_node // stride))


def ring_seconds(cluster: Cluster, size: int, stride: int, total: float) -> float:
    """An all-gather or a reduce-scatter of `total` bytes over a group, all groups at once.

    Each node sends all of it on once, by the NICs of the group's ranks there; within a node each
    rank does.
    """
    if size < 2:
        return 0.0
    moved = total * (size - 1) / size
    here, (intra, inter) = in_node(cluster, size, stride), rates_of(cluster)
    return moved / (intra if here == size else min(here * inter, intra))


def all_to_all_seconds(cluster: Cluster, size: int, stride: int, sent: float) -> float:
    """An all-to-all in which each rank has `sent` bytes for all ranks of its group, itself too.

    Both link classes carry their share at the same time.
    """
    if size < 2:
        return 0.0
    here, (intra, inter) = in_node(cluster, size, stride), rates_of(cluster)
    within, beyond = sent * (here - 1) / size, sent * (size - here) / size
    return max(within / intra, beyond / inter) / cluster.rank_rates().exchange


def send_seconds(cluster: Cluster, stride: int, size: float) -> float:
    """One message to the rank `stride` ranks on, while all ranks send one."""
    return size / rates_of(cluster)[stride >= cluster.ranks_per_node]
