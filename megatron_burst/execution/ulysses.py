# SPDX-License-Identifier: Apache-2.0
"""Head parallelism: an all-to-all that exchanges sequence rows for heads, before and after a ring.

Before the exchange, each rank of a ulysses group has its own rows and all heads. After `scatter`,
each rank has the rows of the whole group and its share of the heads. `gather` is the inverse.
`schedule.head_shares` decides the order of the rows in the ring. One ulysses group with all ranks
is DeepSpeed-Ulysses. Several ulysses groups with rings between them are 2D attention (LoongTrain
section 4.2).

If there are fewer key/value heads than ranks, each rank receives a copy of the head that it needs.
`gather` sums the gradients of the copies in a dtype that the caller chooses. Gradients may be sent
in a narrower dtype.

Shape letters: s local rows, b batch, n heads, d width; p ranks of the ulysses group.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from ..comm.packing import CallTag, Envelope
from ..comm.transport import AllToAll, Channel, Endpoint
from ..schedule.head_shares import Share
from .rank_plan import RankPlan, Tensors

CHANNEL = Channel("ulysses", False)
Orders = Sequence["torch.Tensor | None"]


def heads_here(rank_plan: RankPlan) -> slice:
    """Return the query heads that this rank computes: its share if ranks share heads, else all."""
    return Share(rank_plan.heads, len(rank_plan.ulysses_links)).of(rank_plan.ulysses.rank)


def heads_to_rows(
    rank_plan: RankPlan, call: CallTag, name: str, tensors: Tensors, orders: Orders
) -> Tensors:
    """Return all rows of the ulysses group, for this rank's share of the heads.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        name: Name of the pass, the same on every rank, for envelopes and errors.
        tensors: Tensors of this rank, [s, b, n, d] each.
        orders: Order of the rows of each tensor, as in `RowChunk.order` and `RankPlan.key_order`.

    Returns:
        [p s, b, share of n, d] for each tensor.
    """
    if len(rank_plan.ulysses_links) == 1:
        return tensors
    envelope = Envelope(call, crc32(f"{name} heads to rows".encode()))
    label = f"{name}, ulysses rank {rank_plan.ulysses.rank}"
    group_rows = scatter(rank_plan.ulysses, rank_plan.ulysses_links, tensors, envelope, label)
    for index, order in enumerate(orders):  # one at a time, so that memory is freed early
        if order is not None:
            group_rows[index] = group_rows[index].index_select(0, order)
    return tuple(group_rows)


def rows_to_heads(
    rank_plan: RankPlan,
    call: CallTag,
    name: str,
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    sums: torch.dtype,
    orders: Orders,
) -> tuple[torch.Tensor | None, ...]:
    """Return all heads of this rank's rows: the inverse of `heads_to_rows`.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        name: Name of the pass, the same on every rank.
        tensors: Tensors [p s, b, share of n, d]. For None, the result is None.
        heads: n of each tensor.
        sums: dtype in which the gradients of copied heads are summed, as in `gather`.
        orders: Order of the rows of each tensor, as in `RowChunk.order` and `RankPlan.key_order`.
    """
    if len(rank_plan.ulysses_links) == 1:
        return tuple(tensors)
    tensors = [
        t if t is None or order is None else torch.empty_like(t).index_copy_(0, order, t)
        for t, order in zip(tensors, orders, strict=True)
    ]
    envelope = Envelope(call, crc32(f"{name} rows to heads".encode()))
    label = f"{name}, ulysses rank {rank_plan.ulysses.rank}"
    return tuple(
        gather(rank_plan.ulysses, rank_plan.ulysses_links, tensors, heads, sums, envelope, label)
    )


def scatter(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor],
    envelope: Envelope,
    label: str,
) -> list[torch.Tensor]:
    """Exchange rows for heads: receive the rows of all ranks for this rank's share of the heads.

    Args:
        endpoint: Endpoint of the ulysses group.
        links: Link class to each rank.
        tensors: Tensors of this rank, [s, b, n, d] each.
        envelope: Envelope of the messages.
        label: Text that names the exchange in errors.

    Returns:
        [p s, b, share of n, d] for each tensor. Rows are in the order of the group's ranks.
    """
    parts = [_parts(t, len(links)) for t in tensors]
    received = [p.new_empty(p.shape) for p in parts]
    endpoint.all_to_all(AllToAll(CHANNEL, parts, received, links, envelope, label))
    return [tensor.flatten(0, 1) for tensor in received]


def _parts(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Split [s, b, n, d] by heads into [size, s, b, share of n, d], one part per rank.

    If there are fewer heads than ranks, several parts are copies of the same head (see `Share.of`).
    Otherwise the result is a view.
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
    """Exchange heads for rows, the inverse of `scatter`: receive all heads of this rank's rows.

    Args:
        endpoint: Endpoint of the ulysses group.
        links: Link class to each rank.
        tensors: Tensors [p s, b, share of n, d] of this rank. For None, the result is None.
        heads: n of each tensor.
        sums: dtype in which the gradients of copied heads are summed. A tensor without copied heads
            keeps its dtype.
        envelope: Envelope of the messages.
        label: Text that names the exchange in errors.
    """
    size = len(links)
    parts = [t.unflatten(0, (size, -1)) for t in tensors if t is not None]
    received = [p.new_empty(p.shape) for p in parts]
    if parts:
        endpoint.all_to_all(AllToAll(CHANNEL, parts, received, links, envelope, label))
    arrived = iter(received)
    return [
        None if t is None else _joined(next(arrived), n, sums)
        for t, n in zip(tensors, heads, strict=True)
    ]


def _joined(parts: torch.Tensor, heads: int, sums: torch.dtype) -> torch.Tensor:
    """Join [size, s, b, share of n, d] to [s, b, n, d], the inverse of `_parts`.

    Copies of the same head are summed in dtype `sums`.
    """
    size = len(parts)
    if heads >= size:
        return parts.movedim(0, 2).flatten(2, 3).contiguous()
    _, rows, batch, _, width = parts.shape
    total = parts.new_zeros((rows, batch, heads, width), dtype=sums)
    for copy in parts.squeeze(3).unflatten(0, (heads, -1)).unbind(1):
        total.add_(copy.movedim(0, 2))
    return total
