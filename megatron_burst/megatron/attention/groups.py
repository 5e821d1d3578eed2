# SPDX-License-Identifier: Apache-2.0
"""From Megatron's process groups to the grid of BurstAttention, and to the plan book of each layer.

Activations travel on Megatron's own groups, the context-parallel one and the hierarchical ones;
only rings that none of these is, and gradients, get communicators of their own. Decides which ranks
count as a node.
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
    """The grid of this rank's context-parallel group; collective over that group.

    Nodes are Megatron's hierarchical groups if it made them (index 0 innermost), otherwise runs of
    `burst.intra_size` ranks, otherwise ranks on one host. Nodes of one rank are legal
    (tensor parallelism then takes all GPUs of a node), and the log says so.
    """
    if pg_collection.cp.size() == 1:  # hybrid context parallelism
        return micro_batch_groups(ONE_RANK, None, burst)
    groups = _grid(pg_collection, sizes, burst)
    if sizes or burst.intra_size is not None:
        _warn_of_spread_nodes(pg_collection.cp, groups.topology.per_node)
    if groups.topology.per_node == 1 < groups.size and torch.distributed.get_rank() == 0:
        logging.getLogger("megatron_burst").info(
            f"one context-parallel rank per node: no ring within nodes, a flat one over all "
            f"{groups.size} ranks; fewer --tensor-model-parallel-size would leave it faster links"
        )
    return groups


def micro_batch_groups(group: Any, per_node: int | None, burst: BurstConfig) -> Groups:
    """The grid of the ranks that hold a micro-batch; collective over them.

    per_node: of the whole run, None for as many as share a host. A group is a part of a node,
    or several nodes, or nodes are parts of these: the largest that both sizes allow.
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
            f"{flag_of('nccl_max_ctas')} {burst.nccl_max_ctas} limits kernels of NCCL, and the "
            f"context-parallel group is on {torch.distributed.get_backend(cp)}: leave it out"
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
    """Warn if a node of the grid lies on several hosts; collective over the group.

    This can be intended: fast links may join hosts, such as NVLink within a rack. More often the
    size does not account for tensor parallelism, and exchanges within a node take slow links.
    """
    hosts = gather_objects(this_host(), cp)
    line = node_warning(hosts, per_node)
    if line is not None and torch.distributed.get_rank() == 0:
        logging.getLogger("megatron_burst").warning(line)


def node_warning(hosts: Sequence[Hashable], per_node: int) -> str | None:
    """The warning for context-parallel ranks on these hosts, in rank order; None without one."""
    nodes = [hosts[i : i + per_node] for i in range(0, len(hosts), per_node)]
    if all(len(set(node)) == 1 for node in nodes):
        return None
    fit = max(size for size in range(1, per_node) if not per_node % size and all(
        len(set(node[i : i + size])) == 1 for node in nodes for i in range(0, per_node, size)
    ))  # fmt: skip
    return (
        f"a node of {per_node} context-parallel ranks lies on several hosts: its ring takes the "
        f"links between them; unless those are as fast as within a host, make nodes of {fit} "
        f"(the first of --hierarchical-context-parallel-sizes, or --burst-intra-size): a host's "
        f"GPUs / --tensor-model-parallel-size"
    )


def _hierarchical(pg_collection: Any) -> list[Any]:
    # Called only when the configuration names sizes: destroy_model_parallel leaves the groups of an
    # earlier initialize_model_parallel behind.
    levels = getattr(pg_collection, "hcp", None)
    if levels is None and pg_collection.cp is parallel_state.get_context_parallel_group(
        check_initialized=False
    ):
        # A collection that Attention makes itself has only tp and cp.
        levels = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    if not levels:
        raise ValueError(
            "--hierarchical-context-parallel-sizes is set, but Megatron made no such groups: pass "
            "hierarchical_context_parallel_sizes to initialize_model_parallel too"
        )
    return levels


def book_of(config: Any, pg_collection: Any) -> PlanBook:
    """The book of a layer with this `TransformerConfig` (after `configure`) and these groups.

    A collective over the context-parallel group for the first layer on it.
    """
    return plan_book(
        pg_collection.cp,
        topology_key(config),
        lambda: context_groups(
            pg_collection, config.hierarchical_context_parallel_sizes, config.burst
        ),
    )


def topology_key(config: Any) -> tuple:
    """All of a configuration that the grid depends on, besides its group."""
    burst, sizes = config.burst, config.hierarchical_context_parallel_sizes
    return (
        tuple(sizes or ()), burst.intra_size, burst.ulysses_size, burst.placement,
        burst.nccl_max_ctas,
    )  # fmt: skip
