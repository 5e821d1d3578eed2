# SPDX-License-Identifier: Apache-2.0
"""Cache of the intermediate results of a simulation that depend only on schedule and links.

A search simulates one schedule for several numbers of heads and rates. With these cached
quantities, only the arithmetic of the simulation is repeated.
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
class PreparedSchedule:
    """A schedule and the links between its ranks, with cached intermediate results of simulations.

    Arrays have one entry per transfer, or per pair, in the order of the schedule's tables.
    """

    schedule: Schedule
    wires: Wires = ONE_NIC

    @cached_property
    def between(self) -> np.ndarray:
        """Bool per transfer, true for transfers between nodes."""
        return self.wires.between(self.schedule.tables.transfers, self.schedule.grid)

    @cached_property
    def ports(self) -> np.ndarray:
        """Sender's and receiver's port of each transfer, as returned by `ports_of`."""
        return ports_of(self.schedule.tables.transfers, self.schedule.grid, self.wires)

    @cached_property
    def starting(self) -> dict[int, list[TimedExchange]]:
        """Exchanges that start at each boundary between two steps, by index of the boundary."""
        return exchanges(self.schedule.tables.transfers, self.schedule.grid, self.ports)

    @cached_property
    def load(self) -> np.ndarray | None:
        """Number of messages that share a NIC with each transfer; None if no NIC is shared."""
        places = self.wires.places
        if places is None or not places.shared:
            return None
        load = np.ones(len(self.between))
        for exchange in (exchange for started in self.starting.values() for exchange in started):
            for wave in exchange.waves:
                load[wave.rows] = places.load(*wave.clocks[:2])
        return load

    @cached_property
    def rows(self) -> np.ndarray:
        """Number of rows of each transfer, int64."""
        return rows_sent(self.schedule.tables, self.schedule.tables.transfers)

    def bytes_of(self, sizes: Sizes) -> np.ndarray:
        """Return the payload bytes of each transfer, int64."""
        row_bytes = np.array(sizes.row_bytes(self.schedule), dtype=np.int64)
        return self.rows * row_bytes[self.schedule.tables.transfers.family]

    @cached_property
    def shares(self) -> np.ndarray:
        """Fraction that each pair has of the attention between two chunks; see `pair_shares`."""
        return pair_shares(self.schedule.tables)

    @cached_property
    def calls(self) -> tuple[np.ndarray, np.ndarray]:
        """Index of the first pair of each kernel call, and number of the kernel call of each pair.

        Calls are the same as in `execution.joined`: a call for a rank's own keys is separate unless
        the visibility requires joined calls.
        """
        pairs, joins = self.schedule.tables.pairs, self.schedule.visibility.joined
        call = np.arange(len(pairs.rank))
        if self.schedule.joined:
            call = pairs.step.astype(np.int64) * self.schedule.grid.size + pairs.rank
            call = 2 * call + ((pairs.key == pairs.rank) & (not joins))
        return np.unique(call, return_index=True, return_inverse=True)[1:]

    @cached_property
    def pair_rows(self) -> np.ndarray:
        """Query rows of each pair, or key rows of the pair's kernel call if fewer, int64."""
        tables, pairs = self.schedule.tables, self.schedule.tables.pairs
        keys, call = tables.keys.rows_of(pairs.key, pairs.key_rows), self.calls[1]
        keys = np.bincount(call, keys).astype(np.int64)[call]
        return np.minimum(tables.queries.rows_of(pairs.query, pairs.query_rows), keys)

    @cached_property
    def added(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three float arrays over pairs: added query rows, added key rows, copied key rows.

        Query and key rows are counted if the pair's results for these rows are added to results of
        another pair. This is the case for rows that attend to a chunk of another rank. Key rows are
        copied if their kernel call has several chunks. A kernel call adds to each of its query rows
        once, so these rows are counted for the first pair of the kernel call.
        """
        visibility, pairs = self.schedule.visibility, self.schedule.tables.pairs
        queries, keys = (_rows_used(bundles) for bundles in (visibility.queries, visibility.keys))
        first, call = self.calls
        bundles = visibility.queries
        used_rows = np.bincount(
            bundles.owner, bundles.rows * bundles.users.any(axis=1), bundles.size
        )
        added_in_call = np.bincount(call, queries[pairs.query, pairs.key] * self.shares)
        query_rows = np.zeros(len(call))
        query_rows[first] = np.minimum(added_in_call, used_rows[pairs.query[first]])
        chunks, rows = self._received_keys if self.schedule.joined else (keys, keys)
        several = np.bincount(call, chunks[pairs.rank, pairs.key])[call] > 1
        copied = rows[pairs.rank, pairs.key] * self.shares * (several & self.schedule.joined)
        return query_rows, keys[pairs.key, pairs.query] * self.shares, copied

    @property
    def _received_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of key chunks, and number of key rows, that each rank receives from each owner.

        Both arrays are int64 [rank, owner]. A received chunk is counted if the rank computes with
        some of the chunk's rows. All rows of the chunk are then counted, including rows that the
        rank only relays. A rank's own keys are counted as one chunk.
        """
        tables, keys = self.schedule.tables, self.schedule.visibility.keys
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
        """Step of each pair, if own pairs are computed while the rank sends its last gradients.

        An own pair consists of all queries and all keys of one rank.
        """
        size, tables = self.schedule.grid.size, self.schedule.tables
        pairs, transfers = tables.pairs, tables.transfers
        if not transfers.accumulated.any():
            return pairs.step
        last = np.full(size, tables.steps)
        sums = transfers.where(transfers.accumulated)
        np.maximum.at(last, sums.src, sums.post)
        own = (pairs.query == pairs.rank) & (pairs.key == pairs.rank)
        own &= (pairs.query_rows == ALL) & (pairs.key_rows == ALL)
        return np.where(own, last[pairs.rank], pairs.step)


def _rows_used(bundles: Bundles) -> np.ndarray:
    """Return the number of rows of each chunk that each rank uses, int64 [owner, rank]."""
    rows = np.zeros((bundles.size, bundles.size), dtype=np.int64)
    np.add.at(rows, bundles.owner, bundles.rows[:, None] * bundles.users)
    return rows


def pair_shares(tables: Tables) -> np.ndarray:
    """Return the fraction that each pair has of the attention between its two chunks, float.

    The fraction is 1 if one pair computes all of the attention between the two chunks. Otherwise it
    is proportional to the pair's query rows times its key rows.
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
