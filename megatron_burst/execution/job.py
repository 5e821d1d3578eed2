# SPDX-License-Identifier: Apache-2.0
"""What one rank executes for a call of attention: plain data, made by `planning/build.py`.

A `Pass` is what the loop in `ring` runs, with all that a plan can know written down beforehand:
which hops start together, where their rows lie in which buffer, what each pair adds to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..comm.transport import Channel, Endpoint
from ..kernels.base import Kernel, Scoring
from ..schedule.tables import Chunk, Hop, Pair

Tensors = tuple[torch.Tensor, ...]


@dataclass
class RowPlace:
    """Where some rows lie in the buffer of a chunk.

    count: how many rows. at: where, a slice where they follow one another, else an int64 index on
    the device. whole: are they all rows of the buffer?
    """

    count: int
    at: Any
    whole: bool


class Target(NamedTuple):
    """Rows of a partial result, to which a pair adds or which a hop brings or takes away.

    total: the chunk with all rows of which this rank ever holds partial results; size: how many
    rows that has. rows: bit set of those that get something. place: of the rows in the total.
    """

    total: Chunk
    size: int
    rows: int
    place: RowPlace


@dataclass(frozen=True)
class Call:
    """One call of the kernel: the query and key chunks as they are held, what it planned for
    them, and what it adds to: the output, or the gradients of the queries and of the keys. parts:
    of a call over several chunks of keys, `joined.Parts`.
    """

    pair: Pair
    queries: Chunk
    keys: Chunk
    work: Any
    targets: tuple[Target, ...]
    parts: Any = ()


@dataclass(frozen=True)
class Payload:
    """What one hop carries from or to this rank.

    count: of rows. digest: of pass and chunk, for the envelope. packed: does it travel as one
    message on all devices? Only what an owner sends of its own tensors does not: elsewhere than on
    the CPU these go from where they lie. target: of a partial result. source: of a copy that
    leaves, the chunk it is taken from and where it lies there; None where it is sent on as it came.
    """

    hop: Hop
    count: int
    digest: int
    packed: bool
    target: Target | None = None
    source: tuple[Chunk, RowPlace] | None = None


@dataclass(frozen=True)
class Exchange:
    """Hops that share a process group, start together and land together."""

    channel: Channel
    land: int
    leaving: tuple[Payload, ...]
    arriving: tuple[Payload, ...]


@dataclass(frozen=True)
class Step:
    """A boundary and the pairs computed after it; release: chunks of others that this rank has
    neither to compute with nor to send any more.
    """

    index: int
    release: tuple[Chunk, ...]
    exchanges: tuple[Exchange, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Pass:
    """What one rank needs for one pass.

    deferred: the steps of head chunks that compute the pair of their own chunks last; none where
    there are no such. totals: (family, owner) -> all rows of which this rank holds partial results.
    longest: of each family, the most rows of a chunk of others. sends: how often each copy of rows
    is sent. kinds: what `ring` found out about its messages, by the dtypes and heads that they
    depend on.
    """

    name: str
    steps: tuple[Step, ...]
    deferred: tuple[Step, ...]
    totals: Mapping[tuple[str, int], Target]
    longest: Mapping[str, int]
    sends: Mapping[Chunk, int]
    kinds: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class PartialPass:
    """A forward that runs again for some rows only: int64 row numbers of this rank's ring shard.

    kept: rows whose results were kept. rest: rows that are computed again, the queries of `run`.
    own_kept: the rows that were kept of this rank's own shard, before ranks share heads. In a row
    chunk all are numbers of rows in the chunk.
    """

    kept: torch.Tensor
    rest: torch.Tensor
    own_kept: torch.Tensor
    run: Pass

    def whole(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The rows that were kept and those computed again, each in its place."""
        if not len(self.rest):
            return stored.detach()  # as a result it gets a history of its own
        whole = new.new_empty((len(self.kept) + len(self.rest), *new.shape[1:]))
        whole.index_copy_(0, self.kept, stored.detach())
        whole.index_copy_(0, self.rest, new)
        return whole


@dataclass(frozen=True)
class RowChunk:
    """The passes of the queries of some rows to all keys; with a store, of those it has not kept.

    rows: int64 row numbers of this rank's shard; None for all. order: as of `Job`, of these rows.
    host_forward: the forward for which the keys of other ranks are in host memory from the first
    row chunk on: that of any row chunk can bring the keys for all; None as of `pipeline.RowDemand`.
    """

    rows: torch.Tensor | None
    order: torch.Tensor | None
    forward: Pass
    backward: Pass
    recompute: PartialPass | None = None
    host_forward: Pass | None = None


@dataclass(frozen=True)
class Job:
    """One rank's endpoints, kernel and passes.

    heads, kv_heads: of the call's tensors, before ranks share them. ulysses_links: link class to
    each rank that shares heads with this one. chunks: one of all rows, or several that run one
    behind the other. order: int64, of each row that the ring sees its number among those of the
    first rank that shares heads, then of the second, ...; None where that is their order.
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
    order: torch.Tensor | None

    @property
    def forward(self) -> Pass:
        """The forward pass of all rows, or of the first row chunk."""
        return self.chunks[0].forward

    @property
    def backward(self) -> Pass:
        """The backward pass of all rows, or of the first row chunk."""
        return self.chunks[0].backward


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows of x: x itself where they are all of them."""
    return x if len(rows) == len(x) else x.index_select(0, rows)
