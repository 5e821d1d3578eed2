# SPDX-License-Identifier: Apache-2.0
"""What a document costs: pairs of attention, and linear work for each token.

The unit is one pair (query, key) that see each other in one layer, forward and backward. Counted in
integers, so that every rank that packs the same documents finds the same; `Work.seconds` turns it
into a forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..autotune.rates import BACKWARD, Rates, check_rates
from ..layout.balanced import CAUSAL, Window, document_pairs

LINEAR_BACKWARD = 2.0  # FLOPs of a linear layer's backward over those of its forward


@dataclass(frozen=True)
class Work:
    """The work of a model.

    token: all that is not attention, for each token, padding included, in pairs. windows: (left,
    right, layers) of each kind of layer: how far its attention sees inside documents, None without
    a limit. pair_flops: FLOPs of a pair in forward: 2 x (d + d_v) x heads.

    Raises ValueError that names the value.
    """

    token: int = 0
    windows: tuple[tuple[int | None, int | None, int], ...] = ((*CAUSAL, 1),)
    pair_flops: int = 1

    def __post_init__(self):
        for name, least in (("token", 0), ("pair_flops", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"work: {name} must be an integer from {least} on, got {value!r}")
        if not self.windows:
            raise ValueError("work: windows must name at least one kind of layer")
        for kind in self.windows:
            sides = tuple(0 if side is None else side for side in kind[:2])
            if len(kind) != 3 or any(type(n) is not int or n < 0 for n in (*sides, kind[2])):
                raise ValueError(
                    "work: windows must hold (left, right, layers), integers from 0 on or None for "
                    f"no limit, got {kind!r}"
                )

    @classmethod
    def of(cls, *, token_flops: float, pair_flops: int, windows: Sequence[Window]) -> Work:
        """From the FLOPs of a forward. windows: one per layer; token_flops: of all layers."""
        if type(pair_flops) is not int or pair_flops < 1:
            raise ValueError(f"work: pair_flops must be an integer from 1 on, got {pair_flops!r}")
        kinds = dict.fromkeys(windows, 0)
        for window in windows:
            kinds[window] += 1
        relative = (1 + LINEAR_BACKWARD) / (1 + BACKWARD)
        token = round(relative * token_flops / pair_flops)
        return cls(token, tuple((*kind, layers) for kind, layers in kinds.items()), pair_flops)

    def attention(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Pairs of each document over all layers, int64 [documents].

        Raises ValueError if all of them together are more than int64 holds.
        """
        lengths = np.asarray(lengths, np.int64)
        seen = sum(
            layers * (1.0 + sum(lengths if n is None else np.minimum(lengths, n) for n in sides))
            for *sides, layers in self.windows
        )
        if float((seen * lengths).sum()) >= 2**63:
            raise ValueError(
                f"work: {len(lengths)} documents of up to {lengths.max()} tokens have more pairs "
                "over all layers than fit into 64 bits; pack fewer at once"
            )
        found = np.zeros(len(lengths), np.int64)
        for left, right, layers in self.windows:
            found += layers * document_pairs(lengths, (left, right))
        return found

    def seconds(self, load: float, rates: Rates, *, ranks: int = 1, link: float = 0.0) -> float:
        """Forecast of forward and backward of a load in pairs, on `ranks` ranks.

        link: seconds of its transfers, which run beside the computation. Linear work is taken to
        run at the rate of attention. Raises ValueError without a compute rate.
        """
        check_rates(rates)
        if rates.compute is None:
            raise ValueError("rates: compute is None, and a forecast of packing needs FLOP/s")
        return max((1 + BACKWARD) * load * self.pair_flops / (ranks * rates.compute), link)
