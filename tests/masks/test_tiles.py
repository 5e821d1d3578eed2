"""Tiles: together they are exactly the visible pairs, each once, in shapes kernels know."""

from itertools import product

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_masks import LENGTH, RULES, masks, spans, table

import megatron_burst as mb
from megatron_burst.kernels.operators import CpuFlash
from megatron_burst.layout import Span
from megatron_burst.masks import BlockSparse, Causal, Dense, Dilated, Documents, Full, Window
from megatron_burst.masks.base import PARTIAL
from megatron_burst.masks.tiles import Tile
from megatron_burst.masks.tiling import Cutter, Slices, seen_pairs

LAYOUTS = ("contiguous", "zigzag", "striped")
WHOLE = Cutter(band_rows=None, table_rows=None)
cutters = st.builds(
    Cutter,
    st.sampled_from([1, 2, 3, None]),
    st.sampled_from([1, 2, 5, 64]),
    tile_cost=st.sampled_from([0, 5, 2048]),
)


def painted(tiles, rows, columns):
    """int [rows, columns]: how often each pair is in a tile."""
    count = np.zeros((rows, columns), dtype=int)
    for tile in tiles:
        part = count[tile.rows, tile.columns]
        assert part.shape == tile.shape
        assert 0 not in tile.shape
        shown = np.ones(tile.shape, dtype=bool) if tile.table is None else tile.table
        if tile.triangle:
            assert tile.shape[0] == tile.shape[1]
            shown = np.tri(*tile.shape, dtype=bool)
        if tile.band is not None:
            ahead = np.arange(tile.shape[1])[None, :] - np.arange(tile.shape[0])[:, None]
            shown = (ahead >= -tile.band.left) & (ahead <= tile.band.right)
            assert shown.any(axis=1).all()  # stock operators answer 0 for a row that sees nothing
        assert shown.shape == tile.shape
        assert tile.visible == shown.sum()
        assert tile.computed == shown.size
        count[tile.rows, tile.columns] += shown
    return count


@given(cutters, masks, st.lists(spans(), min_size=1, max_size=3), st.lists(spans(), min_size=1))
def test_tiles_are_the_visible_pairs_each_once(cutter, mask, q_spans, k_spans):
    """Any mask, any spans in any order, however finely cut."""
    expected = np.block([[table(mask, q, k) for k in k_spans] for q in q_spans])
    got = painted(cutter.tiles(mask, q_spans, k_spans), *expected.shape)
    assert got.tolist() == expected.astype(int).tolist()


PACK = [0, 8, 8, 40, 56, 57, 64, 96]  # also an empty document


def document(position):
    return sum(position >= bound for bound in PACK)


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (Documents(PACK) & Causal(), lambda q, k: document(q) == document(k) and q >= k),
        (
            Documents(PACK, padding=[2, 4]),
            lambda q, k: document(q) == document(k) and not (8 <= q < 40 or q == 56),
        ),
        (
            Documents(PACK) & Window(5, 2),
            lambda q, k: document(q) == document(k) and -2 <= q - k <= 5,
        ),
        (Documents(PACK) | Causal(), lambda q, k: document(q) == document(k) or q >= k),
    ],
    ids=["causal", "padding", "window", "or"],
)
def test_pairs_of_many_spans_that_see_something(mask, rule, order):
    """Spans of 3 and 2 positions with gaps; more pairs than are all compared."""
    q_spans = [Span(start, 1, 3) for start in range(0, 96, 4)]
    k_spans = [Span(start, 1, 2) for start in range(0, 96, 3)]
    if order == "shuffled":
        rng = np.random.default_rng(0)
        rng.shuffle(q_spans)
        rng.shuffle(k_spans)
    q_spans, k_spans = ([Span(*map(int, span)) for span in x] for x in (q_spans, k_spans))
    assert len(q_spans) * len(k_spans) > 64
    dense = [
        [np.array([[rule(a, b) for b in k.positions()] for a in q.positions()]) for k in k_spans]
        for q in q_spans
    ]
    seen = seen_pairs(mask, Slices.of([q_spans]), Slices.of([k_spans]))
    pairs = list(zip(seen.query.tolist(), seen.key.tolist(), strict=True))
    assert pairs == sorted(set(pairs))  # tiles are joined in this order
    visible = {(i, j) for i, row in enumerate(dense) for j, cell in enumerate(row) if cell.any()}
    assert set(pairs) >= visible
    for i, j, cover in zip(*seen, strict=True):
        assert cover == PARTIAL or dense[i][j].all()
    expected = np.block(dense)
    tiles = Cutter(None, 64).tiles(mask, q_spans, k_spans)
    assert painted(tiles, *expected.shape).tolist() == expected.astype(int).tolist()


