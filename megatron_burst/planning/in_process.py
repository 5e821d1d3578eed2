# SPDX-License-Identifier: Apache-2.0
"""The plans of ranks that share a process: one per rank, with their tensors in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..comm.groups import PlansOfRanks
from ..kernels.base import Kernel

# This rank's tensor, or a list with one of each rank in this process.
Shard = TypeVar("Shard", torch.Tensor, Sequence[torch.Tensor])


class InProcessPlan(PlansOfRanks):
    """What `prepare` makes with `Groups.in_process`: `ranks`, the plan of each, and as attributes
    what all of them share, such as `side`."""

    def matches(self, q: object, k: object, v: object) -> bool:
        """As `Plan.matches`, of every rank."""
        shards = self.groups.per_rank(q=q, k=k, v=v)
        return all(plan.matches(**shard) for plan, shard in zip(self.ranks, shards, strict=True))

    def with_kernel(self, kernel: Kernel) -> InProcessPlan:
        """As `Plan.with_kernel`, of every rank; the ranks share the kernel."""
        return replace(self, ranks=[plan.with_kernel(kernel) for plan in self.ranks])

    def chunked(self, *_: object, **__: object) -> Any:
        """Raise ValueError: a call in chunks is made on every rank at once."""
        raise ValueError(
            "plan.chunked: of ranks that share a process each makes its own call; hand `plan.ranks`"
            " to `groups.run`, with a function that calls `chunked` on each"
        )
