"""Times of attention on clusters whose ranks share NICs, by hand; and `mb.simulate`'s errors."""

import math
from dataclasses import replace

import numpy as np
import pytest

import megatron_burst as mb
from megatron_burst.autotune.candidates import sharing
from megatron_burst.autotune.clusters import GB, Cluster, gpu
from megatron_burst.autotune.exchanges import Wires
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.autotune.places import Nodes, places
from megatron_burst.autotune.prepared import PreparedSchedule
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.simulator import PassTime, pass_time
from megatron_burst.plugins.tools.advise.forecast.attention_time import (
    attention_time,
    cached_ring_passes,
    ring_of,
)
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.model import Model
from megatron_burst.schedule import rings
from megatron_burst.schedule.demand import all_visible
from megatron_burst.schedule.sizes import Sizes
from megatron_burst.schedule.tables import Grid
from megatron_burst.schedule.topology import Topology

SIZES = Sizes(16, 1, 8, 8, 16, 16, 4, 4, 4, (True, True, True))
KV = 16384  # bytes of K and V: 16 rows, 8 heads of 16, fp32; as many of dK and dV


def rates(intra=1.0, inter=1.0, **more):
    """Seconds that a chunk of keys and values takes on each link."""
    return replace(Rates(KV / intra, KV / inter, compute=math.inf), **more)


def forward(algorithm, grid, topology, nodes, given, seconds=None):
    """The time of a forward of 16 rows per rank on these nodes."""
    grid = Grid(*grid)
    plan = rings.forward(algorithm, grid, visibility=all_visible(grid.size, 16))
    wires = Wires(places=None if nodes is None else places(topology, nodes))
    seconds = np.zeros((grid.size, grid.size)) if seconds is None else seconds
    return pass_time(PreparedSchedule(plan, wires), SIZES, seconds, given)


# --- who shares a NIC ----------------------------------------------------------------------


def test_two_rings_by_one_nic_take_twice_as_long():
    """Two nodes of two ranks: rings 0, 2 and 1, 3. Both of a node send by its one NIC; with two
    NICs each has its own, and of four no rank uses more than one."""
    topology = Topology(4, 2, 2, "head_first")
    assert forward("ring", (2, 1), topology, Nodes(2, 1), rates(inter=4)).seconds == 8
    for nics in (2, 4):
        assert forward("ring", (2, 1), topology, Nodes(2, nics), rates(inter=4)).seconds == 4
    # In one ring each, 0, 1 and 2, 3 stay in their nodes.
    inside = Topology(4, 2, 2, "context_first")
    assert forward("ring", (1, 2), inside, Nodes(2, 1), rates(1, 4)).seconds == 1


def test_a_nic_that_carries_more_than_one_rank_sends():
    """A rank alone takes 4 s; its NIC has 1.5 times that rate, so two take 2/1.5 times as long."""
    topology, given = Topology(4, 2, 2, "head_first"), rates(inter=4, nic=1.5 * KV / 4)
    assert forward("ring", (2, 1), topology, Nodes(2, 1), given).seconds == pytest.approx(8 / 1.5)
    alone = Topology(2, 1)
    assert forward("ring", (2, 1), alone, Nodes(1, 1), given).seconds == 4


def test_tensor_parallel_neighbours_send_beside_each_other():
    """GPUs 0, 2 are a ring and 1, 3 another, of two tensor-parallel ranks each."""
    topology = Topology(2, 1)
    assert forward("ring", (2, 1), topology, Nodes(2, 1, tp=2), rates(inter=4)).seconds == 8
    assert forward("ring", (2, 1), topology, Nodes(2, 2, tp=2), rates(inter=4)).seconds == 4


