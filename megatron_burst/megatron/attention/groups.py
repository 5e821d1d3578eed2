# SPDX-License-Identifier: Apache-2.0
"""The grid of ranks (`Groups`), made from Megatron's groups, and the plan book of each layer.

Activations use Megatron's own groups: the context-parallel group and the hierarchical groups. Rings
over other ranks, and gradients, get their own communicators. This module decides which ranks form a
node.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from ...comm.groups import Groups
from ...comm.hosts import this_host
from ...comm.process_groups import backends, gather_objects
from ...config import BurstConfig, flag_of
from ..checks.config import check_topology, ulysses_size
from ..data.cut import ONE_RANK
from .plan_book import PlanBook, plan_book


def context_groups(pg_collection: Any, sizes: list[int] | None, burst: BurstConfig) -> Groups:
    """Return the grid of this rank's context-parallel group; a collective of the group.

    If `sizes` is set, the innermost hierarchical groups of Megatron are the nodes. Otherwise
    `burst.intra_size` consecutive ranks form a node, or by default the ranks on one host. If
    tensor parallelism uses all GPUs of a host, a node has one rank, and a log line reports this.

    Args:
        pg_collection: Megatron's process groups.
        sizes: [ranks per node, number of nodes]; None if not set.
        burst: the options of the run.

    Raises:
        ValueError: The sizes do not fit the group.
    """
    if pg_collection.cp.size() == 1:  # hybrid context parallelism
        return micro_batch_groups(ONE_RANK, None, burst)
    groups = _grid(pg_collection, sizes, burst)
    if sizes or burst.intra_size is not None:
        _warn_of_spread_nodes(pg_collection.cp, groups.topology.per_node)
    if groups.topology.per_node == 1 < groups.size and torch.distributed.get_rank() == 0:
        logging.getLogger("megatron_burst").info(
            f"one context-parallel rank per node: the ring of all {groups.size} ranks uses only "
            f"links between nodes; a smaller --tensor-model-parallel-size lets it use faster links"
        )
    return groups


def micro_batch_groups(group: Any, per_node: int | None, burst: BurstConfig) -> Groups:
    """Return the grid of the ranks that hold a micro-batch; a collective of these ranks.

    The number of ranks per node is the greatest common divisor of `per_node` and the group size.

    Args:
        group: the ranks that hold the micro-batch.
        per_node: ranks per node in the run; if None, ranks on one host form a node.
        burst: the options of the run.
    """
    if group is ONE_RANK:
        return Groups.single()
    size = group.size()
    shared = size if burst.algorithm == "ulysses" else math.gcd(burst.ulysses_size or 1, size)
    options: dict[str, Any] = {
        "ulysses": shared,
        "placement": burst.placement,
        "reuse": [group],
        "nccl_max_ctas": burst.nccl_max_ctas,
    }
    if per_node is None:
        return Groups.by_host(group, **options)
    return Groups.from_topology(group, intra=math.gcd(per_node, size), **options)


def _grid(pg_collection: Any, sizes: list[int] | None, burst: BurstConfig) -> Groups:
    cp = pg_collection.cp
    check_topology(cp.size(), sizes, burst.intra_size)
    if burst.nccl_max_ctas is not None and "nccl" not in backends(cp).values():
        raise ValueError(
            f"{flag_of('nccl_max_ctas')} {burst.nccl_max_ctas} has an effect only with NCCL, and "
            f"the context-parallel group uses {torch.distributed.get_backend(cp)}: remove the flag"
        )
    options: dict[str, Any] = {
        "ulysses": ulysses_size(burst, cp.size()),
        "placement": burst.placement,
        "nccl_max_ctas": burst.nccl_max_ctas,
    }
    if sizes:
        intra, inter = _hierarchical(pg_collection)
        return Groups(intra=intra, inter=inter, reuse=[cp, intra, inter], **options)
    if burst.intra_size is not None:
        return Groups.from_topology(cp, intra=burst.intra_size, reuse=[cp], **options)
    return Groups.by_host(cp, reuse=[cp], **options)


def _warn_of_spread_nodes(cp: Any, per_node: int) -> None:
    """Warn if a node of the grid includes several hosts; a collective of the group.

    A node of several hosts can be intended: fast links may join hosts, such as NVLink within a
    rack. More often the configured size is too large, because tensor parallelism uses some GPUs of
    each host.
    """
    hosts = gather_objects(this_host(), cp)
    line = node_warning(hosts, per_node)
    if line is not None and torch.distributed.get_rank() == 0:
        logging.getLogger("megatron_burst").warning(line)


def node_warning(hosts: Sequence[Hashable], per_node: int) -> str | None:
    """Return a warning if a node includes several hosts, otherwise None.

    Args:
        hosts: the host of each context-parallel rank, in rank order.
        per_node: ranks per node.
    """
    nodes = [hosts[i : i + per_node] for i in range(0, len(hosts), per_node)]
    if all(len(set(node)) == 1 for node in nodes):
        return None
    fit = max(size for size in range(1, per_node) if not per_node % size and all(
        len(set(node[i : i + size])) == 1 for node in nodes for i in range(0, per_node, size)
    ))  # fmt: skip
    return (
        f"a node of {per_node} context-parallel ranks spans several hosts: its ring uses links "
        f"between hosts; unless these are as fast as links within a host, make nodes of {fit} ranks"
        f" (first size of --hierarchical-context-parallel-sizes, or --burst-intra-size), which is "
        f"GPUs per host / --tensor-model-parallel-size"
    )


def _hierarchical(pg_collection: Any) -> list[Any]:
    # Called only if the configuration names sizes, because destroy_model_parallel does not remove
    # the groups of an earlier initialize_model_parallel.
    levels = getattr(pg_collection, "hcp", None)
    if levels is None and pg_collection.cp is parallel_state.get_context_parallel_group(
        check_initialized=False
    ):
        # A collection that Megatron's Attention makes has only tp and cp.
        levels = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    if not levels:
        raise ValueError(
            "--hierarchical-context-parallel-sizes is set, but Megatron made no such groups: also "
            "pass hierarchical_context_parallel_sizes to initialize_model_parallel"
        )
    return levels


def book_of(config: Any, pg_collection: Any) -> PlanBook:
    """Return the plan book, which has the shared plans and process groups of a layer.

    The first layer on a context-parallel group creates the book, a collective of the group.

    Args:
        config: a `TransformerConfig`, after `configure`.
        pg_collection: Megatron's process groups.
    """
    return plan_book(
        pg_collection.cp,
        topology_key(config),
        lambda: context_groups(
            pg_collection, config.hierarchical_context_parallel_sizes, config.burst
        ),
    )


def topology_key(config: Any) -> tuple:
    """Return the settings that determine the grid of a context-parallel group."""
    burst, sizes = config.burst, config.hierarchical_context_parallel_sizes
    # With algorithm "ulysses" all ranks share heads, also without `ulysses_size`.
    return (
        tuple(sizes or ()), burst.intra_size, burst.algorithm == "ulysses", burst.ulysses_size,
        burst.placement, burst.nccl_max_ctas,
    )  # fmt: skip
