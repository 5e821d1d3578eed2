"""Mask `Tree` against tables of ancestors: exhaustive on small trees."""

import random

import numpy as np
import pytest
from random_trees import draw

import megatron_burst as mb
from megatron_burst.layout import Span, Spans

LENGTH = 9


def every_span():
    for stride in (1, 2, 3):
        for start in range(LENGTH):
            for length in range(1, (LENGTH - 1 - start) // stride + 2):
                yield Span(start, stride, length)


@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_tree_says_of_spans_is_what_it_shows(seed, window):
    out, seen, apart = draw(random.Random(seed), LENGTH)
    mask = mb.masks.Tree(out, window)
    if window is not None:
        seen &= apart <= window
    rows = np.arange(LENGTH)
    assert (mask.visible(rows[:, None], rows[None]) == seen).all()
    assert mask.pairs == seen.sum()
    segment = np.searchsorted(mask.bounds, rows, side="right")
    spans = [*every_span()]
    fields = [np.array(x) for x in zip(*spans, strict=True)]
    queries, keys = Spans(*(x[:, None] for x in fields)), Spans(*(x[None] for x in fields))
    covers, bands = mask.covers(queries, keys), mask.bands(queries, keys)
    viewers = np.array(mask.viewers(Spans(*fields))).T
    for j, k in enumerate(spans):
        columns = seen[:, k.positions()]
        first, last, left, right, exact = viewers[j]
        ahead = k.positions()[None] - rows[:, None]
        allowed = ((rows >= first) & (rows <= last))[:, None] & (ahead >= -left) & (ahead <= right)
        assert not (columns & ~allowed).any()
        assert not exact or (allowed == columns).all()
        for i, q in enumerate(spans):
            part = columns[q.positions()]
            cover = covers[i, j]
            assert cover != mb.masks.Cover.EMPTY or not part.any()
            assert cover != mb.masks.Cover.FULL or part.all()
            if bands.known[i, j]:
                m, n = np.arange(q.length)[:, None], np.arange(k.length)[None]
                band = (n >= m - bands.left[i, j]) & (n <= m + bands.right[i, j])
                assert (band == part).all()
            if q.stride == k.stride and all(segment[x.start] == segment[x.last] for x in (q, k)):
                assert bands.known[i, j]  # nothing is left open within a segment
                assert window is not None or part.any() == (cover != mb.masks.Cover.EMPTY)


def test_windows_count_along_the_path_however_they_are_combined():
    out, seen, apart = draw(random.Random(11), 40)
    rows = np.arange(40)
    tree, window = mb.masks.Tree(out), mb.masks.Window(2, 0)
    documents = mb.masks.Documents([0, 25, 40])
    number = rows >= 25
    same = number[:, None] == number[None]
    near = seen & (apart <= 2)
    assert (near != seen & (rows[:, None] - rows[None] <= 2)).any()  # distances in rows differ
    prefix = (rows[None] < 3) & (rows[:, None] - rows[None] <= 2) & (rows[:, None] >= rows[None])
    cases = {
        "tree first": (tree & window, near),
        "window first": (window & tree, near),
        "the smaller of two": (mb.masks.Tree(out, 5) & window, near),
        "with documents": (tree & documents & window, near & same),
        "documents first": (window & (documents & tree), near & same),
        "either": ((tree | mb.masks.Prefix(3)) & window, near | prefix),
        "a window and a sink": (tree & (window | mb.masks.Prefix(1)), near | (seen & (rows < 1))),
        "a window of documents": (tree & (documents & window), near & same),
        "a sink or a window, then documents": (
            documents & tree & (mb.masks.Prefix(1) | window),
            (near | (seen & (rows < 1))) & same,
        ),
        "causal": (mb.masks.Causal() & tree, seen),
    }
    for name, (mask, by_hand) in cases.items():
        assert (mask.visible(rows[:, None], rows[None]) == by_hand).all(), name


def test_documents_are_a_special_case():
    bounds = [0, 5, 6, 20]
    tree = mb.masks.Tree(np.repeat(bounds[1:], np.diff(bounds)))
    packed = mb.masks.Documents(bounds) & mb.masks.Causal()
    rows = np.arange(20)
    assert (
        tree.visible(rows[:, None], rows[None]) == packed.visible(rows[:, None], rows[None])
    ).all()