@pytest.mark.parametrize("documents", [2, 24])
def test_full_pairs_are_joined_along_both_sides(documents):
    """Documents in halves: the four pairs of spans of a document become one tile.

    With 24 documents there are so many pairs that all are joined at once.
    """
    mask = Documents(range(0, 8 * documents + 1, 8))
    halves = [Span(start, 1, 4) for start in range(0, 8 * documents, 4)]
    assert tuple(WHOLE.tiles(mask, halves, halves)) == tuple(
        Tile(slice(start, start + 8, 1), slice(start, start + 8, 1))
        for start in range(0, 8 * documents, 8)
    )
    assert not WHOLE.tiles(mask, halves[:2], halves[2:])
    # First halves, then second halves: nothing of one document is adjacent.
    apart = halves[::2] + halves[1::2]
    tiles = WHOLE.tiles(mask, apart, apart)
    assert [(tile.rows.start, tile.columns.start) for tile in tiles] == [
        (4 * row, 4 * column)
        for row in range(2 * documents)
        for column in (row % documents, row % documents + documents)
    ]
    assert {tile.shape for tile in tiles} == {(4, 4)}
    # Between the halves of each document are queries that see none of the keys.
    *keys, unseen, _ = halves
    between = [span for n in range(0, len(keys), 2) for span in (keys[n], unseen, keys[n + 1])]
    tiles = WHOLE.tiles(mask, between, keys)
    assert [(tile.rows.start, tile.columns.start) for tile in tiles] == [
        (12 * n + row, 8 * n) for n in range(documents - 1) for row in (0, 8)
    ]
    assert {tile.shape for tile in tiles} == {(4, 8)}


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_tiles_of_every_band(block):
    """Wherever the edges of a window leave a rectangle, and wherever blocks begin and end."""
    cutter = Cutter(band_rows=block, table_rows=4)
    shapes = product((1, 5, 8), (1, 4, 7, 8), range(-4, 5))
    for (rows, columns, ahead), left, right in product(shapes, (0, 1, 3, 20), (0, 1, 20)):
        spans_of = [Span(4, 1, rows)], [Span(4 + ahead, 1, columns)]
        distance = np.arange(columns)[None, :] + ahead - np.arange(rows)[:, None]
        expected = (distance >= -left) & (distance <= right)
        got = painted(cutter.tiles(Window(left, right), *spans_of), rows, columns)
        assert got.tolist() == expected.astype(int).tolist(), (rows, columns, ahead, left, right)


def shown_by(left, right, q, k):
    """bool [rows, columns] of a window over two spans, by hand."""
    ahead = k.positions()[None, :] - q.positions()[:, None]
    return (ahead >= -left) & (ahead <= (1 << 40 if right is None else right))


