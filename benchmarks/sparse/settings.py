"""Settings: one layer with the proportions of DeepSeek-V3.2 at 128K tokens, and its rivals.

128K tokens and 2,048 selected tokens are divided by 16; 128 heads and 64 index heads are divided by
64. This keeps the ratios within compute and within bytes; the speed of the emulated device sets the
ratio of compute to bytes. Links are so slow that the work of a busy CPU hardly counts.
"""

from __future__ import annotations

from typing import NamedTuple

GRID, RATES = (2, 4), "50M/200M"
DIRECT, BY_NODE = "gather, then compute", "gather by node, then compute"
GATHERS = (DIRECT, BY_NODE)
ALGORITHMS = ("burst", "multicast", "all_gather", "auto")
# Compute time / time of the rival if compute takes no time.
REGIMES = {"links": 0.0, "equal": 1.0, "compute": 4.0}


class Layer(NamedTuple):
    """One layer: fp32, batch 1, causal.

    Attributes:
        rows: Rows per rank.
        latent, values: Columns of keys, and number of the first columns that are values.
    """

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
        """Return FLOPs of a query and a visible key."""
        return 2 * self.index_heads * self.index_width

    @property
    def attention_flops(self) -> int:
        """Return FLOPs of a query and a selected key, in forward."""
        return 2 * self.heads * (self.latent + self.values)
