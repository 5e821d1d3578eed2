"""Tiles: every shape acted out row by row, bytes by hand, which shape is taken, what it holds."""

from itertools import pairwise, product
from time import process_time

import numpy as np
import pytest
from tables_oracle import act_out, dense

from megatron_burst import layout, masks
from megatron_burst.schedule import cost
from megatron_burst.schedule import demand as demands
from megatron_burst.schedule.algorithms import burst, tile, tile_shape
from megatron_burst.schedule.algorithms.tile_shape import Shape
from megatron_burst.schedule.demand import Demand, RowBytes, all_visible
from megatron_burst.schedule.program import program
from megatron_burst.schedule.rings import backward, forward
from megatron_burst.schedule.tables import FAMILIES, Grid

# Square, wide and tall, and primes: there a tile is a ring in all but the order.
GRIDS = [Grid(*g) for g in ((1, 1), (1, 3), (1, 4), (1, 6), (1, 7), (7, 1), (2, 2), (3, 3))]
LARGER = [Grid(2, 4), Grid(4, 2)]
# MHA and GQA: either family may have the smaller copies. Without a gradient of queries or of keys.
FORWARD = RowBytes(4, 2, 0, 0, 5), RowBytes(1, 2, 0, 0, 5)
BACKWARD = RowBytes(4, 5, 8, 4, 0), RowBytes(4, 3, 8, 4, 0)
FROZEN = RowBytes(4, 5, 8, 0, 0), RowBytes(4, 5, 0, 4, 0)
PASSES = [*FORWARD, *BACKWARD, *FROZEN]
ROWS = 4  # per rank


