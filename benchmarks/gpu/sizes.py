"""Measured sizes: the sizes of the documentation on a GPU, tiny sizes on a CPU.

Every tuple is in order of importance: a budget cuts it from its end.
"""

from __future__ import annotations

from typing import NamedTuple


class Head(NamedTuple):
    """An LM head."""

    tokens: int
    width: int
    vocabulary: int


class Stack(NamedTuple):
    """Layers for the attention store."""

    tokens: int
    layers: int
    heads: tuple[int, int]
    width: int  # of a head


class Sizes(NamedTuple):
    lead: int  # number of masks that run first, after a few tests
    tokens: tuple[int, ...]  # rows of a shard
    heads: tuple[tuple[int, int], ...]  # (query heads, key/value heads)
    width: int
    window: int
    block: int  # of the block-sparse mask
    matmul: int  # side of the square product that all rates are compared with
    repeats: int
    patience: float  # seconds for one cell; after that, three rounds are enough
    rings: tuple[tuple[int, int], ...]  # nodes x ranks per node
    ring_tokens: int  # per rank
    ring_least: int  # per rank, if memory or time allow no more
    ring_rounds: int
    ring_patience: float  # maximum predicted seconds of one ring
    lm_head: Head
    stack: Stack


GPU = Sizes(
    lead=2,
    tokens=(32768, 16384, 65536, 8192),
    heads=((32, 8), (32, 32)),
    width=128,
    window=4096,
    block=1024,
    matmul=8192,
    repeats=5,
    patience=8.0,
    rings=((1, 8), (4, 8)),
    ring_tokens=32768,
    ring_least=2048,
    ring_rounds=2,
    ring_patience=60.0,
    lm_head=Head(32768, 5120, 122880),
    stack=Stack(32768, 2, (32, 8), 128),
)
CPU = Sizes(
    lead=1,
    tokens=(256, 128),
    heads=((4, 2), (4, 4)),
    width=16,
    window=32,
    block=32,
    matmul=64,
    repeats=3,
    patience=5.0,
    rings=((1, 2), (2, 2)),
    ring_tokens=64,
    ring_least=16,
    ring_rounds=1,
    ring_patience=5.0,
    lm_head=Head(128, 32, 256),
    stack=Stack(128, 2, (4, 2), 16),
)
