# SPDX-License-Identifier: Apache-2.0
"""Head parallelism: an all-to-all that trades sequence rows for heads, around any ring.

The ranks of a ulysses group hold different rows of the sequence and all heads; after `scatter`
each holds the rows of the whole group and its share of the heads, and after `gather` it is as
before. `schedule.head_shares` decides in which order the ring sees these rows. With one ulysses
group over all ranks that is DeepSpeed-Ulysses; around a ring it is 2D attention (LoongTrain section
4.2). Where key/value heads are fewer than ranks each rank takes
the one it needs, and the gradients of its copies are summed at home, in a dtype of the caller's
choice: what travels may be narrower. Knows heads and rows only; how the parts travel is the
transport's choice.

Shape letters: s local rows, b batch, n heads, d width; p ranks of the ulysses group.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from ..comm.packing import CallTag, Envelope
from ..comm.transport import Channel, Endpoint, Trade
from ..schedule.head_shares import Share
from .job import Job, Tensors

CHANNEL = Channel("ulysses", False)


def heads_here(job: Job) -> slice:
    """The query heads that this rank's ring computes."""
    return Share(job.heads, len(job.ulysses_links)).of(job.ulysses.rank)


def heads_to_rows(
    job: Job, call: CallTag, name: str, tensors: Tensors, order: torch.Tensor | None
) -> Tensors:
    """What the ring sees: all rows of the ranks that share heads, and this rank's heads.

    name: of the pass, the same on every rank, for envelopes and errors. order: of the rows, as
    `Job.order`.
    """
    if len(job.ulysses_links) == 1:
        return tensors
    envelope = Envelope(call, crc32(f"{name} heads to rows".encode()))
    label = f"{name}, ulysses rank {job.ulysses.rank}"
    whole = scatter(job.ulysses, job.ulysses_links, tensors, envelope, label)
    if order is not None:
        for index, tensor in enumerate(whole):  # one by one: the first are free before the last
            whole[index] = tensor.index_select(0, order)
            del tensor
    return tuple(whole)


def rows_to_heads(
    job: Job,
    call: CallTag,
    name: str,
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    sums: torch.dtype,
    order: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The inverse of `heads_to_rows`. heads: of each tensor, on this rank; sums: as in `gather`."""
    if len(job.ulysses_links) == 1:
        return tuple(tensors)
    if order is not None:
        tensors = [
            t if t is None else torch.empty_like(t).index_copy_(0, order, t) for t in tensors
        ]
    envelope = Envelope(call, crc32(f"{name} rows to heads".encode()))
    label = f"{name}, ulysses rank {job.ulysses.rank}"
    return tuple(gather(job.ulysses, job.ulysses_links, tensors, heads, sums, envelope, label))


def scatter(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor],
    envelope: Envelope,
    label: str,
) -> list[torch.Tensor]:
    """[s, b, n, d] of this rank -> [p s, b, share of n, d], rows in the order of the group."""
    parts = [_parts(t, len(links)) for t in tensors]
    whole = [p.new_empty(p.shape) for p in parts]
    endpoint.all_to_all(Trade(CHANNEL, parts, whole, links, envelope, label))
    return [w.flatten(0, 1) for w in whole]


def _parts(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """[s, b, n, d] -> [size, s, b, share of n, d], as `Share.of`: a view, unless heads have
    copies.
    """
    heads = tensor.shape[2]
    if heads < size:
        copies = size // heads
        tensor = tensor.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
    return tensor.unflatten(2, (size, -1)).movedim(2, 0)


def gather(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    sums: torch.dtype,
    envelope: Envelope,
    label: str,
) -> list[torch.Tensor | None]:
    """The inverse of `scatter`: [p s, b, share of n, d] -> [s, b, n, d], copies of a head summed.

    heads: n of each tensor. sums: the dtype of these sums; a tensor whose heads have no copies
    keeps its own. None stays None.
    """
    size = len(links)
    parts = [t.unflatten(0, (size, -1)) for t in tensors if t is not None]
    received = [p.new_empty(p.shape) for p in parts]
    if parts:
        endpoint.all_to_all(Trade(CHANNEL, parts, received, links, envelope, label))
    arrived = iter(received)
    return [
        None if t is None else _joined(next(arrived), n, sums)
        for t, n in zip(tensors, heads, strict=True)
    ]


def _joined(parts: torch.Tensor, heads: int, sums: torch.dtype) -> torch.Tensor:
    """The inverse of `_parts`."""
    size = len(parts)
    if heads >= size:
        return parts.movedim(0, 2).flatten(2, 3).contiguous()  # one head of each: a view so far
    _, rows, batch, _, width = parts.shape
    total = parts.new_zeros((rows, batch, heads, width), dtype=sums)
    for copy in parts.squeeze(3).unflatten(0, (heads, -1)).unbind(1):
        total.add_(copy.movedim(0, 2))  # += would also write it back
    return total
