"""Mixers by kind: the widths of their projections, and of the states that they carry.

Decides which form of linear attention a kind of layer computes, and what of it is a parameter.
"""

from __future__ import annotations

from .layer_kinds import Mixer


def gated_delta_net(heads: int, key_heads: int, width: int, value_width: int, taps: int) -> Mixer:
    """Qwen3-Next's (arXiv 2412.06464): q, k, v and a gate, beta and decay of each head."""
    keys, values = key_heads * width, heads * value_width
    return Mixer("gated delta net", 2 * keys + 2 * values + 2 * heads, values, heads,
                 taps * (2 * keys + values), "gated_delta_rule", key_heads, width, value_width,
                 taps)  # fmt: skip


def mamba2(heads: int, groups: int, width: int, value_width: int, taps: int) -> Mixer:
    """Nemotron-H's (arXiv 2405.21060): a gate, x (values), B and C (keys and queries, in groups)
    and dt of each head; the convolution has a bias, and A, D, dt's bias and a norm are others."""
    inner, states = heads * value_width, 2 * groups * width
    return Mixer("Mamba-2", 2 * inner + states + heads, inner, heads,
                 (taps + 1) * (inner + states) + 3 * heads + inner, "scalar_decay", groups, width,
                 value_width, taps)  # fmt: skip


def kimi_delta(heads: int, width: int, taps: int) -> Mixer:
    """Kimi Linear's (arXiv 2510.26692): q, k, v and beta; decay and gate through `width` numbers
    each, whose second matrices are others."""
    inner = heads * width
    return Mixer("Kimi delta attention", 3 * inner + heads + 2 * width, inner, heads,
                 3 * taps * inner + 2 * width * inner + heads + inner + width, "kda", heads,
                 width, width, taps)  # fmt: skip


def lightning(heads: int, width: int) -> Mixer:
    """MiniMax-01's (arXiv 2501.08313): q, k, v and a gate; a decay that is constant per head, no
    convolution."""
    inner = heads * width
    return Mixer("lightning attention", 4 * inner, inner, heads, inner, "scalar_decay", heads,
                 width, width, 0)  # fmt: skip