def test_a_window_is_one_tile_for_a_kernel_that_takes_windows():
    """Wherever its edges leave the rectangle, but for rows beyond the number of columns, which the
    left edge does not reach; without a left edge it is squares and triangles."""
    cutter = Cutter(None, None, windows=True)
    shapes = product((1, 5, 8), (1, 4, 7, 8), range(-4, 5), (1, 3))
    for (rows, columns, ahead, stride), left, right in product(shapes, (0, 1, 3, 9), (0, 2, None)):
        q, k = Span(4, stride, rows), Span(4 + ahead, stride, columns)
        expected = shown_by(left, right, q, k)
        got = cutter.tiles(Window(left, right), [q], [k])
        assert painted(got, rows, columns).tolist() == expected.astype(int).tolist()
        bands = [tile for tile in got if tile.band]
        assert len(bands) <= 1
        assert all(tile.shape[0] <= tile.shape[1] for tile in bands)
        if expected[expected.any(axis=1), 0].all():
            assert not bands
        else:
            with pytest.raises(ValueError, match="supports neither windows nor tables"):
                WHOLE.tiles(Window(left, right), [q], [k])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_over_the_pairs_of_a_ring(layout):
    """A local band of every pair of spans, in no more calls than pairs of spans."""
    shards = [mb.layout.make(layout, cp_size=3).spans(rank, 36) for rank in range(3)]
    cutter = Cutter(None, None, windows=True)
    for q, k in product(shards, shards):
        got = cutter.tiles(Window(7, 0), q, k)
        expected = np.block([[shown_by(7, 0, a, b) for b in k] for a in q])
        assert painted(got, 12, 12).tolist() == expected.astype(int).tolist()
        assert len(got) <= len(q) * len(k)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tiles_of_every_pair_of_ranks_are_the_dense_mask(ranks, layout, mask):
    length = 12 * ranks
    seen = oracle.visible(mask, length)
    positions = oracle.permutation(layout, ranks, length)
    spans_of = [mb.layout.make(layout, cp_size=ranks).spans(r, length) for r in range(ranks)]
    rule = {"full": Full(), "causal": Causal()}[mask]
    for i, j in product(range(ranks), range(ranks)):
        expected = seen[positions[i]][:, positions[j]].int().tolist()
        for cutter in (WHOLE, Cutter(5, 8)):
            assert (
                painted(cutter.tiles(rule, spans_of[i], spans_of[j]), 12, 12).tolist() == expected
            )


def test_zigzag_makes_few_calls():
    """Own shard: a triangle; others: one rectangle each. A kernel that takes triangles in blocks
    gets the own shard as two triangles and the square between them."""
    spans_of = [mb.layout.make("zigzag", cp_size=2).spans(rank, 16) for rank in (0, 1)]
    own = WHOLE.tiles(Causal(), spans_of[0], spans_of[0])
    assert list(own) == [Tile(slice(0, 8, 1), slice(0, 8, 1), triangle=True)]
    blocks = Cutter(4, None).tiles(Causal(), spans_of[0], spans_of[0])
    assert sorted(tile.triangle for tile in blocks) == [False, True, True]
    (ahead,) = WHOLE.tiles(Causal(), spans_of[1], spans_of[0])
    (behind,) = WHOLE.tiles(Causal(), spans_of[0], spans_of[1])
    rectangles = [(tile.rows, tile.columns, tile.triangle) for tile in (ahead, behind)]
    first, last = slice(0, 4, 1), slice(4, 8, 1)
    assert rectangles == [(slice(0, 8, 1), first, False), (last, slice(0, 8, 1), False)]


def test_triangles_are_joined_only_around_a_square_as_wide_as_the_first():
    """Later rows do not see the first four keys, so their square is narrower than the triangle."""
    blocks = np.ones((4, 4))
    blocks[2:, 0] = 0
    halves = [Span(0, 1, 8), Span(8, 1, 8)]
    tiles = WHOLE.tiles(BlockSparse(blocks, 4) & Causal(), halves, halves)
    assert [tile.triangle for tile in tiles] == [True, False, True]
    expected = [[int(k <= q and (q < 8 or k >= 4)) for k in range(16)] for q in range(16)]
    assert painted(tiles, 16, 16).tolist() == expected


def test_a_full_pair_is_one_call():
    spans_of = mb.layout.make("zigzag", cp_size=2).spans(0, 16)
    (tile,) = WHOLE.tiles(Full(), spans_of, spans_of)
    assert tile.shape == (8, 8)
    assert not tile.triangle


def test_a_triangle_is_cut_by_halves():
    """Few large squares and small triangles: every row is merged a logarithmic number of times."""
    got = Cutter(band_rows=4, table_rows=4).tiles(Causal(), [Span(0, 1, 16)], [Span(0, 1, 16)])
    actual = {(t.rows.start, t.columns.start, *t.shape, t.triangle) for t in got}
    squares = {(4, 0, 4, 4, False), (8, 0, 8, 8, False), (12, 8, 4, 4, False)}
    assert actual == squares | {(a, a, 4, 4, True) for a in (0, 4, 8, 12)}


