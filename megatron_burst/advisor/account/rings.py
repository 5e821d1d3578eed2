"""Bytes of ring buffers of a run's core attention, from the schedules that it would run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...layout import make
from ...masks import Causal
from ...options import ring_algorithm
from ...schedule import cost
from ...schedule.demand import wanted
from ...schedule.sizes import Sizes as RowSizes
from ...schedule.tables import Grid
from ...schedule.topology import Topology
from ..settings import BYTES, Settings
from .core import Core
from .ring_buffers import ALIGNMENT, ENVELOPE, Rooms, rooms
from .sizes import Sizes

ALL_GRADIENTS = (True, True, True)
RoomsOf = Callable[..., tuple[Rooms, Rooms]]  # called as `ring_rooms`
SHORT = 64  # rows of a rank in the schedule whose buffers are counted, for each chunk of a layout


def core_of(x: Sizes, run: Settings, rooms_of: RoomsOf | None = None) -> Core:
    """What the core attention of one layer holds beside its tensors, for causal sequences.

    rooms_of: `ring_rooms`, or one that remembers, such as `Remembered.of`.
    """
    shared, x = run.ulysses, on_ring(x, run)
    rows, chunk = run.rows * shared, run.rows * shared // run.sequence_chunks
    whole = run.sequence_chunks == 1  # else dk and dv are summed over chunks, outside
    each = room_bytes(x, run)
    own_query, own_keys = each("dquery", chunk), each("dkv", rows)
    if run.cp == 1:
        own_query, own_keys = chunk * x.query * 4, rows * x.kv * 4
    rest = Core(0, 0, own_query + own_keys * whole, run.rows, run.store, shared, run.head_chunks,
                BYTES[run.wire], each("kv", 0))  # fmt: skip
    if run.cp == shared:
        return rest
    side = side_of(x, run)
    forward, backward = (rooms_of or ring_rooms)(
        run.algorithm, run.layout, run.cp // shared, intra_of(run), side, run.wire == "bf16",
        run.path == "cpu",
    )  # fmt: skip
    rows_of = {"kv": rows, "dkv": rows, "query": chunk, "dquery": chunk, "out": chunk}

    def total(found: Rooms) -> float:
        return sum(
            count
            * each(kind, round(rows_of[kind.split()[0]] * found.rows[kind.split()[0]] / SHORT))
            for kind, count in found.made.items()
        )

    others = total(backward) - own_query - own_keys
    return replace(rest, forward=total(forward), backward=others)


def on_ring(x: Sizes, run: Settings) -> Sizes:
    """What a rank has of a row on its ring: its share of the heads, copies where these are few."""
    heads, kv_heads = x.heads // run.ulysses, max(1, x.kv_heads // run.ulysses)
    return replace(x, heads=heads, kv_heads=kv_heads)


def intra_of(run: Settings) -> int:
    """Ranks of an inner ring: `run.inner`, or those of a ring that are on one node."""
    size = run.cp // run.ulysses
    if run.inner is not None:
        return run.inner if size % run.inner == 0 else size
    node = run.intra if run.intra and run.cp % run.intra == 0 else run.cp
    return Topology(run.cp, node, run.ulysses, run.placement).intra_size


def side_of(x: Sizes, run: Settings) -> str:
    """What travels in backward, of sizes on the ring: keys go round once per chunk of queries."""
    if run.side != "auto":
        return run.side
    of = _row_sizes(x, run).backward
    return "kv" if run.sequence_chunks * (of.kv + of.dkv) <= of.query + of.dquery else "query"


def room_bytes(x: Sizes, run: Settings) -> Callable[[str, int], float]:
    """(kind, rows on the ring) -> bytes of one buffer: on a CPU each has room for the longest
    message. x: sizes on the ring."""
    of, least = _row_sizes(x, run), 0.0
    wire = {"dkv wire": x.kv * BYTES[run.wire], "dquery wire": x.query * BYTES[run.wire]}
    per_row = {"kv": of.forward.kv, "query": of.backward.query, "dkv": x.kv * 4,
               "dquery": x.query * 4, "out": of.forward.out, **wire}  # fmt: skip
    if run.path == "cpu":
        travels = ("kv", side_of(x, run), "d" + side_of(x, run))
        chunks = run.sequence_chunks
        longest = (of.chunk_bytes(f) if "kv" in f else of.chunk_bytes(f) // chunks for f in travels)
        exchanged = max(of.scattered_bytes(run.ulysses, again=True)) * (run.ulysses > 1)
        travelled = max(longest) * (run.cp > run.ulysses)  # without a ring nothing goes round
        least = max(travelled, exchanged) + 4 * ALIGNMENT + ENVELOPE

    def size(kind: str, rows: int) -> float:
        return max(rows * per_row[kind], least)

    return size


def _row_sizes(x: Sizes, run: Settings) -> RowSizes:
    return RowSizes(run.rows * run.ulysses, 1, x.heads, x.kv_heads, x.width, x.value_width, 2, 4,
                    BYTES[run.wire], ALL_GRADIENTS)  # fmt: skip


def ring_rooms(
    algorithm: str, layout: str, cp: int, intra: int, side: str, wire: bool, packed: bool
) -> tuple[Rooms, Rooms]:
    """The most that any rank takes in forward and in backward, of shards of `SHORT` rows."""
    intra = intra if cp % intra == 0 else cp
    grid = Grid(cp // intra, intra)
    shards = [make(layout, cp_size=cp).spans(rank, cp * SHORT) for rank in range(cp)]
    seen = wanted(Causal(), shards, shards)
    sizes = RowSizes(SHORT, 1, 4, 1, 8, 8, 2, 4, 4, ALL_GRADIENTS)
    name = ring_algorithm(algorithm)
    there = cost.forward_schedule(name, grid, seen, sizes)
    back = cost.backward_schedule(name, grid, seen, sizes, side=side)
    ranks = sorted({0, cp // 2, cp - 1})
    return _most([rooms(there, r, wire=wire, packed=packed) for r in ranks]), _most(
        [rooms(back, r, wire=wire, packed=packed) for r in ranks]
    )


class Remembered:
    """`ring_rooms`, made once: they are the same for all runs with the same rings."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], tuple[Rooms, Rooms]] = {}

    def of(self, *ring: Any) -> tuple[Rooms, Rooms]:
        """`ring_rooms` of these arguments."""
        if ring not in self._made:
            self._made[ring] = ring_rooms(*ring)
        return self._made[ring]


def _most(found: list[Rooms]) -> Rooms:
    """That with most rooms, by their rows."""

    def size(one: Rooms) -> int:
        rows: Mapping[str, int] = one.rows
        return sum(count * rows[kind.split()[0]] for kind, count in one.made.items())

    return max(found, key=size)
