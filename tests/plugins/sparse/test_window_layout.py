"""Layout of compressed keys: each key is with the last row of its window."""

import itertools

import numpy as np
import pytest

import megatron_burst as mb
from megatron_burst.plugins.sparse.window_layout import WindowLayout

DOCUMENTS = [0, 7, 7, 16, 24]


def by_hand(rows_of, ratio, documents):
    """The keys of each rank, from the rows of each rank; and the number of keys."""
    owner = {row: rank for rank, rows in enumerate(rows_of) for row in rows}
    keys, number = [[] for _ in rows_of], 0
    for first, last in itertools.pairwise(documents):
        for start in range(first, last - ratio + 1, ratio):
            keys[owner[start + ratio - 1]].append(number)
            number += 1
    return keys, number


@pytest.mark.parametrize("documents", [[0, 24], DOCUMENTS])
@pytest.mark.parametrize("ratio", [2, 3, 5, 25])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["zigzag", "contiguous", "striped", "balanced"])
def test_keys_are_with_the_last_rows_of_their_windows(name, ranks, ratio, documents):
    bounds = {"cu_seqlens": documents} if name == "balanced" else {}
    rows = mb.layout.make(name, cp_size=ranks, **bounds)
    mask = mb.masks.Compressed(ratio, cu_seqlens=documents if len(documents) > 2 else None)
    layout = WindowLayout(rows, mask, 24)
    keys, count = by_hand([rows.positions(rank, 24) for rank in range(ranks)], ratio, documents)
    assert layout.rows == max(map(len, keys))
    for rank in range(ranks if layout.rows else 0):
        positions = layout.positions(rank, layout.key_len)
        assert len(positions) == layout.rows
        assert [p for p in positions.tolist() if p < count] == keys[rank]
        assert (np.diff(positions) > 0).all()
    layout.check(layout.key_len)


def test_regular_keys_have_few_spans():
    rows = mb.layout.make("zigzag", cp_size=4)
    layout = WindowLayout(rows, mb.masks.Compressed(4), 512)
    assert layout.spans(1, 128) == (
        mb.layout.Span(16, 1, 16), mb.layout.Span(96, 1, 16),
    )  # fmt: skip
    striped = WindowLayout(mb.layout.make("striped", cp_size=4), mb.masks.Compressed(2), 512)
    assert striped.rows == 128  # ranks 1 and 3 hold the last rows of all windows
    assert striped.spans(1, 512)[0] == mb.layout.Span(0, 2, 128)


def test_wrong_lengths_are_refused():
    rows = mb.layout.make("zigzag", cp_size=4)
    with pytest.raises(ValueError, match="positive multiple of 8, got 20"):
        WindowLayout(rows, mb.masks.Compressed(2), 20)
    layout = WindowLayout(rows, mb.masks.Compressed(2), 32)
    with pytest.raises(ValueError, match="has 16 keys for 32 rows, got 20; pass 4 key rows per"):
        layout.check(20)
