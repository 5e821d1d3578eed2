# SPDX-License-Identifier: Apache-2.0
"""The plan of one rank for an attention call: plain data, made by `planning/build.py`.

The loop in `ring` runs a `RankPass`. The pass contains everything that can be computed before the
call: which transfers start together, where the sent and received rows are in buffers, and where
each kernel call adds its results.
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
    """Location of some rows of a chunk in the buffer of the chunk.

    Attributes:
        count: Number of rows.
        at: A slice if the rows are consecutive, otherwise an int64 index tensor on the device.
        whole: True if the rows are all rows of the buffer.
    """

    count: int
    at: Any
    whole: bool


class Target(NamedTuple):
    """Rows of a partial result.

    A kernel call adds its output to these rows, or a transfer sends or receives them.

    Attributes:
        total: Chunk with all rows for which this rank holds partial results during the pass.
        size: Number of rows of `total`.
        rows: Bit set of the rows of this target (one bit per bundle: rows that the same ranks use).
        place: Position of the rows in the buffer of `total`.
    """

    total: Chunk
    size: int
    rows: int
    place: RowPlace


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel for a pair of chunks.

    Attributes:
        pair: Owners of the queries and of the keys, with their rows, as in the schedule.
        queries: Chunk with the queries; `Ring.chunks` maps it to the tensors.
        keys: Chunk with the keys; `Ring.chunks` maps it to the tensors.
        work: Result of `Kernel.works_for` for the two chunks.
        targets: Partial results to which the call adds: out, or dquery and dkv.
        parts: All chunks of keys (`joined.JoinedKeys`) if the call reads several, otherwise empty.
    """

    pair: Pair
    queries: Chunk
    keys: Chunk
    work: Any
    targets: tuple[Target, ...]
    parts: Any = ()


class Payload(NamedTuple):
    """The rows that one transfer (hop) sends from or to this rank.

    Attributes:
        hop: Transfer of the schedule.
        row_count: Number of rows.
        digest: Digest of pass and chunk, for the envelope.
        packed: True if the tensors are sent as one message on every device. False if the owner
            sends the chunk: on devices other than the CPU, each tensor is then sent separately,
            without a copy.
        target: Rows of a partial result; None if queries or keys are sent.
        source: Chunk and position of the queries or keys that this rank copies into the message.
            None if this rank receives, or forwards a received chunk unchanged.
    """

    hop: Hop
    row_count: int
    digest: int
    packed: bool
    target: Target | None = None
    source: tuple[Chunk, RowPlace] | None = None


class Exchange(NamedTuple):
    """Transfers that use one process group, start together and end together.

    Attributes:
        channel: Channel of the process group.
        land: Number of the step before which the rank waits for the transfers.
        leaving: Rows that this rank sends.
        arriving: Rows that this rank receives.
    """

    channel: Channel
    land: int
    leaving: tuple[Payload, ...]
    arriving: tuple[Payload, ...]


@dataclass(frozen=True)
class Step:
    """Operations of this rank just before a step, and the kernel calls of the step.

    Attributes:
        index: Number of the step.
        release: Received chunks that this rank does not need any more.
        exchanges: Transfers that start before the step.
        calls: Kernel calls of the step.
        relays: Chain of transfers that the relay stream starts before the step: pairs (boundary,
            transfers that start when the transfers that land at this boundary have ended).
    """

    index: int
    release: tuple[Chunk, ...]
    exchanges: tuple[Exchange, ...]
    calls: tuple[KernelCall, ...]
    relays: tuple[tuple[int, tuple[Exchange, ...]], ...] = ()


