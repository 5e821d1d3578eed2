"""Bytes by formula: the numbers a plan prints and decides by, computed by hand."""

from itertools import permutations

import numpy as np
import oracle
import pytest
import wants
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import sends

from megatron_burst import layout, masks
from megatron_burst.autotune.prepared import pair_shares
from megatron_burst.layout import Span
from megatron_burst.plugins.tools.show.balance import imbalance_of
from megatron_burst.schedule import rings
from megatron_burst.schedule.algorithms import ALGORITHMS as EVERY
from megatron_burst.schedule.cost import (
    Sizes,
    Traffic,
    backward_schedules,
    forward_schedule,
    traffic,
    visible_pairs,
)
from megatron_burst.schedule.cost import backward_schedule as backward_schedule_of
from megatron_burst.schedule.demand import RowBytes, all_visible
from megatron_burst.schedule.demand import visibility_of as wanted_by
from megatron_burst.schedule.rings import SIDES
from megatron_burst.schedule.tables import ALL, ROUTES, Grid, Pairs, Tables, Transfers
from megatron_burst.schedule.topology import Topology

ALGORITHMS = ("burst", "double_ring", "ring")

YES = (True, True, True)


def forward_traffic(algorithm, grid, rank, have):
    plan = rings.forward(algorithm, grid, visibility=all_visible(grid.size, have.tokens),
                         row_bytes=have.forward)  # fmt: skip
    return traffic(plan, rank, have)


def backward_schedule(algorithm, grid, side, have, **more):
    return rings.backward(algorithm, grid, side, visibility=all_visible(grid.size, have.tokens),
                          row_bytes=have.backward, **more)  # fmt: skip


def backward_traffic(algorithm, grid, rank, have, side):
    return traffic(backward_schedule(algorithm, grid, side, have), rank, have)


def chosen_side(algorithm, grid, have):
    everyone = all_visible(grid.size, have.tokens)
    return backward_schedule_of(algorithm, grid, everyone, have).side


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


def test_the_bytes_of_a_row_by_hand():
    """Of 3 sequences: Q 768 B; K, V 1536 B; partial outputs in fp32 with lse 1632 B; Q and dO
    1536 B with lse and delta 192 B; dK, dV in fp32 3072 B; dQ in fp32 1536 B."""
    have = sizes()
    assert have.forward == RowBytes(kv=1536, query=768, dkv=0, dquery=0, out=1632)
    assert have.backward == RowBytes(kv=1536, query=1728, dkv=3072, dquery=1536, out=0)
    chunks = {"kv": 15360, "query": 17280, "dkv": 30720, "dquery": 15360, "out": 16320}
    assert {family: have.chunk_bytes(family) for family in chunks} == chunks


