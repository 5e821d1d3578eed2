"""Assumptions of the forecast: rates of an H100 cluster, a model, lengths of documents.

docs/performance.md names their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_burst.autotune.rates import BACKWARD, Rates
from megatron_burst.schedule.sizes import Sizes
from megatron_burst.schedule.tables import Grid

H100 = Rates(intra=360e9, inter=45e9, latency=10e-6, compute=595e12, launch=30e-6)


@dataclass(frozen=True)
class Setting:
    """A cluster and a model; one rank is one GPU. The page shows the defaults.

    Attributes:
        rates: Rates of attention in forward (`compute`) and of the links.
        backward, linear: FLOP/s of attention in backward and of matrix products with parameters.
        parameters: Parameters of one layer that multiply each token.
        tokens: Maximum number of tokens per rank.
    """

    rates: Rates = H100
    backward: float = 516e12
    linear: float = 550e12
    parameters: int = 487_587_840
    layers: int = 64
    tokens: int = 16384
    per_node: int = 8
    heads: int = 64
    kv_heads: int = 8
    width: int = 128

    @property
    def sizes(self) -> Sizes:
        """Return sizes of a rank with all its tokens: bf16, gradients on the wire in fp32."""
        return Sizes(
            self.tokens, 1, self.heads, self.kv_heads, self.width, self.width, itemsize=2,
            stat_itemsize=4, wire_itemsize=4, needs_grad=(True, True, True),
        )  # fmt: skip

    @property
    def flops(self) -> float:
        """Return FLOPs of a visible pair in forward."""
        return 2.0 * self.heads * 2 * self.width

    @property
    def per_pair(self) -> tuple[float, float]:
        """Return seconds of a visible pair in forward and in backward."""
        assert self.rates.compute is not None
        return self.flops / self.rates.compute, BACKWARD * self.flops / self.backward

    @property
    def per_token(self) -> float:
        """Return seconds of a token in the products of a layer, forward and backward."""
        return 6.0 * self.parameters / self.linear

    @property
    def sync(self) -> float:
        """Return seconds per step and layer to reduce gradients and gather parameters in bf16.

        Each NIC of a node carries its share, and no compute overlaps. The result is equal for all
        methods.
        """
        return 4.0 * self.parameters / self.per_node / self.rates.inter

    def grid(self, ranks: int) -> Grid:
        """Return a grid of neighbouring ranks, a power of two."""
        width = min(ranks, self.per_node)
        return Grid(ranks // width, width)


@dataclass(frozen=True)
class Lengths:
    """Log-normal document lengths up to `cap`."""

    name: str
    median: int
    sigma: float
    cap: int

    def draw(self, seed: int, total: int) -> np.ndarray:
        """Draw int64 lengths that fill `total` tokens; the last length is cut."""
        random, lengths, drawn_total = np.random.default_rng(seed), [], 0
        while drawn_total < total:
            drawn_length = self.median * np.exp(self.sigma * random.standard_normal())
            length = min(int(np.clip(drawn_length, 16, self.cap)), total - drawn_total)
            lengths.append(length)
            drawn_total += length
        return np.array(lengths, dtype=np.int64)


# Sigma is chosen so that two numbers are near the prototype's numbers: the load of the busiest of
# 64 ranks with zigzag of the whole pack, and the rows that are sent to other nodes.
LENGTHS = (
    Lengths("median 1K, cap 32K", 1 << 10, 1.0, 1 << 15),
    Lengths("median 2K, tail to 512K", 1 << 11, 1.8, 1 << 19),
    Lengths("median 8K, tail to 1M", 1 << 13, 1.75, 1 << 20),
    Lengths("64K each, about", 1 << 16, 0.3, 1 << 18),
)
