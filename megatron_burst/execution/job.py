"""What one rank executes for a call of attention: data, made by `planning`, run by `rank`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm.transport import Endpoint
from ..kernels.base import Kernel, Scoring
from .executor import Pass


@dataclass(frozen=True)
class PartialPass:
    """A forward that runs again for some rows only: int64 row numbers of this rank's ring shard.

    kept: rows whose results were kept. rest: rows that are computed again, the queries of `run`.
    """

    kept: torch.Tensor
    rest: torch.Tensor
    run: Pass


@dataclass(frozen=True)
class Job:
    """One rank's endpoints, kernel and passes.

    heads, kv_heads: of the call's tensors, before ranks share them. ulysses_links: link class to
    each rank that shares heads with this one.
    """

    ring: Endpoint
    ulysses: Endpoint
    ulysses_links: tuple[str, ...]
    kernel: Kernel
    scoring: Scoring
    wire_dtype: torch.dtype
    needs_grad: tuple[bool, bool, bool]
    heads: int
    kv_heads: int
    head_chunks: int
    forward: Pass
    backward: Pass
    recompute: PartialPass | None = None
