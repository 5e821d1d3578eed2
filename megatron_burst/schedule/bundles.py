# SPDX-License-Identifier: Apache-2.0
"""Bundles: the rows of every rank's chunk, by who wants them.

Rows of one owner that the same ranks want make a bundle; they travel together. Which rows a message
carries is then a bit set over its owner's bundles, and schedules of rows are made as those of whole
chunks are, by operations on arrays. Decides the order of rows in messages: first the bundles that
most ranks want, so that a message that shrinks on its way mostly keeps its beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..layout import Span
from ..masks.seen import united

MOST = 62  # bundles of one owner: bit sets are int64
CELLS = 1 << 23  # bundles times ranks, at most: of many ranks, each has fewer


class Runs(NamedTuple):
    """Columns: rows first, ..., first + rows - 1 of its owner's shard belong to `bundle`."""

    bundle: np.ndarray
    first: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Bundles:
    """The bundles of all owners, [n] by owner; every row of a shard is in one of them.

    number: int64 [n], the bit of a bundle among those of its owner. wanted: bool [n, G], which
    ranks want it; its owner never does. runs: its rows, by bundle and then by row.
    """

    owner: np.ndarray
    number: np.ndarray
    wanted: np.ndarray
    runs: Runs

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.wanted.shape[1]

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [n]: how many rows each has."""
        return np.bincount(self.runs.bundle, self.runs.rows, len(self.owner)).astype(np.int64)

    def rows_of(self, owner: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """How many rows of its owner each bit set has; int64 arrays of one shape."""
        total = np.zeros(np.shape(bits), dtype=np.int64)
        for bit, rows in enumerate(self._rows_by_bit):
            total += rows[owner] * (np.right_shift(bits, bit) & 1)
        return total

    def count(self, owner: int, bits: int) -> int:
        """How many rows of one owner a bit set has: `rows_of` in a few small steps."""
        rows = self._rows_by_bit[:, owner]
        return int(rows @ (np.right_shift(bits, np.arange(len(rows))) & 1))

    def bits(self, which: np.ndarray) -> np.ndarray:
        """int64 [G, ...]: of each owner's bundles, the set of those in `which`, bool [n, ...]."""
        return self._bits(which).astype(np.int64)

    def sets(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`bits(which)` without the empty sets: flat indices and sets, int64."""
        bits = self._bits(which).reshape(-1)
        at = np.flatnonzero(bits != 0)
        return at, bits[at].astype(np.int64)

    def _bits(self, which: np.ndarray) -> np.ndarray:
        """`bits(which)` in few bytes where an owner has few bundles: tables are large."""
        most = int(self.number.max(initial=0))
        number = np.min_scalar_type(1 << most)
        found = np.zeros((self.size, *which.shape[1:]), dtype=number)
        for bit in range(most + 1):
            these = np.flatnonzero(self.number == bit)
            if bit:
                found[self.owner[these]] |= which[these].astype(number) << number.type(bit)
            else:  # nothing is there yet
                found[self.owner[these]] = which[these]
        return found

    def ranges(self, owner: int, bits: int) -> list[tuple[int, int]]:
        """The rows of a set in the order in which they travel: (first, stop) in the shard.

        ALL stands for the whole shard in its own order.
        """
        low, high = np.searchsorted(self.owner, (owner, owner + 1))
        if bits < 0:
            rows = int(self.rows[low:high].sum())
            return [(0, rows)] if rows else []
        own = slice(*np.searchsorted(self.runs.bundle, (low, high)))
        bundle, *columns = (column[own] for column in self.runs)
        taken = (np.right_shift(bits, self.number[bundle]) & 1).astype(bool)
        found: list[tuple[int, int]] = []
        for first, rows in zip(*(column[taken].tolist() for column in columns), strict=True):
            begin = found.pop()[0] if found and found[-1][1] == first else first
            found.append((begin, first + rows))
        return found

    def whole(self) -> Bundles:
        """One bundle for each owner: whole chunks travel to all who want some of their rows."""
        wanted = np.zeros((self.size, self.size), dtype=bool)
        there, begin, count = np.unique(self.owner, return_index=True, return_counts=True)
        wanted[there] = united(self.wanted, begin, count)
        owner = self.owner[self.runs.bundle]
        order = np.lexsort((self.runs.first, owner))
        first, rows = (column[order] for column in self.runs[1:])
        return bundled(owner[order], first, rows, wanted[owner[order]])

    def where(self, which: np.ndarray) -> Bundles:
        """Some of them, bool [n]; the others' rows are in none."""
        bundle, first, rows = (column[which[self.runs.bundle]] for column in self.runs)
        runs = Runs((np.cumsum(which) - 1)[bundle], first, rows)
        return Bundles(self.owner[which], self.number[which], self.wanted[which], runs)

    def split(self, parts: int) -> Bundles:
        """Every bundle cut into `parts` of about as many rows; the bit of part p of bundle b of an
        owner is b * parts + p. Parts without rows are left out.

        Of owners with too many bundles for that, the last ones are joined first.
        """
        whole = self._with_at_most(max(_most(self.size) // parts, 1))
        runs, rows = whole.runs, whole.rows[whole.runs.bundle]
        begin = np.cumsum(runs.rows) - runs.rows  # its row among all, then among its bundle's
        begin -= begin[np.searchsorted(runs.bundle, runs.bundle)]
        found, turn = [], ((whole.owner + whole.number) % parts)[runs.bundle]
        for part in range(parts):
            # Which parts get what cannot be divided evenly changes from bundle to bundle.
            low = np.maximum((rows * part + turn) // parts - begin, 0)
            high = np.minimum((rows * (part + 1) + turn) // parts - begin, runs.rows)
            taken = np.flatnonzero(low < high)
            index, length = runs.bundle[taken] * parts + part, (high - low)[taken]
            found.append(Runs(index, runs.first[taken] + low[taken], length))
        bundle, first, length = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((first, bundle))
        there, bundle = np.unique(bundle[order], return_inverse=True)
        old, part = np.divmod(there, parts)
        cut = Runs(bundle.reshape(-1), first[order], length[order])
        return Bundles(whole.owner[old], whole.number[old] * parts + part, whole.wanted[old], cut)

    def _with_at_most(self, most: int) -> Bundles:
        """These, or with the last ones of each owner joined: at most so many of an owner."""
        if self.number.max(initial=0) < most:
            return self
        order = np.lexsort((self.runs.first, self.owner[self.runs.bundle]))
        bundle, first, rows = (column[order] for column in self.runs)
        return bundled(self.owner[bundle], first, rows, self.wanted[bundle], most)

    @cached_property
    def _rows_by_bit(self) -> np.ndarray:
        """int64 [most bundles of an owner, G]."""
        table = np.zeros((int(self.number.max(initial=-1)) + 1, self.size), dtype=np.int64)
        table[self.number, self.owner] = self.rows
        return table


def bundled(
    owner: np.ndarray,
    first: np.ndarray,
    rows: np.ndarray,
    wanted: np.ndarray,
    most: int | None = None,
) -> Bundles:
    """The bundles of runs of rows, columns by owner and row; wanted: bool [runs, G].

    most: of one owner; default: as many as there may be.
    """
    size = wanted.shape[1]
    wanted = wanted.copy()
    # What its owner wants never travels, and would tell apart rows that travel alike.
    wanted[np.arange(len(owner)), owner] = False
    bundle, number, start = _numbered(owner, wanted)
    most = most or _most(size)
    if number.max(initial=0) >= most:
        # The last ones, which few ranks want, become one that all of these want.
        joined = owner * most + np.minimum(number, most - 1)[bundle]
        order = np.argsort(joined, kind="stable")
        _, begin, of, count = np.unique(
            joined[order], return_index=True, return_inverse=True, return_counts=True
        )
        wanted[order] = united(wanted[order], begin, count)[of]
        bundle, number, start = _numbered(owner, wanted)
    order = np.lexsort((first, bundle))
    runs = Runs(bundle[order], first[order], rows[order])
    return Bundles(owner[start], number, wanted[start], runs)


def _most(size: int) -> int:
    """How many bundles each of `size` ranks may have."""
    # `wanted` has a line per bundle and a column per rank, and there are as many owners as ranks.
    return int(np.clip(CELLS // size**2, 1, MOST))


def _numbered(owner: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bundle of each run; the number and the first run of each bundle."""
    words = np.packbits(wanted, axis=1)
    words = np.pad(words, ((0, 0), (0, -words.shape[1] % 8))).view(np.uint64)
    # A hash brings equal patterns together; which are equal is then decided by the patterns.
    factors = np.random.default_rng(0).integers(1 << 63, size=words.shape[1], dtype=np.uint64)
    hashes = (words * (2 * factors + 1)).sum(axis=1, dtype=np.uint64)
    order = np.argsort(
        hashes + owner.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), kind="stable"
    )
    fresh = np.ones(len(owner), dtype=bool)
    fresh[1:] = (owner[order][1:] != owner[order][:-1]) | (
        words[order][1:] != words[order][:-1]
    ).any(axis=1)
    start = order[fresh]  # the first run of each: the sort is stable
    few = wanted.shape[1] - np.count_nonzero(wanted[start], axis=1)
    place = np.argsort((owner[start] * (wanted.shape[1] + 1) + few) * len(owner) + start)
    numbers = np.empty_like(place)
    numbers[place] = np.arange(len(place))
    bundle = np.empty_like(order)
    bundle[order] = numbers[np.cumsum(fresh) - 1]
    start = start[place]
    _, first, count = np.unique(owner[start], return_index=True, return_counts=True)
    return bundle, np.arange(len(start)) - np.repeat(first, count), start


def spans_of(
    ranges: Sequence[tuple[int, int]], shard: Sequence[Span], starts: Sequence[int] | None = None
) -> list[Span]:
    """The positions of these rows of a shard, as spans in the order of the rows.

    starts: the row at which each span begins, and the number of rows, where they are known.
    """
    starts = starts or [0, *accumulate(span.length for span in shard)]
    found = []
    for first, stop in ranges:
        at = bisect_right(starts, first) - 1  # the span that holds the first of these rows
        while first < stop:
            begin, end, span = starts[at], starts[at + 1], shard[at]
            if first > begin or stop < end:
                low, high = first - begin, min(stop, end) - begin
                span = Span(span.start + low * span.stride, span.stride, high - low)
            found.append(span)
            first, at = end, at + 1
    return found
