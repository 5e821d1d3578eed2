"""Which rows the ranks see, and their bundles: against dense visibility, row by row."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst import layout
from megatron_burst.layout import Span
from megatron_burst.masks import (
    BlockDiffusion,
    BlockSparse,
    Causal,
    Cover,
    Dense,
    Dilated,
    Documents,
    FrameTiles,
    Full,
    Mask,
    Prefix,
    SameSpan,
    Window,
    seen,
)
from megatron_burst.masks.seen import rows_seen, unpacked
from megatron_burst.schedule import demand

S = 96
RNG = np.random.default_rng(5)
BLOCKS = BlockSparse(RNG.random((8, 8)) < 0.3, 12)
DOCUMENTS = Documents([0, 5, 5, 6, 40, 41, 70, S])
IMAGES = SameSpan([(3, 9), (9, 17), (17, 20), (50, 71)])
PADDED = Documents([0, 5, 5, 6, 40, 41, 70, S], padding=[2, 3, 6])


class Parity(Mask):
    """A user's own: even queries see even keys; `cover` knows it of single positions only."""

    def __repr__(self):
        return "Parity()"

    def visible(self, q, k):
        return (q % 2 == 0) & (k % 2 == 0)

    def cover(self, q_span, k_span):
        if q_span.length * k_span.length > 1:
            return Cover.PARTIAL
        return Cover.FULL if self.visible(q_span.start, k_span.start) else Cover.EMPTY


