"""The section on 256 ranks and 8M tokens: what it says comes from the tables and formulas."""

import pytest

from benchmarks.linear import simulated


@pytest.fixture(scope="module")
def rows():
    return {(row.name, row.layout): row for row in simulated.scans()}


def test_bytes_of_the_busiest_rank(rows):
    """A state is 4 heads x 256 x 512 in fp32, a map has 4 x 256 factors besides."""
    state, one = 2**21, 2**21 + 4096
    assert simulated.states().state == state
    assert rows["scan (ZeCO)", "contiguous"].sent == (state, state)
    assert rows["ring (LASP)", "zigzag"].sent == (2 * state, state)
    assert rows["two_level", "contiguous"].sent[1] == state // 8
    assert rows["two_level", "zigzag"].sent[1] == 2 * state // 8
    # Rank 0 sends states, its neighbours maps, one to each other node.
    assert rows["all_gather (LASP-2)", "contiguous"].sent[1] == 31 * one


def test_the_order_of_the_algorithms(rows):
    for layout in simulated.LAYOUTS:
        names = ("two_level", "scan (ZeCO)", "all_gather (LASP-2)", "ring (LASP)")
        seconds = [rows[name, layout].seconds for name in names]
        assert seconds == sorted(seconds)
    assert simulated.collective().seconds < rows["all_gather (LASP-2)", "contiguous"].seconds
    assert simulated.collective().seconds > rows["scan (ZeCO)", "contiguous"].seconds


def test_an_all_to_all_by_hand():
    """32K rows of 10 KiB and 4 KiB: 248 messages of a 256th to other nodes, twice."""
    size = 32768 * (10240 + 4096) // 256
    found = simulated.heads_exchanged()
    assert found.sent == (7 * size, 248 * size)
    assert found.seconds == pytest.approx(248 * (2 * 10e-6 + size / 25e9))


def test_the_section_names_what_it_assumes():
    text = simulated.section()
    for said in ("Simulated, not measured", "256 ranks on 32 nodes", "8M tokens", "GLA",
                 "25 GB/s", "`two_level`", "all_gather (LASP-2)"):  # fmt: skip
        assert said in text
    assert text.count("\n| ") == 11  # a head and ten ways
