"""Which positions of the global sequence each rank holds, and in which order.

This is the only place that does position arithmetic: everything else asks a layout for
spans. It must not know masks, groups, devices or torch.

A shard is described by spans, affine runs of positions, concatenated in shard order. All
layouts cut a sequence of S positions into G shards of S / G (BurstEngine section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """The positions start, start + stride, ..., `length` of them; stride >= 1, length >= 1."""

    start: int
    stride: int
    length: int

    @property
    def last(self) -> int:
        return self.start + self.stride * (self.length - 1)

    def positions(self) -> np.ndarray:
        """int64 [length]."""
        return self.start + self.stride * np.arange(self.length, dtype=np.int64)


class Layout:
    """How `cp_size` ranks share a sequence. Subclasses give `name`, `pieces_per_rank`, `_spans`."""

    name: str
    pieces_per_rank = 1

    def __init__(self, cp_size: int):
        if cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {cp_size}")
        self.cp_size = cp_size

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.name, self.cp_size))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cp_size={self.cp_size})"

    def check(self, seq_len: int) -> None:
        """Raise ValueError unless a sequence of `seq_len` positions can be laid out."""
        multiple = self.pieces_per_rank * self.cp_size
        if seq_len < multiple or seq_len % multiple:
            raise ValueError(
                f"seq_len: layout {self.name} over {self.cp_size} ranks needs a positive multiple "
                f"of {multiple}, got {seq_len}; pad to {max(1, -(-seq_len // multiple)) * multiple}"
            )

    def spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        """The spans that `rank` holds of a sequence of `seq_len` positions, in shard order."""
        self.check(seq_len)
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank must be in 0..{self.cp_size - 1}, got {rank}")
        return self._spans(rank, seq_len)

    def positions(self, rank: int, seq_len: int) -> np.ndarray:
        """int64 [seq_len / cp_size]: the position of every row of the shard of `rank`."""
        return np.concatenate([span.positions() for span in self.spans(rank, seq_len)])

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        raise NotImplementedError


class Contiguous(Layout):
    """Rank r holds the r-th of G equal runs. Unbalanced for causal masks."""

    name = "contiguous"

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        length = seq_len // self.cp_size
        return (Span(rank * length, 1, length),)


class Zigzag(Layout):
    """Of 2G equal pieces rank r holds r and 2G - 1 - r: Megatron's own layout, causal-balanced."""

    name = "zigzag"
    pieces_per_rank = 2

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        length = seq_len // (2 * self.cp_size)
        back = 2 * self.cp_size - 1 - rank
        return (Span(rank * length, 1, length), Span(back * length, 1, length))


class Striped(Layout):
    """Rank r holds positions r, r + G, r + 2G, ...: balanced for causal masks on any prefix."""

    name = "striped"

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        return (Span(rank, self.cp_size, seq_len // self.cp_size),)


LAYOUTS: dict[str, type[Layout]] = {cls.name: cls for cls in (Contiguous, Zigzag, Striped)}


def make(name: str, *, cp_size: int) -> Layout:
    """The layout called `name` over `cp_size` ranks; ValueError if there is none."""
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(sorted(LAYOUTS))}, got {name!r}")
    return LAYOUTS[name](cp_size)