head_counts = st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1), (3, 1), (16, 12)])
widths = st.sampled_from([(16, 16), (24, 16), (16, 24)])
dtypes = st.sampled_from([(2, 4), (2, 2), (4, 4), (4, 2), (8, 8), (8, 4)])
grids = st.sampled_from([(1, 1), (1, 2), (1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (3, 3)])


@given(st.sampled_from(ALGORITHMS), grids, head_counts, widths, dtypes, st.data())
def test_traffic_is_hops_times_chunk_bytes(algorithm, grid, heads, width, dtype, data):
    rank = data.draw(st.integers(0, grid[0] * grid[1] - 1))
    given_sizes = sizes(*heads, *width, *dtype)
    shape = (30, *heads, *width)
    count = oracle.hops(algorithm, *grid, rank)
    item, wire = dtype
    stat = 8 if item == 8 else 4
    there = oracle.activation_bytes("kv", *shape, item, stat)
    got = forward_traffic(algorithm, Grid(*grid), rank, given_sizes)
    assert got == Traffic(count["intra"] * there, count["inter"] * there)
    for side in SIDES:
        chunk = oracle.activation_bytes(side, *shape, item, stat)
        chunk += oracle.gradient_bytes(side, *shape, wire)
        got = backward_traffic(algorithm, Grid(*grid), rank, given_sizes, side)
        assert got == Traffic(count["intra"] * chunk, count["inter"] * chunk)


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
    for side, expected in (("kv", kv), ("query", query)):
        got = backward_traffic("ring", grid, 0, have, side)
        assert got.total == activations[side] + expected


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(1, 4), Grid(2, 2), Grid(2, 4), Grid(4, 2)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("d", [8, 64, 128])
def test_the_side_inverts_where_the_formula_says(algorithm, grid, d):
    """bf16 with fp32 gradients, d_v = d: the query side wins when Hkv/Hq > 2/3 + 2/(3d)."""
    sides = set()
    for kv_heads in range(1, 49):
        wins = kv_heads / 48 > 2 / 3 + 2 / (3 * d)
        side = chosen_side(algorithm, grid, sizes(48, kv_heads, d, d))
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
    assert chosen_side("burst", Grid(2, 4), sizes(heads, kv_heads, d, w)) == side


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(1, 2)])
def test_equal_bytes_take_kv(grid):
    """48 heads, 33 key heads, d 32 are on the line itself: 2/3 + 2/96 = 33/48."""
    on_the_line = sizes(48, 33, 32, 32)
    totals = {backward_traffic("ring", grid, 0, on_the_line, side).total for side in SIDES}
    assert len(totals) == 1
    assert chosen_side("ring", grid, on_the_line) == "kv"


# --- every rank at once, and sparse masks --------------------------------------------------


tables = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(
    st.sampled_from(sorted(EVERY)), grids, st.sampled_from(["", *SIDES]),
    st.sampled_from(ROUTES), st.floats(0, 1), tables,
)  # fmt: skip
def test_the_bytes_of_all_ranks_are_those_of_each_message(
    algorithm, grid, side, route, density, random
):
    """Each message: the rows of each of its bundles times what a row of its family has."""
    grid, have = Grid(*grid), sizes()
    visible = random.random((grid.size, grid.size)) < density
    want = wants.at_random(random, visible)
    if side:
        plan = rings.backward(algorithm, grid, side, visibility=want, row_bytes=have.backward,
                              route=route)  # fmt: skip
    else:
        plan = rings.forward(
            algorithm, grid, visibility=want, row_bytes=have.forward, route=route
        )  # fmt: skip
    row = (have.backward if side else have.forward)._asdict()

    def payload(hop):
        bundles = plan.tables.bundles(hop.chunk.family)
        ranges = bundles.ranges(hop.chunk.owner, hop.chunk.rows)
        return sum(stop - first for first, stop in ranges) * row[hop.chunk.family]

    each = []
    for rank in range(grid.size):
        sent = {"intra": 0, "inter": 0}
        for hop in sends(plan, rank):
            sent[hop.link] += payload(hop)
        each.append(Traffic(**sent))
        assert traffic(plan, rank, have) == each[-1]
    assert traffic(plan, None, have) == sum(each, start=Traffic())


@given(
    st.sampled_from(["burst", "ring", "double_ring"]), grids, st.sampled_from(["", *SIDES]),
    st.booleans(), st.floats(0, 1), tables,
)  # fmt: skip
def test_auto_takes_the_route_whose_bytes_are_fewest_as_both_are_counted(
    algorithm, grid, side, gradients, density, random
):
    """Fewer between nodes, then fewer within them, and the ring where both are equal; also where
    "direct" is known to be cheaper before the ring has tables, and gradients stay at home."""
    grid, have = Grid(*grid), sizes(needs=(gradients,) * 3)
    want = wants.at_random(random, random.random((grid.size, grid.size)) < density)
    if side:
        made = lambda route: backward_schedule_of(  # noqa: E731
            algorithm, grid, want, have, side=side, route=route
        )
    else:
        made = lambda route: forward_schedule(  # noqa: E731
            algorithm, grid, want, have, route=route
        )

    def sent(route):
        total = traffic(made(route), None, have)
        return total.inter, total.intra

    assert made("auto").route == min(("ring", "direct"), key=sent)


