# SPDX-License-Identifier: Apache-2.0
"""Layouts that are defined by arithmetic, the class `Span`, and checks of arguments.

A layout cuts a sequence of S positions into shards of S / G positions for G ranks (BurstEngine,
section 3.3). It returns a shard as spans (runs of regularly spaced positions), in the order of the
shard's rows. All other code gets the positions of a rank from these spans.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .identity import ComparedByText

LayoutName = Literal["contiguous", "striped", "zigzag", "block_striped", "balanced"]
NAMES: tuple[LayoutName, ...] = get_args(LayoutName)


class Span(NamedTuple):
    """A run of `length` regularly spaced positions: start, start + stride, start + 2 stride, ...

    Attributes:
        start: First position.
        stride: Distance between neighbouring positions, at least 1.
        length: Number of positions, at least 1.

    Example:
        >>> mb.layout.Span(start=1, stride=4, length=3).positions()
        array([1, 5, 9])
    """

    start: int
    stride: int
    length: int

    @property
    def last(self) -> int:
        """The largest position."""
        return self.start + self.stride * (self.length - 1)

    def positions(self) -> np.ndarray:
        """Return the positions, int64 [length]."""
        return self.start + self.stride * np.arange(self.length, dtype=np.int64)


Shards = Sequence[Sequence[Span]]
ShardPairs = Sequence[tuple[Sequence[Span], Sequence[Span]]]  # spans of queries, spans of keys


class Spans(NamedTuple):
    """Many spans, as three integer arrays that broadcast against each other.

    Attributes:
        start: First position of each span.
        stride: Distance between neighbouring positions of each span.
        length: Number of positions of each span.
    """

    start: np.ndarray
    stride: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Spans:
        """Return a sequence of n spans as int64 arrays [n]."""
        if isinstance(spans, SpanArray):
            return spans.arrays
        # `np.array` treats each span as a list, which takes four times longer.
        numbers = np.fromiter(chain.from_iterable(spans), np.int64)
        return cls(*numbers.reshape(-1, 3).T)

    @property
    def last(self) -> np.ndarray:
        """The largest position of each span."""
        return self.start + (self.length - 1) * self.stride

    def at(self, index: np.ndarray | slice | tuple[slice | None, ...]) -> Spans:
        """Return the spans at `index`. All three arrays must have the same shape."""
        return Spans(self.start[index], self.stride[index], self.length[index])


class SpanArray(Sequence[Span]):
    """A sequence of spans, stored as arrays. Reading an item makes a `Span`.

    Args:
        arrays: The spans, int64 [n].
    """

    def __init__(self, arrays: Spans):
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays.start)

    def __iter__(self) -> Iterator[Span]:
        return map(Span, *(field.tolist() for field in self.arrays))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SpanArray(self.arrays.at(index))
        return Span(*(int(field[index]) for field in self.arrays))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpanArray) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> bytes:
        """Bytes of the arrays, which `==` and `hash` use."""
        return np.stack(self.arrays).tobytes()


class Pieces(NamedTuple):
    """Spans of all ranks, or parts of these spans, as arrays with one entry per span or part.

    Attributes:
        owner: Rank that holds the positions.
        first: Row of the first position in the owner's shard.
        span: Start, stride and length of each span or part.
    """

    owner: np.ndarray
    first: np.ndarray
    span: Spans

    def at(self, index: np.ndarray) -> Pieces:
        """Return the entries at `index`."""
        return Pieces(self.owner[index], self.first[index], self.span.at(index))


def pieces_of(shards: Shards) -> Pieces:
    """Return all spans of all ranks as arrays.

    Args:
        shards: Spans of each rank; a rank may have no spans.
    """
    count = np.array([len(shard) for shard in shards], dtype=np.int64)
    if shards and all(isinstance(shard, SpanArray) for shard in shards):
        columns = zip(*(Spans.of(shard) for shard in shards), strict=True)
        span = Spans(*(np.concatenate(column) for column in columns))
    else:
        numbers = chain.from_iterable(chain.from_iterable(shards))
        span = Spans(*np.fromiter(numbers, dtype=np.int64).reshape(-1, 3).T.copy())
    owner = np.repeat(np.arange(len(shards)), count)
    before = np.cumsum(span.length) - span.length
    base = before[np.minimum(np.cumsum(count) - count, len(before) - 1)] if len(before) else count
    return Pieces(owner, before - base[owner], span)


def counted(first: np.ndarray | int, count: np.ndarray) -> np.ndarray:
    """Return first[i], first[i] + 1, ... (count[i] numbers) for each i, concatenated."""
    skipped = np.repeat(first - (np.cumsum(count) - count), count)
    return np.arange(len(skipped)) + skipped


def integer(name: str, value: object) -> int:
    """Return an integer of any type as an int.

    Args:
        name: Name of the argument, for the error message.
        value: Integer of Python or NumPy, or integer tensor with one element.

    Raises:
        ValueError: `value` is not an integer, or is True or False.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def check_fraction(name: str, value: object, alternative: str = "") -> None:
    """Raise ValueError unless `value` is a number from 0 to 1.

    Args:
        name: Name of the argument, for the error message.
        value: The value.
        alternative: Further valid values, such as " or auto", for the error message.

    Raises:
        ValueError: `value` is not a number from 0 to 1.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0.0 <= value <= 1.0:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name} must be a fraction from 0 to 1{alternative}, got {value!r}")


def document_bounds(cu_seqlens: Sequence[int] | np.ndarray, name: str = "cu_seqlens") -> np.ndarray:
    """Return a copy of `cu_seqlens` as int64 [documents + 1].

    Args:
        cu_seqlens: Cumulative lengths of the documents: integers in host memory.
        name: Name of the argument, for the error message.

    Raises:
        ValueError: `cu_seqlens` does not start at 0, decreases, or does not hold integers.
    """
    try:
        lengths = np.asarray(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, on a device, or with gradient
        raise ValueError(f"{name} must be integers on the host, got {cu_seqlens}") from error
    bounds = lengths.astype(np.int64) if lengths.dtype.kind in "iu" else np.array([1])
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{name} must be integers that start at 0 and never decrease (cumulative lengths "
            f"of the documents), got {cu_seqlens}"
        )
    return bounds


def padding_documents(padding: Iterable[int], documents: int) -> tuple[int, ...]:
    """Return the sorted indices of padding documents.

    Args:
        padding: Indices of documents that are padding.
        documents: Number of documents.

    Raises:
        ValueError: `padding` is not iterable, or a value is not the index of a document.
    """
    if not isinstance(padding, Iterable):
        raise ValueError(f"padding must hold indices of documents, got {padding!r}")
    indices = tuple(sorted({integer("padding", index) for index in padding}))
    if indices and not 0 <= indices[0] <= indices[-1] < documents:
        raise ValueError(
            f"padding must hold indices of the {documents} documents, got {[*indices]}"
        )
    return indices


class Layout(ComparedByText):
    """Base class of layouts, which assign the positions of a sequence to `cp_size` ranks.

    Subclasses define `name`, `pieces_per_rank` and `_spans`.

    Args:
        cp_size: Number of ranks.

    Raises:
        ValueError: `cp_size` is not an integer >= 1.
    """

    name: str
    pieces_per_rank = 1

    def __init__(self, cp_size: int):
        self.cp_size = integer("cp_size", cp_size)
        if self.cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {cp_size}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cp_size={self.cp_size})"

    def describe(self) -> str:
        """Return a text that describes the layout: its name, and more in some subclasses."""
        return self.name

    def check(self, seq_len: int) -> None:
        """Raise ValueError unless the layout can split a sequence of `seq_len` positions."""
        multiple = self.pieces_per_rank * self.cp_size
        if seq_len < multiple or seq_len % multiple:
            padded = max(1, -(-seq_len // multiple)) * multiple
            raise ValueError(
                f"seq_len: layout {self.name} over {self.cp_size} ranks needs a positive multiple "
                f"of {multiple}, got {seq_len}; pad to {padded}, {padded // self.cp_size} per rank"
            )

    def spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        """Return the spans that a rank holds, in shard order.

        Args:
            rank: The rank.
            seq_len: Number of positions of the sequence.

        Raises:
            ValueError: `rank` is invalid, or the layout cannot split `seq_len` positions.
        """
        return tuple(self.span_array(rank, seq_len))

    def span_array(self, rank: int, seq_len: int) -> SpanArray:
        """Return the same spans as `spans`, stored as arrays and not as one object per span.

        Args:
            rank: Same as in `spans`.
            seq_len: Same as in `spans`.

        Raises:
            ValueError: Same as in `spans`.
        """
        if type(self).spans is not Layout.spans:  # a layout of the user
            return SpanArray(Spans.of(self.spans(rank, seq_len)))
        rank, seq_len = integer("rank", rank), integer("seq_len", seq_len)
        self.check(seq_len)
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank must be in 0..{self.cp_size - 1}, got {rank}")
        spans = self._spans(rank, seq_len)
        return spans if isinstance(spans, SpanArray) else SpanArray(Spans.of(spans))

    def positions(self, rank: int, seq_len: int) -> np.ndarray:
        """Return the position of every row of the shard of `rank`, int64 [seq_len / cp_size]."""
        return np.concatenate([span.positions() for span in self.spans(rank, seq_len)])

    def _spans(self, rank: int, seq_len: int) -> Sequence[Span]:
        raise NotImplementedError


class Contiguous(Layout):
    """Layout of equal runs: rank r holds run r of `cp_size` runs of consecutive positions.

    With causal masks, later ranks have more work.

    Args:
        cp_size: Number of ranks.

    Example:
        >>> mb.layout.make("contiguous", cp_size=2).positions(1, 8)
        array([4, 5, 6, 7])
    """

    name = "contiguous"

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        length = seq_len // self.cp_size
        return (Span(rank * length, 1, length),)


class Zigzag(Layout):
    """Layout of mirrored pieces: rank r of G holds pieces r and 2G - 1 - r of 2G equal pieces.

    It is Megatron's layout. With causal masks, all ranks have equal work.

    Args:
        cp_size: Number of ranks, G.

    Example:
        >>> mb.layout.make("zigzag", cp_size=2).positions(0, 8)
        array([0, 1, 6, 7])
    """

    name = "zigzag"
    pieces_per_rank = 2

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        length = seq_len // (2 * self.cp_size)
        late = 2 * self.cp_size - 1 - rank
        return (Span(rank * length, 1, length), Span(late * length, 1, length))


class Striped(Layout):
    """Layout of stripes: rank r of G holds positions r, r + G, r + 2G, ...

    With causal masks, ranks have nearly equal work on every prefix of the sequence.

    Args:
        cp_size: Number of ranks, G.

    Example:
        >>> mb.layout.make("striped", cp_size=2).positions(1, 8)
        array([1, 3, 5, 7])
    """

    name = "striped"

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        return (Span(rank, self.cp_size, seq_len // self.cp_size),)


class BlockStriped(Striped):
    """Striped layout for block-sparse masks; ranks have equal work with any block table.

    The positions are the same as in `Striped`. In addition, the layout checks that `cp_size`
    divides `block`, so that every rank has equally many positions of each block (BurstEngine,
    section 3.4).

    Args:
        cp_size: Number of ranks.
        block: Number of positions of a block.

    Raises:
        ValueError: `cp_size` does not divide `block`.

    Example:
        >>> mb.layout.make("block_striped", cp_size=2, block=4).positions(0, 8)
        array([0, 2, 4, 6])
    """

    name = "block_striped"

    def __init__(self, cp_size: int, block: int):
        super().__init__(cp_size)
        block = integer("block", block)
        if block < 1 or block % cp_size:
            raise ValueError(
                f"block must be a positive multiple of cp_size {cp_size}, got block={block}; use "
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
    """Zigzag layout within every document of a packed sequence, as in Megatron.

    Args:
        cp_size: Number of ranks.
        cu_seqlens: Cumulative lengths of the documents. Each document must have a multiple of 2 x
            `cp_size` positions.

    Raises:
        ValueError: `cu_seqlens` is invalid, all documents are empty, or the length of a document is
            not a multiple of 2 x `cp_size`.

    Example:
        >>> mb.layout.make("zigzag", cp_size=2, cu_seqlens=[0, 4, 8]).positions(0, 8)
        array([0, 3, 4, 7])
    """

    name = "zigzag"

    def __init__(self, cp_size: int, cu_seqlens: Sequence[int] | np.ndarray):
        super().__init__(cp_size)
        bounds = document_bounds(cu_seqlens)
        lengths = np.diff(bounds)
        if not bounds[-1]:
            raise ValueError(f"cu_seqlens: all documents are empty, got {cu_seqlens}")
        if (lengths % (2 * cp_size)).any():
            raise ValueError(
                f"cu_seqlens: zigzag within documents needs multiples of {2 * cp_size} positions, "
                f"got lengths {lengths.tolist()}; pad each document, or use layout striped, or "
                "zigzag over the whole sequence, which support documents of any length"
            )
        self.bounds = tuple(bounds.tolist())

    def __repr__(self) -> str:
        return f"DocumentZigzag(cp_size={self.cp_size}, cu_seqlens={list(self.bounds)})"

    def check(self, seq_len: int) -> None:
        if seq_len != self.bounds[-1]:
            raise ValueError(
                f"seq_len must be {self.bounds[-1]}, the total length of the documents, got "
                f"{seq_len}"
            )

    def _spans(self, rank: int, seq_len: int) -> SpanArray:
        first, stride, length = self._documents
        start = length * rank
        start[1::2] = length[1::2] * (2 * self.cp_size - 1 - rank)
        return SpanArray(Spans(start + first, stride, length))

    @cached_property
    def _documents(self) -> Spans:
        """Two pieces of each document that is not empty, both with the document's first position.

        All ranks have the same strides and lengths.
        """
        bounds = np.array(self.bounds, dtype=np.int64)
        lengths = np.diff(bounds) // (2 * self.cp_size)
        first, length = (np.repeat(x[lengths > 0], 2) for x in (bounds[:-1], lengths))
        return Spans(first, np.ones_like(first), length)


@dataclass(frozen=True)
class Replicated:
    """Value of option `key_layout`: every rank holds all keys, so no keys are sent.

    Args:
        sum_gradients: True if every rank receives the gradients of the keys and values summed over
            all ranks. False if the gradients on a rank have only the contributions of its own
            queries. Use False if the gradients of parameters are summed over ranks later, as in
            Megatron.

    Raises:
        ValueError: `sum_gradients` is not a bool.

    Example:
        >>> mb.layout.Replicated(sum_gradients=False)
        Replicated(sum_gradients=False)
    """

    sum_gradients: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.sum_gradients, bool):
            raise ValueError(f"sum_gradients must be True or False, got {self.sum_gradients!r}")


def tree_mask(tree: Any) -> Any:
    """Return the `masks.Tree` of `tree`, a result of `mb.trees.pack` or already a `masks.Tree`."""
    mask = getattr(tree, "mask", tree)
    if not hasattr(mask, "bases"):  # the class is in `masks`, which imports this module
        raise ValueError(f"tree must be a result of mb.trees.pack or a masks.Tree, got {tree!r}")
    return mask