def test_residues_of_a_dilated_mask_are_whole():
    """Every third key: three classes of rows, each with its own columns, nothing computed twice."""
    got = WHOLE.tiles(Dilated(3), [Span(0, 1, 9)], [Span(0, 1, 9)])
    assert [(tile.rows, tile.columns) for tile in got] == [
        (slice(r, r + 7, 3), slice(r, r + 7, 3)) for r in range(3)
    ]


@pytest.mark.parametrize("local", [1024, 2048])
@pytest.mark.parametrize(
    ("mask", "layout", "limit"),
    [
        (Causal(), "zigzag", 1.13),
        (Window(1023, 0), "contiguous", 1.15),
        (Window(1023, 0), "zigzag", 1.15),
        (Documents([0, 1024, 3000, 8192]) & Causal(), "contiguous", 1.15),
    ],
)
def test_little_is_computed_that_is_not_visible(mask, layout, limit, local):
    """What the CPU kernel's cutter wastes where windows and documents are 1K or more."""
    order = mb.layout.make(layout, cp_size=8192 // local)
    shards = [order.spans(rank, 8192) for rank in range(order.cp_size)]
    cutter = Cutter(*CpuFlash.limits)
    actual = [t for q, k in product(shards, shards) for t in cutter.tiles(mask, q, k)]
    assert sum(t.computed for t in actual) <= limit * sum(t.visible for t in actual)


BLOCKS_OF_4 = np.random.default_rng(1).random((256, 256)) < 0.25
SCATTERED = {
    "dilated or near": (
        Dilated(64) | Window(63, 0),
        lambda q, k: ((q - k) % 64 == 0) | ((q - k >= 0) & (q - k <= 63)),
    ),
    "blocks of 4": (BlockSparse(BLOCKS_OF_4, 4), lambda q, k: BLOCKS_OF_4[q // 4, k // 4]),
    "documents of 10": (
        Documents([*range(0, 1024, 10), 1024]) & Causal(),
        lambda q, k: (q // 10 == k // 10) & (k <= q),
    ),
}


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("name", SCATTERED)
def test_where_parts_would_be_tiny_a_table_takes_their_place(name, layout):
    """About a call for each of 16 pairs; the first of these masks took 39,000."""
    mask, rule = SCATTERED[name]
    shards = [mb.layout.make(layout, cp_size=4).spans(rank, 1024) for rank in range(4)]
    positions = [np.array(each) for each in oracle.permutation(layout, 4, 1024)]
    cutter, count = Cutter(*CpuFlash.limits), 0
    for i, j in product(range(4), range(4)):
        got = cutter.tiles(mask, shards[i], shards[j])
        expected = rule(positions[i][:, None], positions[j][None, :])
        assert np.array_equal(painted(got, 256, 256), expected)
        count += len(got)
    short = name == "documents of 10" and layout == "contiguous"  # few pairs, each in a small tile
    assert count <= (112 if short else 40)


def test_parts_are_kept_where_their_calls_cost_less_than_a_table():
    """Of blocks as large as pieces only those that see something; a third of a dilated mask."""
    whole = [Span(0, 1, 1024)]
    cutter = Cutter(*CpuFlash.limits)
    blocks = cutter.tiles(BlockSparse(np.eye(8), 128), whole, whole)
    assert [tile.shape for tile in blocks] == [(128, 128)] * 8
    assert sum(tile.computed for tile in cutter.tiles(Dilated(3), whole, whole)) < 1024**2 / 2.9


def test_kernels_without_tables_refuse_what_needs_one():
    spans_of = [Span(0, 1, LENGTH)]
    for mask in (Dense(np.eye(LENGTH)), Window(3, 0)):
        RULES.setdefault(mask, None)
        with pytest.raises(
            ValueError, match=r"mask: .*supports (only bands|n.* tables); use kernel='triton'"
        ):
            WHOLE.tiles(mask, spans_of, spans_of)
    with pytest.raises(ValueError, match=r"Causal\(\) is not a band"):
        WHOLE.tiles(Causal(), [Span(0, 1, 4)], [Span(0, 2, 4)])
