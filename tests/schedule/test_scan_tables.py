"""Tables of hops: every rank ends with the state that enters each of its pieces, by every
algorithm, and sends only what it has."""

from collections import Counter

import numpy as np
import pytest
import scan_oracle
from hypothesis import given
from hypothesis import strategies as st
from pieces import Pieces

import megatron_burst as mb
from megatron_burst.layout import chains
from megatron_burst.schedule.scans import SCANS
from megatron_burst.schedule.scans.hops import (
    ALL_BLOCKS,
    MAP,
    STATE,
    Hops,
    Task,
    messages_of,
)
from megatron_burst.schedule.topology import Topology

GRIDS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)]
GRIDS.append((8, 8))


@pytest.mark.parametrize("algorithm", SCANS)
@pytest.mark.parametrize(("ranks", "per_node"), GRIDS)
def test_every_piece_gets_its_state(algorithm, ranks, per_node):
    for layout, bounds in scan_oracle.cases(ranks, per_node):
        forward = chains(layout, bounds[-1], bounds)
        for actual in (forward, forward.backward()):
            for blocks in (1, 3, 4):
                hops = SCANS[algorithm](Task(actual, Topology(ranks, per_node), blocks))
                scan_oracle.check(hops, scan_oracle.Problem(actual, blocks))


@given(st.data(), st.sampled_from(sorted(SCANS)), st.sampled_from(GRIDS), st.integers(1, 5))
def test_pieces_in_any_order(data, algorithm, grid, blocks):
    """Rank numbers that go up and down, with several pieces on each and documents anywhere."""
    ranks, _ = grid
    each = data.draw(st.integers(1, 3))
    order = data.draw(st.permutations(range(ranks * each)))
    layout = Pieces([[(p, p + 1) for p in order[r::ranks]] for r in range(ranks)])
    total = ranks * each
    inside = data.draw(st.sets(st.integers(1, total), max_size=3))
    actual = chains(layout, total, sorted({0, total, *inside}))
    hops = SCANS[algorithm](Task(actual, Topology(*grid), blocks))
    scan_oracle.check(hops, scan_oracle.Problem(actual, blocks))


def rows(hops):
    return list(zip(*(column.tolist() for column in hops), strict=True))


def made(algorithm, ranks, per_node, blocks=1, layout="contiguous", bounds=None):
    length = 2 * ranks if bounds is None else bounds[-1]
    found = chains(mb.layout.make(layout, cp_size=ranks), length, bounds)
    return SCANS[algorithm](Task(found, Topology(ranks, per_node), blocks))


def test_zigzag_by_hand():
    """Three ranks, pieces 0 1 2 1 0: up and back, the turn costs nothing."""
    hops = [(1, STATE), (2, STATE), (3, STATE), (4, STATE)]
    path = [(0, 1), (1, 2), (2, 1), (1, 0)]
    expected = [
        (i, *path[i], kind, piece, piece, ALL_BLOCKS) for i, (piece, kind) in enumerate(hops)
    ]
    assert rows(made("ring", 3, 3, layout="zigzag")) == expected
    actual = rows(made("scan", 3, 3, 2, layout="zigzag"))
    assert sorted(actual) == sorted(
        (i + b, *path[i], STATE, i + 1, i + 1, b) for i in range(4) for b in (0, 1)
    )


def test_all_gather_by_hand():
    """On one node: the first sends the state after it, the last nothing."""
    assert sorted(rows(made("all_gather", 3, 3))) == [
        (0, 0, 1, STATE, 1, 1, ALL_BLOCKS),
        (0, 0, 2, STATE, 1, 1, ALL_BLOCKS),
        (0, 1, 2, MAP, 1, 1, ALL_BLOCKS),
    ]


