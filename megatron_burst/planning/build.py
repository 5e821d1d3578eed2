# SPDX-License-Identifier: Apache-2.0
"""From a schedule to what one rank executes: its steps, and where every row lies in every buffer.

Decides how the pair of two chunks is computed when these came in parts: part by part. Everything
that a plan can know is found out here, so that the loop in `ring` only looks it up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any
from zlib import crc32

import numpy as np
import torch

from ..comm.transport import Channel
from ..execution import joined
from ..execution.job import Call, Exchange, Pass, Payload, RowPlace, Step, Target
from ..kernels.base import Kernel
from ..layout.layouts import Shards, Span
from ..layout.sharding import to_device
from ..masks import Mask
from ..schedule.bundles import spans_of
from ..schedule.program import parts_of
from ..schedule.rings import Schedule, totals_of
from ..schedule.sizes import Sizes
from ..schedule.tables import ALL, Boundary, Chunk, Hop, Pair, Tables

OWN = "kv", "query"


class Works:
    """What a kernel plans for pairs of spans, once for each; shared by the passes of a plan."""

    def __init__(self, kernel: Kernel, mask: Mask, queries: Shards, keys: Shards, sizes: Sizes):
        self.kernel, self.mask, self.sizes = kernel, mask, sizes
        self.shards = {"query": queries, "kv": keys}
        self._planned: dict[tuple[Any, ...], Any] = {}

    def of(self, *spans: tuple[Span, ...]) -> Any:
        """What the kernel planned for queries and keys; None if nothing is visible."""
        if spans not in self._planned:
            self._planned[spans] = self.kernel.work_for(self.mask, *spans) if all(spans) else None
        return self._planned[spans]

    def spans(self, schedule: Schedule, chunk: Chunk) -> tuple[Span, ...]:
        """The rows of a chunk."""
        shard = self.shards[chunk.family][chunk.owner]
        if chunk.rows == ALL:
            return tuple(shard)
        ranges = schedule.tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        return tuple(spans_of(ranges, shard))


def make_pass(
    name: str,
    schedule: Schedule,
    rank: int,
    works: Works,
    device: torch.device,
    deferred: bool = True,
) -> Pass:
    """Return the pass that `rank` runs; with `deferred`, also the steps that compute own pairs
    last.
    """
    program = schedule.program(rank)
    hops = [hop for boundary in program for hop in boundary.posts]
    received = [hop.chunk for hop in hops if hop.dst == rank and not hop.chunk.accumulated]
    copies = [*(Chunk(family, rank) for family in OWN), *received]
    pairs = {pair: _calls(schedule, works, copies, pair) for b in program for pair in b.pairs}
    met = [(call.queries, call.keys) for calls in pairs.values() for call in calls]
    totals = totals_of(schedule, rank, hops, met)
    rows = _PassRows(name, rank, copies, received, totals, RowMaps(schedule.tables))

    calls = {pair: tuple(rows.with_targets(call) for call in each) for pair, each in pairs.items()}
    payloads = {hop: rows.payload(hop) for hop in hops}
    longest = rows.longest(hops)
    whole = {key: rows.target(total, total.rows) for key, total in totals.items()}
    rows.maps.finish(device)

    steps = tuple(_step(boundary, rank, payloads, calls) for boundary in program)
    own_last = schedule.program(rank, own_last=True) if deferred else ()
    run = Pass(
        name, steps, tuple(_step(boundary, rank, payloads, calls) for boundary in own_last),
        whole, longest, Counter(hop.chunk for hop in hops if hop.src == rank),
    )  # fmt: skip
    if schedule.joined:
        run = joined.joined(run, schedule, works, device)
    return run


@dataclass(frozen=True)
class _PassRows:
    """The buffers of one rank in one pass, and the places of rows in them.

    copies: the chunks that this rank holds: its own, then the `received` ones. totals: the result
    of `totals_of`.
    """

    name: str
    rank: int
    copies: Sequence[Chunk]
    received: Sequence[Chunk]
    totals: dict[tuple[str, int], Chunk]
    maps: RowMaps

    def target(self, chunk: Chunk, rows: int) -> Target:
        """Return where partial results of these rows of a chunk are added."""
        total = self.totals[chunk[:2]]
        whole = self.maps.place(total, total.rows)
        return Target(total, whole.count, rows, self.maps.place(total, chunk.rows))

    def with_targets(self, call: Call) -> Call:
        """Return the call with the targets of its results."""
        results = (
            ("out", call.queries, call.pair.query_rows),
            ("dquery", call.queries, call.pair.query_rows),
            ("dkv", call.keys, call.pair.key_rows),
        )
        targets = tuple(
            self.target(part._replace(family=family), rows & part.rows)
            for family, part, rows in results
            if (family, part.owner) in self.totals
        )
        return Call(call.pair, call.queries, call.keys, call.work, targets)

    def payload(self, hop: Hop) -> Payload:
        """Return what a hop sends: rows of a partial result, or of a chunk that is held."""
        chunk = hop.chunk
        target = source = None
        if chunk.accumulated:
            target = self.target(chunk, chunk.rows)
        elif hop.src == self.rank and chunk not in self.received:
            (held,) = parts_of(self.copies, *chunk)
            source = held, self.maps.place(held, chunk.rows)
        digest = crc32(f"{self.name} {chunk}".encode())
        packed = chunk.accumulated or hop.src != chunk.owner
        return Payload(hop, self._count(chunk), digest, packed, target, source)

    def longest(self, hops: Sequence[Hop]) -> dict[str, int]:
        """Return the most rows of a chunk of each family that travels."""
        longest: dict[str, int] = defaultdict(int)
        for hop in hops:
            family = hop.chunk.family
            longest[family] = max(longest[family], self._count(hop.chunk))
        return dict(longest)

    def _count(self, chunk: Chunk) -> int:
        return self.maps.place(chunk, chunk.rows).count


def _calls(
    schedule: Schedule, works: Works, copies: Sequence[Chunk], pair: Pair
) -> tuple[Call, ...]:
    """One call for every two parts of the chunks of a pair that see something."""
    meeting = product(
        parts_of(copies, "query", pair.query, pair.query_rows),
        parts_of(copies, "kv", pair.key, pair.key_rows),
    )
    if schedule.joined:  # what is planned is their joined call
        return tuple(Call(pair, *both, None, ()) for both in meeting)
    works_of = ((both, works.of(*(works.spans(schedule, c) for c in both))) for both in meeting)
    return tuple(Call(pair, *both, work, ()) for both, work in works_of if work is not None)


def _step(
    boundary: Boundary,
    rank: int,
    payloads: dict[Hop, Payload],
    calls: dict[Pair, tuple[Call, ...]],
) -> Step:
    if not (boundary.posts or boundary.release or boundary.pairs):  # most, of many ranks
        return Step(boundary.index, (), (), ())
    starting: dict[tuple[Channel, int], list[Payload]] = defaultdict(list)
    for hop in boundary.posts:
        starting[Channel(hop.ring, hop.chunk.accumulated), hop.land].append(payloads[hop])
    exchanges = []
    for key in sorted(starting):
        leaving = tuple(each for each in starting[key] if each.hop.src == rank)
        arriving = tuple(each for each in starting[key] if each.hop.src != rank)
        exchanges.append(Exchange(*key, leaving, arriving))
    computed = [call for pair in boundary.pairs for call in calls[pair]]
    return Step(boundary.index, boundary.release, tuple(exchanges), tuple(computed))


class RowMaps:
    """Where some rows of a chunk, or all, lie in a buffer of it, and how many they are.

    The order of rows in a buffer is that of `schedule.bundles`. Ask for all places, then `finish`:
    what is no slice of a buffer is an index, and all indices go to the device in one copy.
    """

    def __init__(self, tables: Tables):
        self._tables = tables
        self._places: dict[Any, RowPlace] = {}
        self._sorted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def place(self, chunk: Chunk, rows: int) -> RowPlace:
        """Where these rows lie in a buffer of the chunk."""
        # Families of the same rows share their places.
        key = chunk.family in ("kv", "dkv"), chunk.owner, chunk.rows, rows
        if key not in self._places:
            if rows == chunk.rows:  # most
                count = self._tables.bundles(chunk.family).count(chunk.owner, rows)
                at = slice(0, count)
            else:
                at, count = self._among(chunk, rows, key[:3])
            self._places[key] = RowPlace(count, at, rows == chunk.rows)
        return self._places[key]

    def finish(self, device: torch.device) -> None:
        """Bring the indices of all places to the device."""
        apart = [place for place in self._places.values() if not isinstance(place.at, slice)]
        if apart:
            together = to_device(np.concatenate([place.at for place in apart]), device)
            parts = together.split([place.count for place in apart])
            for place, index in zip(apart, parts, strict=True):
                place.at = index

    def _among(self, chunk: Chunk, rows: int, key: Any) -> tuple[slice | np.ndarray, int]:
        """Where some of the rows of a chunk lie in its buffer, and how many they are; key: under
        which its own order is remembered.
        """
        at = want = self._row_numbers(chunk._replace(rows=rows))
        if chunk.rows != ALL:
            if key not in self._sorted:
                have = self._row_numbers(chunk)
                order = np.argsort(have, kind="stable")
                self._sorted[key] = have[order], order
            have, order = self._sorted[key]
            at = order[np.searchsorted(have, want)]
        first = int(at[0]) if len(at) else 0
        consecutive = np.array_equal(at, np.arange(first, first + len(at)))
        return (slice(first, first + len(at)) if consecutive else at), len(at)

    def _row_numbers(self, chunk: Chunk) -> np.ndarray:
        """The rows of a chunk in its owner's shard, in the order of its buffer."""
        ranges = self._tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        return np.concatenate([np.arange(0), *starmap(np.arange, ranges)])
