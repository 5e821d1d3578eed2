"""The plans of ranks that share a process: one per rank, with their tensors in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..comm.groups import InProcessGroups
from ..kernels.base import Kernel
from .plan import Plan

# This rank's tensor, or a list with one of each rank in this process.
Shard = TypeVar("Shard", torch.Tensor, Sequence[torch.Tensor])


@dataclass(frozen=True)
class InProcessPlan:
    """What `prepare` makes with `Groups.in_process`: `ranks`, the plan of each.

    What all of them share is an attribute here too: `side`, `describe()`, and so on.
    """

    groups: InProcessGroups
    ranks: Sequence[Plan]

    def matches(self, q: object, k: object, v: object) -> bool:
        """As `Plan.matches`, of every rank."""
        shards = per_rank(self.groups, q, k, v)
        return all(plan.matches(*shard) for plan, shard in zip(self.ranks, shards, strict=True))

    def with_kernel(self, kernel: Kernel) -> InProcessPlan:
        """As `Plan.with_kernel`, of every rank; the ranks share the kernel."""
        return replace(self, ranks=[plan.with_kernel(kernel) for plan in self.ranks])

    def chunked(self, *_: object, **__: object) -> Any:
        """Raise ValueError: a call in chunks is made on every rank at once."""
        raise ValueError(
            "plan.chunked: of ranks that share a process each makes its own call; hand `plan.ranks`"
            " to `groups.run`, with a function that calls `chunked` on each"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "ranks" or name.startswith("__"):  # asked for by copies that are not filled yet
            raise AttributeError(name)
        return getattr(self.ranks[0], name)


def per_rank(
    groups: InProcessGroups, q: object, k: object, v: object
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(q, k, v) of each rank, from a list of each."""
    lists = [list(x) if isinstance(x, (list, tuple)) else [x] for x in (q, k, v)]
    for name, shards in zip("qkv", lists, strict=True):
        if len(shards) != groups.size:
            raise ValueError(
                f"{name}: groups hold {groups.size} ranks in this process, got {len(shards)} "
                "tensors"
            )
    return list(zip(*lists, strict=True))