def test_a_map_crosses_to_a_node_once():
    hops = made("all_gather", 8, 4)
    between = hops.source // 4 != hops.destination // 4
    crossing = Counter(
        zip(hops.source[between].tolist(), hops.first[between].tolist(), strict=True)
    )
    assert set(crossing.values()) == {1}
    assert hops.destination[between].tolist() == [4, 5, 6, 7]  # in turn by source
    assert set(hops.round.tolist()) == {0, 1}
    assert not hops.round[between].any()
    assert set(made("all_gather", 8, 1).round.tolist()) == {0}


def test_two_level_by_hand():
    """Two nodes of two, two blocks: a lane each."""
    assert sorted(rows(made("two_level", 4, 2, 2))) == [
        (0, 0, 1, STATE, 1, 1, 1),  # what rank 1 needs to pass block 1 on
        (0, 1, 0, MAP, 1, 1, 0),
        (0, 2, 3, MAP, 2, 2, 1),
        (1, 0, 1, STATE, 1, 1, 0),
        (1, 0, 2, STATE, 2, 2, 0),  # between nodes, both at once
        (1, 1, 3, STATE, 2, 2, 1),
        (2, 2, 3, STATE, 3, 3, 0),
        (2, 3, 2, STATE, 2, 2, 1),
    ]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_two_levels_of_single_ranks_are_a_scan(layout):
    scan, two = (made(name, 5, 1, 3, layout) for name in ("scan", "two_level"))
    assert sorted(rows(scan)) == sorted(rows(two))


@pytest.mark.parametrize(
    ("layout", "wanted"), [("contiguous", [2, 2, 2, 0]), ("zigzag", [2, 4, 4, 2])]
)
def test_two_level_loads_all_nics_alike(layout, wanted):
    """Four nodes of four, eight blocks: each rank sends two of them to the next node."""
    hops = made("two_level", 16, 4, 8, layout)
    between = hops.source // 4 != hops.destination // 4
    sent = np.bincount(hops.source[between], minlength=16).reshape(4, 4)
    assert sent.tolist() == [[blocks] * 4 for blocks in wanted]


def test_a_document_in_one_node_stays_there():
    for name in SCANS:
        hops = made(name, 8, 4, 4, bounds=[0, 8, 16])
        assert len(hops)
        assert (hops.source // 4 == hops.destination // 4).all()


def test_maps_of_few_pieces_in_one_node_go_straight():
    """Four pieces: six maps, or states, in one round; of five each block goes by its lane."""
    few = made("two_level", 8, 8, 8, bounds=[0, 8, 10, 12, 14, 16])
    assert sorted(few.block) == [ALL_BLOCKS] * 6
    assert not few.round.any()
    many = made("two_level", 8, 8, 8, bounds=[0, 10, 12, 14, 16])
    assert sorted(set(many.block.tolist())) == list(range(8))
    assert set(many.round.tolist()) == {0, 1}


def test_rounds_follow_the_longest_chain():
    """Four nodes of two, five blocks: three waves of two lanes."""
    for name, expected in (("ring", 14), ("scan", 14 + 4), ("two_level", 1 + 6 + 2 + 1)):
        assert made(name, 8, 2, 5, "zigzag").round.max() + 1 == expected, name


def test_one_rank_sends_nothing():
    for name in SCANS:
        assert len(made(name, 1, 1, 2, bounds=[0, 1, 4])) == 0


@pytest.mark.parametrize("ranks", [3, 1000], ids=["counted", "sorted"])
def test_hops_of_a_round_between_two_ranks_are_a_message(ranks):
    """Few ranks are counted, and many are sorted."""
    draw = np.random.default_rng(0)
    rounds = np.sort(draw.integers(0, 4, 60))
    source, destination, *rest = draw.integers(0, ranks, (6, 60))
    rounds[-1] = rounds[-2]
    source[-1], destination[-1] = source[-2], destination[-2]  # one message has two hops
    hops = Hops(rounds, source, destination, *rest)
    messages, index = messages_of(hops)
    keys = list(zip(rounds.tolist(), source.tolist(), destination.tolist(), strict=True))
    expected = sorted(set(keys))
    assert [tuple(column) for column in messages.T.tolist()] == expected
    assert index.tolist() == [expected.index(key) for key in keys]
