# SPDX-License-Identifier: Apache-2.0
"""How many tiles of rows an MLP is cut into where the user leaves it open. No torch.

The rule: as few as let one tile's working set fit into the size of one [rows, hidden] tensor, but
at least `LEAST` tokens each, below which matrix products lose speed. ALST (TiledMLP) takes
rows / hidden tiles, which ignores how wide the MLP is.
"""

from __future__ import annotations

import math

LEAST = 1024  # tokens of a tile of an MLP half
FEWEST_ROWS = 8192  # rows of a chunk of an attention half


def dense_width(hidden: int, ffn: int, *, gated: bool, tp: int = 1, gathered: bool = False) -> int:
    """Elements per local token that backward of a dense MLP holds at its peak, on one rank.

    hidden, ffn: the model's widths; gated: fc1 makes two of them (SwiGLU). tp: tensor-parallel
    ranks; gathered: the tokens are split over these too (sequence parallelism), so that one local
    token stands for `tp` gathered ones. Counted: fc1's output, the activation and the gradients of
    both; the gathered input and its gradient; the input, its norm, the output and its gradient.
    """
    share = tp if gathered else 1
    return 2 * (gated + 2) * math.ceil(ffn / tp) * share + 2 * share * hidden + 4 * hidden


def moe_width(
    hidden: int, ffn: int, *, topk: int, shared: int = 0, gated: bool, gathered: int = 1
) -> int:
    """The same for a mixture of experts of balanced load: `topk` experts of width `ffn` per token,
    and shared experts of width `shared`. gathered: ranks whose tokens are gathered on each (those
    of TP and EP with the allgather dispatcher).
    """
    experts = topk * (2 * (gated + 2) * ffn + 4 * hidden)
    return experts + 2 * (gated + 2) * shared + 2 * gathered * hidden + 4 * hidden


def automatic(tokens: int, hidden: int, width: int) -> int:
    """The number of tiles for `tokens` local tokens whose backward holds `width` elements each."""
    return max(1, min(math.ceil(width / hidden), tokens // LEAST))
