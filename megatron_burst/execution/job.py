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
    own_kept: the rows that were kept of this rank's own shard, before ranks share heads. Of a row
    chunk all are numbers of rows in the chunk.
    """

    kept: torch.Tensor
    rest: torch.Tensor
    own_kept: torch.Tensor
    run: Pass


@dataclass(frozen=True)
class RowChunk:
    """The passes of the queries of some rows to all keys; with a store, of those it has not kept.

    rows: int64 row numbers of this rank's shard; None for all.
    """

    rows: torch.Tensor | None
    forward: Pass
    backward: Pass
    recompute: PartialPass | None = None


@dataclass(frozen=True)
class Job:
    """One rank's endpoints, kernel and passes.

    heads, kv_heads: of the call's tensors, before ranks share them. ulysses_links: link class to
    each rank that shares heads with this one. chunks: one of all rows, or several that run one
    behind the other.
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
    chunks: tuple[RowChunk, ...]

    @property
    def forward(self) -> Pass:
        """Of all rows, or of the first chunk."""
        return self.chunks[0].forward

    @property
    def backward(self) -> Pass:
        """Of all rows, or of the first chunk."""
        return self.chunks[0].backward

    @property
    def recompute(self) -> PartialPass | None:
        """Of all rows, or of the first chunk."""
        return self.chunks[0].recompute
