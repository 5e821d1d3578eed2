"""Tiles: together they are exactly the visible pairs, each once, in shapes stock kernels know."""

from itertools import product

import oracle
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst.kernels.tiles import tiles
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Full

LAYOUTS = ("contiguous", "zigzag", "striped")


def painted(work, rows, columns):
    """int [rows, columns]: how often each pair is in a tile."""
    count = torch.zeros(rows, columns, dtype=torch.int64)
    for tile in work:
        height = tile.rows.stop - tile.rows.start
        width = tile.columns.stop - tile.columns.start
        assert height > 0
        assert width > 0
        assert not tile.triangle or height == width
        part = torch.ones(height, width, dtype=torch.int64)
        count[tile.rows, tile.columns] += part.tril() if tile.triangle else part
    return count


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tiles_of_every_pair_of_ranks_are_the_dense_mask(ranks, layout, mask):
    length = 12 * ranks
    seen = oracle.visible(mask, length)
    positions = oracle.permutation(layout, ranks, length)
    spans = [mb.layout.make(layout, cp_size=ranks).spans(r, length) for r in range(ranks)]
    rule = {"full": Full(), "causal": Causal()}[mask]
    for i, j in product(range(ranks), range(ranks)):
        wanted = seen[positions[i]][:, positions[j]]
        assert torch.equal(painted(tiles(rule, spans[i], spans[j]), 12, 12), wanted.long())


starts, lengths = st.integers(0, 30), st.integers(1, 7)


@given(st.integers(1, 4), starts, starts, lengths, lengths)
def test_tiles_of_spans_of_different_lengths(stride, q_start, k_start, rows, columns):
    q_span, k_span = Span(q_start, stride, rows), Span(k_start, stride, columns)
    wanted = [[k <= q for k in k_span.positions()] for q in q_span.positions()]
    got = painted(tiles(Causal(), [q_span], [k_span]), rows, columns)
    assert torch.equal(got, torch.tensor(wanted).long())


shards = st.lists(st.builds(Span, st.integers(0, 9), st.just(1), st.integers(1, 4)), min_size=1)


@example([Span(9, 1, 2), Span(0, 1, 2), Span(8, 1, 2)], [Span(5, 1, 2)])
@given(shards, shards)
def test_joined_tiles_still_paint_every_pair_once(q_spans, k_spans):
    """Spans in any order: rectangles that follow each other need not touch."""
    q = [p for span in q_spans for p in span.positions().tolist()]
    k = [p for span in k_spans for p in span.positions().tolist()]
    wanted = torch.tensor([[int(key <= query) for key in k] for query in q])
    assert torch.equal(painted(tiles(Causal(), q_spans, k_spans), len(q), len(k)), wanted)


def test_zigzag_makes_few_calls():
    """Own shard: two triangles and the square between them; others: one rectangle each."""
    spans = [mb.layout.make("zigzag", cp_size=2).spans(rank, 16) for rank in (0, 1)]
    own = tiles(Causal(), spans[0], spans[0])
    assert sorted(tile.triangle for tile in own) == [False, True, True]
    ahead, behind = tiles(Causal(), spans[1], spans[0]), tiles(Causal(), spans[0], spans[1])
    assert ahead == ((slice(0, 8), slice(0, 4), False),)
    assert behind == ((slice(4, 8), slice(0, 8), False),)


def test_a_full_pair_is_one_call():
    spans = mb.layout.make("zigzag", cp_size=2).spans(0, 16)
    assert tiles(Full(), spans, spans) == ((slice(0, 8), slice(0, 8), False),)


def test_what_is_no_triangle_is_refused_with_the_kernel_that_takes_it():
    with pytest.raises(ValueError, match=r"mask: Causal\(\) over spans .* kernel='reference'"):
        tiles(Causal(), [Span(0, 1, 4)], [Span(0, 2, 4)])
