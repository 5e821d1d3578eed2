# SPDX-License-Identifier: Apache-2.0
"""Return of the gradients of keys and values to the ranks that hold the keys.

If every rank holds all keys, the gradients are summed over ranks. Each rank sums one part of the
gradients in the order of ranks, and sends the sum to the other ranks. Therefore the results are
bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch.nn.functional import pad

from ..comm.packing import CallTag, Envelope
from ..comm.transport import AllToAll, Channel
from .rank_plan import KeySum, RankPlan
from .ulysses import rows_to_heads

CHANNEL = Channel("grid", True)


def keys_to_owners(
    rank_plan: RankPlan,
    call: CallTag,
    name: str,
    gradients: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
) -> Sequence[torch.Tensor | None]:
    """Return dk and dv of this rank's own keys, from the gradients that its ring computed.

    If the plan has a `key_sum` (every rank holds all keys), the gradients are summed over ranks.
    Otherwise ranks that share heads (Ulysses) return the gradients to the owners of the keys by
    all-to-all. Without shared heads, the gradients are returned unchanged.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        name: Name of the pass, the same on every rank.
        gradients: dk and dv of this rank's ring, or dk alone if values are the keys; None for a
            gradient that is not needed.
        dtype: dtype in which the gradients of copied key heads are summed.
    """
    if rank_plan.key_sum is not None:
        return summed_over_ranks(rank_plan, rank_plan.key_sum, call, name, gradients)
    if len(rank_plan.ulysses_links) == 1:
        return gradients
    wire = [
        None if gradient is None else gradient.to(rank_plan.wire_dtype) for gradient in gradients
    ]
    heads, orders = (rank_plan.kv_heads,) * len(wire), (rank_plan.key_order,) * len(wire)
    return rows_to_heads(rank_plan, call, name, wire, heads, dtype, orders)


def summed_over_ranks(
    rank_plan: RankPlan,
    key_sum: KeySum,
    call: CallTag,
    name: str,
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Return gradients summed over all ranks.

    Args:
        rank_plan: Plan of this rank.
        key_sum: Ranks that sum their gradients.
        call: Tag of the call; messages on the CPU contain it.
        name: Name of the pass, the same on every rank.
        gradients: Tensors with equal shapes on all ranks, or None. They are sent in the wire dtype
            and summed in their own dtype.
    """
    needed = [gradient for gradient in gradients if gradient is not None]
    if not sum(gradient.numel() for gradient in needed):
        return list(gradients)
    ranks = len(key_sum.links)
    flat = torch.cat([gradient.reshape(-1) for gradient in needed])
    parts = pad(flat, (0, -flat.numel() % ranks)).view(ranks, -1)
    parts = parts.to(rank_plan.wire_dtype)
    received = _exchanged(key_sum, call, f"{name}: sum of keys", parts)
    own = received[0].to(flat.dtype)
    for part in received[1:]:
        own += part
    own = own.to(rank_plan.wire_dtype).expand(ranks, -1)
    sums = _exchanged(key_sum, call, f"{name}: summed keys", own)
    pieces = iter(sums.reshape(-1)[: flat.numel()].split([gradient.numel() for gradient in needed]))
    return [
        None if gradient is None else next(pieces).view_as(gradient).to(gradient.dtype)
        for gradient in gradients
    ]


def _exchanged(key_sum: KeySum, call: CallTag, name: str, parts: torch.Tensor) -> torch.Tensor:
    """Send row i of `parts` [ranks, n] to rank i; return the rows that ranks sent to this rank."""
    endpoint = key_sum.endpoint
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    envelope = Envelope(call, crc32(name.encode()))
    label = f"{name}, rank {endpoint.rank}"
    endpoint.all_to_all(AllToAll(CHANNEL, [parts], [received], key_sum.links, envelope, label))
    return received
