"""Where rows find the token after theirs: what `taken` picks, against a shifted sequence."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pieces import Pieces

import megatron_burst as mb


def shifted(layout, ends):
    """What the ranks hold after each took, of tokens numbered from 1: a list per rank."""
    total = ends[-1]
    ranks = range(layout.cp_size)
    held = [layout.positions(rank, total) + 1 for rank in ranks]
    found = [mb.layout.successors(layout, [0, *ends], rank) for rank in ranks]
    assert len({len(sent) for sent, _ in found}) == 1
    received = [own[sent] for own, (sent, _) in zip(held, found, strict=True)]
    return [
        np.concatenate([own, *received, [0]])[taken].tolist()
        for own, (_, taken) in zip(held, found, strict=True)
    ]


def by_hand(layout, ends):
    """The same from the whole sequence."""
    following = [0 if p + 1 in ends else p + 2 for p in range(ends[-1])]
    ranks = range(layout.cp_size)
    return [[following[p] for p in layout.positions(rank, ends[-1])] for rank in ranks]


def test_eight_tokens_over_two_ranks():
    layout = mb.layout.make("zigzag", cp_size=2)
    assert shifted(layout, [8]) == [[2, 3, 8, 0], [4, 5, 6, 7]]
    assert shifted(layout, [3, 8]) == [[2, 3, 8, 0], [0, 5, 6, 7]]
    layout = mb.layout.make("striped", cp_size=2)
    assert shifted(layout, [1, 6, 8]) == [[0, 4, 6, 8], [3, 5, 0, 0]]


@pytest.mark.parametrize(("name", "rows"), [("contiguous", 1), ("zigzag", 2), ("striped", 6)])
def test_only_rows_that_follow_no_neighbour_are_sent(name, rows):
    sent, _ = mb.layout.successors(mb.layout.make(name, cp_size=4), [0, 24], 1)
    assert len(sent) == rows


@st.composite
def documents(draw, total):
    inside = draw(st.sets(st.integers(1, total - 1), max_size=6)) if total > 1 else ()
    return [*sorted(inside), total]


@given(st.data(), st.sampled_from(("contiguous", "zigzag", "striped")), st.integers(1, 5))
def test_layouts_of_whole_sequences(data, name, ranks):
    layout = mb.layout.make(name, cp_size=ranks)
    ends = data.draw(documents(2 * ranks * data.draw(st.integers(1, 5))))
    assert shifted(layout, ends) == by_hand(layout, ends)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 4))
def test_documents_laid_out_one_by_one(lengths, ranks):
    ends = np.cumsum(lengths) * 2 * ranks
    layout = mb.layout.make("zigzag", cp_size=ranks, cu_seqlens=[0, *ends])
    assert shifted(layout, ends.tolist()) == by_hand(layout, ends.tolist())


@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_pieces_of_any_size_in_any_order(data, ranks, rows):
    """Shards of any pieces: also neighbours apart, and later ones first."""
    total = ranks * rows
    cuts = [0, *data.draw(documents(total))]
    order = data.draw(st.permutations(list(pairwise(cuts))))
    tokens = [p for start, stop in order for p in range(start, stop)]
    shards = [
        [(p, p + 1) for p in tokens[rank * rows : (rank + 1) * rows]] for rank in range(ranks)
    ]
    joined = [[] for _ in shards]
    for shard, runs in zip(shards, joined, strict=True):
        for start, stop in shard:
            if runs and runs[-1][1] == start and data.draw(st.booleans()):
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
    ends = data.draw(documents(total))
    assert shifted(Pieces(joined), ends) == by_hand(Pieces(joined), ends)


@pytest.mark.parametrize(
    ("lengths", "rank", "message"),
    [([0, 6], 0, "layout zigzag"), ([0, 8], 2, "rank"), ([4, 8], 0, "cu_seqlens must")],
)
def test_what_does_not_fit_is_refused(lengths, rank, message):
    with pytest.raises(ValueError, match=message):
        mb.layout.successors(mb.layout.make("zigzag", cp_size=2), lengths, rank)
