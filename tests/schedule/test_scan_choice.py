"""Bytes of scans by formula, their seconds by hand and by a slow simulator, and what is chosen."""

import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst.layout import chains
from megatron_burst.schedule.scans import SCANS
from megatron_burst.schedule.scans.choice import blocks_for, choose, links_of
from megatron_burst.schedule.scans.hops import Task
from megatron_burst.schedule.scans.sizes import ScanSizes
from megatron_burst.schedule.scans.timing import (
    NOMINAL,
    Links,
    scan_seconds,
)
from megatron_burst.schedule.topology import Topology

ELEMENTS = {"none": 0, "scalar": 1, "vector": 16, "matrix": 16 * 16}  # of a transition per head
STATE = 2 * 4 * 16 * 8 * 4


def sizes(form="scalar"):
    return ScanSizes(2, 4, 16, 8, form)


def made(algorithm, ranks, per_node, blocks=1, layout="contiguous", bounds=None):
    """(table, chains, topology)"""
    found = chains(mb.layout.make(layout, cp_size=ranks), 4 * ranks, bounds)
    topology = Topology(ranks, per_node)
    return SCANS[algorithm](Task(found, topology, blocks)), found, topology


def sent(algorithm, ranks, per_node, form, blocks=1, layout="contiguous"):
    hops, _, topology = made(algorithm, ranks, per_node, blocks, layout)
    return sizes(form).sent(hops, blocks, topology).tolist()


@pytest.mark.parametrize("form", ELEMENTS)
def test_states_and_maps(form):
    assert sizes(form).state == STATE
    assert sizes(form).map == STATE + 2 * 4 * ELEMENTS[form] * 4


@pytest.mark.parametrize("algorithm", ["ring", "scan"])
def test_states_pass_once_up_and_once_back(algorithm):
    """Whatever the transitions are: only states travel, all of their blocks."""
    for form in ELEMENTS:
        assert sent(algorithm, 4, 4, form, 8) == [[STATE, 0]] * 3 + [[0, 0]]
        assert sent(algorithm, 4, 2, form, 8, "zigzag") == [
            [STATE, 0], [STATE, STATE], [STATE, STATE], [STATE, 0]
        ]  # fmt: skip


@pytest.mark.parametrize("form", ELEMENTS)
def test_all_gather_sends_maps_to_all_that_come_after(form):
    one = sizes(form).map
    assert sent("all_gather", 4, 4, form) == [[3 * STATE, 0], [2 * one, 0], [one, 0], [0, 0]]
    # Over two nodes to one rank there, which hands it to the other.
    assert sent("all_gather", 4, 2, form) == [
        [STATE, STATE], [0, one], [one + STATE, 0], [one, 0]
    ]  # fmt: skip


@pytest.mark.parametrize("form", ELEMENTS)
def test_two_level_sends_two_states_within_nodes_and_one_between(form):
    """Blocks are heads, so a block of a map is a share of its transition too."""
    block, part = STATE // 4, sizes(form).map // 4
    first = [[3 * block + 3 * block, block]] + [[3 * part + 2 * block, block]] * 3
    middle = [[3 * part + 3 * block, block]] * 4
    last = [[3 * part + 3 * block, 0]] * 3 + [[3 * block, 0]]
    assert sent("two_level", 12, 4, form, 4) == first + middle + last


def test_blocks_of_maps_by_columns_bring_the_transition_each_time():
    """Four heads in eight blocks: each head's columns in two, its transition with both."""
    hops, _, _ = made("two_level", 8, 8, 8)
    for form, elements in ELEMENTS.items():
        actual = sizes(form).of(hops, 8)
        expected = STATE // 8 + np.where(hops.kind, 2 * elements * 4, 0)
        assert actual.tolist() == expected.tolist()
    rows = ScanSizes(1, 1, 16, 1, "vector").of(hops, 8)  # of rows: each has its factors
    assert rows.tolist() == np.where(hops.kind, 2 * (2 * 4), 2 * 4).tolist()


# --- seconds -------------------------------------------------------------------------------

