"""Masks of docs/gallery.md that `megatron-burst show --mask MODULE:NAME` draws."""

import numpy as np

from megatron_burst.masks import BlockSparse, Causal, Dilated, Mask, Prefix, Window


def prefix_lm() -> Mask:
    """Return a causal mask whose queries all attend to the first 20 keys too."""
    return Causal() | Prefix(20)


def random_blocks() -> Mask:
    """Return a causal mask of 128 positions in which a quarter of the blocks of 16 is visible."""
    table = np.random.RandomState(0).rand(8, 8) < 0.25
    return Causal() & BlockSparse(table | np.eye(8, dtype=bool), 16)


def dilated_and_window() -> Mask:
    """Return a causal mask of every fourth key and the last four keys."""
    return Causal() & (Dilated(4) | Window(3, 0))
