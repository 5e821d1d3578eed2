"""Mask `SameSpan`, alone and as Gemma combines it, against tables written by hand."""

from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.layout import Span, Spans
from megatron_burst.plugins.testing import in_process

LENGTH = 11
IMAGES = [(1, 4), (4, 6), (8, 10)]  # two touch
ROWS = np.arange(LENGTH)
BEHIND = ROWS[:, None] - ROWS[None]  # of a key, behind the query
SAME = np.array([[any(a <= q < b and a <= k < b for a, b in IMAGES) for k in ROWS] for q in ROWS])
IN_SECOND = ROWS >= 5
APART = IN_SECOND[:, None] == IN_SECOND[None]
SPANS, CAUSAL = mb.masks.SameSpan(IMAGES), mb.masks.Causal()
WINDOW, AROUND = mb.masks.Window(2, 0), mb.masks.Window(2, 2)
CASES = {
    "alone": (SPANS, SAME),
    "full layers": (CAUSAL | SPANS, (BEHIND >= 0) | SAME),
    "the other way": (SPANS | CAUSAL, (BEHIND >= 0) | SAME),
    "sliding layers": (
        (CAUSAL & WINDOW) | SPANS, ((BEHIND >= 0) & (BEHIND <= 2)) | SAME,
    ),
    "a window over all": (
        (CAUSAL | SPANS) & AROUND, ((BEHIND >= 0) | SAME) & (abs(BEHIND) <= 2),
    ),
    "in documents": (
        (CAUSAL | SPANS) & mb.masks.Documents([0, 5, LENGTH]), ((BEHIND >= 0) | SAME) & APART,
    ),
    "images that see images only": (CAUSAL & SPANS, (BEHIND >= 0) & SAME),
}  # fmt: skip


def every_span():
    for stride in (1, 2, 3):
        for start in range(LENGTH):
            for length in range(1, (LENGTH - 1 - start) // stride + 2):
                yield Span(start, stride, length)


@pytest.mark.parametrize("name", CASES)
def test_what_it_says_of_spans_is_what_it_shows(name):
    mask, seen = CASES[name]
    assert (mask.visible(ROWS[:, None], ROWS[None]) == seen).all()
    spans = [*every_span()]
    fields = [np.array(x) for x in zip(*spans, strict=True)]
    queries, keys = Spans(*(x[:, None] for x in fields)), Spans(*(x[None] for x in fields))
    covers, bands = mask.covers(queries, keys), mask.bands(queries, keys)
    viewers = np.array(mask.viewers(Spans(*fields))).T
    known = 0
    for j, k in enumerate(spans):
        columns = seen[:, k.positions()]
        first, last, left, right, exact = viewers[j]
        ahead = k.positions()[None] - ROWS[:, None]
        allowed = ((first <= ROWS) & (last >= ROWS))[:, None] & (ahead >= -left) & (ahead <= right)
        assert not (columns & ~allowed).any()
        assert not exact or (allowed == columns).all()
        known += int(exact)
        for i, q in enumerate(spans):
            part, cover = columns[q.positions()], covers[i, j]
            assert cover != mb.masks.Cover.EMPTY or not part.any()
            assert cover != mb.masks.Cover.FULL or part.all()
            if bands.known[i, j]:
                m, n = np.arange(q.length)[:, None], np.arange(k.length)[None]
                band = (n >= m - bands.left[i, j]) & (n <= m + bands.right[i, j])
                assert (band == part).all()
    assert known  # some spans of keys need no look at single queries


@pytest.mark.parametrize("name", ["full layers", "a window over all", "the other way"])
def test_queries_of_a_key_are_known_where_description_does_not_change(name):
    """Between breaks: no pair of pieces has to be looked at by itself."""
    mask, _ = CASES[name]
    edges = [0, *mask.breaks[(mask.breaks > 0) & (mask.breaks < LENGTH)].tolist(), LENGTH]
    pieces = [Span(a, 1, b - a) for a, b in pairwise(edges)]
    viewers = mask.viewers(Spans(*(np.array(x) for x in zip(*pieces, strict=True))))
    assert viewers.exact.all()


@pytest.mark.parametrize("name", ["full layers", "sliding layers", "a window over all"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("nodes", "per_node", "algorithm"), [(1, 4, "ring"), (2, 2, "burst")])
@pytest.mark.parametrize("kernel", ["aten", "reference"])
def test_calls_equal_dense_attention(nodes, per_node, algorithm, layout, name, kernel):
    """With spans over edges of ranks, and of which a rank holds a single token."""
    length, ranks = 40, nodes * per_node
    images = [(4, 16), (16, 21), (29, 31), (39, 40)]
    q, k = np.mgrid[:length, :length]
    same = np.array([(q >= a) & (q < b) & (k >= a) & (k < b) for a, b in images]).any(axis=0)
    spans = mb.masks.SameSpan(images)
    mask, visible = {
        "full layers": (CAUSAL | spans, (k <= q) | same),
        "sliding layers": (mb.masks.Window(5, 0) | spans, ((k <= q) & (k >= q - 5)) | same),
        "a window over all": (
            (CAUSAL | spans) & mb.masks.Window(5, 5), ((k <= q) | same) & (abs(q - k) <= 5),
        ),
    }[name]  # fmt: skip
    torch.manual_seed(3)
    whole = [torch.randn(length, 1, heads, 4, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    out, _, *gradients = oracle.attention(*whole, torch.from_numpy(visible))
    rows = [torch.tensor(each) for each in oracle.permutation(layout, ranks, length)]
    q, k, v, dout = ([x[each].clone() for each in rows] for x in whole)
    leaves = [x.requires_grad_() for x in (*q, *k, *v)]
    groups = in_process.groups(inter=nodes, intra=per_node)
    outs = in_process.attention(
        q, k, v, groups=groups, mask=mask, layout=layout, algorithm=algorithm, kernel=kernel
    )
    actual = [*outs, *torch.autograd.grad(outs, leaves, dout)]
    expected = [x[each] for x in (out, *gradients) for each in rows]
    for part, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(part, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "spans",
    [[(3, 2)], [(2, 2)], [(-1, 4)], [(0, 4), (3, 6)], [(4, 6), (0, 2)], [0, 4], [(0, 4, 5)],
     [(0.0, 4.0)], [(0, 4), (5,)], None, "ab"],
)  # fmt: skip
def test_what_are_no_spans(spans):
    with pytest.raises(ValueError, match=r"^spans must be pairs"):
        mb.masks.SameSpan(spans)


def test_spans_that_no_sequence_has():
    mb.masks.SameSpan([(0, 1 << 60)])
    with pytest.raises(ValueError, match=r"^spans must end at position \d+ at the latest, got"):
        mb.masks.SameSpan([(0, 4), (8, (1 << 60) + 1)])


def test_spans_end_where_the_sequence_does():
    SPANS.check(LENGTH)
    mb.masks.SameSpan([]).check(1)
    with pytest.raises(
        ValueError, match="spans: the last span ends at 10, after the end of the sequence, 9"
    ):
        SPANS.check(9)


def test_of_no_spans_nothing_is_seen():
    assert not mb.masks.SameSpan([]).visible(ROWS[:, None], ROWS[None]).any()
    assert repr(mb.masks.SameSpan([])) == "SameSpan([])"
    assert mb.masks.SameSpan(np.array(IMAGES)) == SPANS
    assert mb.masks.SameSpan(IMAGES[1:]) != SPANS
