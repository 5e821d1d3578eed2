"""Bundles of rows, and which rows a mask makes ranks want: by hand, and against dense masks."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import GRIDS, worlds
from tables_oracle import dense

from megatron_burst import layout
from megatron_burst.layout import Span, Spans
from megatron_burst.masks import Causal, Documents, Full, Window
from megatron_burst.masks import seen as seen_module
from megatron_burst.masks.seen import rows_seen, unpacked
from megatron_burst.schedule import bundles as module
from megatron_burst.schedule.bundles import bundled, spans_of
from megatron_burst.schedule.demand import GRAIN, all_visible, row_chunk_spans, visibility_of
from megatron_burst.schedule.topology import Topology

# Three ranks. Of rank 0's six rows, 0-1 and 4 are wanted by both others, 2 by rank 2, 3 and 5 by
# nobody (that rank 0 wants row 5 itself says nothing); rank 1 has no rows; of rank 2's three, the
# last is wanted by rank 1 and the others by both others.
RUNS = [  # owner, first, rows, wanted by
    (0, 0, 2, {1, 2}), (0, 2, 1, {2}), (0, 3, 1, set()), (0, 4, 1, {1, 2}), (0, 5, 1, {0}),
    (2, 0, 1, {0, 1}), (2, 1, 1, {0, 1, 2}), (2, 2, 1, {1}),
]  # fmt: skip


def made(runs=RUNS, size=3, **more):
    owner, first, rows = (np.array(column) for column in list(zip(*runs, strict=True))[:3])
    table = np.array([[rank in users for rank in range(size)] for *_, users in runs])
    return bundled(owner, first, rows, table, **more)


def table_of(bundles, rows):
    """int [G] of [rows]: the number of the bundle of each row, after checking that they are a
    partition of so many rows of each owner."""
    found = [np.full(count, -1) for count in rows]
    for bundle, first, count in zip(*(c.tolist() for c in bundles.runs), strict=True):
        mine = found[bundles.owner[bundle]]
        assert count > 0
        assert 0 <= first < first + count <= len(mine)
        assert (mine[first : first + count] == -1).all(), "a row is in two bundles"
        mine[first : first + count] = bundles.number[bundle]
    assert all((mine >= 0).all() for mine in found), "a row is in none"
    for owner in range(bundles.size):
        numbers = bundles.number[bundles.owner == owner].tolist()
        assert len(numbers) == len(set(numbers))
        assert all(0 <= number < module.MOST for number in numbers)
    assert not bundles.users[np.arange(len(bundles.owner)), bundles.owner].any()
    return found


def dense_wanted(bundles, rows):
    """bool [all rows, G]: which ranks want each row, by its bundle."""
    numbers = table_of(bundles, rows)
    at = {(o, n): i for i, (o, n) in enumerate(zip(bundles.owner, bundles.number, strict=True))}
    lines = [bundles.users[at[o, n]] for o, mine in enumerate(numbers) for n in mine]
    return np.array(lines, dtype=bool).reshape(sum(rows), bundles.size)


# --- by hand ----------------------------------------------------------------------------------


def test_rows_that_the_same_ranks_want_are_a_bundle():
    """Those that most ranks want first."""
    got = made()
    assert [x.tolist() for x in table_of(got, (6, 0, 3))] == [[0, 0, 1, 2, 0, 2], [], [0, 0, 1]]
    assert got.owner.tolist() == [0, 0, 0, 2, 2]
    assert got.rows.tolist() == [3, 1, 2, 2, 1]
    assert got.users.astype(int).tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 0],
                                               [0, 1, 0]]  # fmt: skip


def test_sets_of_bundles():
    got = made()
    assert got.bits(got.users).tolist() == [[0, 1, 3], [0, 0, 0], [1, 3, 0]]
    assert got.bits(np.ones(5, dtype=bool)).tolist() == [7, 0, 3]
    owner, bits = np.array([[0, 0, 0], [2, 1, 2]]), np.array([[1, 6, 7], [2, 0, 3]])
    assert got.rows_of(owner, bits).tolist() == [[3, 3, 6], [1, 0, 3]]


def test_ranges_are_by_bundle_then_by_row():
    got = made()
    assert ranges(got, 0, 1) == [(0, 2), (4, 5)]
    assert ranges(got, 0, 3) == [(0, 2), (4, 5), (2, 3)]
    assert ranges(got, 0, 6) == [(2, 4), (5, 6)], "what follows in the shard is one range"
    assert ranges(got, 0, -1) == [(0, 6)], "ALL is the shard in its own order"
    assert ranges(got, 2, 2) == [(2, 3)]
    assert ranges(got, 2, 3) == [(0, 3)]
    assert ranges(got, 1, -1) == ranges(got, 2, 0) == []


def test_whole_chunks_are_one_bundle_that_all_want_who_want_some_of_it():
    got = made().whole()
    assert [x.tolist() for x in table_of(got, (6, 0, 3))] == [[0] * 6, [], [0] * 3]
    assert got.users.astype(int).tolist() == [[0, 1, 1], [1, 1, 0]]
    assert ranges(got, 0, 1) == [(0, 6)]


def test_of_too_many_bundles_the_last_are_joined():
    """Which few ranks want: these then want all of them."""
    got = made(most=2)
    assert [x.tolist() for x in table_of(got, (6, 0, 3))] == [[0, 0, 1, 1, 0, 1], [], [0, 0, 1]]
    assert got.users.astype(int).tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 0], [0, 1, 0]]
    one = made(most=1)
    assert [x.tolist() for x in table_of(one, (6, 0, 3))] == [[0] * 6, [], [0] * 3]
    assert one.users.astype(int).tolist() == [[0, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("cells", [module.CELLS, 5 * 64])
def test_an_owner_has_at_most_as_many_bundles_as_a_set_has_bits(monkeypatch, cells):
    """Eight ranks want rows of rank 0 in all 128 ways there are; joining only adds, and leaves the
    first ones as they are."""
    monkeypatch.setattr(module, "CELLS", cells)
    most = min(62, cells // 64)
    runs = [(0, row, 1, {r + 1 for r in range(7) if row >> r & 1}) for row in range(128)]
    runs += [(rank, 0, 1, set()) for rank in range(1, 8)]
    got = made(runs, 8)
    asked = np.array([[rank in users for rank in range(8)] for *_, users in runs])
    actual = dense_wanted(got, [128] + [1] * 7)
    assert (actual >= asked).all()
    # The joined ones want what all do, so they are one bundle with the rows that all want.
    assert got.number.max() == most - 2
    changed = (actual != asked).any(axis=1)
    assert changed.sum() == 128 - (most - 1)
    assert actual[changed].tolist() == [[False] + [True] * 7] * changed.sum()


def ranges(bundles, owner, bits):
    return list(map(tuple, bundles.ranges(owner, bits).tolist()))


def test_positions_of_rows():
    """Rows 2 to 5 of a shard whose spans have three and four rows, and then its first row."""
    shard = Spans.of([Span(10, 1, 3), Span(20, 5, 4)])

    def spans(*rows):
        return list(spans_of(np.array(rows, dtype=int).reshape(-1, 2), shard))

    assert spans((2, 6), (0, 1)) == [Span(12, 1, 1), Span(20, 5, 3), Span(10, 1, 1)]
    assert spans((4, 6)) == [Span(25, 5, 2)]
    assert spans((3, 3), (1, 5)) == [Span(11, 1, 2), Span(20, 5, 2)]
    assert spans() == []


def test_row_chunks_ask_for_the_spans_of_each_rank_once():
    """Zigzag over two ranks: chunk c has the c-th half of the early piece and what mirrors it;
    ranks that share heads have the rows of both."""
    zigzag = layout.make("zigzag", cp_size=2)
    with mock.patch.object(zigzag, "spans", wraps=zigzag.spans) as asked:
        first, second = row_chunk_spans(zigzag, Topology(2, 2), 16, 2)
        assert asked.call_count == 2
    assert [first.runs, second.runs] == [[(0, 2), (6, 8)], [(2, 6)]]
    positions = [[[p for span in own for p in span.positions().tolist()] for own in cut.own]
                 for cut in (first, second)]  # fmt: skip
    assert positions == [[[0, 1, 14, 15], [4, 5, 10, 11]], [[2, 3, 12, 13], [6, 7, 8, 9]]]
    assert first.shards == tuple(map(tuple, first.own))
    (shared,) = next(row_chunk_spans(zigzag, Topology(2, 2, 2), 16, 2)).shards
    assert [p for span in shared for p in span.positions()] == [0, 1, 14, 15, 4, 5, 10, 11]


def test_everything_is_one_bundle_of_each_owner():
    got = all_visible(3, rows=4)
    assert got.visible.all()
    assert [x.tolist() for x in table_of(got.keys, [4] * 3)] == [[0] * 4] * 3
    assert got.keys.users.tolist() == (~np.eye(3, dtype=bool)).tolist()


# --- what a mask makes ranks want -------------------------------------------------------------


def of_others(seen):
    """{(owner, another rank): the rows it has to do with}."""
    found = {}
    lines = [(piece, rank, seen.first[piece], seen.stop[piece])
             for piece, rank in np.argwhere(unpacked(seen.full, seen.size))]  # fmt: skip
    lines += zip(*seen.partial, strict=True)
    for piece, rank, first, stop in lines:
        assert seen.first[piece] <= first < stop <= seen.stop[piece]
        rows = found.setdefault((int(seen.owner[piece]), int(rank)), set())
        rows.update(range(first, stop))
    return {who: rows for who, rows in found.items() if who[0] != who[1]}


def test_rows_seen_by_hand():
    """A window of two before on two ranks of four rows: rank 1's first two queries see rank 0's
    last two keys. Causal zigzag: rank 0 has positions 0 and 3, rank 1 has 1 and 2."""
    queries, keys = rows_seen(Window(2, 0), *([[Span(0, 1, 4)], [Span(4, 1, 4)]],) * 2)
    assert of_others(queries) == {(1, 0): {0, 1}}
    assert of_others(keys) == {(0, 1): {2, 3}}
    shards = [[Span(0, 1, 1), Span(3, 1, 1)], [Span(1, 1, 1), Span(2, 1, 1)]]
    queries, keys = rows_seen(Causal(), shards, shards)
    assert of_others(keys) == {(0, 1): {0}, (1, 0): {0, 1}}
    assert of_others(queries) == {(0, 1): {1}, (1, 0): {0, 1}}


def test_spans_are_cut_where_the_description_changes():
    """Documents of three and five positions: the cut is where the second begins."""
    shards = [[Span(0, 1, 4)], [Span(4, 1, 4)]]
    queries, keys = rows_seen(Documents([0, 3, 8]), shards, shards)
    assert of_others(keys) == {(0, 1): {3}, (1, 0): {0, 1, 2, 3}}
    assert of_others(queries) == of_others(keys)


def test_shards_without_rows():
    shards = [[], [Span(0, 1, 3)], []]
    got = visibility_of(Full(), shards, shards)
    assert got.visible.tolist() == [[False] * 3, [False, True, False], [False] * 3]
    assert [len(x) for x in table_of(got.keys, (0, 3, 0))] == [0, 3, 0]
    assert not got.keys.users.any()


def asked_by(world):
    """(query rows, key rows) that see, or are seen by, anything of each rank: bool [rows, G]; and
    bool [G, G]."""
    seen, rows = dense(world.mask, world.shards), rows_on(world)
    owner = np.repeat(np.arange(len(rows)), rows)
    of = owner[:, None] == np.arange(len(rows))
    by_rank = (seen.astype(int) @ of > 0), (seen.T.astype(int) @ of > 0)
    visible = (of.T.astype(int) @ seen @ of) > 0
    return *(x & ~of for x in by_rank), visible


def rows_on(world):
    return [sum(span.length for span in shard) for shard in world.shards]


@settings(max_examples=80)
@given(worlds(GRIDS), st.sampled_from((seen_module.PAIRS, 3)))
def test_what_is_wanted_is_all_that_is_seen(world, pairs):
    """Also where so many pairs of pieces would have to be looked at that blocks are joined."""
    with mock.patch.object(seen_module, "PAIRS", pairs):
        got = visibility_of(world.mask, world.shards, world.shards)
    queries, keys, visible = asked_by(world)
    rows = rows_on(world)
    for bundles, seen in ((got.queries, queries), (got.keys, keys)):
        actual = dense_wanted(bundles, rows)
        assert (actual >= seen).all()
        whole = dense_wanted(bundles.whole(), rows)
        assert (whole >= actual).all()
        for owner in range(world.grid.size):
            mine = np.repeat(np.arange(len(rows)), rows) == owner
            assert (whole[mine] == actual[mine].any(axis=0)).all()
    assert (got.visible >= visible).all()


BANDS = (Full(), Causal(), Window(3, 0), Window(2, 1), Documents([0, 1, 5, 5, 13, 24]) & Causal())


@pytest.mark.parametrize("mask", BANDS, ids=repr)
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_of_bands_nothing_is_wanted_in_vain(name, mask):
    for size in (2, 3, 4):
        order = layout.make(name, cp_size=size)
        shards = [order.spans(rank, 24) for rank in range(size)]
        got, seen = visibility_of(mask, shards, shards), dense(mask, shards)
        rows = [24 // size] * size
        of = np.repeat(np.arange(size), rows)[:, None] == np.arange(size)
        for bundles, each in ((got.queries, seen), (got.keys, seen.T)):
            exact = (each.astype(int) @ of > 0) & ~of
            assert dense_wanted(bundles, rows).tolist() == exact.tolist()
        assert got.visible.tolist() == (of.T.astype(int) @ seen @ of > 0).tolist()


@pytest.mark.parametrize("left", [1, 5, 8, 30])
def test_many_rows_are_told_in_steps(left):
    """A shard of 4 x 1024 rows in steps of four: no rank wants more than that too much."""
    rows = 4 * GRAIN
    shards = [[Span(0, 1, rows)], [Span(rows, 1, rows)]]
    got = visibility_of(Window(left, 0), shards, shards)
    ((first, stop),) = got.keys.ranges(0, int(got.keys.bits(got.keys.users)[0, 1]))
    assert stop == rows
    assert rows - left - 4 < first <= rows - left
    assert first % 4 == 0
    ((first, stop),) = got.queries.ranges(1, int(got.queries.bits(got.queries.users)[1, 0]))
    assert first == 0
    assert left <= stop < left + 4
    assert stop % 4 == 0


# --- parts ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(worlds(), st.integers(2, 3))
def test_bundles_in_parts(world, parts):
    """The rows of a bundle in parts that differ by a row, each of them wanted as it was."""
    keys = visibility_of(world.mask, world.shards, world.shards).keys
    rows = rows_on(world)
    cut = keys.split(parts)
    assert (dense_wanted(cut, rows) >= dense_wanted(keys, rows)).all()
    before, after = table_of(keys, rows), table_of(cut, rows)
    if keys.number.max(initial=0) >= module.MOST // parts:
        return  # some of them were joined first
    for old, new in zip(before, after, strict=True):
        assert (new // parts == old).all()
        for number in set(old.tolist()):
            counts = [(new == number * parts + part).sum() for part in range(parts)]
            assert max(counts) - min(counts) <= 1
    some = cut.where(cut.number % parts == 0)
    assert (some.number % parts == 0).all()
    assert some.rows.tolist() == cut.rows[cut.number % parts == 0].tolist()


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_stay_within_the_bits_of_a_set(parts):
    """Of 64 bundles of two rows that rank 0 has; `table_of` looks."""
    runs = [(0, 2 * row, 2, {r + 1 for r in range(6) if row >> r & 1}) for row in range(64)]
    runs += [(rank, 0, 1, set()) for rank in range(1, 7)]
    (numbers, *_) = table_of(made(runs, 7).split(parts), [128] + [1] * 6)
    assert numbers.max() > 50
