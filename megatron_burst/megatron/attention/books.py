"""The plan book of a layer that is built: of its context-parallel group and of what makes its grid.

All layers of a model that split the sequence share it, whatever they compute.
"""

from __future__ import annotations

from typing import Any

from megatron_burst.megatron.attention.groups import context_groups
from megatron_burst.megatron.attention.plan_book import PlanBook, plan_book


def book_of(config: Any, pg_collection: Any) -> PlanBook:
    """The book of a layer with this ``TransformerConfig`` (after `configure`) and these groups.

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
