"""Masks over two sequences: `Documents(key_cu_seqlens=...)` and `Compressed`, by handwritten rules.

The rules are loops over documents, queries and keys. `mb.masks.check` compares `covers`, `bands`
and `viewers` with `visible` for all pairs of spans of the two short sequences.
"""

from itertools import product

import numpy as np
import pytest

from megatron_burst.layout import Span, Spans
from megatron_burst.masks import (
    BlockDiffusion,
    BlockSparse,
    Causal,
    Compressed,
    Dense,
    Documents,
    Full,
    Mask,
    Prefix,
    Tree,
    Window,
    check,
)
from megatron_burst.masks.seen import rows_seen, unpacked
from megatron_burst.masks.tiling import Cutter

TABLE = np.random.default_rng(0).integers(0, 2, (7, 11))
QUERIES, KEYS = [0, 5, 5, 9, 13], [0, 3, 7, 7, 12]  # documents without queries and without keys


def documents_table(q_lengths, k_lengths, hidden=()):
    table = np.zeros((sum(q_lengths), sum(k_lengths)), dtype=bool)
    top = left = 0
    for index, (rows, columns) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        table[top : top + rows, left : left + columns] = index not in hidden
        top, left = top + rows, left + columns
    return table


def compressed_table(lengths, keys, stride, length, hidden=()):
    table = np.zeros((sum(lengths), sum(keys)), dtype=bool)
    top = left = 0
    for index, (rows, columns) in enumerate(zip(lengths, keys, strict=True)):
        for t, w in product(range(rows), range(columns)):
            table[top + t, left + w] = w * stride + length - 1 <= t and index not in hidden
        top, left = top + rows, left + columns
    return table


