"""Routes of rows: what arrives, against the position of every row."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pieces import Pieces

import megatron_burst as mb
from megatron_burst.layout import Layout, Span, chains, preceding, relayout
from megatron_burst.layout.routes import preceding_and_most

NAMES = ("contiguous", "zigzag", "striped", "documents", "balanced", "pieces")


def shards(data, total, ranks):
    """Runs of positions in any order, equally many positions on each rank."""
    cuts = {0, total, *data.draw(st.sets(st.integers(0, total), max_size=6))}
    runs = data.draw(st.permutations(list(pairwise(sorted(cuts)))))
    positions = np.concatenate([np.arange(a, b) for a, b in runs]).reshape(ranks, -1)
    found = []
    for mine in positions:
        edge = np.flatnonzero(np.diff(mine) != 1) + 1
        found.append([(p[0], p[-1] + 1) for p in np.split(mine, edge)])
    return found


def drawn(data, name, ranks, bounds):
    """A layout of that name over these documents; all of their lengths are multiples of 2 ranks."""
    if name == "pieces":
        return Pieces(shards(data, bounds[-1], ranks))
    given = {"cu_seqlens": bounds} if name in ("documents", "balanced") else {}
    name = "zigzag" if name == "documents" else name
    return mb.layout.make(name, cp_size=ranks, **given)


def documents(data, ranks):
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    return [0, *(np.cumsum(lengths) * 2 * ranks).tolist()]


def arrivals(routes, held):
    """What each rank has after the exchange of its rows; 0 where nobody sends one."""
    results = [np.zeros(route.rows, dtype=int) for route in routes]
    for source, route in enumerate(routes):
        for rank, rows in enumerate(route.sends):
            landing = routes[rank].receives[source]
            assert len(landing) == len(rows)
            results[rank][landing] = held[source][rows]
    return results


@given(st.data(), st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(1, 5))
def test_rows_in_another_layout(data, first, second, ranks):
    bounds = documents(data, ranks)
    source, target = (drawn(data, name, ranks, bounds) for name in (first, second))
    total = bounds[-1]
    routes = [relayout(source, target, total, rank) for rank in range(ranks)]
    held = [source.positions(rank, total) for rank in range(ranks)]
    for rank, got in enumerate(arrivals(routes, held)):
        assert got.tolist() == target.positions(rank, total).tolist()
        landing = np.sort(np.concatenate(routes[rank].receives))
        assert landing.tolist() == list(range(routes[rank].rows))


@given(st.data(), st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9))
def test_rows_before_each_piece(data, name, ranks, width):
    bounds = documents(data, ranks)
    total = bounds[-1]
    name = "zigzag" if name == "striped" else name
    layout = drawn(data, name, ranks, bounds)
    inside = data.draw(st.sets(st.integers(1, total), max_size=4))  # documents it does not know
    bounds = sorted({*bounds, *inside})
    table = chains(layout, total, bounds)
    routes = [preceding(table, width, rank) for rank in range(ranks)]
    held = [layout.positions(rank, total) + 1 for rank in range(ranks)]
    sent = [len(x) for r, route in enumerate(routes) for p, x in enumerate(route.sends) if p != r]
    for rank in range(ranks):
        assert preceding_and_most(table, width, rank)[1] == max(sent, default=0)
    for rank, got in enumerate(arrivals(routes, held)):
        expected = []
        for position in table.table[table.of(rank), 4]:
            start = max(b for b in bounds if b <= position)
            expected += [p + 1 if p >= start else 0 for p in range(position - width + 1, position)]
        assert got.tolist() == expected


def test_by_hand():
    """Zigzag on two ranks: pieces 0, 3 and 1 to 2 of four positions each."""
    layout = mb.layout.make("zigzag", cp_size=2)
    table = chains(layout, 16)
    assert [rows.tolist() for rows in preceding(table, 3, 0).sends] == [[], [2, 3]]
    route = preceding(table, 3, 1)
    assert [rows.tolist() for rows in route.sends] == [[6, 7], []]
    assert [rows.tolist() for rows in route.receives] == [[0, 1], []]
    assert preceding(table, 3, 0).receives[1].tolist() == [2, 3]  # nothing precedes the first piece
    other = relayout(layout, mb.layout.make("contiguous", cp_size=2), 16, 0)
    assert [rows.tolist() for rows in other.sends] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [rows.tolist() for rows in other.receives] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_that_leave():
    """From zigzag to contiguous on two nodes of two, eight positions a rank."""
    zigzag, contiguous = (mb.layout.make(n, cp_size=4) for n in ("zigzag", "contiguous"))
    counts = [relayout(zigzag, contiguous, 32, rank).leaving(rank, 2) for rank in range(4)]
    assert counts == [(0, 4), (4, 4), (0, 4), (4, 4)]


def test_layouts_with_other_strides():
    """Every second position, and every third."""

    class Stride(Layout):
        name = "stride"

        def _spans(self, rank, seq_len):
            return tuple(Span(a, 3, 2) for a in ((0, 1, 2) if rank == 0 else (6, 7, 8)))

    source, target = mb.layout.make("striped", cp_size=2), Stride(2)
    routes = [relayout(source, target, 12, rank) for rank in (0, 1)]
    got = arrivals(routes, [source.positions(rank, 12) for rank in (0, 1)])
    assert [g.tolist() for g in got] == [target.positions(rank, 12).tolist() for rank in (0, 1)]


ZIGZAG = mb.layout.make("zigzag", cp_size=2)


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (preceding, (chains(ZIGZAG, 8), 0, 0), "width must be at least 1, got 0"),
        (preceding, (chains(ZIGZAG, 8), 4, 2), "rank must be in 0..1, got 2"),
        (relayout, (ZIGZAG, "zigzag", 8, 0), "target must be a layout"),
        (relayout, (ZIGZAG, mb.layout.make("zigzag", cp_size=4), 8, 0), "target has 4 ranks"),
        (relayout, (ZIGZAG, ZIGZAG, 6, 0), "seq_len: layout zigzag"),
        (relayout, (ZIGZAG, ZIGZAG, 8, -1), "rank must be in 0..1, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(function, given, message):
    with pytest.raises(ValueError, match=message):
        function(*given)
