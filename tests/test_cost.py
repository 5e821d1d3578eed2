"""Bytes by formula: the numbers a plan prints and decides by, computed by hand."""

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.cost import Sizes, Traffic, backward_traffic, cheaper_side, forward_traffic
from megatron_burst.schedule import ALGORITHMS, SIDES, Grid

YES = (True, True, True)


def sizes(heads=8, kv=8, d=16, w=16, item=2, wire=4, needs=YES, tokens=10, batch=3):
    stat = 8 if item == 8 else 4
    return Sizes(tokens, batch, heads, kv, d, w, item, stat, wire, needs)


def test_one_hop_of_bf16_multi_head_by_hand():
    """30 rows, 8 heads of 16: K, V 15360 B; dK, dV in fp32 30720 B; Q, dO 15360 B with lse and
    delta 1920 B; dQ in fp32 15360 B. On two ranks everything makes one hop."""
    grid = Grid(1, 2)
    assert forward_traffic("ring", grid, 0, sizes()) == Traffic(intra=15360, inter=0)
    kv = backward_traffic("ring", grid, 0, sizes(), "kv")
    query = backward_traffic("ring", grid, 0, sizes(), "query")
    assert kv == Traffic(intra=15360 + 30720, inter=0)
    assert query == Traffic(intra=15360 + 1920 + 15360, inter=0)
    assert kv.total == 46080


head_counts = st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1), (3, 1), (16, 12)])
widths = st.sampled_from([(16, 16), (24, 16), (16, 24)])
dtypes = st.sampled_from([(2, 4), (2, 2), (4, 4), (4, 2), (8, 8), (8, 4)])
grids = st.sampled_from([(1, 1), (1, 2), (1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (3, 3)])


@given(st.sampled_from(ALGORITHMS), grids, head_counts, widths, dtypes, st.data())
def test_traffic_is_hops_times_chunk_bytes(algorithm, grid, heads, width, dtype, data):
    rank = data.draw(st.integers(0, grid[0] * grid[1] - 1))
    given_sizes = sizes(*heads, *width, *dtype)
    shape = (30, *heads, *width)
    hops = oracle.hops(algorithm, *grid, rank)
    item, wire = dtype
    stat = 8 if item == 8 else 4
    there = oracle.activation_bytes("kv", *shape, item, stat)
    got = forward_traffic(algorithm, Grid(*grid), rank, given_sizes)
    assert got == Traffic(hops["intra"] * there, hops["inter"] * there)
    for side in SIDES:
        chunk = oracle.activation_bytes(side, *shape, item, stat)
        chunk += oracle.gradient_bytes(side, *shape, wire)
        got = backward_traffic(algorithm, Grid(*grid), rank, given_sizes, side)
        assert got == Traffic(hops["intra"] * chunk, hops["inter"] * chunk)


@pytest.mark.parametrize(
    ("needs", "kv", "query"),
    [
        (YES, 30 * 4 * (16 + 24) * 4, 30 * 8 * 16 * 4),
        ((False, True, True), 30 * 4 * (16 + 24) * 4, 0),
        ((True, False, True), 30 * 4 * 24 * 4, 30 * 8 * 16 * 4),
        ((True, True, False), 30 * 4 * 16 * 4, 30 * 8 * 16 * 4),
        ((True, False, False), 0, 30 * 8 * 16 * 4),
    ],
)
def test_gradients_nobody_needs_do_not_travel(needs, kv, query):
    grid = Grid(1, 2)
    have = sizes(8, 4, 16, 24, needs=needs)
    activations = {"kv": 30 * 4 * 40 * 2, "query": 30 * 8 * 40 * 2 + 30 * 8 * 8}
    for side, wanted in (("kv", kv), ("query", query)):
        got = backward_traffic("ring", grid, 0, have, side)
        assert got.total == activations[side] + wanted
        assert have.gradients_travel(side) == (wanted > 0)


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(1, 4), Grid(2, 2), Grid(2, 4), Grid(4, 2)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("d", [8, 64, 128])
def test_the_side_inverts_where_the_formula_says(algorithm, grid, d):
    """bf16 with fp32 gradients, d_v = d: the query side wins when Hkv/Hq > 2/3 + 2/(3d)."""
    sides = set()
    for kv_heads in range(1, 49):
        wins = kv_heads / 48 > 2 / 3 + 2 / (3 * d)
        side = cheaper_side(algorithm, grid, sizes(48, kv_heads, d, d))
        assert side == ("query" if wins else "kv"), kv_heads
        sides.add(side)
    assert sides == {"kv", "query"}


@pytest.mark.parametrize(
    ("model", "heads", "kv_heads", "d", "w", "side"),
    [
        ("llama-3-8b", 32, 8, 128, 128, "kv"),
        ("llama-2-7b", 32, 32, 128, 128, "query"),
        ("multi-query", 32, 1, 128, 128, "kv"),
        ("mla with expanded heads", 128, 128, 192, 128, "query"),
    ],
)
def test_known_models_take_the_side_the_paper_says(model, heads, kv_heads, d, w, side):
    assert cheaper_side("burst", Grid(2, 4), sizes(heads, kv_heads, d, w)) == side


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(1, 2)])
def test_equal_bytes_take_kv(grid):
    """48 heads, 33 key heads, d 32 are on the line itself: 2/3 + 2/96 = 33/48."""
    on_the_line = sizes(48, 33, 32, 32)
    totals = {backward_traffic("ring", grid, 0, on_the_line, side).total for side in SIDES}
    assert len(totals) == 1
    assert cheaper_side("ring", grid, on_the_line) == "kv"
