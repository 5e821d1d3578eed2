"""Masks: `visible` against rules written by hand, `cover` and `diagonal` against `visible`.

The spans of the exhaustive tests are small but of every stride, so an off-by-one has no room.
"""

from itertools import product

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Cover, Full, Mask, cover

RULES = {Full(): lambda query, key: True, Causal(): lambda query, key: not key > query}
SPANS = [Span(*x) for x in product(range(0, 7), (1, 2, 3), (1, 2, 3, 4))]
spans = st.builds(Span, st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
masks = st.sampled_from(list(RULES))


def table(mask, q_span, k_span):
    """[rows of [bool]] of a pair of spans, by the handwritten rule."""
    rule = RULES[mask]
    return [
        [
            rule(q_span.start + m * q_span.stride, k_span.start + n * k_span.stride)
            for n in range(k_span.length)
        ]
        for m in range(q_span.length)
    ]


def truth(seen):
    flat = [x for row in seen for x in row]
    return Cover.FULL if all(flat) else Cover.PARTIAL if any(flat) else Cover.EMPTY


@pytest.mark.parametrize("mask", RULES, ids=repr)
def test_cover_is_exact_on_all_small_spans(mask):
    for q_span, k_span in product(SPANS, SPANS):
        assert mask.cover(q_span, k_span) == truth(table(mask, q_span, k_span)), (q_span, k_span)


def test_diagonal_says_exactly_which_columns_a_row_sees():
    found = 0
    for q_span, k_span in product(SPANS, SPANS):
        offset = Causal().diagonal(q_span, k_span)
        if offset is None:
            assert q_span.stride != k_span.stride
            continue
        found += 1
        band = [[n <= m + offset for n in range(k_span.length)] for m in range(q_span.length)]
        assert band == table(Causal(), q_span, k_span), (q_span, k_span, offset)
    assert found == len(SPANS) ** 2 // 3
    assert Full().diagonal(Span(0, 1, 2), Span(0, 1, 2)) is None


@given(masks, spans, spans)
def test_visible_is_the_handwritten_rule(mask, q_span, k_span):
    q, k = q_span.positions(), k_span.positions()
    seen = mask.visible(q[:, None], k[None, :])
    assert seen.dtype == bool
    assert seen.tolist() == table(mask, q_span, k_span)


def test_causal_sees_itself():
    assert Causal().visible(np.array([3]), np.array([2, 3, 4])).tolist() == [True, True, False]


@given(masks, st.lists(spans, min_size=1, max_size=3), st.lists(spans, min_size=1, max_size=3))
def test_cover_of_shards_is_exact_too(mask, q_spans, k_spans):
    rows = [row for q, k in product(q_spans, k_spans) for row in table(mask, q, k)]
    assert cover(mask, iter(q_spans), iter(k_spans)) == truth(rows)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_causal_skips_and_keeps_the_right_ranks(layout):
    """Contiguous: later ranks are invisible, earlier ones wholly visible; no other layout skips."""
    positions = oracle.permutation(layout, 4, 16)
    spans_of = [mb.layout.make(layout, cp_size=4).spans(rank, 16) for rank in range(4)]
    for i, j in product(range(4), range(4)):
        seen = [[key <= query for key in positions[j]] for query in positions[i]]
        assert cover(Causal(), spans_of[i], spans_of[j]) == truth(seen)


def test_cover_is_ordered_so_that_and_is_min_and_or_is_max():
    assert Cover.EMPTY < Cover.PARTIAL < Cover.FULL


@pytest.mark.parametrize("mask", [Full(), Causal(), Mask()])
def test_a_mask_has_no_truth_value(mask):
    with pytest.raises(TypeError, match="combine masks with & and"):
        bool(mask)


def test_masks_are_values():
    assert Causal() == Causal()
    assert Causal() != Full()
    assert repr(Causal()) == "Causal()"
