# SPDX-License-Identifier: Apache-2.0
"""Work of a document: visible pairs of attention, and linear work per token.

The unit of work is the pair: the forward and backward of one visible (query, key) pair in one
layer. Work is an integer, so that all ranks that pack the same documents compute the same packing.
`Work.seconds` converts work to a forecast time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..autotune.rates import BACKWARD, Rates, check_rates
from ..layout.balanced import CAUSAL, Window, document_pairs

LINEAR_BACKWARD = 2.0  # FLOPs of a linear layer's backward per FLOP of its forward


@dataclass(frozen=True)
class Work:
    """Work of a model, as a function of the lengths of documents.

    The unit is the pair: forward and backward of one visible (query, key) pair in one layer.

    Attributes:
        token: Linear work per token, in pairs. Padding has this work too.
        windows: (left, right, layers) for each attention window of the model. A token sees at most
            `left` earlier and `right` later tokens of its document; None means no limit. `layers`
            is the number of layers with this window.
        pair_flops: Forward FLOPs of a visible pair in one layer: 2 x (width of q and k + width of
            v) x heads.

    Raises:
        ValueError: An attribute is invalid.
    """

    token: int = 0
    windows: tuple[tuple[int | None, int | None, int], ...] = ((*CAUSAL, 1),)
    pair_flops: int = 1

    def __post_init__(self):
        for name, least in (("token", 0), ("pair_flops", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"work: {name} must be an integer >= {least}, got {value!r}")
        if not self.windows:
            raise ValueError(
                "work: windows must have at least one entry (left, right, layers), got none"
            )
        for kind in self.windows:
            sides = tuple(0 if side is None else side for side in kind[:2])
            if len(kind) != 3 or any(type(n) is not int or n < 0 for n in (*sides, kind[2])):
                raise ValueError(
                    "work: windows must hold (left, right, layers), integers >= 0 or None for "
                    f"no limit, got {kind!r}"
                )

    @classmethod
    def of(cls, *, token_flops: float, pair_flops: int, windows: Sequence[Window]) -> Work:
        """Return the work of a model, computed from the FLOPs of its forward.

        Args:
            token_flops: FLOPs per token of all layers, without attention to other tokens.
            pair_flops: FLOPs of a visible pair in one layer.
            windows: Attention window (left, right) of each layer.

        Raises:
            ValueError: `pair_flops` is not a positive integer.
        """
        if type(pair_flops) is not int or pair_flops < 1:
            raise ValueError(f"work: pair_flops must be an integer >= 1, got {pair_flops!r}")
        kinds = dict.fromkeys(windows, 0)
        for window in windows:
            kinds[window] += 1
        relative = (1 + LINEAR_BACKWARD) / (1 + BACKWARD)
        token = round(relative * token_flops / pair_flops)
        return cls(token, tuple((*kind, layers) for kind, layers in kinds.items()), pair_flops)

    def attention(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the number of visible pairs of each document in all layers, int64 [documents].

        Args:
            lengths: Tokens of each document.

        Raises:
            ValueError: The sum over the documents exceeds int64.
        """
        lengths = np.asarray(lengths, np.int64)
        seen = sum(
            layers * (1.0 + sum(lengths if n is None else np.minimum(lengths, n) for n in sides))
            for *sides, layers in self.windows
        )
        if float((seen * lengths).sum()) >= 2**63:
            raise ValueError(
                f"work: {len(lengths)} documents of up to {lengths.max()} tokens have more pairs "
                "over all layers than fit into 64 bits; pack fewer documents at once"
            )
        pairs = np.zeros(len(lengths), np.int64)
        for left, right, layers in self.windows:
            pairs += layers * document_pairs(lengths, (left, right))
        return pairs

    def seconds(self, load: float, rates: Rates, *, ranks: int = 1, link: float = 0.0) -> float:
        """Return the forecast time of work in seconds, forward and backward.

        Linear layers are assumed to run at the FLOP/s of attention.

        Args:
            load: Work in pairs.
            rates: Rates of the cluster.
            ranks: Number of ranks that share the work equally.
            link: Seconds of the transfers, which overlap with the computation.

        Raises:
            ValueError: `rates` has no compute rate.
        """
        check_rates(rates)
        if rates.compute is None:
            raise ValueError(
                "rates.compute is None, and a forecast of packing needs it: pass Rates with FLOP/s"
            )
        return max((1 + BACKWARD) * load * self.pair_flops / (ranks * rates.compute), link)
