"""Scans on 256 ranks and 8M tokens, played from their tables; `test_bench_linear` has formulas."""

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
