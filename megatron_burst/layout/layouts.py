# SPDX-License-Identifier: Apache-2.0
"""Which positions of the global sequence each rank holds, and in which order.

Decides the arithmetic of positions: everything else asks a layout for spans. A shard is a sequence
of spans, affine runs of positions, in shard order. All layouts cut a sequence of S positions into
G shards of S / G positions (BurstEngine section 3.3).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

LayoutName = Literal["contiguous", "striped", "zigzag", "block_striped", "balanced"]
NAMES: tuple[LayoutName, ...] = get_args(LayoutName)


class Span(NamedTuple):
    """The positions start, start + stride, ..., `length` of them; stride >= 1, length >= 1."""

    start: int
    stride: int
    length: int

    @property
    def last(self) -> int:
        """The largest position."""
        return self.start + self.stride * (self.length - 1)

    def positions(self) -> np.ndarray:
        """int64 [length]."""
        return self.start + self.stride * np.arange(self.length, dtype=np.int64)


Shards = Sequence[Sequence[Span]]


class Spans(NamedTuple):
    """Many spans at once: start, stride and length as of `Span`, as integer arrays that broadcast
    together.
    """

    start: np.ndarray
    stride: np.ndarray
    length: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """The largest position of each."""
        return self.start + (self.length - 1) * self.stride

    def at(self, index: np.ndarray) -> Spans:
        """The spans at `index`; the fields must have one shape."""
        return Spans(self.start[index], self.stride[index], self.length[index])


class Pieces(NamedTuple):
    """Columns: spans, or pieces of spans, of shards; `first` is the row of its owner's shard at
    which one begins.
    """

    owner: np.ndarray
    first: np.ndarray
    span: Spans

    def at(self, index: np.ndarray) -> Pieces:
        """Those at `index`."""
        return Pieces(self.owner[index], self.first[index], self.span.at(index))


def pieces_of(shards: Shards) -> Pieces:
    """All spans of all shards; a shard is the spans of a rank, possibly none."""
    count = np.array([len(shard) for shard in shards], dtype=np.int64)
    numbers = chain.from_iterable(chain.from_iterable(shards))
    span = Spans(*np.fromiter(numbers, dtype=np.int64).reshape(-1, 3).T.copy())
    owner = np.repeat(np.arange(len(shards)), count)
    before = np.cumsum(span.length) - span.length
    base = before[np.minimum(np.cumsum(count) - count, len(before) - 1)] if len(before) else count
    return Pieces(owner, before - base[owner], span)


def counted(first: np.ndarray | int, count: np.ndarray) -> np.ndarray:
    """first, first + 1, ..., `count` numbers of each, one after another."""
    skipped = np.repeat(first - (np.cumsum(count) - count), count)
    return np.arange(len(skipped)) + skipped


def integer(name: str, value: object) -> int:
    """`value` as an int; it may be a Python or numpy integer or a tensor with one.

    Raises ValueError, naming the argument `name`, for everything else, True and False included.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def check_fraction(name: str, value: object, other: str = "") -> None:
    """Raise ValueError, which calls it `name`, unless `value` is a number from 0 to 1; `other`:
    what else it might have been, for the message.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0.0 <= value <= 1.0:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name} must be a fraction from 0 to 1{other}, got {value!r}")


def document_bounds(cu_seqlens: Sequence[int] | np.ndarray) -> np.ndarray:
    """A copy of `cu_seqlens` as int64 [documents + 1]; ValueError unless it holds cumulative
    lengths: integers on the host that start at 0 and never decrease.
    """
    try:
        given = np.asarray(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, elsewhere, or with a gradient
        raise ValueError(f"cu_seqlens must be integers on the host, got {cu_seqlens}") from error
    bounds = given.astype(np.int64) if given.dtype.kind in "iu" else np.array([1])
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(
            "cu_seqlens must be integers that start at 0 and never decrease (cumulative lengths "
            f"of the documents), got {cu_seqlens}"
        )
    return bounds


def padding_documents(padding: Iterable[int], documents: int) -> tuple[int, ...]:
    """The sorted indices of those of `documents` documents that are padding; ValueError for
    others.
    """
    if not isinstance(padding, Iterable):
        raise ValueError(f"padding must hold indices of documents, got {padding!r}")
    found = tuple(sorted({integer("padding", index) for index in padding}))
    if found and not 0 <= found[0] <= found[-1] < documents:
        raise ValueError(f"padding must hold indices of the {documents} documents, got {[*found]}")
    return found


class Layout:
    """Which positions each of `cp_size` ranks holds; ValueError for an invalid number of ranks.

    Subclasses give `name`, `pieces_per_rank` and `_spans`.
    """

    name: str
    pieces_per_rank = 1

    def __init__(self, cp_size: int):
        self.cp_size = integer("cp_size", cp_size)
        if self.cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {cp_size}")

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cp_size={self.cp_size})"

    def describe(self) -> str:
        """Its name, and its parameters."""
        return self.name

    def check(self, seq_len: int) -> None:
        """Raise ValueError unless a sequence of `seq_len` positions can be laid out."""
        multiple = self.pieces_per_rank * self.cp_size
        if seq_len < multiple or seq_len % multiple:
            wanted = max(1, -(-seq_len // multiple)) * multiple
            raise ValueError(
                f"seq_len: layout {self.name} over {self.cp_size} ranks needs a positive multiple "
                f"of {multiple}, got {seq_len}; pad to {wanted}, {wanted // self.cp_size} on each"
            )

    def spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        """The spans that `rank` holds of a sequence of `seq_len` positions, in shard order.

        Raises ValueError for an invalid rank, or a length that this layout cannot split.
        """
        rank, seq_len = integer("rank", rank), integer("seq_len", seq_len)
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
    """Rank r of `cp_size` holds the r-th of as many equal runs. Unbalanced for causal masks."""

    name = "contiguous"

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        length = seq_len // self.cp_size
        return (Span(rank * length, 1, length),)


class Zigzag(Layout):
    """Rank r of G = `cp_size` holds pieces r and 2G - 1 - r of 2G equal ones: Megatron's own
    layout, balanced for causal masks.
    """

    name = "zigzag"
    pieces_per_rank = 2

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        length = seq_len // (2 * self.cp_size)
        late = 2 * self.cp_size - 1 - rank
        return (Span(rank * length, 1, length), Span(late * length, 1, length))


class Striped(Layout):
    """Rank r of G = `cp_size` holds positions r, r + G, r + 2G, ...: balanced for causal masks on
    any prefix.
    """

    name = "striped"

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        return (Span(rank, self.cp_size, seq_len // self.cp_size),)


class BlockStriped(Striped):
    """Every block of `block` positions is striped over all `cp_size` ranks, so that any block table
    is balanced. ValueError if the ranks do not divide a block.

    Where the ranks divide the block these are the positions of `Striped`; this layout says, and
    checks, that the blocks of a block-sparse mask were meant (BurstEngine section 3.4).
    """

    name = "block_striped"

    def __init__(self, cp_size: int, block: int):
        super().__init__(cp_size)
        block = integer("block", block)
        if block < 1 or block % cp_size:
            raise ValueError(
                f"block: {cp_size} ranks must divide every block, got block={block}; use "
                f"{max(1, -(-block // cp_size)) * cp_size}"
            )
        self.block = block

    def __repr__(self) -> str:
        return f"BlockStriped(cp_size={self.cp_size}, block={self.block})"

    def check(self, seq_len: int) -> None:
        if seq_len < self.block or seq_len % self.block:
            raise ValueError(
                f"seq_len: layout block_striped needs a positive multiple of block={self.block}, "
                f"got {seq_len}"
            )


class DocumentZigzag(Layout):
    """Zigzag within every document of a packed sequence, as Megatron lays packed sequences out.

    cu_seqlens: cumulative lengths; every document must be a multiple of 2 x `cp_size` positions
    long, or the constructor raises ValueError.
    """

    name = "zigzag"

    def __init__(self, cp_size: int, cu_seqlens: Sequence[int] | np.ndarray):
        super().__init__(cp_size)
        bounds = document_bounds(cu_seqlens)
        lengths = np.diff(bounds)
        if not bounds[-1]:
            raise ValueError(f"cu_seqlens: the documents hold no position, got {cu_seqlens}")
        if (lengths % (2 * cp_size)).any():
            raise ValueError(
                f"cu_seqlens: zigzag within documents needs multiples of {2 * cp_size} positions, "
                f"got lengths {lengths.tolist()}; pad them, or use layout striped or zigzag over "
                "the whole sequence, which take documents of any length"
            )
        self.bounds = tuple(bounds.tolist())

    def __repr__(self) -> str:
        return f"DocumentZigzag(cp_size={self.cp_size}, cu_seqlens={list(self.bounds)})"

    def check(self, seq_len: int) -> None:
        if seq_len != self.bounds[-1]:
            raise ValueError(f"seq_len: the documents end at {self.bounds[-1]}, got {seq_len}")

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        spans = []
        for start, stop in zip(self.bounds, self.bounds[1:], strict=False):
            length = (stop - start) // (2 * self.cp_size)
            late = 2 * self.cp_size - 1 - rank
            if length:
                spans.append(Span(start + rank * length, 1, length))
                spans.append(Span(start + late * length, 1, length))
        return tuple(spans)


def tree_mask(tree: Any) -> Any:
    """The `masks.Tree` of what `mb.trees.pack` returns, or the mask itself."""
    mask = getattr(tree, "mask", tree)
    if not hasattr(mask, "bases"):  # its class is in a room above
        raise ValueError(f"tree must be what mb.trees.pack returns, or a masks.Tree, got {tree!r}")
    return mask
