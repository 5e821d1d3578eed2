"""Visibility of queries on the device equals the definition of every mask."""

import numpy as np
import pytest
import torch

from megatron_burst.layout import Span
from megatron_burst.masks import (
    BlockSparse,
    Causal,
    Dense,
    Dilated,
    Documents,
    Full,
    Mask,
    Prefix,
    Tree,
    Window,
)
from megatron_burst.plugins.sparse.pairs import SelectedPairs

S = 24
OUT = [9, 5, 3, 4, 5, 9, 7, 8, 9, 0, 16, 14, 14, 14, 16, 16, 24, 20, 20, 20, 24, 24, 24, 24]
TABLE = np.random.default_rng(0).random((6, 6)) < 0.5
DOCUMENTS = Documents([0, 5, 5, 12, 20, S], padding=[3])
ONE = {  # one interval for every query
    "causal": Causal(),
    "full": Full(),
    "window": Window(3, 2),
    "window without a left end": Window(None, 4),
    "prefix": Prefix(7),
    "documents": DOCUMENTS,
    "causal documents": DOCUMENTS & Causal(),
    "windows in documents": Documents([0, 5, 12, S]) & Window(2, 0),
    "prefix language model": Causal() | Prefix(5),
    "prefix and window": Prefix(9) & Window(4, 0),
}
OTHERS = {
    "a sink and a window": Window(3, 0) | (Prefix(2) & Causal()),
    "tree": Tree(OUT),
    "tree with a window": Tree(OUT, window=2),
    "dilated": Dilated(3) & Causal(),
    "blocks": BlockSparse(TABLE, 4),
    "blocks or tree": BlockSparse(TABLE, 4) & Causal() | Tree(OUT),
}


class Odd(Mask):
    """Mask of a user."""

    def visible(self, q, k):
        return (q + k) % 2 == 1


HOST = {
    "dense": Dense(np.random.default_rng(1).random((S, S)) < 0.5),
    "of a user": Odd(),
    "of a user and causal": Odd() & Causal(),
}
SPANS = [Span(3, 1, 6), Span(20, 1, 3), Span(1, 4, 5)]


def pair(mask):
    return SelectedPairs(mask, SPANS, [Span(0, 1, 4)])


@pytest.mark.parametrize("name", ONE | OTHERS | HOST)
def test_as_the_mask_says(name):
    mask = (ONE | OTHERS | HOST)[name]
    actual, queries = pair(mask), np.concatenate([span.positions() for span in SPANS])
    keys = np.random.default_rng(2).integers(0, S, (len(queries), 2, 40))
    expected = mask.visible(queries[:, None, None], keys)
    rows = slice(2, 11)
    assert actual.sees(rows, torch.from_numpy(keys[rows])).tolist() == expected[rows].tolist()
    assert (actual.condition is None) == (name in HOST)
    assert (actual.interval is not None) == (name in ONE)
    if actual.interval is not None:
        low, high = (bound[:, None, None] for bound in actual.interval)
        assert np.array_equal((keys >= low) & (keys < high), expected)


def test_tables_go_to_a_device_once():
    """Positions of queries that are the same in all pairs are copied once too."""
    mask = Tree(OUT)
    first = pair(mask)
    second = SelectedPairs(mask, SPANS, [Span(4, 1, 4)], first.tables)
    assert second.queries is first.queries
    assert second.condition is first.condition
    there = first.tables.on(mask.out, torch.device("cpu"))
    assert second.tables.on(mask.out, torch.device("cpu")) is there


@pytest.mark.parametrize(
    ("spans", "unit"),
    [
        ([(8, 1, 4), (0, 1, 4)], 4),
        ([(0, 1, 6)], 1),
        ([(2, 1, 8)], 1),
        ([(0, 2, 8)], 1),
        ([(0, 1, 4), (4, 1, 2), (12, 1, 2)], 1),
        ([(8, 1, 2), (0, 1, 4), (10, 1, 2)], 1),  # whole, but not at a multiple of 4 rows
    ],
)
def test_blocks_that_lie_whole(spans, unit):
    """Blocks of four positions."""
    keys = [Span(*span) for span in spans]
    assert SelectedPairs(Full(), SPANS, keys).unit(4) == unit
