# SPDX-License-Identifier: Apache-2.0
"""What the simulator needs of a schedule besides sizes and rates, worked out once.

A search asks for the same schedule with other heads and rates; then only the arithmetic of the
simulation itself is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..schedule.bundles import Bundles
from ..schedule.cost import rows_sent
from ..schedule.rings import Schedule
from ..schedule.sizes import Sizes
from ..schedule.tables import ALL, FAMILIES, Tables
from .exchanges import ONE_NIC, TimedExchange, Wires, exchanges, ports_of


@dataclass(frozen=True, eq=False)
class Prepared:
    """A schedule on its wires. Arrays over transfers and over pairs are in the tables' order."""

    schedule: Schedule
    wires: Wires = ONE_NIC

    @cached_property
    def between(self) -> np.ndarray:
        """bool: which transfers cross between nodes?"""
        return self.wires.between(self.schedule.tables.transfers, self.schedule.grid)

    @cached_property
    def ports(self) -> np.ndarray:
        """As of `ports_of`."""
        return ports_of(self.schedule.tables.transfers, self.schedule.grid, self.wires)

    @cached_property
    def starting(self) -> dict[int, list[TimedExchange]]:
        """As of `exchanges`."""
        return exchanges(self.schedule.tables.transfers, self.schedule.grid, self.ports)

    @cached_property
    def load(self) -> np.ndarray | None:
        """float: how many messages share a NIC with each transfer; None where none does."""
        places = self.wires.places
        if places is None or not places.shared:
            return None
        found = np.ones(len(self.between))
        for exchange in (one for some in self.starting.values() for one in some):
            for wave in exchange.waves:
                found[wave.which] = places.load(*wave.clocks[:2])
        return found

    @cached_property
    def rows(self) -> np.ndarray:
        """int64: rows of each transfer."""
        return rows_sent(self.schedule.tables, self.schedule.tables.transfers)

    def bytes_of(self, sizes: Sizes) -> np.ndarray:
        """int64: payload bytes of each transfer."""
        each = np.array(sizes.row_bytes(self.schedule), dtype=np.int64)
        return self.rows * each[self.schedule.tables.transfers.family]

    @cached_property
    def shares(self) -> np.ndarray:
        """float: as of `pair_shares`."""
        return pair_shares(self.schedule.tables)

    @cached_property
    def calls(self) -> tuple[np.ndarray, np.ndarray]:
        """int: the first pair of every call, and of each pair the number of its call; as
        `execution.joined` has them, which leaves own keys alone unless the kernel joins always.
        """
        pairs, joins = self.schedule.tables.pairs, self.schedule.wanted.joined
        call = np.arange(len(pairs.rank))
        if self.schedule.joined:
            call = pairs.step.astype(np.int64) * self.schedule.grid.size + pairs.rank
            call = 2 * call + ((pairs.key == pairs.rank) & (not joins))
        return np.unique(call, return_index=True, return_inverse=True)[1:]

    @cached_property
    def pair_rows(self) -> np.ndarray:
        """int64: of each pair the rows of its queries or of its call's keys, if these are fewer."""
        tables, pairs = self.schedule.tables, self.schedule.tables.pairs
        keys, of = tables.keys.rows_of(pairs.key, pairs.key_rows), self.calls[1]
        keys = np.bincount(of, keys).astype(np.int64)[of]
        return np.minimum(tables.queries.rows_of(pairs.query, pairs.query_rows), keys)

    @cached_property
    def added(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float: to how many rows of queries and of keys each pair adds results, where its own rank
        adds to them as well: those of two ranks that see each other; and how many rows of keys it
        has that are copied into a call of several pairs. A call adds once to each row of its
        queries, which counts with its first pair.
        """
        want, pairs = self.schedule.wanted, self.schedule.tables.pairs
        queries, keys = (_rows_wanted(bundles) for bundles in (want.queries, want.keys))
        first, of = self.calls
        some = np.bincount(want.queries.owner, want.queries.rows * want.queries.wanted.any(axis=1),
                           want.queries.size)  # fmt: skip
        seen = np.bincount(of, queries[pairs.query, pairs.key] * self.shares)
        once = np.zeros(len(of))
        once[first] = np.minimum(seen, some[pairs.query[first]])
        chunks, rows = self._held if self.schedule.joined else (keys, keys)
        several = np.bincount(of, chunks[pairs.rank, pairs.key])[of] > 1
        copied = rows[pairs.rank, pairs.key] * self.shares * (several & self.schedule.joined)
        return once, keys[pairs.key, pairs.query] * self.shares, copied

    @property
    def _held(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [rank, owner]: in how many chunks the keys of each owner come to each rank that
        computes with some of their rows, and how many rows these have, others that it passes on
        among them.
        """
        tables, keys = self.schedule.tables, self.schedule.wanted.keys
        used = np.zeros((keys.size, keys.size), dtype=np.int64)
        np.bitwise_or.at(used, (tables.pairs.rank, tables.pairs.key), tables.pairs.key_rows)
        chunks = np.eye(keys.size, dtype=np.int64)
        rows = np.diag(np.bincount(keys.owner, keys.rows, keys.size).astype(np.int64))
        copies = tables.transfers.where(tables.transfers.family == FAMILIES.index("kv"))
        computes = (used[copies.dst, copies.owner] & copies.rows) != 0
        np.add.at(chunks, (copies.dst, copies.owner), computes)
        moved = tables.keys.rows_of(copies.owner, copies.rows)
        np.add.at(rows, (copies.dst, copies.owner), computes * moved)
        return chunks, rows

    @cached_property
    def own_last(self) -> np.ndarray:
        """int: the step of each pair where every rank's own pair waits for the boundary at which
        the rank posts its last partial result, and runs beside it.
        """
        size, tables = self.schedule.grid.size, self.schedule.tables
        pairs, moved = tables.pairs, tables.transfers
        if not moved.accumulated.any():
            return pairs.step
        last = np.full(size, tables.steps)
        sums = moved.where(moved.accumulated)
        np.maximum.at(last, sums.src, sums.post)
        own = (pairs.query == pairs.rank) & (pairs.key == pairs.rank)
        own &= (pairs.query_rows == ALL) & (pairs.key_rows == ALL)
        return np.where(own, last[pairs.rank], pairs.step)


def _rows_wanted(bundles: Bundles) -> np.ndarray:
    """int64 [owner, rank]: how many rows of each chunk each rank wants."""
    found = np.zeros((bundles.size, bundles.size), dtype=np.int64)
    np.add.at(found, bundles.owner, bundles.rows[:, None] * bundles.wanted)
    return found


def pair_shares(tables: Tables) -> np.ndarray:
    """float: which part of its chunks' visible pairs each row of `tables.pairs` computes.

    1 where the two chunks meet once; where they meet in parts, a part's share is that of its rows.
    """
    pairs = tables.pairs
    meeting = pairs.query.astype(np.int64) * tables.keys.size + pairs.key
    times = np.bincount(meeting, minlength=1)
    if times.max() <= 1:
        return np.ones(len(meeting))
    rows = (
        tables.queries.rows_of(pairs.query, pairs.query_rows)
        * tables.keys.rows_of(pairs.key, pairs.key_rows)
    ).astype(float)
    return rows / np.bincount(meeting, rows)[meeting]
