"""The buffers that one rank of a ring holds during a pass, from the tables of its schedule.

The same steps as `execution.executor` takes them, without tensors: what arrives and what is summed
lies in rooms of one kind per family, each as long as the longest message of the kind, which are
used again and given back at the end of the pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ...schedule.program import parts_of
from ...schedule.rings import Schedule
from ...schedule.tables import ALL, Boundary, Chunk, Hop, Pair

ALIGNMENT, ENVELOPE = 16, 40  # bytes, of `comm.packing`: CPU messages only


class Rooms(NamedTuple):
    """made: rooms of each kind at the end of a pass, the rank's own sums of gradients among them;
    rows: of the longest message of each kind."""

    made: dict[str, int]
    rows: dict[str, int]


def rooms(schedule: Schedule, rank: int, *, wire: bool = False, packed: bool = False) -> Rooms:
    """What `rank` takes during a pass.

    wire: sums travel in another dtype than they are added in, so they have kinds of their own,
    "dkv wire". packed: every message is one buffer (the CPU), so own chunks are copied to be sent.
    """
    replay = _Replay(schedule, rank, wire, packed)
    replay.run()
    return Rooms(dict(replay.made), replay.longest)


class _Replay:
    """The state of an `Executor` and its `Partials`, as names and counts."""

    def __init__(self, schedule: Schedule, rank: int, wire: bool, packed: bool):
        self.schedule, self.me, self.wire, self.packs = schedule, rank, wire, packed
        self.program = schedule.program(rank)
        self.made: Counter[str] = Counter()
        self.free: Counter[str] = Counter()
        hops = [hop for boundary in self.program for hop in boundary.posts]
        own = [Chunk(family, rank) for family in ("kv", "query")]
        self.kept = schedule.kept_chunks(rank)
        arrive = [h.chunk for h in hops if h.dst == rank and not h.chunk.accumulated]
        self.copies = [*own, *self.kept, *arrive]
        self.held = {*own, *self.kept}
        self.partials = self._partials(hops)
        self.longest: dict[str, int] = defaultdict(int)
        for chunk in (*(hop.chunk for hop in hops), *self.partials.values(), *self.kept):
            self.longest[chunk.family] = max(self.longest[chunk.family], self._rows(chunk))
        self.sums: dict[Chunk, int] = {}  # partial results that are there, and their filled rows
        self.packed: set[Chunk] = set()
        self.sends = Counter(hop.chunk for hop in hops if hop.src == rank)
        self.flights: list[tuple[int, Hop]] = []

    def run(self) -> None:
        for at in range(len(self.program) + 1):
            if at:
                self._land(at - 1)
                for pair in self.program[at - 1].pairs:
                    self._compute(pair)
            if at < len(self.program):
                self._post(self.program[at])
        for family in self._families():
            self._whole(family, self.me)

    def _post(self, boundary: Boundary) -> None:
        self._land(boundary.index)
        for chunk in boundary.release:
            if not parts_of(self.kept, *chunk):
                self.held.discard(chunk)
                self._give(chunk.family)
        for hop in boundary.posts:
            if hop.dst == self.me:
                self._take(self._kind(hop.chunk))
            elif hop.chunk.accumulated:
                self._send(hop.chunk)
            elif self._must_pack(hop.chunk) and hop.chunk not in self.packed:
                self._take(hop.chunk.family)
                self.packed.add(hop.chunk)
            self.flights.append((hop.land, hop))

    def _must_pack(self, chunk: Chunk) -> bool:
        """Whether what is sent is a copy: own rows, or some of those that came."""
        came = chunk in self.held and chunk.owner != self.me
        return self.packs and not came

    def _land(self, index: int) -> None:
        landing = [hop for land, hop in self.flights if land == index]
        self.flights = [each for each in self.flights if each[0] != index]
        for hop in (hop for hop in landing if hop.src == self.me):
            self.sends[hop.chunk] -= 1
            if hop.chunk.accumulated:
                self._give(self._kind(hop.chunk))
            elif hop.chunk in self.packed and not self.sends[hop.chunk]:
                self.packed.remove(hop.chunk)
                self._give(hop.chunk.family)
        for hop in (hop for hop in landing if hop.dst == self.me):
            if hop.chunk.accumulated:
                self._receive(hop.chunk)
            else:
                self.held.add(hop.chunk)

    def _compute(self, pair: Pair) -> None:
        for queries, keys in self._calls(pair):
            for family in self._families():
                part, rows = (
                    (keys, pair.key_rows) if family == "dkv" else (queries, pair.query_rows)
                )
                self.sums[self._whole(family, part.owner)] |= rows & part.rows

    def _receive(self, chunk: Chunk) -> None:
        whole, kind = self.partials[chunk[:2]], self._kind(chunk)
        if whole == chunk and whole not in self.sums and kind == chunk.family:
            self.sums[whole] = chunk.rows
            return
        self.sums[self._whole(*chunk[:2])] |= chunk.rows
        self._give(kind)

    def _send(self, chunk: Chunk) -> None:
        whole, kind = self._whole(*chunk[:2]), self._kind(chunk)
        self.sums[whole] &= ~chunk.rows
        if whole == chunk and kind == chunk.family:
            del self.sums[whole]  # what was summed is the message
            return
        self._take(kind)
        if not self.sums[whole]:
            del self.sums[whole]
            self._give(chunk.family)

    def _whole(self, family: str, owner: int) -> Chunk:
        """The partial results of a chunk, made when first asked for. A rank's own outputs have
        tensors of their own."""
        chunk = self.partials[family, owner]
        if chunk not in self.sums:
            self.sums[chunk] = 0
            if family != "out" or chunk.rows != ALL:
                self._take(family)
        return chunk

    def _take(self, kind: str) -> None:
        if self.free[kind]:
            self.free[kind] -= 1
        else:
            self.made[kind] += 1

    def _give(self, kind: str) -> None:
        self.free[kind] += 1

    def _kind(self, chunk: Chunk) -> str:
        return chunk.family + " wire" * (chunk.accumulated and self.wire)

    def _families(self) -> tuple[str, ...]:
        return ("out",) if self.schedule.row_bytes.out else ("dquery", "dkv")

    def _rows(self, chunk: Chunk) -> int:
        return self.schedule.tables.bundles(chunk.family).count(chunk.owner, chunk.rows)

    def _calls(self, pair: Pair) -> list[tuple[Chunk, Chunk]]:
        queries = parts_of(self.copies, "query", pair.query, pair.query_rows)
        keys = parts_of(self.copies, "kv", pair.key, pair.key_rows)
        return [(q, k) for q in queries for k in keys]

    def _partials(self, hops: Sequence[Hop]) -> dict[tuple[str, int], Chunk]:
        """For every chunk of which this rank holds partial results: all rows that it ever holds."""
        rows: dict[tuple[str, int], int] = defaultdict(int)
        for pair in (pair for boundary in self.program for pair in boundary.pairs):
            for queries, keys in self._calls(pair):
                for family in self._families():
                    part = keys if family == "dkv" else queries
                    rows[family, part.owner] |= part.rows
        for hop in hops:
            if hop.chunk.accumulated:
                rows[hop.chunk[:2]] |= hop.chunk.rows
        for family in self._families():
            rows[family, self.me] = ALL
        return {(family, owner): Chunk(family, owner, of) for (family, owner), of in rows.items()}
