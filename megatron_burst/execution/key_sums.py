# SPDX-License-Identifier: Apache-2.0
"""Sum over ranks of the gradients of keys and values that every rank holds.

Every rank sums one part of the gradients, in the order of ranks, and sends the sum to the others.
So all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch.nn.functional import pad

from ..comm.packing import CallTag, Envelope
from ..comm.transport import AllToAll, Channel
from .rank_plan import RankPlan

CHANNEL = Channel("grid", True)


def summed_over_ranks(
    rank_plan: RankPlan, call: CallTag, name: str, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return gradients summed over all ranks; unchanged if `rank_plan.key_sum` is None.

    Args:
        rank_plan: Plan of this rank.
        call: Tag of the call; messages on the CPU contain it.
        name: Name of the pass, the same on every rank.
        gradients: Tensors with equal shapes on all ranks, or None. They are sent in the wire dtype
            and summed in their own dtype.
    """
    needed = [gradient for gradient in gradients if gradient is not None]
    if rank_plan.key_sum is None or not sum(gradient.numel() for gradient in needed):
        return list(gradients)
    ranks = len(rank_plan.key_sum.links)
    flat = torch.cat([gradient.reshape(-1) for gradient in needed])
    parts = pad(flat, (0, -flat.numel() % ranks)).view(ranks, -1)
    received = _exchanged(rank_plan, call, f"{name}: sum of keys", parts)
    own = received[0].to(flat.dtype)
    for part in received[1:]:
        own += part
    sums = _exchanged(rank_plan, call, f"{name}: summed keys", own.expand(ranks, -1))
    pieces = iter(sums.reshape(-1)[: flat.numel()].split([gradient.numel() for gradient in needed]))
    return [
        None if gradient is None else next(pieces).view_as(gradient).to(gradient.dtype)
        for gradient in gradients
    ]


def _exchanged(rank_plan: RankPlan, call: CallTag, name: str, parts: torch.Tensor) -> torch.Tensor:
    """Send row i of `parts` [ranks, n] to rank i; return the rows that ranks sent to this rank."""
    assert rank_plan.key_sum is not None
    endpoint, links = rank_plan.key_sum.endpoint, rank_plan.key_sum.links
    wire = parts.to(rank_plan.wire_dtype)
    received = torch.empty(parts.shape, dtype=wire.dtype, device=wire.device)
    envelope = Envelope(call, crc32(name.encode()))
    label = f"{name}, rank {endpoint.rank}"
    endpoint.all_to_all(AllToAll(CHANNEL, [wire], [received], links, envelope, label))
    return received