# Of these exactly the rows that see something are told, wherever strides are equal.
EXACT = [
    Full(),
    Causal(),
    Window(7, 0),
    Window(0, 0),
    Window(2, 30),
    Window(None, 4),
    Prefix(0),
    Prefix(17),
    Causal() | Prefix(9),
    Window(5, 0) | Prefix(3),
    DOCUMENTS,
    DOCUMENTS & Causal(),
    DOCUMENTS & Window(3, 1),
    DOCUMENTS & (Window(3, 0) | Prefix(50)),
    Documents([0, 30, 60, S]) & DOCUMENTS & Causal(),
    PADDED,
    PADDED & Causal(),
    PADDED & Window(3, 1),
    IMAGES,
    Causal() | IMAGES,
    (IMAGES | Causal()) & Window(9, 9),
    DOCUMENTS & (Causal() | IMAGES),
    Window(9, 0) | IMAGES,
    BLOCKS,
    BlockDiffusion(S // 2, 7),
    BlockDiffusion(S // 2, 8, causal=False),
    FrameTiles(S, S // 12, 4),
]
CONSERVATIVE = [
    Dilated(3),
    Dilated(3) & Causal(),
    BLOCKS & Causal(),
    BLOCKS | Window(4, 0),
    DOCUMENTS | Window(10, 0),
    PADDED | Prefix(20),
    Causal() | (Window(None, 40) & Prefix(60)),
    Dense(RNG.random((S, S)) < 0.05),
    Parity(),
    Parity() & DOCUMENTS,
]


def shards(name, seed=0):
    """Four ranks' spans; "pieces" are many of any length, one rank has none."""
    if name == "documents":
        made = layout.DocumentZigzag(4, [0, 8, 8, 40, 64, S])
    elif name == "balanced":
        made = layout.Balanced(4, [0, 5, 5, 6, 40, 41, 70, S], per_node=2, padding=[6])
    elif name == "pieces":
        rng = np.random.default_rng(seed)
        cuts = [0, *np.sort(rng.choice(np.arange(1, S), 11, replace=False)).tolist(), S]
        owner = rng.integers(0, 3, 12)
        every = [Span(a, 1, b - a) for a, b in pairwise(cuts)]
        rng.shuffle(every)
        return [[Span(*s) for s, o in zip(every, owner, strict=True) if o == r] for r in range(4)]
    else:
        made = layout.make(name, cp_size=4)
    return [made.spans(rank, S) for rank in range(4)]


LAYOUTS = ["contiguous", "zigzag", "striped", "documents", "balanced", "pieces"]


def positions(shard):
    return np.concatenate([np.empty(0, dtype=np.int64), *(span.positions() for span in shard)])


def sees(mask, q_shards, k_shards):
    """By owner: bool [rows, G], which rows see keys of a rank, and which keys a rank sees."""
    table = mask.visible(np.arange(S)[:, None], np.arange(S)[None, :])
    q, k = ([positions(shard) for shard in x] for x in (q_shards, k_shards))
    queries = [np.stack([table[np.ix_(a, b)].any(axis=1) for b in k], axis=1) for a in q]
    keys = [np.stack([table[np.ix_(a, b)].any(axis=0) for a in q], axis=1) for b in k]
    return queries, keys


def told(found, rows):
    """The same as `rows_seen` tells it; the pieces must have every row once."""
    tables = [np.zeros((n, found.size), dtype=bool) for n in rows]
    pieces = [np.zeros(n, dtype=int) for n in rows]
    full = unpacked(found.full, found.size)
    for o, first, stop, whole in zip(*found[:3], full, strict=True):
        tables[o][first:stop] |= whole
        pieces[o][first:stop] += 1
    assert all((each == 1).all() for each in pieces)
    for piece, rank, first, stop in zip(*found.partial, strict=True):
        assert found.first[piece] <= first < stop <= found.stop[piece]
        tables[found.owner[piece]][first:stop, rank] = True
    return tables


def check(mask, q_shards, k_shards, exact):
    truth = sees(mask, q_shards, k_shards)
    for found, table, own in zip(
        rows_seen(mask, q_shards, k_shards), truth, (q_shards, k_shards), strict=True
    ):
        got = told(found, [len(positions(shard)) for shard in own])
        for a, b in zip(got, table, strict=True):
            assert not (b & ~a).any(), f"{mask}: a row that is seen is not told"
            if exact:
                np.testing.assert_array_equal(a, b, err_msg=f"{mask}")
        ranks = np.array([x.any(axis=0) for x in got])
        np.testing.assert_array_equal(found.ranks(len(own)), ranks)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_rows_are_told_exactly(mask, name):
    own = shards(name)
    check(mask, own, own, exact=True)


@pytest.mark.parametrize("cells", [2, 5])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_rows_are_told_to_the_cell(mask, name, cells):
    """All rows that are seen, and none of a cell without such a row."""
    own = shards(name)
    longest = max(len(positions(shard)) for shard in own)
    grain = max(1, longest // cells)
    for found, table in zip(rows_seen(mask, own, own, cells), sees(mask, own, own), strict=True):
        assert found.grain == grain
        got = told(found, [len(positions(shard)) for shard in own])
        for a, b in zip(got, table, strict=True):
            assert not (b & ~a).any()
            rounded = b.copy()
            for first in range(0, len(b), grain):
                rounded[first : first + grain] = b[first : first + grain].any(axis=0)
            assert not (a & ~rounded).any()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", CONSERVATIVE, ids=repr)
def test_every_row_that_is_seen_is_told(mask, name):
    own = shards(name)
    check(mask, own, own, exact=False)


@pytest.mark.parametrize("mask", EXACT + CONSERVATIVE, ids=repr)
def test_queries_may_lie_elsewhere_than_keys(mask):
    check(mask, shards("pieces", 1), shards("zigzag"), exact=mask in EXACT)
    check(mask, shards("striped"), shards("pieces", 2), exact=False)
    check(mask, shards("contiguous"), [[Span(r, 4, 1 + 5 * r)] for r in range(4)], exact=False)


@given(
    st.lists(st.integers(0, S), max_size=8),
    st.sampled_from([Full(), Causal(), Window(6, 0), Window(None, 3), Causal() | Prefix(5)]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 1 << 20),
    st.sets(st.integers(0, 8)),
)
@settings(max_examples=60, deadline=None)
def test_any_documents(bounds, mask, name, seed, padding):
    own, ends = shards(name, seed), [0, *sorted(bounds), S]
    padding = [i for i in padding if i < len(ends) - 1]
    check(Documents(ends, padding) & mask, own, own, exact=True)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", EXACT + CONSERVATIVE, ids=repr)
def test_blocks_are_joined_where_there_are_too_many_pairs(mask, name, monkeypatch):
    monkeypatch.setattr(seen, "PAIRS", 40)
    own = shards(name)
    check(mask, own, own, exact=False)


@pytest.mark.parametrize("mask", EXACT + CONSERVATIVE, ids=repr)
def test_viewers_are_those_that_see(mask):
    """For spans cut at the breaks and for others; `exact`: no more and no less."""
    spans = [Span(a, d, n) for a in range(0, S, 7) for d in (1, 4) for n in (1, 5, 12)]
    spans = [span for span in spans if span.last < S]
    actual = mask.viewers(Span(*np.array(spans).T))
    p = np.arange(S)[:, None]
    for span, first, last, left, right, exact in zip(spans, *actual, strict=True):
        k = span.positions()
        may = (first <= p) & (p <= last) & (p - left <= k) & (k <= p + right)
        assert not (mask.visible(p, k) & ~may).any()
        if exact:
            np.testing.assert_array_equal(mask.visible(p, k), may)


def test_what_is_exact():
    """Documents, bands and prefixes are, of spans between two breaks: most pairs need no look."""
    spans = Span(*(np.array(x) for x in ([9, 41], [1, 1], [8, 9])))
    for mask in EXACT[: EXACT.index(BLOCKS) - 1]:
        assert mask.viewers(spans).exact.all(), mask
    assert not BLOCKS.viewers(spans).exact.any()


@pytest.mark.parametrize("grain", [1, 5, 16])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", EXACT + CONSERVATIVE, ids=repr)
def test_bundles_hold_every_row_once_for_those_that_want_it(mask, name, grain, monkeypatch):
    own = shards(name)
    rows = [len(positions(shard)) for shard in own]
    monkeypatch.setattr(demand, "GRAIN", max(1, max(rows) // grain))
    expected = demand.visibility_of(mask, own, own)
    truth = sees(mask, own, own)
    for bundles, table, actual in zip(
        (expected.queries, expected.keys), truth, rows_seen(mask, own, own), strict=True
    ):
        got = [np.zeros((n, 4), dtype=int) for n in rows]
        once = [np.zeros(n, dtype=int) for n in rows]
        for of, first, n in zip(*bundles.runs, strict=True):
            once[bundles.owner[of]][first : first + n] += 1
            got[bundles.owner[of]][first : first + n] += bundles.users[of]
        assert all((each == 1).all() for each in once)
        exact = told(actual, rows)
        for owner in range(4):
            table[owner][:, owner] = exact[owner][:, owner] = False  # they are at home
            assert not (table[owner] & (got[owner] == 0)).any()
            if grain == 1:
                np.testing.assert_array_equal(got[owner], exact[owner])
            patterns = [tuple(x) for x in bundles.users[bundles.owner == owner]]
            assert len(set(patterns)) == len(patterns)
            counts = [sum(pattern) for pattern in patterns]
            assert counts == sorted(counts, reverse=True)


def test_few_bundles_of_many_ranks(monkeypatch):
    """Those that few ranks want become one; no row is lost."""
    monkeypatch.setattr("megatron_burst.schedule.bundles.CELLS", 16 * 2)
    own = shards("pieces")
    rows = [len(positions(shard)) for shard in own]
    actual = demand.visibility_of(DOCUMENTS & Causal(), own, own).keys
    assert np.bincount(actual.owner).max() == 2
    got = [np.zeros((n, 4), dtype=bool) for n in rows]
    for of, first, n in zip(*actual.runs, strict=True):
        got[actual.owner[of]][first : first + n] = actual.users[of]
    for owner, table in enumerate(sees(DOCUMENTS & Causal(), own, own)[1]):
        table[:, owner] = False
        assert not (table & ~got[owner]).any()
