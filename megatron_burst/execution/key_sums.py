# SPDX-License-Identifier: Apache-2.0
"""Sum over ranks of the gradients of keys and values that every rank holds.

Each rank sums one part of the gradients in the order of ranks, and sends the sum to the other
ranks. Therefore the results are bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch.nn.functional import pad

from ..comm.packing import CallTag, Envelope
from ..comm.transport import AllToAll, Channel
from .rank_plan import KeySum, RankPlan

CHANNEL = Channel("grid", True)


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
