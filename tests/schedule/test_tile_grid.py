"""Grids of tiles: together their tiles show exactly what the mask shows, and each tile once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst.kernels.tile_grid import WORD, tile_grid, tile_grids
from megatron_burst.layout import Span

CAUSAL = mb.masks.Causal()
MASKS = {
    "full": mb.masks.Full(),
    "causal": CAUSAL,
    "window": mb.masks.Window(30, 5),
    "dilated": mb.masks.Dilated(3) & CAUSAL,
    "documents": mb.masks.Documents([0, 7, 64, 65, 200, 5000]) & CAUSAL,
    "padding": mb.masks.Documents([0, 7, 64, 65, 200, 5000], padding=(1, 3)) & CAUSAL,
    "prefix": mb.masks.Prefix(50) | mb.masks.Window(10, 0),
    "sparse": mb.masks.BlockSparse(np.eye(320, dtype=bool), 16),
}


def positions(spans):
    return [s.start + s.stride * i for s in spans for i in range(s.length)]


def shown(found, shape, rows, columns):
    """bool [shape]: what the tiles show, drawn tile by tile; a tile drawn twice is an error."""
    padded = [-(-n // size) for n, size in zip(shape, (rows, columns), strict=True)]
    table = np.zeros((padded[0] * rows, padded[1] * columns), dtype=int)
    for i, j in found.full:
        table[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] += 1
    for i, j, which in found.partial:
        for r in range(rows):
            for c in range(columns):
                bit = int(found.bits[which, r, c // WORD]) >> (c % WORD) & 1
                table[i * rows + r, j * columns + c] += bit
    assert not table[:, shape[1] :].any(), "columns behind the end are shown"
    assert table.max(initial=0) <= 1
    return table[: shape[0], : shape[1]] == 1


@st.composite
def spans(draw):
    count = draw(st.integers(1, 4))
    found, start = [], draw(st.integers(0, 40))
    for _ in range(count):
        span = Span(start, draw(st.integers(1, 3)), draw(st.integers(1, 70)))
        found.append(span)
        start = span.last + draw(st.integers(1, 50))
    return found


@pytest.mark.parametrize("name", MASKS)
@given(q=spans(), k=spans(), sizes=st.sampled_from([(16, 32), (32, 32), (64, 64)]))
def test_the_tiles_show_what_the_mask_shows(name, q, k, sizes):
    expected = MASKS[name].visible(np.array(positions(q))[:, None], np.array(positions(k))[None, :])
    actual = tile_grid(MASKS[name], q, k, *sizes)
    assert np.array_equal(shown(actual, expected.shape, *sizes), expected)
    assert bool(actual) == expected.any()


@pytest.mark.parametrize("name", ["documents", "window", "dilated"])
@given(pairs=st.lists(st.tuples(spans(), spans()), min_size=2, max_size=4))
def test_many_pairs_have_the_grids_that_each_has_alone(name, pairs):
    grids = tile_grids(MASKS[name], pairs, 32, 32)
    for actual, (q, k) in zip(grids, pairs, strict=True):
        alone = tile_grid(MASKS[name], q, k, 32, 32)
        for array in ("full", "partial", "bits"):
            one, other = getattr(actual, array), getattr(alone, array)
            assert one.dtype == other.dtype == np.int32
            assert np.array_equal(one, other)


def test_more_pieces_than_are_compared_at_once(monkeypatch):
    """Blocks of two positions: they are looked at in larger ones, and pairs one after another."""
    monkeypatch.setattr("megatron_burst.kernels.tile_grid.LEAST", 0)
    monkeypatch.setattr("megatron_burst.kernels.tile_grid.PER_TILE", 1)
    mask = mb.masks.BlockSparse(np.random.default_rng(0).random((90, 90)) < 0.3, 2)
    pairs = [([Span(first, 2, 60)], [Span(first, 1, 60)]) for first in (0, 1)]
    for actual, (q, k) in zip(tile_grids(mask, pairs, 16, 32), pairs, strict=True):
        expected = mask.visible(np.array(positions(q))[:, None], np.array(positions(k))[None, :])
        assert np.array_equal(shown(actual, expected.shape, 16, 32), expected)


@given(q=spans(), k=spans())
def test_the_worklists_hold_every_tile_once_and_the_longest_first(q, k):
    actual = tile_grid(MASKS["documents"], q, k, 16, 32)
    for side, lists in ((0, actual.by_rows), (1, actual.by_columns)):
        for tiles, work in zip((actual.full, actual.partial), lists, strict=True):
            listed = []
            for block, first, stop in work.programs.tolist():
                for place in range(first, stop):
                    other = int(work.others[place])
                    tile = (block, other) if side == 0 else (other, block)
                    listed.append((*tile, *work.tables[place : place + 1].tolist()))
            assert sorted(listed) == sorted(map(tuple, tiles.tolist()))
            lengths = [stop - first for _, first, stop in work.programs.tolist()]
            assert lengths == sorted(lengths, reverse=True)
            assert all(lengths)


def test_tiles_that_look_alike_share_a_table():
    whole = [Span(0, 1, 4096)]
    assert len(tile_grid(CAUSAL, whole, whole, 128, 128).bits) == 2  # everything, and the diagonal
    actual = tile_grid(mb.masks.Window(1000, 0), whole, whole, 128, 128)
    assert len(actual.bits) <= 4
    ahead = np.arange(4096)[None, :] - np.arange(4096)[:, None]
    assert np.array_equal(shown_packed(actual, 4096, 128), (ahead >= -1000) & (ahead <= 0))
    assert len(tile_grid(CAUSAL, [Span(4096, 1, 4096)], whole, 128, 128).partial) == 0


class Counted(mb.masks.BlockSparse):
    """How often was it asked position by position?"""

    asked = 0

    def visible(self, q, k):
        self.asked += 1
        return super().visible(q, k)


def test_the_mask_is_asked_once_for_all_tiles_that_look_alike():
    """Blocks of 64 under tiles of 128: 2 x 2 blocks are visible in 16 ways, be there 256 tiles or
    65536; where the tiles begin half a block later, 3 x 3 in 512, and the blocks at the ends."""
    rng = np.random.default_rng(0)
    for first, ways in ((0, 16), (32, 512 + 2 * 64)):
        blocks = rng.random((66, 66)) < 0.25
        mask = Counted(blocks, 64)
        span = Span(first, 1, 4096)
        actual = tile_grid(mask, [span], [span], 128, 128)
        assert len(actual.partial) > 600
        assert mask.asked <= min(ways, len(actual.partial) - 100)
        own = blocks[(first + np.arange(4096)) // 64]
        expected = own[:, (first + np.arange(4096)) // 64]
        assert np.array_equal(shown_packed(actual, 4096, 128), expected)


def shown_packed(found, length, size):
    """As `shown`, for whole tiles, a tile at a time."""
    table = np.zeros((length, length), dtype=bool)
    for i, j in found.full:
        table[i * size : (i + 1) * size, j * size : (j + 1) * size] = True
    for i, j, which in found.partial:
        words = found.bits[which].astype("<i4").view(np.uint8)
        part = np.unpackbits(words, axis=1, bitorder="little").astype(bool)
        table[i * size : (i + 1) * size, j * size : (j + 1) * size] = part
    return table


def test_tiles_with_parts_of_other_lengths_do_not_look_alike():
    """Two documents in each block, wholly visible to themselves: 10 and 54 rows, 26 and 38."""
    ends = [0, 10, 64, 90, 128]
    actual = tile_grid(mb.masks.Documents(ends), [Span(0, 1, 128)], [Span(0, 1, 128)], 64, 64)
    own = np.array([sum(p >= end for end in ends) for p in range(128)])
    assert np.array_equal(shown(actual, (128, 128), 64, 64), own[:, None] == own[None, :])
