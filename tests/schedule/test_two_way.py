"""Both ways round one ring, TokenRing, and bundles cut in halves."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables_oracle import act_out, dense

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.bundles import bundled
from megatron_burst.schedule.demand import RowBytes, visibility_of
from megatron_burst.schedule.rings import backward, forward
from megatron_burst.schedule.tables import FAMILIES, Grid

BOTH = ("two_way", "token_ring")
SIZES = (1, 2, 3, 4, 5, 8)
ROWS = 8  # per rank
FORWARD, BACKWARD = RowBytes(kv=2, query=1, dkv=0, dquery=0, out=3), RowBytes(2, 4, 4, 2)


def documents(length):
    """Some shorter than a rank's rows, some over several ranks."""
    bounds = np.minimum([0, 2, 5, 6, 23, 30, 51, 100], length)
    return mb.masks.Documents(bounds) & mb.masks.Causal()


CASES = {
    "full": ("contiguous", lambda length: mb.masks.Full()),
    "causal zigzag": ("zigzag", lambda length: mb.masks.Causal()),
    "window contiguous": ("contiguous", lambda length: mb.masks.Window(6, 0)),
    "documents zigzag": ("zigzag", documents),
    "documents striped": ("striped", documents),
}


def case(name, size, rows=ROWS):
    """What the ranks want of each other, and what sees what."""
    layout, mask = CASES[name]
    mask = mask(size * rows)
    spans = mb.layout.make(layout, cp_size=size)
    shards = [spans.spans(rank, size * rows) for rank in range(size)]
    return visibility_of(mask, shards, shards), dense(mask, shards)


