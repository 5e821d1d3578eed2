"""Chains of pieces: against the position and the owner of every row."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pieces import Pieces

import megatron_burst as mb
from megatron_burst.layout import Layout, Piece, Span, chains


def by_hand(layout, bounds):
    """Every piece, by going through the rows of every rank one after the other."""
    found = []
    for rank in range(layout.cp_size):
        before = None
        for row, position in enumerate(layout.positions(rank, bounds[-1]).tolist()):
            document = next(i for i, (a, b) in enumerate(pairwise(bounds)) if a <= position < b)
            if before == (position - 1, document):
                found[-1] = found[-1]._replace(length=found[-1].length + 1)
            else:
                found.append(Piece(rank, row, 1, document, position))
            before = (position, document)
    return sorted(found, key=lambda piece: piece.position)


def check(layout, bounds):
    found, wanted = chains(layout, bounds[-1], bounds), by_hand(layout, bounds)
    assert [Piece(*row) for row in found.table.tolist()] == wanted
    assert (found.documents, found.ranks) == (len(bounds) - 1, layout.cp_size)
    documents = [piece.document for piece in wanted]
    assert found.begins.tolist() == [documents.index(d) == i for i, d in enumerate(documents)]
    back = found.backward()
    assert back.begins.tolist() == found.ends.tolist()[::-1]
    assert back.table.tolist() == found.table.tolist()[::-1]
    for rank in range(layout.cp_size):
        mine = [i for i, piece in enumerate(wanted) if piece.rank == rank]
        mine.sort(key=lambda i: wanted[i].first)
        assert found.of(rank).tolist() == mine
        assert found.order[mine].tolist() == list(range(len(mine)))


@given(st.data(), st.integers(1, 5), st.sampled_from(("contiguous", "zigzag", "documents")))
def test_layouts(data, ranks, name):
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    bounds = [0, *(np.cumsum(lengths) * 2 * ranks).tolist()]
    given = {"cu_seqlens": bounds} if name == "documents" else {}
    layout = mb.layout.make("zigzag" if given else name, cp_size=ranks, **given)
    check(layout, bounds)
    other = data.draw(st.lists(st.integers(0, bounds[-1]), max_size=5))
    check(layout, [0, *sorted(other), bounds[-1]])  # documents that the layout does not know


@given(st.data(), st.integers(1, 6))
def test_balanced(data, ranks):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    lengths.append(-sum(lengths) % ranks or ranks)
    per_node = data.draw(st.sampled_from([n for n in (1, 2, 3) if ranks % n == 0]))
    bounds = [0, *np.cumsum(lengths).tolist()]
    check(mb.layout.make("balanced", cp_size=ranks, cu_seqlens=bounds, per_node=per_node), bounds)


@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_pieces_in_any_order(data, ranks, rows):
    total = ranks * rows
    cuts = st.sets(st.integers(1, total))
    cuts = sorted({0, total, *range(0, total, rows), *data.draw(cuts)})
    runs = data.draw(st.permutations(list(pairwise(cuts))))
    positions = np.concatenate([np.arange(a, b) for a, b in runs]).reshape(ranks, -1)
    layout = Pieces([[(p, p + 1) for p in mine.tolist()] for mine in positions])
    check(layout, sorted({0, total, *data.draw(st.sets(st.integers(1, total), max_size=4))}))


def test_zigzag_goes_up_and_back():
    actual = chains(mb.layout.make("zigzag", cp_size=3), 12)
    assert [Piece(*row) for row in actual.table.tolist()] == [
        Piece(0, 0, 2, 0, 0),
        Piece(1, 0, 2, 0, 2),
        Piece(2, 0, 4, 0, 4),  # the turn
        Piece(1, 2, 2, 0, 8),
        Piece(0, 2, 2, 0, 10),
    ]


@pytest.mark.parametrize(
    ("layout", "bounds", "message"),
    [
        (mb.layout.make("zigzag", cp_size=2), [0, 4], "cu_seqlens ends at 4, but seq_len is 8"),
        (mb.layout.make("striped", cp_size=2), None, "layout striped: every row's predecessor"),
        (mb.layout.make("block_striped", cp_size=2, block=2), None, "layout block_striped"),
        ("zigzag", None, "layout must be made by mb.layout.make, got 'zigzag'"),
        (mb.layout.make("zigzag", cp_size=2), [4, 8], "cu_seqlens must be integers"),
        (mb.layout.make("zigzag", cp_size=3), None, "seq_len: layout zigzag over 3 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(layout, bounds, message):
    with pytest.raises(ValueError, match=message):
        chains(layout, 8, bounds)


@pytest.mark.parametrize(
    ("length", "message"),
    [(None, "seq_len must be an integer, got None"), (7.0, "seq_len must be an integer, got 7.0"),
     (-4, "seq_len: layout zigzag over 2 ranks needs a positive multiple of 4, got -4")],
)  # fmt: skip
def test_what_is_no_length_is_named(length, message):
    with pytest.raises(ValueError, match=message):
        chains(mb.layout.make("zigzag", cp_size=2), length)


def test_spans_with_strides_are_refused():
    class Thirds(Layout):
        name = "thirds"

        def _spans(self, rank, seq_len):
            return (Span(rank, self.cp_size, seq_len // self.cp_size),)

    with pytest.raises(ValueError, match="layout thirds: every row's predecessor"):
        chains(Thirds(3), 12)


def test_one_rank_holds_one_piece_of_each_document():
    for name in ("contiguous", "zigzag", "striped"):
        actual = chains(mb.layout.make(name, cp_size=1), 8, [0, 3, 3, 8])
        assert actual.table.tolist() == [[0, 0, 3, 0, 0], [0, 3, 5, 2, 3]]


def test_pieces_of_a_tree_continue_the_end_of_the_segment_above():
    tree = mb.masks.Tree([8, 8, 5, 4, 5, 8, 8, 0])  # rows 2..4 branch from row 1, as 5 and 6 do
    actual = chains(mb.layout.make("contiguous", cp_size=2), 8, tree=tree)
    #  positions          0  2  3  4  5  7 (padding)
    assert actual.table[:, 4].tolist() == [0, 2, 3, 4, 5, 7]
    assert actual.before.tolist() == [-1, 0, 1, 1, 0, -1]
    assert actual.begins.tolist() == [True, False, False, False, False, True]
    assert actual.ends.tolist() == [False, False, True, True, True, True]
    with pytest.raises(ValueError, match="backward is not supported for the pieces of a tree"):
        actual.backward()
    layout = mb.layout.make("contiguous", cp_size=2)
    with pytest.raises(ValueError, match="tree: mutually exclusive with cu_seqlens"):
        chains(layout, 8, [0, 8], tree=tree)
    with pytest.raises(ValueError, match="tree has 8 rows, but seq_len is 10"):
        chains(layout, 10, tree=tree)