CASES = {
    "documents": (
        Documents(QUERIES, key_cu_seqlens=KEYS),
        documents_table([5, 0, 4, 4], [3, 4, 0, 5]),
    ),
    "padding": (
        Documents(QUERIES, padding=[3], key_cu_seqlens=KEYS),
        documents_table([5, 0, 4, 4], [3, 4, 0, 5], hidden=[3]),
    ),
    "more keys": (Documents([0, 3], key_cu_seqlens=[0, 16]), documents_table([3], [16])),
    "windows": (Compressed(3), compressed_table([13], [4], 3, 3)),
    "padded windows": (Compressed(3), compressed_table([13], [6], 3, 3)),
    "overlapping": (Compressed(2, 4), compressed_table([13], [5], 2, 4)),
    "gaps": (Compressed(4, 2), compressed_table([13], [3], 4, 2)),
    "packed windows": (
        Compressed(2, cu_seqlens=[0, 5, 5, 6, 13]),
        compressed_table([5, 0, 1, 7], [2, 0, 0, 3], 2, 2),
    ),
    "packed, padded": (
        Compressed(2, 3, [0, 5, 6, 13], [0, 4, 5, 9]),
        compressed_table([5, 1, 7], [4, 1, 4], 2, 3),
    ),
    "padding without windows": (
        Compressed(2, cu_seqlens=[0, 5, 9, 12, 16], padding=[1, 3]),
        compressed_table([5, 4, 3, 4], [2, 0, 1, 0], 2, 2),
    ),
    "padding with keys": (
        Compressed(2, 3, [0, 5, 9, 12], [0, 2, 5, 6], padding=[1]),
        compressed_table([5, 4, 3], [2, 3, 1], 2, 3, hidden=[1]),
    ),
    "dense": (Dense(TABLE), TABLE.astype(bool)),
    "blocks": (
        BlockSparse(TABLE[:3, :4], 3),
        np.repeat(np.repeat(TABLE[:3, :4].astype(bool), 3, axis=0), 3, axis=1),
    ),
    "packed and a prefix": (
        Compressed(2, cu_seqlens=[0, 5, 13]) & Prefix(3),
        compressed_table([5, 8], [2, 4], 2, 2) & (np.arange(6) < 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_visible_is_the_table(name):
    mask, table = CASES[name]
    rows, columns = (np.arange(n) for n in table.shape)
    assert (mask.visible(rows[:, None], columns[None]) == table).all()
    check(mask, *table.shape)


@pytest.mark.parametrize("name", CASES)
def test_tiles_have_the_visible_pairs(name):
    mask, table = CASES[name]
    rows, columns = table.shape
    for queries, keys in (
        ([Span(0, 1, rows)], [Span(0, 1, columns)]),
        ([Span(1, 2, rows // 2)], [Span(0, 1, columns)]),
        ([Span(rows - 3, 1, 3), Span(0, 1, 2)], [Span(1, 1, columns - 1), Span(0, 1, 1)]),
    ):
        at = [np.concatenate([span.positions() for span in spans]) for spans in (queries, keys)]
        expected = table[np.ix_(*at)]
        got = np.zeros_like(expected)
        for tile in Cutter(band_rows=4, table_rows=4).tiles(mask, queries, keys):
            part = got[tile.rows, tile.columns]
            assert not part.any(), "a pair is in two tiles"
            part |= tile.table if tile.table is not None else True
            if tile.triangle:
                part &= np.tri(*part.shape, dtype=bool)
        assert (got == expected).all()


def marked(seen, sizes, ranks):
    """Return a bool [ranks, ranks, rows]: rows of each owner that each rank uses."""
    used = np.zeros((ranks, ranks, sizes), dtype=bool)
    full_ranks = unpacked(seen.full, seen.size)
    for owner, first, stop, full in zip(seen.owner, seen.first, seen.stop, full_ranks, strict=True):
        used[owner, full, first:stop] = True
    for piece, rank, first, stop in zip(*seen.partial, strict=True):
        used[seen.owner[piece], rank, first:stop] = True
    return used


@pytest.mark.parametrize("name", ["windows", "packed windows", "gaps"])
def test_only_used_keys_are_sent(name):
    """Rows that no query of a rank sees are not listed for it, if shards have one span each."""
    mask, table = CASES[name]
    table = table[:12]
    ranks = 3
    keys = table.shape[1]
    q_shards = [[Span(4 * rank, 1, 4)] for rank in range(ranks)]
    k_shards = [[Span(rank, 1, 1)] if rank < keys else [] for rank in range(ranks - 1)]
    k_shards.append([Span(ranks - 1, 1, keys - ranks + 1)])
    queries, used = rows_seen(mask, q_shards, k_shards)
    got = marked(used, keys, ranks)
    for owner, rank in product(range(ranks), repeat=2):
        at = np.concatenate([span.positions() for span in k_shards[owner]])
        seen = table[4 * rank : 4 * rank + 4][:, at].any(axis=0)
        assert (got[owner, rank, : len(at)] == seen).all(), (owner, rank)
    got = marked(queries, 4, ranks)
    for owner, rank in product(range(ranks), repeat=2):
        at = np.concatenate([span.positions() for span in k_shards[rank]])
        seen = table[4 * owner : 4 * owner + 4][:, at].any(axis=1)
        assert (got[owner, rank] >= seen).all(), (owner, rank)


class Staircase(Mask):
    """A mask of a user, over two sequences of different lengths; `covers` may be wrong."""

    def __init__(self, wrong=False):
        self.wrong = wrong

    def visible(self, q, k):
        return 2 * k <= q

    def covers(self, q_spans, k_spans):
        empty = 2 * k_spans.start > q_spans.last + (k_spans.last > 3 if self.wrong else 0)
        return np.where(empty | self.wrong & (k_spans.start > 5), 0, 1)


def test_check_compares_keys_beyond_the_queries():
    check(Staircase(), 9, 5)
    check(Staircase(wrong=True), 9, 5)
    for lengths in ((14, 7), (40, 30)):
        with pytest.raises(ValueError, match="cover is EMPTY"):
            check(Staircase(wrong=True), *lengths)


@pytest.mark.parametrize(
    ("mask", "lengths", "error"),
    [
        (
            Documents([0, 4]),
            (4, 8),
            "keys have 8 positions, and cu_seqlens ends at 4; pass key",
        ),
        (Documents([0, 4], key_cu_seqlens=[0, 6]), (4, 8), "key positions, 8, got 6$"),
        (Documents([0, 4], key_cu_seqlens=[0, 6]), (8, 6), "cu_seqlens must end at the length"),
        (Compressed(2), (8, 3), "8 positions have 4 windows of 2 positions every 2, got 3 keys"),
        (Compressed(2, cu_seqlens=[0, 8]), (8, 3), "got 3 keys"),
        (Compressed(2, cu_seqlens=[0, 8]), (6, 4), "cu_seqlens must end"),
        (Tree([4, 4, 4, 4]), (4, 8), "4"),
        (Dense(TABLE), (7, 7), "table describes 11 positions, but the sequence has 7"),
        (Dense(TABLE), (8, 11), "table describes 7 positions, but queries have 8"),
        (BlockSparse(TABLE, 2), (14, 20), "11 blocks of 2 describe 22 positions, but keys have 20"),
        (BlockDiffusion(4, 2), (8, 4), "got 4"),
        (Causal() & Documents([0, 4]), (4, 5), "key_cu_seqlens"),
    ],
)
def test_lengths_that_do_not_fit(mask, lengths, error):
    with pytest.raises(ValueError, match=error):
        mask.check_lengths(*lengths)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2, 3), Prefix(2)])
def test_masks_of_positions_fit_any_lengths(mask):
    mask.check_lengths(4, 9)
    check(mask, 5, 9)
    check(mask, 9, 4)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Documents([0, 4], key_cu_seqlens=[0, 1, 2]), r"as many documents .*\(1\), got 2"),
        (lambda: Documents([0, 4], key_cu_seqlens=[1, 2]), "key_cu_seqlens must be integers"),
        (lambda: Compressed(0), "stride must be at least 1"),
        (lambda: Compressed(2, 0), "length must be at least 1"),
        (lambda: Compressed(2, key_cu_seqlens=[0, 1]), "requires cu_seqlens"),
        (lambda: Compressed(2, padding=[0]), "padding requires cu_seqlens"),
        (lambda: Compressed(2, cu_seqlens=[0, 4], padding=[1]), "padding"),
        (lambda: Compressed(2, cu_seqlens=[0, 4], key_cu_seqlens=[0, 1]), r"\[2\], got \[1\]"),
        (lambda: Compressed(2, cu_seqlens=[0, 4], key_cu_seqlens=[0, 1, 2]), r"\(1\), got 2"),
    ],
)
def test_invalid_arguments(make, error):
    with pytest.raises(ValueError, match=error):
        make()


def test_repr_tells_masks_apart():
    masks = [
        Documents([0, 4]), Documents([0, 4], key_cu_seqlens=[0, 4]),
        Documents([0, 4], key_cu_seqlens=[0, 5]), Compressed(2), Compressed(2, 4),
        Compressed(2, cu_seqlens=[0, 4]), Compressed(2, cu_seqlens=[0, 4], key_cu_seqlens=[0, 3]),
        Compressed(2, cu_seqlens=[0, 1, 4]), Compressed(2, cu_seqlens=[0, 1, 4], padding=[0]),
    ]  # fmt: skip
    assert len({repr(mask) for mask in masks}) == len(masks)
    assert Compressed(2).cacheable
    assert not Compressed(2, cu_seqlens=[0, 4]).cacheable


def test_positions_after_the_last_document_see_nothing():
    mask = Compressed(2, cu_seqlens=[0, 4])
    assert not mask.visible(np.array([[3], [4], [9]]), np.array([[2, 5]])).any()
    assert not mask.visible(np.array([[4], [9]]), np.array([[0, 1]])).any()
    span = Spans(*(np.array([x]) for x in (2, 1, 2)))
    assert (mask.covers(Spans(*(np.array([x]) for x in (0, 1, 4))), span) == 0).all()