LINKS = Links(100.0, 10.0, 1.0, 2.0, 50.0, 0.5)
ONE = ScanSizes(1, 4, 5, 5, itemsize=1)  # a state of 100 bytes


def test_seconds_by_hand():
    """Two nodes of two; each hop of 100 bytes 1 + 1 + 2 seconds within a node, 2 + 10 + 2 between;
    each round half a second to start."""
    hops, _, topology = made("ring", 4, 2)
    actual = scan_seconds(hops, topology, ONE, 1, LINKS)
    assert actual.tolist() == [2.5, 4.5 + 12.5, 4.5 + 14.5 + 2.5, 4.5 + 14.5 + 4.5]
    # In two blocks 0.5 + 1.5 within the node, 0.5 + 7 between, and 1 to fold in: rank 1 has the
    # first at 3, and has sent both at 10.5 and 18; rank 2 has the second at 19.
    hops, _, topology = made("scan", 4, 2, 2)
    actual = scan_seconds(hops, topology, ONE, 2, LINKS)
    assert actual.tolist() == [4.0, 18.0, 21.0, 22.0]


def test_what_one_rank_gets_from_many_comes_one_behind_the_other():
    hops, _, topology = made("all_gather", 4, 4)
    links = Links(100.0, 10.0, 1.0)
    assert scan_seconds(hops, topology, ONE, 1, links).tolist() == [6.0, 4.0, 4.0, 6.0]


def slow(hops, topology, state, blocks, links):
    """The same rules, message by message."""
    clock = [0.0] * topology.size
    size = state.of(hops, blocks).tolist()
    for count in sorted(set(hops.round.tolist())):
        messages = defaultdict(int)
        for i in np.flatnonzero(hops.round == count).tolist():
            messages[int(hops.source[i]), int(hops.destination[i])] += size[i]
        nic, left, takes = defaultdict(float), {}, {}
        for (a, b), volume in sorted(messages.items()):
            link = topology.link(a, b)
            rate, latency = getattr(links, link), getattr(links, f"{link}_latency")
            takes[a, b] = latency + volume / rate
            nic[a, link] += takes[a, b]
            left[a, b] = clock[a] + links.posting + nic[a, link]
        after = list(clock)
        for rank in range(topology.size):
            came = [pair for pair in messages if pair[1] == rank]
            if came:
                begin = min(clock[a] for a, _ in came) + links.posting
                busy = [
                    sum(takes[pair] for pair in came if topology.link(*pair) == link)
                    for link in ("intra", "inter")
                ]
                last = max(clock[rank] + links.posting, *(left[pair] for pair in came))
                fold = sum(messages[pair] for pair in came) / links.combine
                after[rank] = max(last, begin + max(busy)) + fold
            sends = [left[pair] for pair in messages if pair[0] == rank]
            after[rank] = max([after[rank], *sends])
        clock = after
    return clock


@given(
    st.sampled_from(sorted(SCANS)),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3), (8, 4), (8, 8)]),
    st.sampled_from(["contiguous", "zigzag"]),
    st.integers(0, 2),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(sorted(ELEMENTS)),
)
def test_the_simulator_agrees_with_a_slow_one(algorithm, grid, layout, cut, blocks, form):
    bounds = [0, *sorted({cut, 3 * grid[0] - cut, 4 * grid[0]} - {0})]
    hops, _, topology = made(algorithm, *grid, blocks, layout, bounds)
    actual = scan_seconds(hops, topology, sizes(form), blocks, LINKS)
    np.testing.assert_allclose(actual, slow(hops, topology, sizes(form), blocks, LINKS), rtol=1e-12)


# --- the choice ----------------------------------------------------------------------------