def test_a_window_over_many_ranks_by_hand():
    """A window that reaches into the chunk before: contiguous ranks send one hop on, whatever
    the route; zigzag ranks are wanted by both neighbours, which direct sends reach in one hop
    each and the ring only by going all the way round."""
    grid, have = Grid(1, 8), sizes()
    before = np.eye(8, dtype=bool) | np.eye(8, k=-1, dtype=bool)
    both = before | before.T
    chunk = have.chunk_bytes("kv")

    def made(visible, route):
        return forward_schedule("burst", grid, wants.whole(visible, 10), have, route=route)

    def total(visible, route):
        return sum(traffic(made(visible, route), rank, have).total for rank in range(8)) // chunk

    assert (total(before, "ring"), total(before, "direct")) == (7, 7)
    # Owners 1 to 6 go to o + 1 and, seven hops on, to o - 1; 0 goes one hop, 7 goes seven.
    assert (total(both, "ring"), total(both, "direct")) == (6 * 7 + 1 + 7, 14)
    for visible, route in ((before, "ring"), (both, "direct")):
        assert made(visible, "auto").route == route


def test_rows_go_no_further_than_they_are_seen_on_the_causal_ring():
    """Four zigzag ranks, eight half chunks: everybody sees the first half of rank r, and the second
    only ranks before r. Going back, the first makes 3 hops and the second of rank r makes r: 18
    halves, where whole chunks are 24 and going ahead would send 21."""
    grid, have = Grid(1, 4), sizes(tokens=16)
    want = wants.of(masks.Causal(), layout.make("zigzag", cp_size=4), Topology(4, 4), 64)
    half = have.chunk_bytes("kv") // 2
    plan = forward_schedule("ring", grid, want, have, route="ring")
    # First halves: 3 from each rank; second halves: of owner r >= s from rank s, not from rank 0.
    sent = [traffic(plan, rank, have).total / half for rank in range(4)]
    assert sent == [3, 3 + 3, 3 + 2, 3 + 1]
    assert traffic(plan, None, have).total == 18 * half
    whole = forward_schedule("ring", grid, want.whole(), have, route="ring")
    assert traffic(whole, None, have).total == 24 * half


@pytest.mark.parametrize(
    ("name", "whole", "rows", "busiest"),
    [("zigzag", 126, 31.5, Traffic(32, 16)), ("contiguous", 63, 15.75, Traffic(16, 16))],
)
def test_a_window_of_4k_over_64_ranks_of_16k_rows(name, whole, rows, busiest):
    """MiB sent per rank: 63 (or 126, of both halves) chunks of 64 MiB over 64 ranks, or 4095 of
    their 16384 rows (rounded up to 16). The last chunks have no reader after them."""
    grid = Grid(8, 8)
    have = Sizes(16384, 1, 32, 8, 128, 128, 2, 4, 4, YES)
    want = wants.of(
        masks.Window(4095, 0), layout.make(name, cp_size=64), Topology(64, 8), 64 * 16384
    )
    for demanded, mean in ((want.whole(), whole), (want, rows)):
        plan = forward_schedule("burst", grid, demanded, have)
        assert traffic(plan, None, have).total / 64 / 2**20 == mean
    each = [traffic(plan, rank, have) for rank in range(64)]
    most = max(x.intra for x in each), max(x.inter for x in each)
    assert Traffic(*(size >> 20 for size in most)) == busiest


# --- work ----------------------------------------------------------------------------------


def test_visible_pairs_are_counted():
    spans = [Span(0, 2, 5)], [Span(1, 3, 6)]
    expected = sum(k <= q for q in (0, 2, 4, 6, 8) for k in (1, 4, 7, 10, 13, 16))
    assert visible_pairs(masks.Causal(), *spans) == expected


