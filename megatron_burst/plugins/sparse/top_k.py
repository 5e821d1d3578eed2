# SPDX-License-Identifier: Apache-2.0
"""Running top-k: the best units of every query, updated with the scores of each received chunk.

Among units with equal scores the first in the sequence is selected. The result therefore depends
neither on the order of the chunks nor on the number of ranks.
"""

from __future__ import annotations

import torch

NOTHING = torch.iinfo(torch.int32).max  # marks an unused entry; sorts after all units


def no_units(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the initial scores (-inf) and unit indices (`NOTHING`, int32) of a running top-k.

    Args:
        shape: Shape of both tensors, [..., top_k].
        like: Tensor with the dtype and device of the scores.
    """
    units = torch.full(shape, NOTHING, dtype=torch.int32, device=like.device)
    return like.new_full(shape, float("-inf")), units


def add_units_(
    scores: torch.Tensor, units: torch.Tensor, new: torch.Tensor, new_units: torch.Tensor
) -> None:
    """Merge the units of a chunk into the best units of each query, in place.

    Args:
        scores: Scores of the best units so far [..., top_k].
        units: Indices of the best units so far, int32 [..., top_k].
        new: Scores of the chunk's units [..., new units]; -inf for units that the query does not
            see.
        new_units: Indices of the chunk's units, int32 [new units], ascending. A unit must not be
            added twice.
    """
    count = scores.shape[-1]
    # A stable sort: among equal scores the earlier column, which is the lower unit, comes first.
    new, column = torch.sort(new, dim=-1, descending=True, stable=True)
    new, column = new[..., :count], column[..., :count]
    chosen = new_units[column].masked_fill(new == float("-inf"), NOTHING)
    all_units, all_scores = torch.cat([units, chosen], -1), torch.cat([scores, new], -1)
    all_units, order = torch.sort(all_units, dim=-1, stable=True)
    best, order = torch.sort(all_scores.gather(-1, order), dim=-1, descending=True, stable=True)
    scores.copy_(best[..., :count])
    units.copy_(all_units.gather(-1, order[..., :count]))


def in_order(units: torch.Tensor) -> torch.Tensor:
    """Sort the unit indices [..., top_k] of each query in ascending order.

    Unused entries (`NOTHING`) are last and are replaced by -1.
    """
    units = units.sort(dim=-1).values
    return units.masked_fill(units == NOTHING, -1)
