# SPDX-License-Identifier: Apache-2.0
"""Bytes of ring buffers of a run's core attention, from the schedules that it would run.

A rank's boundaries are replayed without tensors: what arrives and what is summed lies in buffers of
one kind per family, each as long as the longest message of the kind, which are used again and given
back at the end of the pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from .....layout import make
from .....masks import Causal, Window
from .....options import ring_algorithm
from .....schedule import cost
from .....schedule.demand import Wanted, wanted
from .....schedule.program import parts_of
from .....schedule.rings import Schedule
from .....schedule.sizes import Sizes as RowSizes
from .....schedule.tables import ALL, Boundary, Chunk, Grid, Hop, Pair
from .....schedule.topology import Topology
from ..settings import BYTES, Settings
from .operators import Core, F, LayerSizes

ALIGNMENT, ENVELOPE = 16, 40  # bytes, of `comm.packing`: CPU messages only


class Rooms(NamedTuple):
    """made: the most rooms of each kind, the rank's own sums of gradients among them; moments:
    rooms that there are at the same time, of which one takes most; rows: of the longest message of
    each kind."""

    made: dict[str, int]
    rows: Mapping[str, float]
    moments: tuple[dict[str, int], ...]


def rooms(schedule: Schedule, rank: int, *, wire: bool = False, packed: bool = False) -> Rooms:
    """What `rank` takes during a pass.

    wire: sums travel in another dtype than they are added in, so they have kinds of their own,
    "dkv wire". packed: every message is one buffer (the CPU), so own chunks are copied to be sent.
    """
    return _Replay(schedule, rank, wire, packed).run()


class _Replay:
    """The state of a `Ring` and its partial results, as names and counts."""

    def __init__(self, schedule: Schedule, rank: int, wire: bool, packed: bool):
        self.schedule, self.me, self.wire, self.packs = schedule, rank, wire, packed
        self.program = schedule.program(rank)
        self.families = ("out",) if schedule.row_bytes.out else ("dquery", "dkv")
        self.used: Counter[str] = Counter()
        self.there: Counter[str] = Counter()  # of each kind, those used and those free to be
        self.made: dict[str, int] = {}
        self.moments: list[dict[str, int]] = []
        # Of joined calls: their keys and gradients, the sums that lie in these, chunks let go of.
        self.joined: Counter[str] = Counter()
        self.later: set[Chunk] = set()
        self.freed: set[Chunk] = set()
        hops = [hop for boundary in self.program for hop in boundary.posts]
        own = [Chunk(family, rank) for family in ("kv", "query")]
        arrive = [h.chunk for h in hops if h.dst == rank and not h.chunk.accumulated]
        self.copies: dict[tuple[str, int], list[Chunk]] = defaultdict(list)  # by what and whose
        for chunk in (*own, *arrive):
            self.copies[chunk[:2]].append(chunk)
        self.held = set(own)
        self.partials = self._partials(hops)
        self.longest: dict[str, int] = defaultdict(int)
        for chunk in (*(hop.chunk for hop in hops), *self.partials.values()):
            rows = schedule.tables.bundles(chunk.family).count(chunk.owner, chunk.rows)
            self.longest[chunk.family] = max(self.longest[chunk.family], rows)
        self.sums: dict[Chunk, int] = {}  # partial results that are there, and their filled rows
        self.packed: set[Chunk] = set()
        self.sends = Counter(hop.chunk for hop in hops if hop.src == rank)
        self.flights: list[tuple[int, Hop]] = []

    def run(self) -> Rooms:
        for at in range(len(self.program) + 1):
            if at:
                self._land(at - 1)
                self._compute(at - 1)
            if at < len(self.program):
                self._post(self.program[at])
                self._note()
        for family in self.families:
            self._whole(family, self.me)
        self._note()
        unique = dict.fromkeys(tuple(sorted(each.items())) for each in self.moments)
        return Rooms(self.made, self.longest, tuple(map(dict, unique)))

    def _note(self) -> None:
        """What there is now, with a rank's own sums of gradients, which every moment has room for;
        without joined calls it only grows."""
        if not self.schedule.joined:
            self.moments.clear()
        own = [self.partials[family, self.me] for family in self.families if family != "out"]
        missing = Counter(each.family for each in own if each not in self.sums.keys() - self.later)
        self.moments.append(dict(self.there + self.joined + missing))

    def _post(self, boundary: Boundary) -> None:
        self._land(boundary.index)
        for chunk in boundary.release:
            if chunk not in self.freed:
                self.held.discard(chunk)
                self._give(chunk.family)
        # As the executor does: exchange by exchange, and what leaves before what comes.
        order = {hop: (hop.ring, hop.chunk.accumulated, hop.land, hop.dst == self.me)
                 for hop in boundary.posts}  # fmt: skip
        for hop in sorted(order, key=order.__getitem__):
            if hop.dst == self.me:
                self._take(self._kind(hop.chunk))
            elif hop.chunk.accumulated:
                self._send(hop.chunk)
            elif self.packs and hop.chunk not in self.packed and not self._came(hop.chunk):
                self._take(hop.chunk.family)
                self.packed.add(hop.chunk)
            self.flights.append((hop.land, hop))

    def _came(self, chunk: Chunk) -> bool:
        """Whether it is sent on as it came; own rows, and some of those that came, are copied."""
        return chunk in self.held and chunk.owner != self.me

    def _land(self, index: int) -> None:
        landing = [hop for land, hop in self.flights if land == index]
        self.flights = [each for each in self.flights if each[0] != index]
        for hop in landing:
            if hop.src != self.me:
                continue
            self.sends[hop.chunk] -= 1
            if hop.chunk.accumulated:
                self._give(self._kind(hop.chunk))
            elif hop.chunk in self.packed and not self.sends[hop.chunk]:
                self.packed.remove(hop.chunk)
                self._give(hop.chunk.family)
        for hop in landing:
            if hop.dst != self.me:
                continue
            if hop.chunk.accumulated:
                self._receive(hop.chunk)
            else:
                self.held.add(hop.chunk)

    def _compute(self, index: int) -> None:
        pairs = self.program[index].pairs
        calls = [(pair, *both) for pair in pairs for both in self._calls(pair)]
        together = []
        if self.schedule.joined:
            own = self.schedule.wanted.joined  # else a rank's own keys are a call of their own
            together = [keys for _, _, keys in calls if own or keys.owner != self.me]
        if len(together) > 1:
            self._join(together, index)
        for pair, queries, keys in calls:
            for family in self.families:
                part, rows = (
                    (keys, pair.key_rows) if family == "dkv" else (queries, pair.query_rows)
                )
                whole = self.partials[family, part.owner]
                if self._waits(whole, part, keys in together):
                    self.sums[whole] = rows & part.rows
                    self.later.add(whole)
                else:
                    self.sums[self._whole(family, part.owner)] |= rows & part.rows

    def _waits(self, whole: Chunk, part: Chunk, joined: bool) -> bool:
        """Do these sums stay among the gradients of a joined call until they are asked for?"""
        made = joined and self.joined["dkv joined"] > 0 and whole.family == "dkv"
        return made and whole not in self.sums and whole.rows == part.rows

    def _join(self, together: Sequence[Chunk], index: int) -> None:
        """One call has a copy of these chunks, those that nothing else wants are let go of, and
        then it has their gradients."""
        rows = sum(self.schedule.tables.keys.count(each.owner, each.rows) for each in together)
        count = -(-rows // max(1, self.longest["kv"]))
        self._joins("kv joined", count)
        (arrived, left), uses = self._leaving(), Counter(together)
        after = self.program[index + 1 : index + 2] if index >= arrived else ()
        for chunk in (chunk for boundary in after for chunk in boundary.release):
            if uses[chunk] == 1 and left.get(chunk, 0) <= index:
                self.freed.add(chunk)
                self.held.discard(chunk)
                self._give(chunk.family)
                self.there[chunk.family] -= 1
        if len(self.families) > 1:
            self._joins("dkv joined", count)
        else:
            self._note()
        del self.joined["kv joined"]

    def _joins(self, kind: str, count: int) -> None:
        self.joined[kind] = count
        self.made[kind] = max(self.made.get(kind, 0), count)
        self._note()

    def _leaving(self) -> tuple[int, dict[Chunk, int]]:
        """At which boundary the last copy sets out to this rank, and when each chunk has left."""
        hops = [h for b in self.program for h in b.posts if not h.chunk.accumulated]
        arrive = {hop.chunk: hop.post for hop in hops if hop.dst == self.me}
        left: dict[Chunk, int] = defaultdict(int)
        for hop in (hop for hop in hops if hop.src == self.me):
            of = hop.chunk if hop.chunk in arrive else self._parts(*hop.chunk)[0]
            left[of] = max(left[of], hop.land)
        return max(arrive.values(), default=0), left

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
        waited = chunk in self.later
        if chunk not in self.sums or waited:
            self.sums.setdefault(chunk, 0)
            if family != "out" or chunk.rows != ALL:
                self._take(family)
        if waited:
            self.later.remove(chunk)
            if not self.later:
                self._note()
                del self.joined["dkv joined"]
        return chunk

    def _take(self, kind: str) -> None:
        self.used[kind] += 1
        self.there[kind] = max(self.there[kind], self.used[kind])
        self.made[kind] = max(self.made.get(kind, 0), self.used[kind])

    def _give(self, kind: str) -> None:
        self.used[kind] -= 1

    def _kind(self, chunk: Chunk) -> str:
        return f"{chunk.family} wire" if chunk.accumulated and self.wire else chunk.family

    def _calls(self, pair: Pair) -> list[tuple[Chunk, Chunk]]:
        queries = self._parts("query", pair.query, pair.query_rows)
        keys = self._parts("kv", pair.key, pair.key_rows)
        return [(q, k) for q in queries for k in keys]

    def _parts(self, family: str, owner: int, rows: int) -> list[Chunk]:
        return parts_of(self.copies.get((family, owner), ()), family, owner, rows)

    def _partials(self, hops: Sequence[Hop]) -> dict[tuple[str, int], Chunk]:
        """For every chunk of which this rank holds partial results: all rows that it ever holds."""
        rows: dict[tuple[str, int], int] = defaultdict(int)
        for pair in (pair for boundary in self.program for pair in boundary.pairs):
            for queries, keys in self._calls(pair):
                for family in self.families:
                    part = keys if family == "dkv" else queries
                    rows[family, part.owner] |= part.rows
        for hop in hops:
            if hop.chunk.accumulated:
                rows[hop.chunk[:2]] |= hop.chunk.rows
        for family in self.families:
            rows[family, self.me] = ALL
        return {(family, owner): Chunk(family, owner, of) for (family, owner), of in rows.items()}


ALL_GRADIENTS = (True, True, True)
RoomsOf = Callable[..., tuple[Rooms, Rooms]]  # called as `ring_rooms`
CoreOf = Callable[..., Core]  # called as `core_of`
SHORT = 64  # rows of a rank in the schedule whose buffers are counted, for each chunk of a layout


def core_of(x: LayerSizes, run: Settings, rooms_of: RoomsOf | None = None, window: int = 0) -> Core:
    """What the core attention of one layer holds beside its tensors, for causal sequences.

    rooms_of: `ring_rooms`, or one that remembers. window: tokens that a query sees, 0: all before
    it.
    """
    shared, x = run.ulysses, on_ring(x if x.indexer is None else x.absorbed, run)
    rows, chunk = run.rows * shared, run.rows * shared // run.sequence_chunks
    whole = run.sequence_chunks == 1  # else dk and dv are summed over chunks, outside
    of = _row_sizes(x, run)
    side = side_by_bytes(run, of) if x.indexer is None else "kv"
    each = room_bytes(x, run, of, side)
    own_query, own_keys = each("dquery", chunk), each("dkv", rows)
    if run.cp == 1:
        own_query, own_keys = chunk * x.query * 4, rows * x.kv * 4
    rest = Core(
        sums=own_query + own_keys * whole,
        keys=run.rows,
        store=run.store,
        heads_shared=shared,
        reordered=run.layout != "contiguous",
        parts=run.head_chunks,
        wire=BYTES[run.wire],
        room=each("kv", 0),
    )
    if run.cp == shared:
        return rest
    forward, backward = (rooms_of or ring_rooms)(
        run.algorithm, run.layout, run.cp // shared, intra_of(run), side, run.wire == "bf16",
        run.path == "cpu", joins(x.indexer is not None),
        -(-(window - 1) * SHORT * run.cp // (shared * run.seq)) if window else None,
        run.keys_on_host,
    )  # fmt: skip
    rows_of = {"kv": rows, "dkv": rows, "query": chunk, "dquery": chunk, "out": chunk}

    def total(found: Rooms) -> float:
        return max(
            sum(
                count
                * each(kind, round(rows_of[kind.split()[0]] * found.rows[kind.split()[0]] / SHORT))
                for kind, count in moment.items()
            )
            for moment in found.moments
        )

    others = total(backward) - own_query - own_keys
    return replace(rest, forward=total(forward), backward=others)


def remembering() -> CoreOf:
    """`core_of` that remembers what it found of rings, which no length changes."""
    return partial(core_of, rooms_of=cache(ring_rooms))


def on_ring(x: LayerSizes, run: Settings) -> LayerSizes:
    """What a rank has of a row on its ring: its share of the heads, copies where these are few."""
    heads, kv_heads = x.heads // run.ulysses, max(1, x.kv_heads // run.ulysses)
    return replace(x, heads=heads, kv_heads=kv_heads)


def joins(sparse: bool) -> bool | None:
    """Whether all keys that a rank has at a step are one call, as of `Wanted`: those of sparse
    attention are; None: the algorithm decides."""
    return True if sparse else None


def visiting_rows(run: Settings, window: int = 0) -> int:
    """Return how many rows of other ranks of its ring a rank's queries see at most. window: tokens
    that a query sees, 0: all before it."""
    ring = run.cp // run.ulysses
    others = run.rows * run.ulysses * (ring - 1)
    pieces = {"contiguous": 1, "zigzag": 2}.get(run.layout)
    if not window or pieces is None:
        return others
    return min(others, pieces * (window - 1) * run.micro_batch)


def intra_of(run: Settings) -> int:
    """Ranks of an inner ring: `run.inner`, or those of a ring that are on one node."""
    size = run.cp // run.ulysses
    if run.inner is not None:
        return run.inner if size % run.inner == 0 else size
    node = run.intra if run.intra and run.cp % run.intra == 0 else run.cp
    return Topology(run.cp, node, run.ulysses, run.placement).intra_size


def side_by_bytes(run: Settings, sizes: RowSizes) -> str:
    """The side of a run; where it is "auto", that with fewer bytes: keys go round once per row
    chunk of queries. sizes: of one rank on the ring."""
    if run.side != "auto":
        return run.side
    sent = sizes.backward
    keys = run.sequence_chunks * (sent.kv + sent.dkv)
    return "kv" if keys <= sent.query + sent.dquery else "query"


def room_bytes(
    x: LayerSizes, run: Settings, of: RowSizes, side: str
) -> Callable[[str, int], float]:
    """(kind, rows on the ring) -> bytes of one buffer: on a CPU each has room for the longest
    message. x, of: sizes on the ring; side: what travels in backward."""
    least = 0.0
    per_row = {"kv": of.forward.kv, "query": of.backward.query, "dkv": x.kv * F,
               "dkv wire": x.kv * BYTES[run.wire], "kv joined": of.forward.kv,
               "dkv joined": x.kv * F, "dquery": x.query * F,
               "dquery wire": x.query * BYTES[run.wire], "out": (x.out + x.heads) * F,
               "out wire": of.forward.out}  # fmt: skip
    if run.path == "cpu":
        travels = ("kv", side, "d" + side)
        chunks = run.sequence_chunks
        longest = (of.chunk_bytes(f) if "kv" in f else of.chunk_bytes(f) // chunks for f in travels)
        exchanged = max(of.scattered_bytes(run.ulysses, again=True)) * (run.ulysses > 1)
        travelled = max(longest) * (run.cp > run.ulysses)  # without a ring nothing goes round
        least = max(travelled, exchanged) + 4 * ALIGNMENT + ENVELOPE

    def size(kind: str, rows: int) -> float:
        return max(rows * per_row[kind], least)

    return size


def _row_sizes(x: LayerSizes, run: Settings) -> RowSizes:
    width = x.width if x.indexer is None else x.rope  # the rest of a key are its values
    return RowSizes(run.rows * run.ulysses, 1, x.heads, x.kv_heads, width, x.value_width, 2, 4,
                    BYTES[run.wire], ALL_GRADIENTS)  # fmt: skip


def ring_rooms(
    algorithm: str, layout: str, cp: int, intra: int, side: str, wire: bool, packed: bool,
    joined: bool | None = None, before: int | None = None, host: bool = False,
) -> tuple[Rooms, Rooms]:  # fmt: skip
    """The most that any rank takes in forward and in backward, of shards of `SHORT` rows. joined:
    as `joins` says; before: how many of these rows before its own a query sees, None: all. host:
    keys of other ranks are in host memory, from which no call takes several chunks in forward."""
    intra = intra if cp % intra == 0 else cp
    grid = Grid(cp // intra, intra)
    shards = [make(layout, cp_size=cp).spans(rank, cp * SHORT) for rank in range(cp)]
    mask = Causal() if before is None else Window(before, 0)
    seen = wanted(mask, shards, shards, joined)
    sizes = RowSizes(SHORT, 1, 4, 1, 8, 8, 2, 4, 4, ALL_GRADIENTS)
    ranks = sorted({0, cp // 2, cp - 1})
    return most_rooms(
        algorithm, grid, seen, sizes, side, ranks, wire=wire, packed=packed, host=host
    )


def most_rooms(
    algorithm: str, grid: Grid, seen: Wanted, sizes: RowSizes, side: str, ranks: Sequence[int],
    *, wire: bool, packed: bool, host: bool = False,
) -> tuple[Rooms, Rooms]:  # fmt: skip
    """The most that any of these ranks takes in forward and in backward."""
    name = ring_algorithm(algorithm)
    one_by_one = replace(seen, joined=False) if host else seen
    forward = cost.forward_schedule(name, grid, one_by_one, sizes)
    backward = cost.backward_schedule(name, grid, seen, sizes, side=side)
    return _most([rooms(forward, r, wire=wire, packed=packed) for r in ranks]), _most(
        [rooms(backward, r, wire=wire, packed=packed) for r in ranks]
    )


def _most(found: list[Rooms]) -> Rooms:
    """That with most rooms, by their rows."""

    def size(one: Rooms) -> float:
        return max(
            sum(n * one.rows[kind.split()[0]] for kind, n in each.items()) for each in one.moments
        )

    return max(found, key=size)
