# SPDX-License-Identifier: Apache-2.0
"""Bytes of the ring buffers of core attention, from the schedules that a run would execute.

`schedule.dry_run` simulates these schedules with few rows per rank and counts the rows of buffers.
This module converts rows to bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from ..... import registry
from .....config import BurstConfig
from .....layout import make
from .....masks import Causal, Window
from .....options import ring_algorithm
from .....schedule import cost
from .....schedule.demand import Visibility, visibility_of
from .....schedule.dry_run import HeldBuffers, dry_run
from .....schedule.rings import Schedule
from .....schedule.sizes import Sizes as RowSizes
from .....schedule.tables import Grid
from .....schedule.topology import Topology
from ..settings import BYTES, Settings
from ..shapes.layer_kinds import KEY_WINDOW, Hybrid
from .operators import Core, F, LayerSizes

ALIGNMENT, ENVELOPE = 16, 40  # bytes, from `comm.packing`; only CPU messages have them


ALL_GRADIENTS = (True, True, True)
RingBuffersOf = Callable[..., tuple[HeldBuffers, HeldBuffers]]  # called as `ring_held`
CoreOf = Callable[..., Core]  # called as `core_of`
SHORT = 64  # rows of a rank in the simulated schedules


def core_of(
    x: LayerSizes, run: Settings, buffers_of: RingBuffersOf | None = None, window: int = 0,
    kind: str = KEY_WINDOW,
) -> Core:  # fmt: skip
    """Return the memory of core attention in one layer, with a causal mask.

    Args:
        x: Sizes of the layer.
        run: Settings of the run.
        buffers_of: Function to call instead of `ring_held`, for example a cached one.
        window: Tokens that a query attends to (sliding window); 0 for full causal attention.
        kind: Kind of the layer, if it has hybrid attention.

    Returns:
        The memory in addition to q, k, v and out.
    """
    if x.hybrid is not None:
        return _hybrid_core(x, run, buffers_of or ring_held, kind)
    shared, x = run.ulysses, on_ring(x if x.indexer is None else x.absorbed, run)
    rows, chunk = run.rows * shared, run.rows * shared // run.sequence_chunks
    one_chunk = run.sequence_chunks == 1  # otherwise dk and dv are summed outside the ring
    of = _row_sizes(x, run)
    side = side_by_bytes(run, of) if x.indexer is None else "kv"
    buffer_bytes = room_bytes(x, run, of, side)
    own_query, own_keys = buffer_bytes("dquery", chunk), buffer_bytes("dkv", rows)
    if run.cp == 1:
        own_query, own_keys = chunk * x.query * 4, rows * x.kv * 4
    core = Core(
        sums=own_query + own_keys * one_chunk,
        keys=run.rows,
        store=run.store,
        heads_shared=shared,
        reordered=run.layout != "contiguous",
        parts=run.head_chunks,
        wire=BYTES[run.wire],
        room=buffer_bytes("kv", 0),
    )
    if run.cp == shared:
        return core
    forward, backward = (buffers_of or ring_held)(
        run.algorithm, run.layout, run.cp // shared, intra_of(run), side, run.wire == "bf16",
        run.path == "cpu", joins(x.indexer is not None),
        -(-(window - 1) * SHORT * run.cp // (shared * run.seq)) if window else None,
        run.keys_on_host, run.relay_stream,
    )  # fmt: skip
    rows_of = {"kv": rows, "dkv": rows, "query": chunk, "dquery": chunk, "out": chunk}

    def size(kind: str, short: float) -> float:
        return buffer_bytes(kind, round(rows_of[kind.split()[0]] * short / SHORT))

    ring_backward = backward.bytes(size) - own_query - own_keys
    return replace(core, forward=forward.bytes(size), backward=ring_backward)


def _hybrid_core(x: LayerSizes, run: Settings, buffers_of: RingBuffersOf, kind: str) -> Core:
    """Return the memory of hybrid attention in one layer.

    The rings of window keys, compressed keys and index keys run one after the other. Buffers of
    compressed keys are computed for a causal ring and scaled to the number of compressed keys. With
    algorithm "auto", all compressed keys are assumed to be in memory at once (`prefetch`), which
    needs the most memory.
    """
    assert x.hybrid is not None
    ratio, rows = x.hybrid.ratio_of(kind), run.rows
    keys = rows // ratio if ratio else 0
    own_query, own_keys = rows * x.query * F, (rows + keys) * x.kv * F
    core = Core(sums=own_query + own_keys, keys=rows + keys, wire=BYTES[run.wire])
    if run.cp == 1:
        return core
    sizes = replace(_row_sizes(x, run), values_are_keys=True)
    buffer_bytes, most = room_bytes(x, run, sizes, "kv"), [0.0, 0.0]
    before = -(-(x.hybrid.window - 1) * SHORT * run.cp // run.seq)
    for key_rows, window in ((rows, before), *([(keys, None)] if ratio else [])):
        of_keys = kind if window is None else KEY_WINDOW
        algorithm, joined = key_algorithm(run, x.hybrid, of_keys, x.width)
        passes = buffers_of(
            algorithm or ("ring" if window is not None else "prefetch"), run.layout, run.cp,
            intra_of(run), "kv", run.wire == "bf16", run.path == "cpu", joined, window, False,
            run.relay_stream,
        )  # fmt: skip

        def size(name: str, short: float, of_keys: int = key_rows) -> float:
            count = of_keys if "kv" in name else rows
            return buffer_bytes(name, round(count * short / SHORT))

        own = buffer_bytes("dquery", rows) + buffer_bytes("dkv", key_rows)
        held = passes[0].bytes(size), passes[1].bytes(size) - own
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return replace(core, forward=most[0], backward=most[1])


def key_algorithm(
    run: Settings, hybrid: Hybrid, kind: str, width: int
) -> tuple[str | None, bool | None]:
    """Return the ring algorithm that sends the keys of hybrid attention.

    Args:
        run: Settings of the run.
        hybrid: Sizes of hybrid attention.
        kind: `KEY_WINDOW` for the keys of the window, otherwise the kind of the layer.
        width: Width of the keys.

    Returns:
        The algorithm, None for the fastest; and the value of `Visibility.joined`.
    """
    ratio = 0 if kind == KEY_WINDOW else hybrid.ratio_of(kind)
    hybrid_keys = registry.required("hybrid_keys", "a model with hybrid attention")
    selects, on_cuda = hybrid.index_of(kind) is not None, run.path != "cpu"
    options = BurstConfig(algorithm=run.algorithm)
    algorithm, lists = hybrid_keys(options, ratio, selects, width, on_cuda)
    return None if run.algorithm == "auto" else algorithm, joins(lists)


def cached_core_of() -> CoreOf:
    """Return `core_of` with a cache of ring buffers.

    The cache keeps the sizes of ring buffers as fractions of a shard, so all sequence lengths share
    one entry.
    """
    return partial(core_of, buffers_of=cache(ring_held))


def on_ring(x: LayerSizes, run: Settings) -> LayerSizes:
    """Return the sizes of a layer on a rank of the ring, with 1 / `run.ulysses` of the heads.

    If ranks that share heads outnumber the key/value heads, each rank has a copy of one key/value
    head.
    """
    heads, kv_heads = x.heads // run.ulysses, max(1, x.kv_heads // run.ulysses)
    return replace(x, heads=heads, kv_heads=kv_heads)


def joins(sparse: bool) -> bool | None:
    """Return `Visibility.joined`: True for sparse attention, otherwise None.

    True: one kernel call reads all keys of a step. None: the algorithm decides.
    """
    return True if sparse else None


def visiting_rows(run: Settings, window: int = 0) -> int:
    """Return an upper bound on the number of key rows that a rank receives from other ranks.

    With a sliding window, only keys in the windows of the rank's queries are counted.

    Args:
        run: Settings of the run.
        window: Tokens that a query attends to (sliding window); 0 for full causal attention.
    """
    ring = run.cp // run.ulysses
    ring_rows = run.rows * run.ulysses * (ring - 1)
    pieces = {"contiguous": 1, "zigzag": 2}.get(run.layout)
    if not window or pieces is None:
        return ring_rows
    return min(ring_rows, pieces * (window - 1) * run.micro_batch)


def intra_of(run: Settings) -> int:
    """Return the number of ranks of an inner ring.

    It is `run.inner`. If that is None, it is the number of the ring's ranks on one node.
    """
    size = run.cp // run.ulysses
    if run.inner is not None:
        return run.inner if size % run.inner == 0 else size
    node = run.intra if run.intra and run.cp % run.intra == 0 else run.cp
    return Topology(run.cp, node, run.ulysses, run.placement).intra_size


def side_by_bytes(run: Settings, sizes: RowSizes) -> str:
    """Return the tensors that ranks send in backward (the side): "kv" or "query".

    If `run.side` is "auto", the side with fewer bytes is returned. Keys and values are sent once
    per row chunk, queries once in total.

    Args:
        run: Settings of the run.
        sizes: Sizes of one rank's tensors on the ring.
    """
    if run.side != "auto":
        return run.side
    sent = sizes.backward
    keys = run.sequence_chunks * (sent.kv + sent.dkv)
    return "kv" if keys <= sent.query + sent.dquery else "query"


def room_bytes(
    x: LayerSizes, run: Settings, of: RowSizes, side: str
) -> Callable[[str, int], float]:
    """Return a function that computes the bytes of a ring buffer from its kind and its rows.

    `HeldBuffers` explains the kinds of buffers. On a CPU each buffer is at least as large as the
    longest message.

    Args:
        x: Sizes of a layer on the ring.
        run: Settings of the run.
        of: Sizes of one rank's tensors on the ring.
        side: Tensors that backward sends: "kv" or "query".
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
        travelled = max(longest) * (run.cp > run.ulysses)  # without a ring nothing is sent
        least = max(travelled, exchanged) + 4 * ALIGNMENT + ENVELOPE

    def size(kind: str, rows: int) -> float:
        return max(rows * per_row[kind], least)

    return size


