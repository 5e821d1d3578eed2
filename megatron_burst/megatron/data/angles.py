# SPDX-License-Identifier: Apache-2.0
"""Rotary angles of any rows, exact at any position.

Megatron multiplies positions and frequencies in fp32, for all positions of a sequence. Half a unit
in the last place of such an angle is 0.03 rad at one million and 1 rad at 20 million tokens; from
2^24 on, neighbouring positions are equal. Here the angles of given positions are computed: the same
fp32 product up to `EXACT` positions, so that a run equals Megatron's own bit for bit, and beyond
that a product in fp64, reduced modulo 2 pi before it is rounded to fp32. Frequencies are the same
fp32 numbers on both sides, so that they meet without a step in phase.

The border is where Megatron's own error stops being harmless. Angles below 2^16 are off by at most
2^-9 rad, which is what rounding a cosine near 1 to bf16 costs anyway. It belongs to a position and
not to a sequence: the angle of a token does not depend on how many follow, on the other documents
of a pack, or on the number of ranks.

Shape letters: n rows, d rotary width (both halves).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EXACT = 65536  # positions whose angles are Megatron's own
_BLOCK = 4096  # rows at a time, so that what is fp64 stays small


@dataclass(frozen=True, eq=False)
class TurnRates:
    """How fast the angles of one rotary embedding turn.

    per_position: radians, fp32 [d / 2], as Megatron computed them. interpolation: what positions
    are multiplied by first, None for nothing. interleaved: whether the two angles of a pair are
    neighbours (2 i, 2 i + 1) or half the width apart. scale: what Yarn multiplies cosines by.
    """

    per_position: torch.Tensor
    interpolation: float | None = None
    interleaved: bool = False
    scale: float = 1.0

    @property
    def width(self) -> int:
        return 2 * len(self.per_position)

    def key(self) -> tuple:
        """Equal for rates with equal angles on one device; waits for the device."""
        values = tuple(self.per_position.tolist())
        return values, self.interpolation, self.interleaved, self.per_position.device

    def worst_of_fp32(self, position: int) -> float:
        """Radians by which Megatron's angle of `position` may be off: half the distance of fp32
        numbers there, of the product and of the factors.
        """
        turned = position * (self.interpolation or 1.0)
        fastest = float(self.per_position.max())
        spacing = 2.0 ** (math.floor(math.log2(max(turned * fastest, 1.0))) - 24)
        of_position = 2.0 ** (math.floor(math.log2(max(position, 1))) - 24)
        return spacing + (of_position * fastest if position > 2**24 else 0.0)


def angles_at(positions: torch.Tensor, rates: TurnRates, reach: int) -> torch.Tensor:
    """Rotary angles, fp32 [n, 1, 1, d], of int64 `positions` [n] on the device of the rates.

    reach: a bound that no position reaches; it is given, because the host should not wait to see
    the positions. Up to `EXACT` angles are not reduced; beyond that they lie within +-pi. Besides
    the result, a few MB are used.
    """
    half = rates.width // 2
    table = torch.empty(
        len(positions), rates.width, dtype=torch.float32, device=rates.per_position.device
    )
    for start in range(0, len(positions), _BLOCK):
        some = positions[start : start + _BLOCK]
        angles = _product(some, rates)
        if reach > EXACT:
            angles = torch.where((some < EXACT)[:, None], angles, _reduced(some, rates))
        rows = table[start : start + _BLOCK]
        if rates.interleaved:
            rows.view(-1, half, 2).copy_(angles[:, :, None])
        else:
            rows.view(-1, 2, half).copy_(angles[:, None, :])
    return table[:, None, None, :]


def _product(positions: torch.Tensor, rates: TurnRates) -> torch.Tensor:
    """fp32 [n, d / 2], rounded as Megatron rounds."""
    turned = positions.to(torch.float32)
    if rates.interpolation is not None:
        turned *= rates.interpolation
    return turned[:, None] * rates.per_position


def _reduced(positions: torch.Tensor, rates: TurnRates) -> torch.Tensor:
    """fp32 [n, d / 2] within +-pi: the product in fp64 less whole turns."""
    turned = positions.to(torch.float64)
    if rates.interpolation is not None:
        # As torch rounds it above: another frequency beyond the border would be a step in phase.
        turned *= torch.tensor(rates.interpolation, dtype=torch.float32).item()
    angles = turned[:, None] * rates.per_position.to(torch.float64)
    angles -= (angles / math.tau).round_().mul_(math.tau)
    return angles.to(torch.float32)
