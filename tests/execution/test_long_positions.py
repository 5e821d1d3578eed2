"""Positions and numbers of pairs of sequences of 20 million and of 2^33 tokens.

They are compared with arithmetic in Python's unbounded integers.
"""

import itertools

import numpy as np
import pytest

import megatron_burst as mb
from megatron_burst.autotune.pair_counts import pairs_seen
from megatron_burst.layout import Span
from megatron_burst.layout.balanced import DocumentCosts, document_pairs
from megatron_burst.masks import Documents, Full, Window
from megatron_burst.masks.base import Cover
from megatron_burst.packing import Work
from megatron_burst.plugins.tools.show.balance import imbalance_of
from megatron_burst.schedule import rings
from megatron_burst.schedule.cost import visible_pairs
from megatron_burst.schedule.demand import visibility_of
from megatron_burst.schedule.tables import Grid

LENGTHS = (20 * 2**20, 2**33)
RANKS = 8


def layouts(length):
    yield from (mb.layout.make(name, cp_size=RANKS) for name in ("contiguous", "striped", "zigzag"))
    yield mb.layout.make("block_striped", cp_size=RANKS, block=1024)
    ends = [0, length // 2 + 4, length]
    yield mb.layout.make("zigzag", cp_size=RANKS, cu_seqlens=[0, length // 2, length])
    yield mb.layout.make("balanced", cp_size=RANKS, cu_seqlens=ends)


def each(length):
    return [
        pytest.param(layout, length, id=f"{layout.name} {length}") for layout in layouts(length)
    ]


CASES = [case for length in LENGTHS for case in each(length)]


@pytest.mark.parametrize(("layout", "length"), CASES)
def test_ranks_hold_every_position_once(layout, length):
    spans = [span for rank in range(RANKS) for span in layout.spans(rank, length)]
    assert sum(span.length for span in spans) == length
    assert max(span.last for span in spans) == length - 1
    exact = [tuple(map(int, span)) for span in spans]
    total = sum(first * n + stride * (n * (n - 1) // 2) for first, stride, n in exact)
    assert total == length * (length - 1) // 2
    for a, b in itertools.combinations(spans, 2):
        apart = a.last < b.start or b.last < a.start
        assert apart or (a.stride == b.stride > 1 and (a.start - b.start) % a.stride)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["contiguous", "striped", "zigzag"])
def test_numbers_of_positions(name, length):
    ranks = length // 64  # 64 rows each
    layout, rank = mb.layout.make(name, cp_size=ranks), ranks - 3
    found = layout.positions(rank, length)
    half = 32 * rank, 32 * (2 * ranks - 1 - rank)
    by_hand = {
        "contiguous": [64 * rank + i for i in range(64)],
        "striped": [rank + ranks * i for i in range(64)],
        "zigzag": [first + i for first in half for i in range(32)],
    }
    assert found.dtype == np.int64
    assert found.tolist() == by_hand[name]


@pytest.mark.parametrize(("layout", "length"), CASES)
def test_pairs_of_all_shards(layout, length):
    spans = [layout.spans(rank, length) for rank in range(RANKS)]
    window, cut = 4096, length // 2
    for mask, pairs in (
        (mb.masks.Causal(), length * (length + 1) // 2),
        (Full(), length**2),
        (Window(window - 1, 0), length * window - window * (window - 1) // 2),
        (Documents((0, cut, length)), cut**2 + (length - cut) ** 2),
    ):
        assert pairs_seen(mask, spans).sum() == pytest.approx(pairs, rel=1e-13)


def test_pairs_of_one_rank():
    for length in (2**31, 2**33):
        found = pairs_seen(mb.masks.Causal(), [[Span(0, 1, length)]])
        assert found.tolist() == [[pytest.approx(length * (length + 1) // 2, rel=1e-13)]]


def test_pairs_of_two_spans_are_counted_exactly():
    far, n = 2**32, 2**32 + 6
    late, early = [Span(far + n, 1, n)], [Span(0, 1, n)]
    assert visible_pairs(mb.masks.Causal(), late, early) == n * n > 2**63
    assert visible_pairs(mb.masks.Causal(), early, late) == 0
    here = [Span(2**33, 1, 1000)], [Span(2**33 - 10, 1, 20)]
    assert visible_pairs(mb.masks.Causal(), *here) == sum(min(11 + i, 20) for i in range(1000))
    assert visible_pairs(Window(3, 0), *here) == sum(4 for i in range(10)) + 3 + 2 + 1


def test_masks_at_far_positions():
    at = 2**33 + np.arange(-2, 3)
    see = [[1 if k <= q else 0 for k in range(5)] for q in range(5)]
    assert mb.masks.Causal().visible(at[:, None], at).astype(int).tolist() == see
    window = [[1 if q - 1 <= k <= q else 0 for k in range(5)] for q in range(5)]
    assert Window(1, 0).visible(at[:, None], at).astype(int).tolist() == window
    apart = [[1 if (q < 2) == (k < 2) else 0 for k in range(5)] for q in range(5)]
    documents = Documents((0, 2**33, 2**34))
    assert documents.visible(at[:, None], at).astype(int).tolist() == apart
    late, early = Span(2**33, 1, 2**20), Span(0, 1, 2**20)
    covers = [mask.cover(late, early) for mask in (mb.masks.Causal(), Window(9, 0), documents)]
    assert covers == [Cover.FULL, Cover.EMPTY, Cover.EMPTY]


@pytest.mark.parametrize(("layout", "length"), CASES)
def test_schedules_carry_every_row(layout, length):
    """Rows of a shard that other ranks see under a causal mask, counted by hand."""
    spans = [layout.spans(rank, length) for rank in range(RANKS)]
    wants = visibility_of(mb.masks.Causal(), spans, spans)
    assert wants.keys.rows.dtype == np.int64
    assert wants.keys.rows.sum() == length
    if layout.name == "contiguous":
        seen = rings.forward("ring", Grid(1, RANKS), visibility=wants).tables.pairs
        assert len(seen.query) == RANKS * (RANKS + 1) // 2


def test_imbalance_of_more_pairs_than_64_bits():
    schedule = rings.forward("ring", Grid(1, 4))
    pairs = np.full((4, 4), 2**62)
    assert imbalance_of(schedule, pairs) == 1.0


@pytest.mark.parametrize("length", LENGTHS)
def test_pairs_of_documents(length):
    causal, all_ = length * (length + 1) // 2, length**2
    assert document_pairs([length, 3]).tolist() == [causal, 6]
    assert document_pairs([length, 3], (None, None)).tolist() == [all_, 9]
    assert document_pairs([length], (4095, 0)).tolist() == [4096 * length - 4096 * 4095 // 2]
    costs = DocumentCosts([length, length], [(None, 0)] * 3 + [(4095, 0)], padding=[1])
    assert costs.whole == [3 * causal + 4096 * length - 4096 * 4095 // 2, 0]


def test_layout_balanced_of_long_documents():
    for length in LENGTHS:
        ends = [0, length // 2 + 4, length]
        layout = mb.layout.make("balanced", cp_size=RANKS, cu_seqlens=ends)
        assert sum(layout.pairs) == sum(n * (n + 1) // 2 for n in np.diff(ends).tolist())
        assert layout.balance == pytest.approx(1, abs=1e-3)


def test_work_of_a_step_that_64_bits_do_not_hold_is_refused():
    work = Work(windows=((None, 0, 80),))
    assert work.attention([20 * 2**20]).tolist() == [80 * 20 * 2**20 * (20 * 2**20 + 1) // 2]
    with pytest.raises(
        ValueError, match=r"1000 documents of up to 20971520 tokens have more pairs"
    ):
        work.attention([20 * 2**20] * 1000)
    assert len(Work(windows=((4095, 0, 80),)).attention([20 * 2**20] * 1000)) == 1000
