# SPDX-License-Identifier: Apache-2.0
"""Rotary angles of any rows, accurate at any position.

Megatron multiplies positions and frequencies in fp32. The rounding error of such an angle (half a
unit in the last place) is 0.03 rad at position one million and 1 rad at 20 million. From 2^24 on,
adjacent positions round to the same fp32 value. This module computes the angles of given positions.
For positions below `EXACT` it uses the same fp32 product as Megatron, so the angles are bitwise
equal. From `EXACT` on it uses a product in fp64, reduced modulo 2 pi before it is rounded to fp32.
Both products use the same fp32 frequencies, so the phase is continuous at `EXACT`.

Below the position `EXACT`, Megatron's own error is harmless. Angles below 2^16 have an
error of at most 2^-9 rad, which equals the rounding of a cosine near 1 to bf16. The threshold
applies to positions, not to sequence lengths: the angle of a token does not depend on the number of
later tokens, on the other documents of a pack, or on the number of ranks.

Shape letters: n rows, d rotary width (both halves).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EXACT = 65536  # below this position, angles are bitwise equal to Megatron's
_BLOCK = 4096  # rows at a time, which limits the memory of fp64 values


@dataclass(frozen=True, eq=False)
class TurnRates:
    """The angular frequencies of one rotary embedding.

    Attributes:
        per_position: Radians per position, fp32 [d / 2], as Megatron computed them.
        interpolation: The factor by which positions are multiplied; None for 1.
        interleaved: Whether frequency i has the columns 2 i and 2 i + 1; otherwise it has the
            columns i and i + d / 2.
        scale: Yarn's factor of cosines and sines.
    """

    per_position: torch.Tensor
    interpolation: float | None = None
    interleaved: bool = False
    scale: float = 1.0

    @property
    def width(self) -> int:
        return 2 * len(self.per_position)

    def key(self) -> tuple:
        """Return a hashable key; equal keys mean equal angles on the same device.

        Waits for the device.
        """
        values = tuple(self.per_position.tolist())
        return values, self.interpolation, self.interleaved, self.per_position.device

    def worst_of_fp32(self, position: int) -> float:
        """Return an upper bound of the error of Megatron's fp32 angle at `position`, in radians.

        The bound is half a unit in the last place of the product; beyond 2^24, the rounding of the
        position is added.
        """
        turned = position * (self.interpolation or 1.0)
        fastest = float(self.per_position.max())
        spacing = 2.0 ** (math.floor(math.log2(max(turned * fastest, 1.0))) - 24)
        of_position = 2.0 ** (math.floor(math.log2(max(position, 1))) - 24)
        return spacing + (of_position * fastest if position > 2**24 else 0.0)


def angles_at(positions: torch.Tensor, rates: TurnRates, reach: int) -> torch.Tensor:
    """Return rotary angles, fp32 [n, 1, 1, d], on the device of the rates.

    Angles of positions below `EXACT` are not reduced; later angles are within +-pi. Temporary
    tensors have a few MB.

    Args:
        positions: int64 [n].
        rates: the angular frequencies.
        reach: exclusive upper bound of the positions. The caller passes it, so that the host does
            not wait for the device to read `positions`.
    """
    half = rates.width // 2
    table = torch.empty(
        len(positions), rates.width, dtype=torch.float32, device=rates.per_position.device
    )
    for start in range(0, len(positions), _BLOCK):
        block = positions[start : start + _BLOCK]
        angles = _product(block, rates)
        if reach > EXACT:
            angles = torch.where((block < EXACT)[:, None], angles, _reduced(block, rates))
        rows = table[start : start + _BLOCK]
        if rates.interleaved:
            rows.view(-1, half, 2).copy_(angles[:, :, None])
        else:
            rows.view(-1, 2, half).copy_(angles[:, None, :])
    return table[:, None, None, :]


def _product(positions: torch.Tensor, rates: TurnRates) -> torch.Tensor:
    """Return positions times frequencies, fp32 [n, d / 2], rounded as in Megatron."""
    turned = positions.to(torch.float32)
    if rates.interpolation is not None:
        turned *= rates.interpolation
    return turned[:, None] * rates.per_position


def _reduced(positions: torch.Tensor, rates: TurnRates) -> torch.Tensor:
    """Return positions times frequencies, computed in fp64, as fp32 [n, d / 2] within +-pi."""
    turned = positions.to(torch.float64)
    if rates.interpolation is not None:
        # Rounded as in `_product`: another factor would make the phase discontinuous at `EXACT`.
        turned *= torch.tensor(rates.interpolation, dtype=torch.float32).item()
    angles = turned[:, None] * rates.per_position.to(torch.float64)
    angles -= (angles / math.tau).round_().mul_(math.tau)
    return angles.to(torch.float32)