def test_inner_rings_of_two_share_a_nic_with_neighbours_and_not_by_stride():
    """Nodes of four ranks and two NICs: ranks 2 and 3 cross to 4 and 5, by NIC 1, or by 0 and 1.
    Three hops cross one after another, each 8 s or 4 s; the last hop of an inner ring takes 1 s."""
    topology, ends = Topology(8, 4), (np.array([2, 3]), np.array([4, 5]))
    for nic_of, nics, each in (("neighbours", [0, 0, 1, 1], 2), ("stride", [0, 1, 0, 1], 1)):
        nodes = Nodes(4, 2, nic_of=nic_of)
        assert nodes.nic(np.arange(8)).tolist() == nics + [4 + nic for nic in nics]
        assert places(topology, nodes).load(*ends).tolist() == [each, each]
        got = forward("burst", (4, 2), topology, nodes, rates(1, 4)).seconds
        assert got == 3 * 4 * each + 1


def test_a_flat_ring_has_the_nic_to_itself_and_a_two_level_ring_does_not():
    """Nodes of two: on the flat ring 0 1 2 3 only 1 and 3 cross; on the two-level ring all four do
    at once, 8 s in two inner steps of 1 s, where the flat ring has three hops of 4 s."""
    topology = Topology(4, 2)
    assert forward("ring", (2, 2), topology, Nodes(2, 1), rates(1, 4)).seconds == 12
    assert forward("burst", (2, 2), topology, Nodes(2, 2), rates(1, 4)).seconds == 4 + 1
    assert forward("burst", (2, 2), topology, Nodes(2, 1), rates(1, 4)).seconds == 8 + 1


def test_inner_rings_smaller_than_a_node_stay_in_it():
    """Two inner rings of two on one node of four: what crosses between them is NVLink's."""
    topology = Topology(4, 4)
    got = forward("burst", (2, 2), topology, Nodes(4, 1), rates(1, 100))
    assert got == PassTime(seconds=2 + 1, compute=0, intra=3, inter=0)
    assert forward("burst", (2, 2), topology, None, rates(1, 100)).seconds == 101


def test_nics_of_their_own_are_the_default():
    given = rates(1, 3, latency=0.5, launch=0.25)
    pairs = np.arange(16.0).reshape(4, 4)
    for algorithm in ("ring", "burst", "double_ring", "all_gather", "tile"):
        plain = forward(algorithm, (2, 2), Topology(4, 2), None, given, pairs)
        assert forward(algorithm, (2, 2), Topology(4, 2), Nodes(2, 2), given, pairs) == plain


# --- what slows a pass down ----------------------------------------------------------------


def two(given):
    """Two ranks, each pair 4 s."""
    return forward("ring", (1, 2), Topology(2, 2), None, given, np.full((2, 2), 4.0)).seconds


def test_computing_is_slower_beside_traffic():
    """The hop takes 3 s, in which a pair that is half as long again gets 2 of its 4 s done."""
    assert two(rates(3)) == 8
    assert two(rates(3, slowdown=0.5)) == 3 + 2 + 4
    assert two(rates(100, slowdown=0.5)) == 100 + 4  # 6 s beside the hop, which is what binds
    assert two(rates(5, slowdown=0.5)) == pytest.approx(5 + (4 - 5 / 1.5) + 4)


def test_small_chunks_and_starts():
    """16 rows where 8 have half the rate: half as long again."""
    assert two(rates(1, half_rows=8.0)) == 2 * 6
    assert two(rates(1, start=10.0)) == 10 + 8


def test_an_all_to_all_waits_for_nics_copies_and_its_start():
    """Four ranks on two nodes share heads. Each sends a quarter of q, k, v and out (32768 bytes, a
    second on either link) to each other one: one in its node, two beyond."""
    topology, rate = Topology(4, 2, 4), 8192.0
    given = Rates(rate, rate)
    assert [each.seconds for each in sharing(topology, SIZES, given)] == [2.0, 2.0]
    assert sharing(topology, SIZES, given, per_nic=2)[0].seconds == 4
    assert sharing(topology, SIZES, replace(given, nic=1.5 * rate), per_nic=2)[0].seconds == (
        pytest.approx(4 / 1.5)
    )
    assert sharing(topology, SIZES, replace(given, exchange=0.5))[0].seconds == 4
    assert sharing(topology, SIZES, replace(given, copying=rate / 2))[0].seconds == 8
    assert sharing(topology, SIZES, replace(given, exchange_start=0.5))[0].seconds == 2 + 2 * 0.5
    assert sharing(Topology(4, 2), SIZES, replace(given, exchange_start=0.5))[0].seconds == 0


