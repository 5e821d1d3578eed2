# SPDX-License-Identifier: Apache-2.0
"""Bytes of ring buffers of a run's core attention, from the schedules that it would run.

`schedule.dry_run` runs these schedules with short shards; here rows become bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from .....layout import make
from .....masks import Causal, Window
from .....options import ring_algorithm
from .....schedule import cost
from .....schedule.demand import Visibility, visibility_of
from .....schedule.dry_run import HeldBuffers, dry_run
from .....schedule.sizes import Sizes as RowSizes
from .....schedule.tables import Grid
from .....schedule.topology import Topology
from ..settings import BYTES, Settings
from .operators import Core, F, LayerSizes

ALIGNMENT, ENVELOPE = 16, 40  # bytes, of `comm.packing`: CPU messages only


ALL_GRADIENTS = (True, True, True)
HeldOf = Callable[..., tuple[HeldBuffers, HeldBuffers]]  # called as `ring_held`
CoreOf = Callable[..., Core]  # called as `core_of`
SHORT = 64  # rows of a rank in the schedule whose buffers are counted, for each chunk of a layout


def core_of(x: LayerSizes, run: Settings, held_of: HeldOf | None = None, window: int = 0) -> Core:
    """What the core attention of one layer holds beside its tensors, for causal sequences.

    held_of: `ring_held`, or one that remembers. window: tokens that a query sees, 0: all before
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
    forward, backward = (held_of or ring_held)(
        run.algorithm, run.layout, run.cp // shared, intra_of(run), side, run.wire == "bf16",
        run.path == "cpu", joins(x.indexer is not None),
        -(-(window - 1) * SHORT * run.cp // (shared * run.seq)) if window else None,
        run.keys_on_host,
    )  # fmt: skip
    rows_of = {"kv": rows, "dkv": rows, "query": chunk, "dquery": chunk, "out": chunk}

    def size(kind: str, short: float) -> float:
        return each(kind, round(rows_of[kind.split()[0]] * short / SHORT))

    others = backward.bytes(size) - own_query - own_keys
    return replace(rest, forward=forward.bytes(size), backward=others)


def remembering() -> CoreOf:
    """`core_of` that remembers what it found of rings, which no length changes."""
    return partial(core_of, held_of=cache(ring_held))


def on_ring(x: LayerSizes, run: Settings) -> LayerSizes:
    """What a rank has of a row on its ring: its share of the heads, copies where these are few."""
    heads, kv_heads = x.heads // run.ulysses, max(1, x.kv_heads // run.ulysses)
    return replace(x, heads=heads, kv_heads=kv_heads)


def joins(sparse: bool) -> bool | None:
    """Whether all keys that a rank has at a step are one call, as of `Visibility`: those of sparse
    attention are; None: the algorithm decides.
    """
    return True if sparse else None


def visiting_rows(run: Settings, window: int = 0) -> int:
    """Return how many rows of other ranks of its ring a rank's queries see at most. window: tokens
    that a query sees, 0: all before it.
    """
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
    chunk of queries. sizes: of one rank on the ring.
    """
    if run.side != "auto":
        return run.side
    sent = sizes.backward
    keys = run.sequence_chunks * (sent.kv + sent.dkv)
    return "kv" if keys <= sent.query + sent.dquery else "query"


def room_bytes(
    x: LayerSizes, run: Settings, of: RowSizes, side: str
) -> Callable[[str, int], float]:
    """(kind, rows on the ring) -> bytes of one buffer: on a CPU each has room for the longest
    message. x, of: sizes on the ring; side: what travels in backward.
    """
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
        exchanged = max(of.scattered_bytes(run.ulysses, resends_q=True)) * (run.ulysses > 1)
        travelled = max(longest) * (run.cp > run.ulysses)  # without a ring nothing goes round
        least = max(travelled, exchanged) + 4 * ALIGNMENT + ENVELOPE

    def size(kind: str, rows: int) -> float:
        return max(rows * per_row[kind], least)

    return size


def _row_sizes(x: LayerSizes, run: Settings) -> RowSizes:
    width = x.width if x.indexer is None else x.rope  # the rest of a key are its values
    return RowSizes(run.rows * run.ulysses, 1, x.heads, x.kv_heads, width, x.value_width, 2, 4,
                    BYTES[run.wire], ALL_GRADIENTS)  # fmt: skip


def ring_held(
    algorithm: str, layout: str, cp: int, intra: int, side: str, wire: bool, packed: bool,
    joined: bool | None = None, before: int | None = None, host: bool = False,
) -> tuple[HeldBuffers, HeldBuffers]:  # fmt: skip
    """The most that any rank takes in forward and in backward, of shards of `SHORT` rows. joined:
    as `joins` says; before: how many of these rows before its own a query sees, None: all. host:
    keys of other ranks are in host memory, from which no call takes several chunks in forward.
    """
    intra = intra if cp % intra == 0 else cp
    grid = Grid(cp // intra, intra)
    shards = [make(layout, cp_size=cp).spans(rank, cp * SHORT) for rank in range(cp)]
    mask = Causal() if before is None else Window(before, 0)
    seen = visibility_of(mask, shards, shards, joined)
    sizes = RowSizes(SHORT, 1, 4, 1, 8, 8, 2, 4, 4, ALL_GRADIENTS)
    ranks = sorted({0, cp // 2, cp - 1})
    return most_held(algorithm, grid, seen, sizes, side, ranks, wire=wire, packed=packed, host=host)


def most_held(
    algorithm: str, grid: Grid, seen: Visibility, sizes: RowSizes, side: str, ranks: Sequence[int],
    *, wire: bool, packed: bool, host: bool = False,
) -> tuple[HeldBuffers, HeldBuffers]:  # fmt: skip
    """The most that any of these ranks takes in forward and in backward."""
    name = ring_algorithm(algorithm)
    one_by_one = replace(seen, joined=False) if host else seen
    forward = cost.forward_schedule(name, grid, one_by_one, sizes)
    backward = cost.backward_schedule(name, grid, seen, sizes, side=side)
    passes = (forward, backward)
    held = ([dry_run(each, rank, wire=wire, packed=packed) for rank in ranks] for each in passes)
    first, second = (max(each, key=lambda one: one.bytes(_rows)) for each in held)
    return first, second


def _rows(_kind: str, rows: float) -> float:
    return rows
