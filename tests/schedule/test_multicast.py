"""Multicast: rows cross once to every node that wants them, and no rail carries much more than it
must.

What has to cross is counted here from the dense visibility of rows, or for the larger grids from
its description; who sends how much, from the columns of the tables.
"""

from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables_oracle import act_out, dense

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule import rails
from megatron_burst.schedule.bundles import MOST, bundled
from megatron_burst.schedule.demand import BACKWARD, FORWARD, Visibility, visibility_of
from megatron_burst.schedule.rings import Schedule
from megatron_burst.schedule.tables import FAMILIES, RINGS, Grid

GRIDS = [Grid(1, 1), Grid(1, 4), Grid(4, 1), Grid(2, 2), Grid(2, 4), Grid(3, 3), Grid(5, 2)]
PASSES = [("kv", FORWARD), ("kv", BACKWARD), ("query", BACKWARD)]
ROWS = 8  # per rank


def lengths(seed, total, median, sigma, cap):
    """Boundaries of documents of log-normal lengths that fill `total` positions."""
    random, found = np.random.default_rng(seed), []
    while sum(found) < total:
        found.append(int(np.clip(random.lognormal(np.log(median), sigma), 1, cap)))
    return np.minimum(np.cumsum([0, *found]), total)


def documents(seed, total, median, sigma, cap):
    return mb.masks.Documents(lengths(seed, total, median, sigma, cap)) & mb.masks.Causal()