BIG, SMALL = ScanSizes(1, 16, 128, 128, "scalar"), ScanSizes(1, 4, 64, 64, "scalar")
GRIDS = [(2, 2), (8, 4), (16, 8), (32, 8)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("state", [BIG, SMALL, BIG._replace(form="matrix")])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_choice_is_nearly_the_quickest(grid, state, layout):
    """Of all algorithms with all powers of two as blocks, by the simulator."""
    actual = chains(mb.layout.make(layout, cp_size=grid[0]), 4 * grid[0])
    topology, quickest = Topology(*grid), float("inf")
    for name in SCANS:
        for blocks in 2 ** np.arange(9):
            hops = SCANS[name](Task(actual, topology, int(blocks)))
            seconds = scan_seconds(hops, topology, state, int(blocks), NOMINAL).max()
            quickest = min(quickest, seconds)
    chosen = choose(actual, topology, state)
    hops = SCANS[chosen.algorithm](Task(actual, topology, chosen.blocks))
    seconds = scan_seconds(hops, topology, state, chosen.blocks, NOMINAL).max()
    assert chosen.seconds == seconds
    assert seconds <= 1.05 * quickest
    assert chosen.blocks in state.numbers(chosen.blocks)
    assert chosen.tried[0][0] == chosen.algorithm


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_blocks_of_a_scan_are_nearly_the_best(layout):
    actual, topology = made("ring", 64, 8, layout=layout)[1:]
    for name in ("scan", "two_level"):
        seconds = {}
        for blocks in (1, 2, 4, 8, 16, 32, 64, blocks_for(name, actual, topology, BIG)):
            hops = SCANS[name](Task(actual, topology, blocks))
            seconds[blocks] = scan_seconds(hops, topology, BIG, blocks, NOMINAL).max()
        assert seconds[blocks] <= 1.01 * min(seconds.values())
    assert blocks_for("ring", actual, topology, BIG) == 1
    assert blocks_for("all_gather", actual, topology, BIG) == 1


def test_small_states_are_gathered_and_large_ones_take_all_nics():
    actual, topology = made("ring", 8, 4)[1:]
    assert choose(actual, topology, SMALL).algorithm == "all_gather"
    chosen = choose(actual, topology, BIG)
    assert (chosen.algorithm, chosen.blocks) == ("two_level", 4)
    assert chosen.describe().startswith("two_level in 4 blocks, 62 us predicted; all_gather 97.4")
    # Where every rank has a node of its own, a scan in blocks is the same and as quick.
    actual, topology = made("ring", 32, 1)[1:]
    chosen = choose(actual, topology, ScanSizes(1, 64, 128, 128, "scalar"))
    assert chosen.blocks > 1
    assert {n: s for n, _, s in chosen.tried}["scan"] == chosen.seconds


def test_other_links_give_another_choice():
    """No latency: parts as small as can be. Only latency: few messages in a row."""
    actual, topology = made("ring", 8, 4)[1:]
    free = links_of(mb.Rates(200e9, 25e9))
    assert free == Links(200e9, 25e9)
    assert blocks_for("scan", actual, topology, BIG, free) == 256
    slow = links_of(mb.Rates(200e9, 25e9, latency=1.0, posting=1.0))
    assert (slow.intra_latency, slow.inter_latency, slow.posting) == (1.0, 1.0, 1.0)
    assert blocks_for("scan", actual, topology, BIG, slow) == 1
    assert links_of(None) == NOMINAL


def test_chains_that_travel_nowhere():
    actual = chains(mb.layout.make("contiguous", cp_size=4), 16, [0, 4, 8, 12, 16])
    chosen = choose(actual, Topology(4, 2), BIG)
    assert (chosen.algorithm, chosen.blocks, chosen.seconds) == ("all_gather", 1, 0.0)
    assert blocks_for("two_level", actual, Topology(4, 2), BIG) == 1


def test_another_grid_is_refused():
    actual = made("ring", 4, 2)[1]
    with pytest.raises(ValueError, match="topology has 8 ranks, but chains has 4"):
        choose(actual, Topology(8, 2), BIG)


@pytest.mark.parametrize(("ranks", "limit"), [(64, 0.1), (1024, 2.0)])
def test_choosing_takes_little_time(ranks, limit):
    """About 5 ms and 200 ms; the limits leave room for slow machines."""
    actual, topology = made("ring", ranks, 8, layout="zigzag")[1:]
    start = time.process_time()
    choose(actual, topology, BIG)
    assert time.process_time() - start < limit