def worlds(size):
    """name -> (mask, shards) of so many ranks."""
    length, random = ROWS * size, np.random.default_rng(size)
    zigzag, contiguous, striped = (
        [layout.make(name, cp_size=size).spans(rank, length) for rank in range(size)]
        for name in ("zigzag", "contiguous", "striped")
    )
    idle = [shard if rank % 3 else () for rank, shard in enumerate(contiguous)]
    bounds = np.unique([0, *random.integers(1, length, size // 2), length])
    documents = masks.Documents(bounds) & masks.Causal()
    return {
        "full": (masks.Full(), contiguous),
        "causal": (masks.Causal(), zigzag),
        "window": (masks.Window(5, 0), contiguous),
        "documents in zigzag": (documents, zigzag),
        "documents": (documents, contiguous),
        "some ranks have nothing": (masks.Causal(), idle),
        "nobody sees anything": (masks.Dense(np.zeros((length, length), dtype=bool)), contiguous),
        "anything": (masks.Dense(random.random((length, length)) < 0.1), striped),
    }


def asked(grid, mask, shards, row_bytes):
    return Demand(grid, "kv", demands.visibility_of(mask, shards, shards), row_bytes)


def played(demand, shape, seen, own_last):
    made = tile.tables(demand, shape=shape)
    programs = [program(made, demand.grid, rank, own_last) for rank in range(demand.grid.size)]
    return act_out(made, demand.grid, seen, row_bytes=demand.row_bytes, programs=programs)


def check_by_the_rules(grid, name, row_bytes):
    """Every shape of a grid; and no rank holds more chunks than `chunks_held` says."""
    mask, shards = worlds(grid.size)[name]
    demand, seen = asked(grid, mask, shards, row_bytes), dense(mask, shards)
    for number, shape in enumerate(tile_shape.shapes(grid)):
        play = played(demand, shape, seen, own_last=bool(number % 2))
        assert play.most_held <= sum(tile_shape.chunks_held(shape, row_bytes)) - 2, shape


@pytest.mark.parametrize("name", worlds(1))
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_shape_by_the_rules(grid, name):
    for row_bytes in PASSES:
        check_by_the_rules(grid, name, row_bytes)


@pytest.mark.parametrize("name", worlds(1))
@pytest.mark.parametrize("grid", LARGER, ids=str)
def test_every_shape_of_eight_ranks_by_the_rules(grid, name):
    for row_bytes in (FORWARD[0], BACKWARD[len(name) % 2]):
        check_by_the_rules(grid, name, row_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", worlds(1))
def test_every_shape_of_four_by_four_by_the_rules(name):
    for row_bytes in PASSES:
        check_by_the_rules(Grid(4, 4), name, row_bytes)


# --- bytes ----------------------------------------------------------------------------------


def sent(made, grid, row_bytes):
    """{"inter": bytes of all ranks, "intra": ...}, counted from the columns."""
    moved = made.transfers
    each = np.array(row_bytes)[moved.family] * cost.rows_sent(made, moved)
    between = moved.src // grid.intra != moved.dst // grid.intra
    return {"inter": int(each[between].sum()), "intra": int(each[~between].sum())}


def by_hand(grid, shape, seen, row_bytes):
    """The same from the dense mask: a chunk's rows cross once to each node of its owner's row or
    column in which they are wanted, and once more to each other rank there that wants them."""
    blocks = seen.reshape(grid.size, -1, grid.size, seen.shape[1] // grid.size)
    place = {}  # rank -> (I, J, i, j)
    for rank in range(grid.size):
        node, index = divmod(rank, grid.intra)
        (i, j), (k, m) = divmod(node, shape.query_nodes), divmod(index, shape.query_ranks)
        place[rank] = i, j, k, m
    total = {"inter": 0, "intra": 0}
    kv, query, dkv, dquery, out = row_bytes
    for axis, each in ((1, kv + dkv), (0, query + dquery + out)):
        # Keys stay in their column (J, j), queries in their row (I, i).
        fixed, free = slice(axis, None, 2), slice(1 - axis, None, 2)
        for owner, rank in product(range(grid.size), repeat=2):
            same = place[owner][fixed] == place[rank][fixed]
            (node, member), (home, gate) = place[rank][free], place[owner][free]
            if not same or rank == owner:
                continue
            wants = wanted_rows(blocks, place, axis, owner, rank)
            if member != gate:
                total["intra"] += each * int(wants.sum())
                continue
            for other, at in place.items():  # the node's first rank: for all of its ranks
                if at[fixed] == place[rank][fixed] and at[free][0] == node:
                    wants = wants | wanted_rows(blocks, place, axis, owner, other)
            total["inter" if node != home else "intra"] += each * int(wants.sum())
    return total


def wanted_rows(blocks, place, axis, owner, rank):
    """bool [rows of the owner]: which does the tile of `rank` compute with?"""
    # Keys (axis 1) meet the queries of the row of `rank`, queries the keys of its column.
    fixed = slice(1 - axis, None, 2)
    peers = [r for r, at in place.items() if at[fixed] == place[rank][fixed]]
    if axis:
        return blocks[peers][:, :, owner].any(axis=(0, 1))
    return blocks[owner][:, peers].any(axis=(1, 2))


@pytest.mark.parametrize("name", worlds(1))
@pytest.mark.parametrize("grid", [Grid(1, 6), Grid(2, 2), Grid(2, 4), Grid(4, 2)], ids=str)
def test_rows_travel_where_they_are_seen_and_once_per_node(grid, name):
    if name in ("some ranks have nothing", "anything"):
        pytest.skip("by hand ranks have equally many rows, and of these bands are seen")
    mask, shards = worlds(grid.size)[name]
    seen = dense(mask, shards)
    for row_bytes in (FORWARD[0], BACKWARD[0], FROZEN[0]):
        demand = asked(grid, mask, shards, row_bytes)
        actual = {s: by_hand(grid, s, seen, row_bytes) for s in tile_shape.shapes(grid)}
        for shape, expected in actual.items():
            assert sent(tile.tables(demand, shape=shape), grid, row_bytes) == expected, shape
        inter, intra = (actual[tile_shape.chosen(demand)][link] for link in ("inter", "intra"))
        assert inter == min(each["inter"] for each in actual.values())
        nodes = tile_shape.chosen(demand)[:2]
        assert intra == min(each["intra"] for shape, each in actual.items() if shape[:2] == nodes)


def test_whole_chunks_by_the_formula():
    """(A - 1) KV and (B - 1) query tensors between nodes; within, A (a - 1) and B (b - 1)."""
    grid, row_bytes = Grid(6, 4), RowBytes(7, 11, 13, 17, 0)
    for shape in tile_shape.shapes(grid):
        made = tile.tables(Demand(grid, "kv", all_visible(24, 3), row_bytes), shape=shape)
        a, b, ranks_a, ranks_b = shape
        rows = 3 * grid.size
        assert sent(made, grid, row_bytes) == {
            "inter": rows * ((a - 1) * (7 + 13) + (b - 1) * (11 + 17)),
            "intra": rows * (a * (ranks_a - 1) * (7 + 13) + b * (ranks_b - 1) * (11 + 17)),
        }


def heads(heads, kv_heads, width=128):
    """Forward and backward in bf16 with fp32 on the wire."""
    query, kv = heads * width, 2 * kv_heads * width
    stat = 4 * heads
    return (
        RowBytes(2 * kv, 2 * query, 0, 0, 4 * query + stat),
        RowBytes(2 * kv, 4 * query + 2 * stat, 4 * kv, 4 * query, 0),
    )


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "at_least", "at_most"),
    [
        (16, 32, 1.0, 1.0), (64, 32, 1.5, 1.56), (256, 32, 2.6, 2.70), (1024, 32, 4.9, 4.99),
        (16, 8, 1.0, 1.0), (64, 8, 1.16, 1.17), (256, 8, 1.87, 1.88), (1024, 8, 3.37, 3.38),
    ],
)  # fmt: skip
def test_times_fewer_bytes_between_nodes_than_burst(ranks, kv_heads, at_least, at_most):
    """Forward and backward with whole chunks, all see all, 8 ranks per node."""
    grid, expected = Grid(ranks // 8, 8), all_visible(ranks)

    def inter(algorithm, side, row_bytes):
        made = algorithm.tables(Demand(grid, side, expected, row_bytes))
        return sent(made, grid, row_bytes)["inter"]

    there, back = heads(32, kv_heads)
    rings = inter(burst, "kv", there) + min(inter(burst, side, back) for side in ("kv", "query"))
    tiles = inter(tile, "kv", there) + inter(tile, "kv", back)
    assert at_least <= rings / tiles <= at_most


# --- which shape ----------------------------------------------------------------------------


def test_forward_and_backward_take_different_grids():
    there, back = heads(32, 32)
    visibility = all_visible(64)
    chosen = [
        tile_shape.chosen(Demand(Grid(8, 8), "kv", visibility, each)) for each in (there, back)
    ]
    assert chosen == [Shape(4, 2, 2, 4), Shape(2, 4, 4, 2)]


def test_a_ring_where_that_sends_less():
    """A window over contiguous shards: each rank needs a few keys of the one before it."""
    grid, length = Grid(4, 2), 8 * 8
    shards = [layout.make("contiguous", cp_size=8).spans(rank, length) for rank in range(8)]
    demand = asked(grid, masks.Window(3, 0), shards, FORWARD[0])
    assert tile_shape.chosen(demand) == Shape(4, 1, 2, 1)


def test_what_a_tile_holds_and_may_hold():
    there, back = RowBytes(4, 2, 0, 0, 5), RowBytes(4, 5, 8, 4, 0)
    # Forward gathers queries: of keys its own node's, one node's more, and one that is arriving.
    assert tile_shape.memory(Shape(4, 2, 2, 4), there, rows=10) == 10 * (5 * 4 + 8 * 7)
    assert tile_shape.memory(Shape(4, 2, 2, 4), back, rows=10) == 10 * (8 * 12 + 8 * 9)
    assert tile_shape.memory(Shape(1, 8, 2, 4), back) == 2 * 12 + 32 * 9 - (32 - 9) * 9
    demand = Demand(Grid(8, 8), "kv", all_visible(64), back)
    # By default 32 times a rank's own chunks, or what the smallest needs.
    assert tile_shape.memory(tile_shape.chosen(demand), back) <= 32 * sum(back)
    prime = Demand(Grid(1, 131), "kv", all_visible(131), back)
    assert tile_shape.chosen(prime) == Shape(1, 1, 1, 131)


# --- the order ------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [FORWARD[0], FORWARD[1], BACKWARD[0]])
@pytest.mark.parametrize("shape", [Shape(2, 2, 2, 1), Shape(2, 4, 2, 4), Shape(1, 1, 2, 4)])
def test_others_first_and_partial_results_leave_early(shape, row_bytes):
    """One pair per step and rank; what crosses back crosses while pairs are left to compute."""
    grid = Grid(shape.key_nodes * shape.query_nodes, shape.key_ranks * shape.query_ranks)
    made = tile.tables(Demand(grid, "kv", all_visible(grid.size), row_bytes), shape=shape)
    for rank in range(grid.size):
        of = made.pairs.rank == rank
        steps = made.pairs.step[of]
        assert sorted(steps) == list(range(grid.size))
        # Behind all others: half of the pairs of the own node's queries and keys but the own one.
        last = np.argsort(steps)[grid.size - (grid.intra - 1) // 2 :]
        ends = made.pairs.query[of][last], made.pairs.key[of][last]
        assert {x // grid.intra for each in ends for x in each.tolist()} <= {rank // grid.intra}
    moved = made.transfers.where(made.transfers.between(grid))
    back = moved.where(moved.accumulated)
    assert (back.post < made.steps).all() or grid.intra < 4
    assert (moved.land > moved.post).all()
    # One after another, copies as partial results: nothing queues behind what is not awaited yet.
    for some in (moved.where(~moved.accumulated), back):
        spans = sorted(set(zip(some.post.tolist(), some.land.tolist(), strict=True)))
        assert all(one[1] == two[0] for one, two in pairwise(spans))


def test_a_tile_of_two_by_two_by_hand():
    """Rank 1 = (0, 1) of one node: queries of its row, ranks 0 and 1; keys of its column, 1 and 3.

    Queries are gathered, so rank 0's come first and meet the own keys; then keys of rank 3 meet
    rank 0's queries, whose results leave, and at last the own.
    """
    made = tile.tables(
        Demand(Grid(1, 4), "kv", all_visible(4), FORWARD[0]), shape=Shape(1, 1, 2, 2)
    )
    of = np.flatnonzero(made.pairs.rank == 1)
    order = of[np.argsort(made.pairs.step[of])]
    pairs = [(int(made.pairs.query[i]), int(made.pairs.key[i])) for i in order]
    assert pairs == [(1, 1), (0, 1), (0, 3), (1, 3)]
    moved = made.transfers
    out = [
        (int(moved.owner[i]), int(moved.dst[i]), int(moved.post[i]), int(moved.land[i]))
        for i in np.flatnonzero((moved.src == 1) & (moved.family == FAMILIES.index("out")))
    ]
    assert out == [(0, 0, 3, 4)]


def test_channels_are_those_of_any_shape():
    """Also if the pass at hand sends no partial results of one side: another mask may."""
    every = [(ring, partial) for partial in (False, True) for ring in ("intra", "inter")]
    for row_bytes in PASSES:
        if row_bytes != FROZEN[0] and row_bytes != FROZEN[1]:
            make = forward if row_bytes.out else lambda *a, **k: backward(*a, "kv", **k)
            assert make("tile", Grid(4, 2), row_bytes=row_bytes).travels({})[0] == every


def test_tables_of_a_thousand_ranks_take_less_than_a_second():
    demand = Demand(Grid(128, 8), "kv", all_visible(1024), heads(32, 32)[1])
    start = process_time()
    made = tile.tables(demand)
    assert process_time() - start < 1  # 0.15 s where nothing else runs
    assert len(made.pairs.rank) == 1024**2
    assert len(made.transfers.src) < 2**17