def blocks(seed, total, block, density=0.2):
    count = -(-total // block)
    table = np.random.default_rng(seed).random((count, count)) < density
    return mb.masks.BlockSparse(table, block) & mb.masks.Causal()


MASKS = {
    "full": lambda total: mb.masks.Full(),
    "causal": lambda total: mb.masks.Causal(),
    "window": lambda total: mb.masks.Window(total // 12, 0),
    "documents": lambda total: documents(total, total, 9, 1.5, 60),
    "blocks": lambda total: blocks(total, total, 4),
    "hot": lambda total: mb.masks.Window(1, 0) | mb.masks.Prefix(ROWS),
    "few": lambda total: mb.masks.Window(0, 0) | mb.masks.Prefix(3) & mb.masks.Window(3, total),
}


def sharded(layout, size, total):
    layout = mb.layout.make(layout, cp_size=size)
    return [layout.spans(rank, total) for rank in range(size)]


def case(mask, layout, size, rows=ROWS):
    """What the ranks want of each other, and what sees what, bool [queries, keys]."""
    mask, shards = MASKS[mask](size * rows), sharded(layout, size, size * rows)
    return visibility_of(mask, shards, shards), dense(mask, shards)


def multicast(grid, visibility, side="kv", row_bytes=FORWARD):
    return Schedule(grid, side, visibility, row_bytes, algorithm="multicast")


def loads(schedule, accumulated=False):
    """Rows that each rank sends and receives between nodes, and within: float [2, 2, G]."""
    tables, grid = schedule.tables, schedule.grid
    moved = tables.transfers.where(tables.transfers.accumulated == accumulated)
    bundles = tables.keys if schedule.side == "kv" else tables.queries
    rows, between = bundles.rows_of(moved.owner, moved.rows), moved.between(grid)
    return np.array([
        [np.bincount(end, rows * there, grid.size) for end in (moved.src, moved.dst)]
        for there in (between, ~between)
    ])  # fmt: skip


def needed(seen, grid, side):
    """Rows that each node needs from the others, by dense visibility: int [nodes]."""
    seen = (seen if side == "kv" else seen.T).reshape(
        grid.inter, -1, grid.inter, seen.shape[0] // grid.inter
    )
    union = seen.any(axis=1).sum(axis=2)  # of every node, rows of every node
    return union.sum(axis=1) - union.diagonal()


# --- exact -----------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids="{0.inter}x{0.intra}".format)
@pytest.mark.parametrize("mask", MASKS)
def test_every_pair_once_everything_home_and_nothing_crosses_twice(grid, mask):
    for number, (side, row_bytes) in enumerate(PASSES):
        layout = ("zigzag", "contiguous", "striped")[(grid.size + number) % 3]
        visibility, seen = case(mask, layout, grid.size)
        schedule = multicast(grid, visibility, side, row_bytes)
        act_out(schedule, grid, seen)
        act_out(schedule, grid, seen, programs=[schedule.program(r) for r in range(grid.size)])
        least = needed(seen, grid, side)
        for accumulated in {False, schedule.gradients}:
            sent, got = loads(schedule, accumulated)[0]
            ends = sent if accumulated else got
            assert ends.reshape(grid).sum(axis=1).tolist() == least.tolist()


@given(
    st.sampled_from(GRIDS), st.sampled_from(PASSES), st.floats(0, 1), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_visibility_of_any_rows(grid, which, density, seed):
    """Shards of any length, also none; some ranks see nothing, some are seen by all."""
    side, row_bytes = which
    random = np.random.default_rng(seed)
    rows = random.integers(0, 6, size=grid.size)
    rank = np.repeat(np.arange(grid.size), rows)
    chance = density * random.choice([0, 0.2, 1, 5], size=(2, grid.size))
    seen = random.random((len(rank),) * 2) < chance[0, rank][:, None] * chance[1, rank]
    visibility = from_dense(seen, rank, grid.size)
    schedule = multicast(grid, visibility, side, row_bytes)
    act_out(schedule, grid, seen)
    act_out(schedule, grid, seen, programs=[schedule.program(r) for r in range(grid.size)])


def from_dense(seen, rank, size):
    """`Visibility` of rows of these ranks, row by row."""

    def bundles(sees):  # [rows, other rows]
        wants = np.zeros((len(rank), size), dtype=bool)
        for other in range(size):
            wants[:, other] = sees[:, rank == other].any(axis=1)
        first = np.arange(len(rank)) - np.searchsorted(rank, rank)
        return bundled(rank, first, np.ones(len(rank), dtype=int), wants)

    visible = np.zeros((size, size), dtype=bool)
    queries, keys = np.nonzero(seen)
    visible[rank[queries], rank[keys]] = True
    return Visibility(visible, bundles(seen), bundles(seen.T))


def test_a_planted_second_crossing_is_noticed():
    """The counts above would notice: one message doubled, as if two ranks of a node asked."""
    grid = Grid(2, 2)
    visibility, seen = case("causal", "zigzag", 4)
    schedule = multicast(grid, visibility)
    moved = schedule.tables.transfers
    again = np.r_[np.arange(len(moved.owner)), np.flatnonzero(moved.between(grid))[:1]]
    schedule.__dict__["tables"] = schedule.tables._replace(transfers=moved.where(again))
    got = loads(schedule)[0][1].reshape(grid).sum(axis=1)
    assert got.sum() > needed(seen, grid, "kv").sum()
    with pytest.raises(AssertionError, match="a second time"):
        act_out(schedule, grid, seen)


# --- the lower bound on many ranks -------------------------------------------------------------


def needed_of_intervals(first, shards, grid):
    """Rows that each node needs from the others; query position p sees keys first[p] to p."""
    found = []
    for node in range(grid.inter):
        mine = np.concatenate([
            span.start + span.stride * np.arange(span.length)
            for shard in shards[node * grid.intra :][: grid.intra] for span in shard
        ])  # fmt: skip
        change = np.zeros(len(first) + 1, dtype=int)
        np.add.at(change, first[mine], 1)
        np.add.at(change, mine + 1, -1)
        covered = np.cumsum(change)[:-1] > 0
        covered[mine] = False
        found.append(covered.sum())
    return found


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents 125", "documents 250"])
def test_between_eight_nodes_of_eight_the_union_crosses(mask, layout):
    grid, rows = Grid(8, 8), 1024
    total = grid.size * rows
    first, shards = np.arange(total), sharded(layout, grid.size, total)
    if mask.startswith("documents"):
        sigma, cap = {"125": (1.5, 2048), "250": (1.8, 16384)}[mask.split()[1]]
        bounds = np.unique(lengths(3, total, int(mask.split()[1]), sigma, cap))
        visible, first = documents(3, total, int(mask.split()[1]), sigma, cap), bounds[
            np.searchsorted(bounds, first, side="right") - 1
        ]  # fmt: skip
    elif mask == "window":
        visible, first = mb.masks.Window(300, 0), np.maximum(first - 300, 0)
    else:
        visible, first = mb.masks.Causal(), np.zeros(total, dtype=int)
    visibility = visibility_of(visible, shards, shards)
    for row_bytes in (FORWARD, BACKWARD):
        schedule = multicast(grid, visibility, "kv", row_bytes)
        least = needed_of_intervals(first, shards, grid)
        got = loads(schedule)[0][1].reshape(grid).sum(axis=1)
        assert got.tolist() == least
        if schedule.gradients:
            back = loads(schedule, accumulated=True)
            assert (back[:, ::-1] == loads(schedule)).all(), "gradients go the same way back"


def test_block_sparse_between_eight_nodes_of_eight():
    grid, rows = Grid(8, 8), 16
    total = grid.size * rows
    visible, shards = blocks(0, total, 16, 0.05), sharded("zigzag", grid.size, total)
    visibility, seen = visibility_of(visible, shards, shards), dense(visible, shards)
    got = loads(multicast(grid, visibility))[0][1].reshape(grid).sum(axis=1)
    assert got.tolist() == needed(seen, grid, "kv").tolist()


# --- the busiest link ----------------------------------------------------------------------------


def plain(bundles, grid):
    """Everything on its owner's rail, sent by its owner's node."""
    node, index = np.divmod(bundles.owner, grid.intra)
    to = bundles.users.reshape(-1, *grid).any(axis=2)
    to[np.arange(len(node)), node] = False
    return rails.Routes(
        bundles, index, np.where(to, node[:, None], -1), np.zeros(len(node), dtype=bool)
    )


def busiest(schedule):
    """[link class, sends or receives]: what the busiest rank moves over the mean."""
    found = loads(schedule)
    return found.max(axis=2) / np.maximum(found.mean(axis=2), 1e-9)


@pytest.mark.parametrize("grid", [Grid(8, 8), Grid(4, 4), Grid(8, 1), Grid(3, 2), Grid(16, 8)])
def test_a_hot_owner_is_spread_over_peers_and_nodes(grid, monkeypatch):
    """Everybody wants all of rank 0 and little else."""
    rows, total = 256, grid.size * 256
    visible, shards = mb.masks.Prefix(rows), sharded("contiguous", grid.size, total)
    visibility = visibility_of(visible, shards, shards)
    spread = multicast(grid, visibility)
    crossing = loads(spread)[0].sum()
    with monkeypatch.context() as patch:
        patch.setattr("megatron_burst.schedule.algorithms.multicast.routes", plain)
        direct = multicast(grid, replace(visibility))
        assert busiest(direct)[0].max() > 2
        assert loads(direct)[0].sum() == crossing, "nothing crosses twice"
        if grid.intra > 2:
            assert busiest(direct)[1, 0] > 2
    # Of M nodes, one receives nothing: M / (M - 1) is the least for those that do.
    least = grid.inter / (grid.inter - 1)
    assert busiest(spread)[0].max() < 1.1 * least
    if grid.intra > 1:
        assert busiest(spread)[1].max() <= 2.01
    depth = spread.tables.transfers.land.max()
    assert depth <= 4 + 2 * np.log2(grid.inter), "trees, not chains"


def test_rails_carry_no_more_than_they_must(monkeypatch):
    """A window over contiguous shards leaves the last rank of a node to feed the next one: spread
    over the node, each rail carries an eighth of that."""
    grid, rows = Grid(8, 8), 1024
    total = grid.size * rows
    visible, shards = mb.masks.Window(256, 0), sharded("contiguous", grid.size, total)
    visibility = visibility_of(visible, shards, shards)
    assert busiest(multicast(grid, visibility))[0].max() < 1.3  # seven of eight nodes send: 8 / 7
    monkeypatch.setattr("megatron_burst.schedule.algorithms.multicast.routes", plain)
    assert busiest(multicast(grid, replace(visibility)))[0].max() > 9


def test_a_rail_that_only_receives_too_much_is_relieved():
    """Ranks 2 and 4, of two nodes, each send 64 rows to rank 0: no rail sends too much, and half of
    what arrives comes on the other rail."""
    grid, size, rows = Grid(3, 2), 6, 64
    owner, first = np.divmod(np.arange(size * rows), rows)
    wants = np.zeros((size * rows, size), dtype=bool)
    wants[(owner == 2) | (owner == 4), 0] = True
    keys = bundled(owner, first, np.ones(size * rows, dtype=int), wants)
    visible = np.zeros((size, size), dtype=bool)
    visible[0, [2, 4]] = True
    got = loads(multicast(grid, Visibility(visible, keys, keys)))[0][1]
    assert got.sum() == 2 * rows
    assert got.max() <= 1.1 * rows


@pytest.mark.parametrize("name", ["documents", "window", "hot"])
def test_passes_of_the_same_rows_share_their_paths(name):
    """Forward and backwards of both sides, of two algorithms, have the tables that
    each has of its own; paths are made once for each side."""
    grid = Grid(2, 4)
    visibility, _ = case(name, "zigzag", grid.size)
    for algorithm in ("multicast", "prefetch"):
        for side, sizes in PASSES:
            shared, alone = (
                Schedule(grid, side, each, sizes, algorithm=algorithm).tables
                for each in (visibility, replace(visibility))
            )
            assert shared.digest == alone.digest
            for one, other in zip(shared[1:3], alone[1:3], strict=True):
                assert all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert len(visibility.common) == 2


def test_a_plan_keeps_no_paths():
    """They are as large as tables, and a run has hundreds of plans."""
    q = [torch.zeros(8, 1, 2, 4, requires_grad=True) for _ in range(4)]
    plan = in_process.prepare(q, q, q, groups=in_process.groups(inter=2, intra=2),
                      mask=MASKS["documents"](32), algorithm="multicast")  # fmt: skip
    for schedule in chain(*(each for rank in plan.ranks for each in rank.passes)):
        assert not schedule.visibility.common


def test_where_rails_are_even_everything_stays_on_its_own():
    """Nothing is cut and no hop is added where owners' rails carry alike."""
    grid = Grid(4, 4)
    for mask in ("full", "causal"):
        visibility, _ = case(mask, "zigzag", grid.size)
        actual, bundles = rails.routes(visibility.keys, grid), visibility.keys
        assert len(actual.bundles.owner) == len(bundles.owner)
        assert (actual.carrier == actual.bundles.owner % grid.intra).all()
        assert not actual.handed.any()


def test_bundles_that_were_cut_are_the_same_rows():
    """Each row is in one bundle, with the ranks that wanted it, and no owner has more than a bit
    set has bits."""
    random, size, patterns = np.random.default_rng(0), 16, 60
    rows = np.array([patterns * 32, *[4] * (size - 1)])  # rank 0 has most, and all want it
    wants = np.repeat(random.random((patterns, size)) < 0.9, 32, axis=0)
    wants = np.concatenate([wants, random.random((4 * (size - 1), size)) < 0.5])
    owner = np.repeat(np.arange(size), rows)
    first = np.arange(len(owner)) - np.searchsorted(owner, owner)
    before = bundled(owner, first, np.ones(len(owner), dtype=int), wants)
    after = rails.routes(before, Grid(4, 4)).bundles
    assert len(after.owner) > len(before.owner)
    assert np.bincount(after.owner).max() <= MOST
    assert after.number.max() < MOST

    def by_row(bundles):
        run = np.repeat(np.arange(len(bundles.runs.rows)), bundles.runs.rows)
        row = np.concatenate([np.arange(f, f + n) for _, f, n in zip(*bundles.runs, strict=True)])
        bundle = bundles.runs.bundle[run]
        order = np.lexsort((row, bundles.owner[bundle]))
        assert (row[order] == first).all()
        return bundles.users[bundle[order]]

    assert (by_row(before) == by_row(after)).all()


# --- when, and on what ---------------------------------------------------------------------------


def test_two_by_two_by_hand():
    """Everything is seen. Rank 3 gets the keys of 1 on its rail and those of 0 from its peer 2."""
    tables = multicast(Grid(2, 2), wanted_of_all(4), "kv", FORWARD).tables
    assert keys_of(tables, 3) == [3, 2, 1, 0]
    columns = tables.transfers.where(tables.transfers.dst == 3)
    hops = sorted(zip(columns.owner.tolist(), columns.src.tolist(), columns.ring.tolist(),
                      columns.post.tolist(), columns.land.tolist(), strict=True))  # fmt: skip
    intra, inter = RINGS.index("intra"), RINGS.index("inter")
    assert hops == [(0, 2, intra, 1, 3), (1, 1, inter, 0, 1), (2, 2, intra, 0, 1)]
    assert set(tables.transfers.family.tolist()) == {FAMILIES.index("kv")}


def test_gradients_cross_while_the_rest_of_the_own_node_is_computed():
    """Rank 3 of two by two computes with its node peer last; the sum of the rows of 1, of ranks 2
    (their step 2) and 3, crosses before it has come home for that step."""
    tables = multicast(Grid(2, 2), wanted_of_all(4), "kv", BACKWARD).tables
    assert keys_of(tables, 3) == [3, 1, 0, 2]
    moved = tables.transfers
    hops = {
        (src, dst, post, land)
        for *_, src, dst, _, post, land in zip(
            *(x[moved.accumulated & (moved.owner == 1)].tolist() for x in moved), strict=True
        )
    }
    assert hops == {(0, 1, 4, 6), (2, 3, 3, 5), (3, 1, 5, 7)}


def keys_of(tables, rank):
    """The owners of the keys that a rank computes with, a step for each."""
    step, key = (x[tables.pairs.rank == rank] for x in (tables.pairs.step, tables.pairs.key))
    assert sorted(step.tolist()) == list(range(len(step)))
    return key[np.argsort(step)].tolist()


def wanted_of_all(size):
    shards = sharded("contiguous", size, size)
    return visibility_of(mb.masks.Full(), shards, shards)


@pytest.mark.parametrize(
    ("grid", "copies"), [(Grid(1, 8), 3), (Grid(8, 1), 3), (Grid(4, 4), 5), (Grid(2, 8), 4)]
)
def test_few_chunks_are_held_whatever_the_size_of_the_grid(grid, copies):
    """With all seen: three to compute with, two of them on their way, and two to pass on, of this
    turn and of the next."""
    schedule = multicast(grid, wanted_of_all(grid.size), "kv", BACKWARD)
    programs = [schedule.program(rank) for rank in range(grid.size)]
    play = act_out(schedule, grid, np.ones((grid.size,) * 2, dtype=bool), programs=programs)
    assert play.most_held == copies


def test_steps_are_even():
    """With all seen: at every step, every rank receives from one rank of its node and from one of
    another, and no rank sends to two."""
    grid = Grid(4, 4)
    moved = multicast(grid, wanted_of_all(16)).tables.transfers
    for land, between in product(range(17), (False, True)):
        some = (moved.land == land) & (moved.between(grid) == between)
        for end in (moved.src, moved.dst):
            assert np.bincount(end[some], minlength=1).max() <= 1


def test_a_hot_owner_of_a_single_node_hands_parts_to_its_peers():
    """Eight ranks, all want what rank 0 has: its link carries two shards, not seven."""
    grid, rows = Grid(1, 8), 64
    shards = sharded("contiguous", grid.size, grid.size * rows)
    visibility = visibility_of(mb.masks.Prefix(rows), shards, shards)
    sent, got = loads(multicast(grid, visibility))[1]
    assert got.tolist() == [0, *[rows] * 7]
    assert sent.max() <= 2 * rows
