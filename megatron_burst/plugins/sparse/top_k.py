# SPDX-License-Identifier: Apache-2.0
"""The best units of every query so far, to which the scores of each arriving chunk are added.

Among equal scores the lower unit wins, so the result depends neither on the order in which chunks
arrive nor on how many ranks there are.
"""

from __future__ import annotations

import torch

NOTHING = torch.iinfo(torch.int32).max  # the unit of a place that is not taken: after all others


def no_units(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, units int32) of queries that have seen nothing; like: dtype and device of scores."""
    units = torch.full(shape, NOTHING, dtype=torch.int32, device=like.device)
    return like.new_full(shape, float("-inf")), units


def add_units_(
    scores: torch.Tensor, units: torch.Tensor, new: torch.Tensor, new_units: torch.Tensor
) -> None:
    """Keep in (scores, units) [..., top_k] the best of these and of `new` [..., u], in place.

    new_units int32 [u], ascending, none of which was there before; -inf: hidden from this query.
    """
    count = scores.shape[-1]
    # Stable: of equal scores the earlier column, which is the lower unit, comes first.
    new, column = torch.sort(new, dim=-1, descending=True, stable=True)
    new, column = new[..., :count], column[..., :count]
    found = new_units[column].masked_fill(new == float("-inf"), NOTHING)
    both, of_both = torch.cat([units, found], -1), torch.cat([scores, new], -1)
    both, order = torch.sort(both, dim=-1, stable=True)
    best, order = torch.sort(of_both.gather(-1, order), dim=-1, descending=True, stable=True)
    scores.copy_(best[..., :count])
    units.copy_(both.gather(-1, order[..., :count]))


def in_order(units: torch.Tensor) -> torch.Tensor:
    """The units of each query ascending, -1 in places that are not taken."""
    units = units.sort(dim=-1).values
    return units.masked_fill(units == NOTHING, -1)