# --- a call of a run -----------------------------------------------------------------------

MODEL = Model("small", 2, 1024, 8, 8, 4096, 32000)
CLUSTER = Cluster(gpu("a100"), 16, per_node=4, nics=2, nic_rate=25 * GB)


def test_a_rank_alone_computes_and_nothing_else():
    """Causal: half of 4 S S H d operations, and half a row more, for the diagonal."""
    run = Settings(4096, layout="contiguous")
    given = replace(CLUSTER.rank_rates(), launch=0.0, half_rows=0.0, start=0.0)
    assert given.compute is not None
    free = HostTime(0.0, 0.0, 0.0, 0.0)
    got = attention_time(MODEL, replace(CLUSTER, rates=given, host_time=free), run)
    assert got.forward == pytest.approx(4 * 4096 * 4097 / 2 * 1024 / given.compute)
    assert got.backward == pytest.approx(got.forward * given.backward)
    assert (got.bottleneck, got.exchange, got.host) == ("compute", (0, 0), (0, 0))
    assert got.seconds == got.forward + got.backward
    # 3 s to launch a pass, 4 s a call: one in forward, two as long in backward.
    slow = replace(CLUSTER, rates=given, host_time=HostTime(call=4.0, start=3.0))
    got = attention_time(MODEL, slow, run)
    assert (got.bottleneck, got.seconds) == ("host", 7 + 11)


def test_schedules_are_remembered_for_other_heads_and_not_for_other_nodes():
    rings, run = cached_ring_passes(), Settings(8192, cp=8)
    plain = attention_time(MODEL, CLUSTER, run)
    assert attention_time(MODEL, CLUSTER, run, rings=rings) == plain
    assert attention_time(MODEL, CLUSTER, run, rings=rings) == plain
    key = ring_of(MODEL, CLUSTER, run)
    other = replace(MODEL, heads=4, kv_heads=4, head_dim=128)
    assert ring_of(other, CLUSTER, run) == key
    assert rings(key) is rings(ring_of(other, CLUSTER, run))
    assert ring_of(MODEL, replace(CLUSTER, nics=4), run) != key
    assert CLUSTER.nodes(tp=2) == Nodes(4, 2, 2)


def test_chunks_of_rows_compute_as_much_and_send_keys_again():
    """Smaller calls take somewhat longer; where queries travel back, they do so once."""
    for side, least, most in (("kv", 3.5, 4.5), ("query", 1.2, 3.0)):
        run = Settings(1 << 16, cp=8, side=side)
        whole = attention_time(MODEL, CLUSTER, run)
        cut = attention_time(MODEL, CLUSTER, replace(run, sequence_chunks=4))
        assert 1 < cut.busy["compute"] / whole.busy["compute"] < 1.4
        assert least < cut.busy["inter"] / whole.busy["inter"] < most


def test_inner_rings_divide_the_ring():
    with pytest.raises(ValueError, match="inner 3 does not divide the 8 ranks"):
        mb.simulate(MODEL, CLUSTER, Settings(8192, cp=8, inner=3), part="attention")
    got = mb.simulate(MODEL, CLUSTER, Settings(8192, cp=8, inner=2), part="attention")
    assert got.seconds > 0


def test_a_part_that_is_none():
    with pytest.raises(ValueError, match="part must be attention, layer or step, got 'all'"):
        mb.simulate(MODEL, CLUSTER, Settings(8192), part="all")  # pyright: ignore[reportArgumentType]