def test_a_pair_in_parts_is_shared_by_rows():
    """Rank 1's queries meet 3 of 12 key rows of rank 0 at step 0 and the others at step 1."""
    rows = np.array([3, 9])
    # In bundles that different ranks want: bit 0 of owner 0 has 9 rows, which two ranks want.
    who = np.array([[[0, 1, 0], [0, 0, 0], [0, 0, 0]], [[0, 1, 1], [0, 0, 0], [0, 0, 0]]], bool)
    want = wants.in_bundles(np.ones((3, 3)), rows, who)
    columns = [(1, 0, 1, 0, ALL, 2), (1, 1, 1, 0, ALL, 1), (1, 1, 1, 1, ALL, ALL)]
    none = np.zeros(0, dtype=int)
    made = Tables(
        2, Pairs(*np.array(columns).T), Transfers(*[none] * 8),
        want.queries, want.keys,
    )  # fmt: skip
    assert pair_shares(made).tolist() == [1 / 4, 3 / 4, 1]
    plan = rings.forward("ring", Grid(1, 3), visibility=want)
    plan.__dict__["tables"] = made
    pairs = np.zeros((3, 3), dtype=int)
    pairs[1, :2] = 100, 10
    assert imbalance_of(plan, pairs) == pytest.approx(3 * (25 + 75 + 10) / 110)


@pytest.mark.parametrize("algorithm", ["burst", "ring", "multicast", "tile", "two_way"])
def test_auto_takes_the_side_with_fewer_bytes_of_all_that_there_are(algorithm):
    """Random packs in row chunks, more heads of queries, or as many as of keys: as both sides count
    that are made whole, though the dearer one is seldom made."""
    rng, taken = np.random.default_rng(0), set()
    for case in range(12):
        grid = Grid(*((2, 3), (1, 4), (4, 2))[case % 3])
        shards = [[Span(rank * 10, 1, 10)] for rank in range(grid.size)]
        ends = np.sort(rng.choice(np.arange(1, grid.size * 10), 3, replace=False)).tolist()
        mask = masks.Documents([0, *ends, grid.size * 10]) & masks.Causal()
        halves = [[[Span(rank * 10 + half, 1, 5)] for rank in range(grid.size)] for half in (0, 5)]
        chunks = [wanted_by(mask, queries, shards) for queries in halves]
        have = sizes(8, (8, 4, 1)[case // 4], wire=(4, 2)[case % 2], needs=(True, True, case < 9))
        every = {side: backward_schedules(algorithm, grid, chunks, have, side=side)
                 for side in SIDES}  # fmt: skip
        sent = {side: sum(traffic(each, None, have).total for each in passes)
                for side, passes in every.items()}  # fmt: skip
        actual = backward_schedules(algorithm, grid, chunks, have)
        assert [each.side for each in actual] == [min(SIDES, key=sent.__getitem__)] * 2
        routes = [each.route for each in every[actual[0].side]]
        assert [each.route for each in actual] == routes
        taken.add(actual[0].side)
    assert taken == {*SIDES} or algorithm == "tile"


@pytest.mark.parametrize("placement", ["head_first", "context_first"])
@pytest.mark.parametrize("ulysses", [1, 2, 3, 6, 12])
def test_pairs_of_ranks_that_share_heads(ulysses, placement):
    """Twelve ranks on nodes of six; groups of neighbours, or of every third, sixth, ... rank."""
    rings = 12 // ulysses
    group_of = [rank // ulysses if placement == "head_first" else rank % rings
                for rank in range(12)]  # fmt: skip
    counts = {"intra": 0, "inter": 0}
    for a, b in permutations(range(12), 2):
        if group_of[a] == group_of[b]:
            counts["intra" if a // 6 == b // 6 else "inter"] += 1
    assert Topology(12, 6, ulysses, placement).ulysses_pairs() == counts