def _row_sizes(x: LayerSizes, run: Settings) -> RowSizes:
    width = x.width if x.indexer is None else x.rope  # the other columns of a key are its values
    return RowSizes(run.rows * run.ulysses, 1, x.heads, x.kv_heads, width, x.value_width, 2, 4,
                    BYTES[run.wire], ALL_GRADIENTS)  # fmt: skip


def ring_held(
    algorithm: str, layout: str, cp: int, intra: int, side: str, wire: bool, packed: bool,
    joined: bool | None = None, before: int | None = None, host: bool = False,
    streams: bool = False,
) -> tuple[HeldBuffers, HeldBuffers]:  # fmt: skip
    """Return the sizes of ring buffers in forward and in backward, on the rank with the most rows.

    Args:
        algorithm: Name of the ring algorithm.
        layout: Name of the layout. Each simulated rank has `SHORT` rows; the caller scales the
            result.
        cp: Number of ranks of the ring.
        intra: Number of ranks of an inner ring.
        side: Tensors that backward sends: "kv" or "query".
        wire: Whether gradients are sent in bf16.
        packed: Whether messages are packed into one buffer (on a CPU).
        joined: True if one kernel call reads all keys of a step; None if the algorithm decides.
        before: Number of preceding rows that a query attends to; None for all.
        host: Whether keys of other ranks are in host memory, so that each kernel call of forward
            reads one chunk.
        streams: Whether received rows are sent on a relay stream; see `Visibility.streams`.
    """
    intra = intra if cp % intra == 0 else cp
    grid = Grid(cp // intra, intra)
    shards = [make(layout, cp_size=cp).spans(rank, cp * SHORT) for rank in range(cp)]
    mask = Causal() if before is None else Window(before, 0)
    seen = visibility_of(mask, shards, shards, joined, streams=streams)
    sizes = RowSizes(SHORT, 1, 4, 1, 8, 8, 2, 4, 4, ALL_GRADIENTS)
    ranks = sorted({0, cp // 2, cp - 1})
    return most_held(algorithm, grid, seen, sizes, side, ranks, wire=wire, packed=packed, host=host)


def most_held(
    algorithm: str, grid: Grid, seen: Visibility, sizes: RowSizes, side: str, ranks: Sequence[int],
    *, wire: bool, packed: bool, host: bool = False,
) -> tuple[HeldBuffers, HeldBuffers]:  # fmt: skip
    """Return the sizes of ring buffers in forward and in backward, on the rank with the most rows.

    Args:
        algorithm: Name of the ring algorithm.
        grid: Grid of the ranks of the ring.
        seen: Pairs of queries and keys that the mask allows.
        sizes: Sizes of one rank's tensors on the ring.
        side: Tensors that backward sends: "kv" or "query".
        ranks: Ranks to simulate.
        wire: Whether gradients are sent in bf16.
        packed: Whether messages are packed into one buffer (on a CPU).
        host: Whether each kernel call of forward reads one chunk, as in `ring_held`.
    """
    name = ring_algorithm(algorithm)
    one_by_one = replace(seen, joined=False, streams=False) if host else seen
    forward = cost.forward_schedule(name, grid, one_by_one, sizes)
    backward = cost.backward_schedule(name, grid, seen, sizes, side=side)

    def most(schedule: Schedule) -> HeldBuffers:
        of_ranks = (dry_run(schedule, rank, wire=wire, packed=packed) for rank in ranks)
        return max(of_ranks, key=lambda buffers: buffers.bytes(_rows))

    return most(forward), most(backward)


def _rows(_kind: str, rows: float) -> float:
    return rows
