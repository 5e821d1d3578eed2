"""What is measured: one layer with the proportions of DeepSeek-V3.2 at 128K tokens, and its rivals.

128K tokens and 2,048 selected of them, a sixteenth each, 128 heads and 64 index heads, a 64th
each, keep the ratios of compute to compute and of bytes to bytes; the speed of the emulated device
decides the ratio of one to the other. Links are so slow that what a busy CPU takes for itself is
little.
"""

from __future__ import annotations

from typing import NamedTuple

GRID, RATES = (2, 4), "50M/200M"
DIRECT, BY_NODE = "gather, then compute", "gather by node, then compute"
GATHERS = (DIRECT, BY_NODE)
ALGORITHMS = ("burst", "multicast", "all_gather", "auto")
# Compute over the time that the rival takes where compute takes none.
REGIMES = {"links": 0.0, "equal": 1.0, "compute": 4.0}


class Layer(NamedTuple):
    """fp32, batch 1, causal. rows: of a rank; latent, values: columns of keys, and the
    first of them that are values."""

    rows: int = 1024
    heads: int = 2
    index_heads: int = 1
    top_k: int = 128
    latent: int = 576
    values: int = 512
    index_width: int = 128
    layout: str = "striped"

    @property
    def index_flops(self) -> int:
        """Of a query and a key that it sees."""
        return 2 * self.index_heads * self.index_width

    @property
    def attention_flops(self) -> int:
        """Of a query and a key that it selected, in forward."""
        return 2 * self.heads * (self.latent + self.values)
