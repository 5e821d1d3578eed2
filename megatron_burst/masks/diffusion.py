# SPDX-License-Identifier: Apache-2.0
"""Masks of diffusion models: BlockDiffusion for text and chunks of frames, FrameTiles for video.

Both masks divide the sequence into blocks of equal length. They compare the block index of the
query with the block index of the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..layout import Spans
from .base import EMPTY, FAR, FULL, PARTIAL, SpanBands, VectorMask, Viewers, cover_where
from .positions import Causal, position_field


def _at_least_one(mask: VectorMask, *names: str) -> None:
    """Convert fields of a frozen mask to integers, in place, and check that they are at least 1.

    Raises:
        ValueError: A field is not an integer >= 1.
    """
    for name in names:
        if position_field(mask, name) < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {getattr(mask, name)}")


class _CopyPart(NamedTuple):
    """The part of each span that is in one of the two copies (noised, clean).

    Positions are counted from the start of the copy.

    Attributes:
        first: First position; undefined if the span has no position in the copy.
        last: Last position; undefined if the span has no position in the copy.
        present: bool, true if the span has a position in the copy.
    """

    first: np.ndarray
    last: np.ndarray
    present: np.ndarray


@dataclass(frozen=True, eq=False)
class BlockDiffusion(VectorMask):
    """Mask of block diffusion models, whose sequence is a noised copy and then a clean copy.

    Both copies have `length` positions and are divided into blocks of `block` positions. A noised
    position attends to the noised positions of its block and to the clean positions of earlier
    blocks. A clean position attends only to clean positions: with `causal`, to itself and earlier
    positions; otherwise, to its block and earlier blocks. Source: Block Diffusion (arXiv
    2503.09573), section 3.2.

    For video models that denoise one chunk of frames after another, `block` is the number of tokens
    of a chunk, and `causal` is False.

    Args:
        length: Number of positions of one copy; the sequence has 2 x `length` positions.
        block: Number of positions of a block. The last block may be shorter.
        causal: True if clean positions do not attend to later positions of their block.

    Raises:
        ValueError: `length` or `block` is not an integer >= 1.

    Example:
        >>> mask = mb.masks.BlockDiffusion(4, block=2)
        >>> mask.visible(np.array([2]), np.arange(8)).astype(int)
        array([0, 0, 1, 1, 1, 1, 0, 0])
    """

    length: int
    block: int
    causal: bool = True

    def __post_init__(self) -> None:
        _at_least_one(self, "length", "block")
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal must be True or False, got {self.causal!r}")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        q_clean, k_clean = np.greater_equal(q, self.length), np.greater_equal(k, self.length)
        q_block, k_block = self._block(q), self._block(k)
        noised = np.where(k_clean, q_block > k_block, q_block == k_block)
        seen = np.greater_equal(q, k) if self.causal else q_block >= k_block
        return np.where(q_clean, k_clean & seen, noised)

    def _block(self, positions: np.ndarray) -> np.ndarray:
        return np.mod(positions, self.length) // self.block

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        pairs = [
            (q.present & k.present, self._cover(q, k, q_clean, k_clean))
            for q_clean, q in enumerate(self._parts(q_spans))
            for k_clean, k in enumerate(self._parts(k_spans))
        ]
        full, empty = True, True
        for present, cover in pairs:
            full = full & (~present | (cover == FULL))
            empty = empty & (~present | (cover == EMPTY))
        return cover_where(empty, full)

    def _parts(self, spans: Spans) -> tuple[_CopyPart, _CopyPart]:
        """Return the parts of spans in the noised copy, and the parts in the clean copy."""
        start, last, stride = np.asarray(spans.start), np.asarray(spans.last), spans.stride
        # First position in the clean copy, and last position in the noised copy, of each span.
        steps = np.maximum(-((start - self.length) // stride), 0)  # rounded up
        clean, noised = start + steps * stride, start + (steps - 1) * stride
        return (
            _CopyPart(start, np.minimum(last, noised), start < self.length),
            _CopyPart(clean - self.length, last - self.length, last >= self.length),
        )

    def _cover(self, q: _CopyPart, k: _CopyPart, q_clean: int, k_clean: int) -> np.ndarray:
        """Return the `Cover` values of parts of query spans and parts of key spans.

        Args:
            q: Parts of query spans in one copy.
            k: Parts of key spans in one copy.
            q_clean: 1 if the queries are in the clean copy, else 0.
            k_clean: 1 if the keys are in the clean copy, else 0.
        """
        q_first, q_last, k_first, k_last = (
            x // self.block for x in (q.first, q.last, k.first, k.last)
        )
        if not k_clean:
            shape = np.broadcast_shapes(np.shape(q_first), np.shape(k_first))
            if q_clean:
                return np.full(shape, EMPTY)
            apart = (q_last < k_first) | (k_last < q_first)
            return cover_where(apart, (q_first == q_last) & (k_first == k_last) & ~apart)
        if not q_clean:
            return cover_where(q_last <= k_first, q_first > k_last)
        if self.causal:
            return cover_where(q.last < k.first, q.first >= k.last)
        return cover_where(q_last < k_first, q_first >= k_last)

    def bands(self, q_spans: Spans, k_spans: Spans) -> SpanBands:
        bands = super().bands(q_spans, k_spans)
        if not self.causal:
            return bands
        clean = (q_spans.start >= self.length) & (k_spans.start >= self.length)
        causal = Causal().bands(q_spans, k_spans)
        columns = zip(causal, bands, strict=True)
        return SpanBands(*(np.where(clean & causal.known, *pair) for pair in columns))

    def viewers(self, k_spans: Spans) -> Viewers:
        noised, clean = self._parts(k_spans)
        # The first noised query that sees a clean key is in the next block. After the last block
        # comes the clean copy, so the bound is then the first clean query.
        after = np.minimum((clean.first // self.block + 1) * self.block, self.length)
        first = np.where(clean.present, after, 2 * self.length)
        first = np.where(
            noised.present, np.minimum(first, noised.first // self.block * self.block), first
        )
        end = np.minimum((noised.last // self.block + 1) * self.block, self.length)
        last = np.where(clean.present, 2 * self.length, end) - 1
        far = np.full(np.shape(first), FAR)
        return Viewers(first, last, far, far, np.zeros_like(far, dtype=bool))

    @cached_property
    def breaks(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        bounds = np.arange(0, self.length, self.block)
        return np.concatenate([bounds, self.length + bounds, [2 * self.length]])

    def check(self, seq_len: int) -> None:
        if seq_len != 2 * self.length:
            raise ValueError(
                f"length: a mask of two copies of {self.length} positions is valid for sequences "
                f"of {2 * self.length} positions, got {seq_len}"
            )


@dataclass(frozen=True, eq=False)
class FrameTiles(VectorMask):
    """Mask of sparse attention in video models.

    A query attends to the keys of its own frame and to the keys of every `every`-th frame (frame
    numbers count from 0). The number of visible pairs is linear in the number of frames if `every`
    is proportional to the number of frames. Source: Efficient-vDiT (arXiv 2502.06155), section 3.2.

    Args:
        length: Number of positions of the sequence.
        frame: Number of positions of a frame.
        every: Every query sees the frames whose number is a multiple of `every`.

    Raises:
        ValueError: A value is not an integer >= 1, or `frame` does not divide `length`.

    Example:
        >>> mask = mb.masks.FrameTiles(8, frame=2, every=3)
        >>> mask.visible(np.array([2]), np.arange(8)).astype(int)
        array([1, 1, 1, 1, 0, 0, 1, 1])
    """

    length: int
    frame: int
    every: int

    def __post_init__(self) -> None:
        _at_least_one(self, "length", "frame", "every")
        if self.length % self.frame:
            raise ValueError(f"frame: {self.frame} must divide length, {self.length}")

    def visible(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        frame = np.floor_divide(k, self.frame)
        return (np.floor_divide(q, self.frame) == frame) | (frame % self.every == 0)

    def covers(self, q_spans: Spans, k_spans: Spans) -> np.ndarray:
        q_first, q_last, k_first, k_last = (
            np.floor_divide(x, self.frame)
            for x in (q_spans.start, q_spans.last, k_spans.start, k_spans.last)
        )
        # Frames of the key span that all queries see, and its other frames.
        shared = k_last // self.every - (k_first - 1) // self.every
        others = k_last - k_first + 1 - shared
        apart = (q_last < k_first) | (k_last < q_first)
        own = (q_first == q_last) & ~apart & (q_first % self.every != 0)  # the query's own frame
        full = (others == 0) | ((others == 1) & own)
        return np.where(full, FULL, np.where(apart & (shared == 0), EMPTY, PARTIAL))

    def viewers(self, k_spans: Spans) -> Viewers:
        first, last = (np.floor_divide(x, self.frame) for x in (k_spans.start, k_spans.last))
        shared = last // self.every * self.every >= first
        begin = np.where(shared, 0, first * self.frame)
        end = np.where(shared, self.length, (last + 1) * self.frame) - 1
        far = np.full(np.shape(begin), FAR)
        return Viewers(begin, end, far, far, np.asarray(first == last))

    @cached_property
    def breaks(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.arange(0, self.length + 1, self.frame)

    def check(self, seq_len: int) -> None:
        if seq_len != self.length:
            raise ValueError(
                f"length must be the length of the sequence, {seq_len}, got {self.length}"
            )