def passes(algorithm, grid, visibility):
    """Every pass of one algorithm."""
    yield forward(algorithm, grid, visibility=visibility, row_bytes=FORWARD)
    for side, gradients in product(("kv", "query"), (True, False)):
        row_bytes = BACKWARD if gradients else BACKWARD._replace(dkv=0, dquery=0)
        # Gradients of the side that stays are not asked for: they do not travel.
        row_bytes = row_bytes._replace(**{"dkv" if side == "query" else "dquery": 0})
        yield backward(algorithm, grid, side, visibility=visibility, row_bytes=row_bytes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("algorithm", BOTH)
def test_every_pair_of_rows_once_and_everything_home(algorithm, name, size):
    visibility, seen = case(name, size)
    for schedule in passes(algorithm, Grid(1, size), visibility):
        act_out(schedule, schedule.grid, seen)


def sent(schedule, family):
    """Rows that each rank sends to each other one: {(src, dst): rows}."""
    tables, found = schedule.tables, Counter()
    moved = tables.transfers.where(tables.transfers.family == FAMILIES.index(family))
    rows = tables.bundles(family).rows_of(moved.owner, moved.rows)
    for src, dst, count in zip(moved.src.tolist(), moved.dst.tolist(), rows.tolist(), strict=True):
        found[src, dst] += count
    return found


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_each_direction_carries_half_of_the_ring(size):
    visibility, _ = case("full", size)
    half = (size - 1) * ROWS // 2
    to = {(r, (r + way) % size): half for r in range(size) for way in (1, -1)}
    assert sent(forward("two_way", Grid(1, size), visibility=visibility), "kv") == to
    back = backward("two_way", Grid(1, size), "kv", visibility=visibility)
    assert sent(back, "kv") == sent(back, "dkv") == to


def test_two_ranks_have_one_link_for_both_ways():
    visibility, _ = case("full", 2)
    assert sent(forward("two_way", Grid(1, 2), visibility=visibility), "kv") == {
        (0, 1): 8,
        (1, 0): 8,
    }


@pytest.mark.parametrize("size", [8, 16])
def test_causal_zigzag_loads_both_ways_alike(size):
    """The first half of a chunk's rows is seen by all ranks; the others by the ranks before it.

    One ring the better way: 0.75 G^2 half chunks of rows. Both ways: little more than half of it.
    """
    visibility, _ = case("causal zigzag", size)
    ring = sent(forward("ring", Grid(1, size), visibility=visibility), "kv")
    assert sum(ring.values()) == ROWS // 2 * (size * (size - 1) + sum(range(size)))
    both = sent(forward("two_way", Grid(1, size), visibility=visibility), "kv")
    ways = [sum(rows for (src, dst), rows in both.items() if (dst - src) % size == way)
            for way in (1, size - 1)]  # fmt: skip
    assert max(ways) < 0.55 * sum(ring.values())


def test_rows_that_only_the_next_rank_sees_go_there_alone():
    visibility, _ = case("window contiguous", 5)
    there = {(rank, rank + 1): 6 for rank in range(4)}  # the 6 keys before each rank's queries
    assert sent(forward("two_way", Grid(1, 5), visibility=visibility), "kv") == there


@pytest.mark.parametrize("size", [2, 4, 8])
def test_both_halves_of_the_farthest_chunk_arrive_together(size):
    visibility, _ = case("full", size)
    pairs = forward("two_way", Grid(1, size), visibility=visibility).tables.pairs
    far = pairs.step == size // 2
    met = sorted(zip(*(column[far].tolist() for column in (pairs.rank, pairs.key)), strict=True))
    assert met == sorted([(r, (r + size // 2) % size) for r in range(size)] * 2)
    assert (pairs.step[pairs.rank == pairs.key] == 0).all(), "the own pair comes first"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_token_ring_sends_queries_on_and_outputs_straight_home(size):
    visibility, _ = case("full", size)
    schedule = forward("token_ring", Grid(1, size), visibility=visibility)
    moved = schedule.tables.transfers
    names = np.array(FAMILIES)[moved.family]
    assert set(names) == {"query", "out"}
    hops = set(
        zip(*(c.tolist() for c in (names, *moved[1:2], *moved[3:5], *moved[6:])), strict=True)
    )
    ranks, steps = range(size), range(1, size)
    assert hops == {
        ("query", o, (o + t - 1) % size, (o + t) % size, t - 1, t) for o in ranks for t in steps
    } | {("out", o, (o + t) % size, o, t + 1, t + 2) for o in ranks for t in steps}


def test_token_ring_in_backward_leaves_the_other_side_where_it_is():
    visibility, _ = case("full", 4)
    for side, families in (("kv", {"kv", "dkv"}), ("query", {"query", "dquery"})):
        moved = backward("token_ring", Grid(1, 4), side, visibility=visibility).tables.transfers
        assert {FAMILIES[f] for f in moved.family} == families


# --- through attention ---


def plan(algorithm, ranks, **choices):
    """Of 6 rows, two sequences, four heads and two of keys, in float64."""
    shapes = (6, 2, 4, 5), (6, 2, 2, 5), (6, 2, 2, 3)
    tensors = ([torch.zeros(shape, dtype=torch.float64)] * ranks for shape in shapes)
    return in_process.prepare(*tensors, groups=in_process.groups(intra=ranks), algorithm=algorithm,
                      side="kv", kernel="reference", needs_grad=(True,) * 3, **choices)  # fmt: skip


def test_bytes_by_hand():
    """Five ranks, 6 rows, all seen, float64, side kv; two sequences. Counters are those of the plan
    in every random call of `execution/test_every.py`."""
    kv, query, out, stat = 2 * 2 * 8 * 8, 2 * 4 * 5 * 8, 2 * 4 * 3 * 8, 2 * 4 * 8
    sent = {"two_way": 6 * 4 * 3 * kv, "token_ring": 6 * 4 * (query + out + stat + 2 * kv)}
    for algorithm, each in sent.items():
        ranks = plan(algorithm, 5, mask=mb.masks.Full()).ranks
        assert [sum(way.intra for way in one.traffic()) for one in ranks] == [each] * 5


# --- bundles ---


def random_bundles(draw, size):
    """Of every rank some runs of rows, each wanted by some ranks."""
    counts = [draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)) for _ in range(size)]
    rows = np.array([n for of in counts for n in of])
    owner = np.repeat(np.arange(size), [len(of) for of in counts])
    first = np.concatenate([np.cumsum(of) - of for of in counts])
    seen = draw(st.lists(st.lists(st.booleans(), min_size=size, max_size=size),
                         min_size=len(rows), max_size=len(rows)))  # fmt: skip
    return bundled(owner, first, rows, np.array(seen))


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_split_bundles_have_the_same_rows_in_parts_of_about_equal_size(data, size, parts):
    whole = random_bundles(data.draw, size)
    cut = whole.split(parts)
    rows = {}
    for bundle, first, count in zip(*(c.tolist() for c in cut.runs), strict=True):
        rows.setdefault(bundle, []).extend(range(first, first + count))
    for index, (owner, number) in enumerate(zip(whole.owner, whole.number, strict=True)):
        mine = np.flatnonzero((cut.owner == owner) & (cut.number // parts == number))
        assert (cut.users[mine] == whole.users[index]).all()
        runs = whole.runs
        expected = [r for b, first, n in zip(*runs, strict=True) if b == index
                  for r in range(first, first + n)]  # fmt: skip
        assert [row for part in mine for row in rows[part]] == expected
        lengths = [len(rows[part]) for part in mine] + [0] * (parts - len(mine))
        assert max(lengths) - min(lengths) <= 1
    assert all(np.diff(cut.runs.bundle) >= 0)
    assert sorted(rows) == list(range(len(cut.owner)))


def test_many_bundles_are_joined_before_they_are_split():
    """62 of an owner are as many as there are bits: half of them in two parts each."""
    size, count = 8, 62
    expected = (np.arange(1, count + 1)[:, None] >> np.arange(size - 1)) & 1
    expected = np.pad(expected.astype(bool), ((0, 0), (1, 0)))
    zero = np.zeros(count, dtype=np.int64)
    whole = bundled(zero, np.arange(count) * 4, np.full(count, 4), expected)
    assert len(whole.owner) == count
    cut = whole.split(2)
    assert 60 <= len(set(cut.number.tolist())) == len(cut.number)
    assert cut.number.max() < 62
    assert cut.rows.sum() == 4 * count
    for index in range(len(cut.number)):  # ranks that wanted a row still get it
        for first, stop in cut.ranges(0, 1 << int(cut.number[index])):
            for row in range(first, stop):
                assert (cut.users[index] | ~expected[row // 4]).all()
