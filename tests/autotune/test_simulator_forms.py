"""The simulator against closed forms: links alone, compute alone, all-to-alls.

T is the time of one tensor of a chunk on a link: two travel in forward (K, V), four in a backward
of keys and values (dK, dV too), three and the scalars lse and delta in one of queries (Q, dO, dQ).
M nodes of L ranks, G of both. BurstEngine (arXiv 2509.19836), table 1, states 6 G max(T_intra,
T_inter) for a ring, 4 max(a, b) + 2 (a + b) for a double ring and 5 max(a, b) for burst, with
a = (G - M) T_intra and b = M T_inter; a chunk that is already where it is needed does not travel
here, so a ring makes G - 1 hops, and b has M - 1.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_burst.autotune.candidates import FixedSettings, Workload, on_grid
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.layout import make
from megatron_burst.masks import Full
from megatron_burst.schedule import rings
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.demand import all_visible
from megatron_burst.schedule.tables import Grid
from megatron_burst.schedule.topology import Topology

SIZES = Sizes(16, 1, 8, 8, 16, 16, 4, 4, 4, (True, True, True))
TENSOR = 16 * 8 * 16 * 4  # bytes
STATS = 2 * 4 / (16 * 4)  # lse and delta, of a tensor

grids = pytest.mark.parametrize("grid", [(2, 4), (4, 4), (8, 8), (4, 8), (1, 8), (8, 1)])
links = pytest.mark.parametrize("link", [(1, 1), (1, 4), (1, 8), (1, 16), (4, 1)])


def passes(algorithm, grid, link, side="kv", work=0.0):
    """Seconds of forward and of backward; link: T within a node and between nodes."""
    grid = Grid(*grid)
    size = grid.size
    rates = Rates(*(TENSOR / each if each else math.inf for each in link), compute=1.0)
    plans = (
        rings.forward(algorithm, grid, visibility=all_visible(size, 16), row_bytes=SIZES.forward),
        rings.backward(algorithm, grid, side, visibility=all_visible(size, 16),
                       row_bytes=SIZES.backward),
    )  # fmt: skip
    seconds = np.full((size, size), work)
    return [pass_time(plan, SIZES, seconds, rates).seconds for plan in plans]


@grids
@links
def test_a_flat_ring_makes_g_less_one_hops_of_its_slowest_link(grid, link):
    hops = grid[0] * grid[1] - 1
    slowest = link[1] if grid[1] == 1 else link[0] if grid[0] == 1 else max(link)
    assert passes("ring", grid, link) == pytest.approx([2 * hops * slowest, 4 * hops * slowest])
    of_queries = passes("ring", grid, link, "query")[1]
    assert of_queries == pytest.approx((3 + STATS) * hops * slowest)


@grids
@links
@pytest.mark.parametrize("algorithm", ["double_ring", "burst"])
def test_two_levels_of_rings_turn_while_the_next_chunk_crosses(algorithm, grid, link):
    """M - 1 times the longer of one crossing and L - 1 turns, then L - 1 turns."""
    (nodes, ranks), (intra, inter) = grid, link
    turns = 2 * (ranks - 1) * intra
    actual, _ = passes(algorithm, grid, link)
    assert actual == pytest.approx((nodes - 1) * max(2 * inter, turns) + turns)


@grids
@links
def test_burst_hides_gradients_behind_one_level_or_the_other(grid, link):
    """5 max(a, b) of the table is 2 forward and 3 backward; keys and values take 4 backward. What
    comes first and last, a crossing and a cycle within nodes, is not hidden."""
    (nodes, ranks), (intra, inter) = grid, link
    for side, tensors in (("kv", 4), ("query", 3 + STATS)):
        cycle, crossing = tensors * (ranks - 1) * intra, tensors * inter
        least = max(nodes * cycle, (nodes - 1) * crossing)
        actual = passes("burst", grid, link, side)[1]
        assert least * (1 - 1e-9) <= actual <= least + cycle + crossing * (nodes > 1)


@pytest.mark.parametrize("link", [(1, 0), (0, 1)])
def test_burst_with_one_level_only_takes_exactly_its_bytes(link):
    hops = 8 * 7 if link[0] else 7
    assert passes("burst", (8, 8), link) == pytest.approx([2 * hops, 4 * hops])
    assert passes("burst", (8, 8), link, "query")[1] == pytest.approx((3 + STATS) * hops)


@links
def test_a_double_ring_does_not_overlap_its_gradients(link):
    """4 max(a, b) + 2 (a + b): keys and values overlap both levels in both passes, dK and dV
    neither."""
    nodes, ranks, (intra, inter) = 8, 8, link
    turns = 2 * (ranks - 1) * intra
    activations = (nodes - 1) * max(2 * inter, turns) + turns
    gradients = 2 * (nodes * (ranks - 1) * intra + (nodes - 1) * inter)
    actual = sum(passes("double_ring", (nodes, ranks), link))
    # What the closed form counts apart can overlap by a turn or a crossing at the ends.
    assert actual == pytest.approx(2 * activations + gradients, abs=4 * inter + turns)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("grid", [(1, 4), (2, 4), (4, 1)])
def test_compute_alone_takes_every_ranks_pairs(algorithm, grid):
    """Links that take nothing: G pairs of one second each."""
    size = grid[0] * grid[1]
    assert passes(algorithm, grid, (0, 0), work=1.0) == pytest.approx([size, size])


@pytest.mark.parametrize("algorithm", ["ring", "burst", "double_ring"])
def test_hops_that_are_hidden_cost_nothing_in_forward(algorithm):
    """Compute of 8 for each pair, hops of 2 and crossings of 8 beside 4 pairs."""
    assert passes(algorithm, (4, 4), (1, 4), work=8.0)[0] == pytest.approx(16 * 8)


@pytest.mark.parametrize(
    ("ranks", "per_node", "both"), [(8, 8, (7, 0)), (8, 1, (0, 7)), (8, 4, (3, 4))]
)
def test_an_all_to_all_sends_each_rank_its_share(ranks, per_node, both):
    """U ranks share heads: each sends 1 / U of q, k, v and out to each other one in forward, of
    dout, dq, dk and dv in backward, in four messages; the two links work at once."""
    sizes = replace(SIZES, heads=8, kv_heads=8)
    rates = Rates(TENSOR / 2, TENSOR / 16, latency=0.25, compute=math.inf)
    work = Workload(sizes, Full(), make("contiguous", cp_size=ranks))
    grid = Topology(ranks, per_node, ranks)
    (actual,) = on_grid(work, grid, rates, FixedSettings("ring", "kv", 1))
    each = [4 * (peers * (t / ranks + 0.25)) for peers, t in zip(both, (2, 16), strict=True)]
    assert actual.algorithm == "ulysses"
    assert (actual.forward.seconds, actual.backward.seconds) == pytest.approx((max(each),) * 2)
    assert (actual.forward.intra, actual.forward.inter) == pytest.approx(tuple(each))
