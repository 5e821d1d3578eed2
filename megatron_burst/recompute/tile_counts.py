# SPDX-License-Identifier: Apache-2.0
"""Default number of tiles of rows in which an MLP runs.

The default is the smallest number for which the working set of a tile is at most the size of one
[rows, hidden] tensor. A tile has at least `MIN_TILE_TOKENS` tokens, because smaller matrix products
are slow. ALST (TiledMLP) uses rows / hidden tiles, which ignores the width of the MLP. The module
does not import torch.
"""

from __future__ import annotations

import math

MIN_TILE_TOKENS = 1024  # minimum tokens of an MLP tile
MIN_CHUNK_ROWS = 8192  # minimum rows of a row chunk in the attention part of a layer


def dense_width(hidden: int, ffn: int, *, gated: bool, tp: int = 1, gathered: bool = False) -> int:
    """Return the peak number of elements per local token in the backward of a dense MLP.

    At the peak a rank holds these tensors: the output of fc1, the activation and the gradients of
    both; the gathered input and its gradient; the input, the normalized input, the output and its
    gradient.

    Args:
        hidden: Hidden size of the model.
        ffn: Width of the MLP.
        gated: True if fc1 has two outputs of width `ffn` (SwiGLU).
        tp: Number of tensor-parallel ranks.
        gathered: True if the tokens are split over the tensor-parallel ranks too (sequence
            parallelism). The MLP then computes `tp` gathered tokens per local token.
    """
    share = tp if gathered else 1
    return 2 * (gated + 2) * math.ceil(ffn / tp) * share + 2 * share * hidden + 4 * hidden


def moe_width(
    hidden: int, ffn: int, *, topk: int, shared: int = 0, gated: bool, gathered: int = 1
) -> int:
    """Return the peak number of elements per local token in the backward of a mixture of experts.

    The load of the experts is assumed to be balanced.

    Args:
        hidden: Hidden size of the model.
        ffn: Width of an expert.
        topk: Number of experts per token.
        shared: Width of the shared experts.
        gated: True if fc1 of an expert has two outputs of its width (SwiGLU).
        gathered: Number of ranks whose tokens each rank gathers (the TP and EP ranks with the
            allgather dispatcher).
    """
    experts = topk * (2 * (gated + 2) * ffn + 4 * hidden)
    return experts + 2 * (gated + 2) * shared + 2 * gathered * hidden + 4 * hidden


def automatic(tokens: int, hidden: int, width: int) -> int:
    """Return the default number of tiles for the tokens of this rank.

    Args:
        tokens: Number of tokens of this rank.
        hidden: Hidden size of the model.
        width: Elements per token that backward holds: the result of `dense_width` or `moe_width`.
    """
    return max(1, min(math.ceil(width / hidden), tokens // MIN_TILE_TOKENS))
