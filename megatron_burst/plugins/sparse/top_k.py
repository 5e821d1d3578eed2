# SPDX-License-Identifier: Apache-2.0
"""Best units of every query so far, updated with the scores of each received chunk.

Among equal scores the lower unit is selected. The result therefore depends neither on the order of
the chunks nor on the number of ranks.
"""

from __future__ import annotations

import torch

NOTHING = torch.iinfo(torch.int32).max  # unit of an empty place; sorts after all units


def no_units(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty (scores, units int32) of queries.

    Args:
        shape: Shape [..., top_k].
        like: Tensor with the dtype and device of the scores.
    """
    units = torch.full(shape, NOTHING, dtype=torch.int32, device=like.device)
    return like.new_full(shape, float("-inf")), units


def add_units_(
    scores: torch.Tensor, units: torch.Tensor, new: torch.Tensor, new_units: torch.Tensor
) -> None:
    """Update the best units with new units, in place.

    Args:
        scores: Scores of the best units so far [..., top_k].
        units: Best units so far [..., top_k].
        new: Scores of new units [..., u]; -inf for units that are hidden from the query.
        new_units: New units int32 [u], ascending, none of which was added before.
    """
    count = scores.shape[-1]
    # Stable: among equal scores the earlier column, which is the lower unit, comes first.
    new, column = torch.sort(new, dim=-1, descending=True, stable=True)
    new, column = new[..., :count], column[..., :count]
    chosen = new_units[column].masked_fill(new == float("-inf"), NOTHING)
    all_units, all_scores = torch.cat([units, chosen], -1), torch.cat([scores, new], -1)
    all_units, order = torch.sort(all_units, dim=-1, stable=True)
    best, order = torch.sort(all_scores.gather(-1, order), dim=-1, descending=True, stable=True)
    scores.copy_(best[..., :count])
    units.copy_(all_units.gather(-1, order[..., :count]))


def in_order(units: torch.Tensor) -> torch.Tensor:
    """Return the units of each query in ascending order, with -1 in empty places."""
    units = units.sort(dim=-1).values
    return units.masked_fill(units == NOTHING, -1)
