# SPDX-License-Identifier: Apache-2.0
"""Bundles: the rows of each rank's chunk, grouped by the ranks that use them.

Rows of one owner that the same ranks use are a bundle, and are sent together. The rows of a message
are stored as a bit set with one bit per bundle of their owner. So schedules of rows are made by
operations on arrays, like schedules of whole chunks. In a message, the bundles that most ranks use
are first. If a rank forwards only a part of a message, the omitted rows are then mostly at the end
of the message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

import numpy as np

from ..layout import Spans
from ..layout.layouts import SpanArray, counted
from ..masks.seen import one_each, packed, united, unpacked

MOST = 62  # largest number of bundles of one owner: bit sets are int64
CELLS = 1 << 23  # largest number of bundles of all owners, multiplied by the number of ranks


class Runs(NamedTuple):
    """Ranges of consecutive rows, as parallel arrays.

    Attributes:
        bundle: Index of the bundle (rows that the same ranks use) that contains the rows.
        first: First row in the owner's shard.
        rows: Number of rows.
    """

    bundle: np.ndarray
    first: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Bundles:
    """The n bundles of all G ranks: groups of rows of one owner that the same ranks use.

    Attributes:
        owner: int [n], ascending, rank that owns the bundle. Every row of a rank is in one of its
            bundles.
        number: int64 [n], number of the bundle's bit in the bit sets of its owner.
        users: bool [n, G], true for ranks that use the bundle; false for its owner.
        runs: Rows of the bundles, sorted by bundle and then by row.
    """

    owner: np.ndarray
    number: np.ndarray
    users: np.ndarray
    runs: Runs
    _runs: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.users.shape[1]

    @cached_property
    def rows(self) -> np.ndarray:
        """Number of rows of each bundle, int64 [n]."""
        return np.bincount(self.runs.bundle, self.runs.rows, len(self.owner)).astype(np.int64)

    @cached_property
    def digest(self) -> int:
        """Checksum of the owners' bundle numbers and runs, computed once for all passes."""
        checksum = 0
        for column in (self.number, *self.runs):
            checksum = crc32(np.ascontiguousarray(column, dtype=np.int64).data, checksum)
        return checksum

    def rows_of(self, owner: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Return the number of rows in each bit set, int64.

        Args:
            owner: Owner of each set.
            bits: int64 array of the same shape: bit i of an entry selects the owner's bundle number
                i.
        """
        total = np.zeros(np.shape(bits), dtype=np.int64)
        for first, sets in enumerate(self._rows_by_octet):
            total += sets[owner, np.right_shift(bits, 8 * first) & (sets.shape[1] - 1)]
        return total

    def count(self, owner: int, bits: int) -> int:
        """Return the number of rows in some bundles of one owner.

        This is faster than `rows_of`, which has arrays as arguments.

        Args:
            owner: The owner.
            bits: Bit set: bit i selects the owner's bundle number i.
        """
        total = 0
        for first, sets in enumerate(self._rows_by_octet):
            total += int(sets[owner, bits >> 8 * first & (sets.shape[1] - 1)])
        return total

    def bits(self, selected: np.ndarray) -> np.ndarray:
        """Return the bit set of the selected bundles of each owner, int64 [G, ...].

        Args:
            selected: bool [n, ...], true for selected bundles; further axes are independent.
        """
        return self._bits(selected).astype(np.int64)

    def sets(self, selected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return only the bit sets of `bits(selected)` that are not empty.

        Args:
            selected: bool [n, ...], true for selected bundles.

        Returns:
            Flat indices into the result of `bits`, and the bit sets at these indices; int64 each.
        """
        bits = self._bits(selected).reshape(-1)
        at = np.flatnonzero(bits != 0)
        return at, bits[at].astype(np.int64)

    def _bits(self, selected: np.ndarray) -> np.ndarray:
        """Return `bits(selected)` in the smallest dtype that has enough bits, to save memory."""
        most = int(self.number.max(initial=0))
        number = np.min_scalar_type(1 << most)
        sets = np.zeros((self.size, *selected.shape[1:]), dtype=number)
        for bit in range(most + 1):
            at = np.flatnonzero(self.number == bit)
            if bit:
                sets[self.owner[at]] |= selected[at].astype(number) << number.type(bit)
            else:  # the sets are still empty
                sets[self.owner[at]] = selected[at]
        return sets

    def ranges(self, owner: int, bits: int) -> np.ndarray:
        """Return the rows of some bundles as ranges (first, stop) of the owner's shard, [n, 2].

        The ranges are in the order in which a message contains the rows. `bits` is a bit set: bit i
        selects the owner's bundle number i. `ALL` selects the whole shard, in the order of its
        rows.
        """
        return self.all_ranges(np.array([owner]), np.array([bits]))[1]

    def all_ranges(self, owner: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of several sets of bundles as ranges (first, stop), as in `ranges`.

        Args:
            owner: Owner of each set.
            bits: Bit set of each set, int64, as in `ranges`.

        Returns:
            Index of the set of each range, ascending; the ranges, int64 [n, 2].
        """
        partial = np.flatnonzero(bits >= 0)
        low, high = np.searchsorted(self.owner, (owner[partial], owner[partial] + 1))
        low, high = np.searchsorted(self.runs.bundle, (low, high))
        index, at = np.repeat(partial, high - low), counted(low, high - low)
        bundle = self.runs.bundle[at]
        taken = (np.right_shift(bits[index], self.number[bundle]) & 1).astype(bool)
        index, at = index[taken], at[taken]
        first = self.runs.first[at]
        stop = first + self.runs.rows[at]
        apart = np.ones(len(index) + 1, dtype=bool)  # consecutive rows are one range
        apart[1:-1] = (first[1:] != stop[:-1]) | (index[1:] != index[:-1])
        index, first, stop = index[apart[:-1]], first[apart[:-1]], stop[apart[1:]]
        if len(partial) < len(bits):
            rows = np.where(bits < 0, self._rows_by_bit.sum(axis=0)[owner], 0)
            (shard,) = np.nonzero(rows)
            index, first = np.append(index, shard), np.append(first, 0 * shard)
            stop = np.append(stop, rows[shard])
            order = np.argsort(index, kind="stable")
            index, first, stop = index[order], first[order], stop[order]
        return index, np.stack([first, stop], axis=1)

    def places(self, owner: int, held: int, bits: int) -> np.ndarray:
        """Return where the rows of some bundles are in a buffer, as ranges (first, stop), [n, 2].

        The ranges are in the order in which a message contains the rows.

        Args:
            owner: Owner of the rows.
            held: Bit set of the bundles in the buffer; `ALL` for the owner's shard.
            bits: Bit set of the bundles, a subset of `held`.
        """
        if owner not in self._runs:  # bundle numbers, first rows and numbers of rows of its runs
            low, high = np.searchsorted(self.owner, (owner, owner + 1))
            own = slice(*np.searchsorted(self.runs.bundle, (low, high)))
            bundle, first, rows = (column[own] for column in self.runs)
            self._runs[owner] = self.number[bundle], first, rows
        number, first, rows = self._runs[owner]
        if held >= 0:
            held_rows = rows * (np.right_shift(held, number) & 1)
            first = np.cumsum(held_rows) - held_rows
        (taken,) = np.nonzero(np.right_shift(bits, number) & 1)
        first, stop = first[taken], (first + rows)[taken]
        apart = np.ones(len(taken) + 1, dtype=bool)  # consecutive rows are one range
        apart[1:-1] = first[1:] != stop[:-1]
        return np.array([first[apart[:-1]], stop[apart[1:]]]).T

    def whole(self) -> Bundles:
        """Return one bundle per owner, with all rows of the owner's bundles.

        Every rank that uses some of these rows then uses all of them.
        """
        users = np.zeros((self.size, self.size), dtype=bool)
        owners, begin, count = np.unique(self.owner, return_index=True, return_counts=True)
        users[owners] = unpacked(united(packed(self.users), begin, count), self.size)
        owner = self.owner[self.runs.bundle]
        order = np.lexsort((self.runs.first, owner))
        first, rows = (column[order] for column in self.runs[1:])
        return bundled(owner[order], first, rows, users[owner[order]])

    def where(self, selected: np.ndarray) -> Bundles:
        """Return the bundles that `selected`, bool [n], selects; other rows are in no bundle."""
        bundle, first, rows = (column[selected[self.runs.bundle]] for column in self.runs)
        runs = Runs((np.cumsum(selected) - 1)[bundle], first, rows)
        return Bundles(self.owner[selected], self.number[selected], self.users[selected], runs)

    def split(self, parts: int) -> Bundles:
        """Split each bundle into `parts` bundles with about equally many rows.

        Part p of the owner's bundle number b gets the number b * parts + p. Parts without rows are
        omitted. If an owner has too many bundles for its bit sets, its last bundles are joined
        before the split.
        """
        bundles = self._with_at_most(max(_most(self.size) // parts, 1))
        runs, rows = bundles.runs, bundles.rows[bundles.runs.bundle]
        begin = np.cumsum(runs.rows) - runs.rows  # first rows: in all rows, then in the bundle
        begin -= begin[np.searchsorted(runs.bundle, runs.bundle)]
        cuts, turn = [], ((bundles.owner + bundles.number) % parts)[runs.bundle]
        for part in range(parts):
            # The parts that get a remainder row change from bundle to bundle.
            low = np.maximum((rows * part + turn) // parts - begin, 0)
            high = np.minimum((rows * (part + 1) + turn) // parts - begin, runs.rows)
            taken = np.flatnonzero(low < high)
            index, length = runs.bundle[taken] * parts + part, (high - low)[taken]
            cuts.append(Runs(index, runs.first[taken] + low[taken], length))
        bundle, first, length = (np.concatenate(column) for column in zip(*cuts, strict=True))
        order = np.lexsort((first, bundle))
        cut_number, bundle = np.unique(bundle[order], return_inverse=True)
        old, part = np.divmod(cut_number, parts)
        cut = Runs(bundle.reshape(-1), first[order], length[order])
        return Bundles(
            bundles.owner[old], bundles.number[old] * parts + part, bundles.users[old], cut
        )

    def _with_at_most(self, most: int) -> Bundles:
        """Join the last bundles of each owner, so that it has at most `most` bundles."""
        if self.number.max(initial=0) < most:
            return self
        order = np.lexsort((self.runs.first, self.owner[self.runs.bundle]))
        bundle, first, rows = (column[order] for column in self.runs)
        return bundled(self.owner[bundle], first, rows, self.users[bundle], most)

    @cached_property
    def _rows_by_octet(self) -> list[np.ndarray]:
        """Number of rows of each bit set of bundles 0 to 7, 8 to 15 and so on, int64 [owner, set].

        One look-up per octet is faster than an addition per bundle, because there may be a million
        transfers.
        """
        octets = []
        for first in range(0, len(self._rows_by_bit), 8):
            sets = np.zeros((self.size, 1), dtype=np.int64)
            for rows in self._rows_by_bit[first : first + 8]:
                sets = np.concatenate([sets, sets + rows[:, None]], axis=1)
            octets.append(sets)
        return octets

    @cached_property
    def _rows_by_bit(self) -> np.ndarray:
        """Number of rows of each bundle, int64 [bundle number, owner]; 0 for no bundle."""
        table = np.zeros((int(self.number.max(initial=-1)) + 1, self.size), dtype=np.int64)
        table[self.number, self.owner] = self.rows
        return table


def bundled(
    owner: np.ndarray,
    first: np.ndarray,
    rows: np.ndarray,
    users: np.ndarray,
    most: int | None = None,
) -> Bundles:
    """Group ranges of rows into bundles: rows of one owner that the same ranks use.

    Args:
        owner: Owner of each range; ranges are sorted by owner and row.
        first: First row of each range.
        rows: Number of rows of each range.
        users: bool [ranges, G], true for ranks that use the rows.
        most: Largest number of bundles of an owner; default: computed from `MOST` and `CELLS`.
    """
    return bundles_of_sets(owner, first, rows, packed(users), users.shape[1], most)


def bundles_of_sets(
    owner: np.ndarray,
    first: np.ndarray,
    rows: np.ndarray,
    users: np.ndarray,
    size: int,
    most: int | None = None,
) -> Bundles:
    """Return the same as `bundled`; `users` are bit sets of `size` ranks, as from `packed`."""
    # Rows are never sent to their owner, so its use must not separate rows into bundles.
    users = users & ~one_each(owner, size)
    bundle, number, start = _numbered(owner, users, size)
    most = most or _most(size)
    if number.max(initial=0) >= most:
        # Join the last bundles, which few ranks use, into one bundle used by all of these ranks.
        joined = owner * most + np.minimum(number, most - 1)[bundle]
        order = np.argsort(joined, kind="stable")
        _, begin, index, count = np.unique(
            joined[order], return_index=True, return_inverse=True, return_counts=True
        )
        users[order] = united(users[order], begin, count)[index]
        bundle, number, start = _numbered(owner, users, size)
    # The ranges of a bundle are in the order of rows. Sorting small integers is much faster.
    order = np.argsort(bundle.astype(np.min_scalar_type(len(start))), kind="stable")
    runs = Runs(bundle[order], first[order], rows[order])
    return Bundles(owner[start], number, unpacked(users[start], size), runs)


def _most(size: int) -> int:
    """Return the largest allowed number of bundles per owner for `size` ranks."""
    # `users` has a row per bundle and a column per rank, and every rank is an owner.
    return int(np.clip(CELLS // size**2, 1, MOST))


def _numbered(
    owner: np.ndarray, words: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group ranges of rows by owner and users.

    Args:
        owner: Owner of each range.
        words: Bit sets of the ranks that use the rows.
        size: Number of ranks.

    Returns:
        Index of the bundle (group) of each range; number of each bundle among the bundles of its
        owner; index of the first range of each bundle.
    """
    # A hash sorts equal patterns next to each other. The patterns themselves decide equality.
    odd = np.uint64(0x9E3779B97F4A7C15)
    factors = np.cumprod(np.full(words.shape[1] + 1, odd))  # powers of an odd number, modulo 2**64
    order = np.argsort(words @ factors[1:] + owner.astype(np.uint64) * odd, kind="stable")
    sorted_owner, sorted_words = owner[order], words[order]
    fresh = np.ones(len(owner), dtype=bool)
    fresh[1:] = (sorted_owner[1:] != sorted_owner[:-1]) | (
        sorted_words[1:] != sorted_words[:-1]
    ).any(axis=1)
    start = order[fresh]  # the first run of each bundle: the sort is stable
    unused = size - np.count_nonzero(unpacked(words[start], size), axis=1)
    place = np.argsort((owner[start] * (size + 1) + unused) * len(owner) + start)
    numbers = np.empty_like(place)
    numbers[place] = np.arange(len(place))
    bundle = np.empty_like(order)
    bundle[order] = numbers[np.cumsum(fresh) - 1]
    start = start[place]
    owners = owner[start]
    return bundle, np.arange(len(start)) - np.searchsorted(owners, owners), start


def spans_of(ranges: np.ndarray, shard: Spans) -> SpanArray:
    """Return the positions of some rows of a shard, as spans in the order of `ranges`.

    Args:
        ranges: The rows, as ranges (first, stop) of the shard, int [m, 2].
        shard: Spans of the shard, arrays [n].
    """
    return SpanArray(spans_in(ranges, shard)[1])


def spans_in(ranges: np.ndarray, shard: Spans) -> tuple[np.ndarray, Spans]:
    """Return the index of the range that contains each span, and the spans of `spans_of`."""
    bounds = np.cumsum(np.append(0, shard.length))  # first row of each span
    first, stop = ranges.T
    # Each range overlaps the spans `begin` to `end`.
    begin = np.searchsorted(bounds, first, side="right") - 1
    end = np.searchsorted(bounds, stop)
    number = np.where(first < stop, end - begin, 0)
    of_range = np.repeat(np.arange(len(first)), number)
    at = counted(begin, number)
    low = np.maximum(first[of_range], bounds[at])
    high = np.minimum(stop[of_range], bounds[at + 1])
    fields = shard.start[at] + (low - bounds[at]) * shard.stride[at], shard.stride[at], high - low
    return of_range, Spans(*fields)
