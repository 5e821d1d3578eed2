"""Attention speed per GPU at 64 GPUs over that at 8, in the setting of a published chart.

MagiAttention 1.1, H100, packed causal, 64:8 heads of width 128, bf16, 8K tokens per GPU: TFLOP/s
per GPU at 8 and at 64 GPUs, read off its chart. Its documents are not published; ours are
long-tailed, scaled to the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_burst.layout import make

from . import ours
from .setting import Lengths, Setting

TOKENS, RANKS = 8192, (8, 64)
TAIL = Lengths("median 8K, tail to 1M", 1 << 13, 1.75, 1 << 20)  # of a pack of 1M tokens
PACK = 1 << 20
# TFLOP/s per GPU: forward at 8, at 64, backward at 8, at 64.
PUBLISHED = {
    "MagiAttention 1.1": (459, 237, 360, 264),
    "LoongTrain": (259, 193, 321, 171),
    "ring of TransformerEngine": (89, 28, 97, 29),
}


class Speed(NamedTuple):
    """TFLOP/s per GPU of visible pairs, of forward and backward, at so many GPUs."""

    ranks: int
    seed: int
    forward: float
    backward: float
    note: str


def speeds(
    setting: Setting, seeds: Sequence[int], scaled: bool, ranks: Sequence[int] = RANKS
) -> list[Speed]:
    """Ours. scaled: documents grow with the pack; else those of 8 GPUs, more of them."""
    setting, found = setting.with_tokens(TOKENS), []
    for size in ranks:
        pack = size * TOKENS
        for seed in seeds:
            scale = (pack if scaled else min(ranks) * TOKENS) / PACK
            lengths = TAIL.draw(seed, pack, scale)
            layout = make(
                "balanced", cp_size=size, cu_seqlens=np.concatenate([[0], np.cumsum(lengths)])
            )
            got = ours.passes(setting, layout, lengths)
            flops = setting.flops * float((lengths * (lengths + 1) / 2).sum()) / size / 1e12
            found.append(
                Speed(
                    size, seed, flops / got.forward.seconds, 2.5 * flops / got.backward.seconds,
                    f"{'/'.join(got.algorithms)}, balance {got.balance:.2f}",
                )
            )  # fmt: skip
    return found