@dataclass(frozen=True)
class RankPass:
    """A forward or backward pass of one rank.

    Attributes:
        name: Name in envelopes, errors and profiles.
        steps: Steps of the pass.
        deferred: Steps of the head chunks (groups of heads) that compute attention of the rank's
            own queries to its own keys last; empty if the plan has no such head chunks.
        totals: (family, owner) -> all rows of the owner for which this rank holds partial results.
            A family is "out", "dquery" or "dkv".
        longest: Kind of buffer -> largest number of rows. "kv" or "dkv" has the sent and received
            chunks, and the sums for rows of other ranks, so that both share buffers. "dkv wire" has
            only the chunks.
        sends: Chunk -> number of times that this rank sends the chunk.
        kinds: Cache for the results of `ring.kinds`, by dtypes and number of heads.
    """

    name: str
    steps: tuple[Step, ...]
    deferred: tuple[Step, ...]
    totals: Mapping[tuple[str, int], Target]
    longest: Mapping[str, int]
    sends: Mapping[Chunk, int]
    kinds: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class RecomputePass:
    """A forward pass that is repeated for some rows only.

    Rows are int64 indices. With row chunks, they are indices within the row chunk.

    Attributes:
        kept: Rows whose results are in the store, among the rows that this rank has in the ring
            (after the all-to-all of heads).
        missing: Rows that are computed again, among the same rows: the queries of `forward`.
        own_kept: Rows whose results are in the store, among the rows of this rank's own shard
            (before the all-to-all of heads).
        forward: The forward pass of `missing`.
    """

    kept: torch.Tensor
    missing: torch.Tensor
    own_kept: torch.Tensor
    forward: RankPass

    def all_rows(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return stored and recomputed rows in their original order."""
        if not len(self.missing):
            return stored.detach()  # autograd sets the history of a returned tensor
        all_rows = new.new_empty((len(self.kept) + len(self.missing), *new.shape[1:]))
        all_rows.index_copy_(0, self.kept, stored.detach())
        all_rows.index_copy_(0, self.missing, new)
        return all_rows


@dataclass(frozen=True)
class RowChunk:
    """Plan of one row chunk: the passes of some query rows over all keys.

    Attributes:
        rows: int64 row numbers in this rank's shard; None for all rows.
        order: int64, one entry per row of this row chunk in the ring: the index of the row in the
            concatenated row chunks of the ranks that share heads. None if the two orders are equal.
        forward: Forward pass.
        backward: Backward pass.
        recompute: Forward pass of the rows whose outputs the attention store does not keep; None
            without a store.
        host_forward: Forward pass that receives the keys for all row chunks, for a call with keys
            in host memory. Any row chunk may run it first. None with one row chunk, and for
            algorithms that send more than keys in forward.
    """

    rows: torch.Tensor | None
    order: torch.Tensor | None
    forward: RankPass
    backward: RankPass
    recompute: RecomputePass | None = None
    host_forward: RankPass | None = None


@dataclass(frozen=True)
class KeySum:
    """The ranks that sum the gradients of keys and values that every rank holds.

    Attributes:
        endpoint: Endpoint with all ranks of the grid.
        links: Link class to each rank, including this rank.
    """

    endpoint: Endpoint
    links: tuple[str, ...]


@dataclass(frozen=True)
class RankPlan:
    """Endpoints (transports to other ranks), kernel and passes of one rank.

    Attributes:
        ring: Endpoint of the ring.
        ulysses: Endpoint of the ranks that share heads.
        ulysses_links: Link class to each rank of the ulysses group, including this rank.
        kernel: Local attention kernel.
        scoring: Scale and softcap of the scores.
        wire_dtype: dtype in which gradients are sent.
        needs_grad: Whether q, k and v need a gradient.
        heads: Number of heads of q before the all-to-all of heads.
        kv_heads: Number of heads of k and v before the all-to-all of heads.
        head_chunks: Number of head chunks.
        chunks: One row chunk with all rows, or several that run one after the other.
        key_order: int64, one entry per key of this rank in the ring: the index of the key in the
            concatenated shards of the ranks that share heads. None if the two orders are equal.
        key_sum: Ranks that sum the gradients of keys that every rank holds. None if every rank has
            its own keys, or if ranks do not sum the gradients.
        values_are_keys: True if values are the keys, which are then sent once.
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
    key_order: torch.Tensor | None
    key_sum: KeySum | None = None
    values_are_keys: bool = False

    @property
    def forward(self) -> RankPass:
        """Return the forward pass of all rows, or of the first row chunk."""
        return self.chunks[0].forward

    @property
    def backward(self) -> RankPass:
        """Return the backward pass of all rows, or of the first row chunk."""
        return self.chunks[0].backward


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of x with these indices; x itself if `rows` has as many rows as x."""
    return x if len(rows) == len(x) else x.index_select(0, rows)
