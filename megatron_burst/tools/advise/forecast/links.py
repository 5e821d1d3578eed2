"""Rates at which a rank's collectives move bytes: within a node, between nodes, to the host.

Plain arithmetic on a cluster. The rings of attention are simulated message by message elsewhere.
"""

from __future__ import annotations

from ....autotune.clusters import Cluster


def intra_rate(cluster: Cluster) -> float:
    """Bytes per second that a rank sends within its node, one way."""
    return cluster.rank_rates().intra


def inter_rate(cluster: Cluster) -> float:
    """Bytes per second that a rank sends to other nodes while all ranks of its node do."""
    return cluster.rank_rates().inter * cluster.nic_share


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
    here = in_node(cluster, size, stride)
    if here == size:
        return moved / intra_rate(cluster)
    return moved / min(here * inter_rate(cluster), intra_rate(cluster))


def all_to_all_seconds(cluster: Cluster, size: int, stride: int, sent: float) -> float:
    """An all-to-all in which each rank has `sent` bytes for all ranks of its group, itself too.

    Both link classes carry their share at the same time.
    """
    if size < 2:
        return 0.0
    here = in_node(cluster, size, stride)
    within, beyond = sent * (here - 1) / size, sent * (size - here) / size
    taken = max(within / intra_rate(cluster), beyond / inter_rate(cluster))
    return taken / cluster.rank_rates().exchange


def send_seconds(cluster: Cluster, stride: int, size: float) -> float:
    """One message to the rank `stride` ranks on, while all ranks send one."""
    within = stride < cluster.ranks_per_node
    return size / (intra_rate(cluster) if within else inter_rate(cluster))
