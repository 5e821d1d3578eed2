"""Faults: whom they disturb, by hand, and what that costs rings, layers and steps."""

import numpy as np
import pytest

from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.disturbance import Disturbance
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.schedule import rings
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.demand import everything
from megatron_burst.schedule.tables import Grid
from megatron_burst.schedule.topology import Topology
from megatron_burst.tools.advise.forecast.attention_time import attention_time
from megatron_burst.tools.advise.forecast.faults import Faults, Group, draws, groups
from megatron_burst.tools.advise.settings import Settings
from megatron_burst.tools.advise.shapes.models import named
from megatron_burst.tools.advise.simulate import simulate

KV = 16384  # bytes of K and V of 16 rows, 8 heads of 16 in fp32
SIZES = Sizes(16, 1, 8, 8, 16, 16, 4, 4, 4, (True, True, True))
MODEL, CLUSTER = named("llama3-8b"), Cluster("h100", 64)


def ring(size, hop, work, disturbed=None, **more):
    """Seconds of a forward ring in one node: hops of `hop` seconds, pairs of `work`."""
    plan = rings.forward("ring", Grid(1, size), wanted=everything(size, 16))
    rates = Rates(KV / hop, KV, compute=1.0, **more)
    work = np.full((size, size), float(work))
    return pass_time(plan, SIZES, work, rates, disturbed=disturbed).seconds


def factors(size, ranks=(), links=(), **more):
    of_ranks, of_links = np.ones(size), np.ones((size, size))
    for rank, factor in ranks:
        of_ranks[rank] = factor
    for *ends, factor in links:
        of_links[tuple(ends)] = factor
    return Disturbance(of_ranks, of_links, **more)


# --- a ring, by hand -------------------------------------------------------------------------


def test_a_slow_rank_is_waited_for():
    """Two ranks, hops of 1, pairs of 4: rank 1 takes 6 for each, and is done at 12."""
    assert ring(2, 1, 4) == 8
    assert ring(2, 1, 4, factors(2, [(1, 1.5)])) == 12
    assert ring(2, 1, 4, factors(2)) == 8


def test_a_slow_link_costs_its_own_hop_only():
    """Two ranks, pairs of 2: the hop 0 -> 1 takes 5 and not 1, and its latency of 1 stays."""
    assert ring(2, 1, 2, latency=1.0) == 4
    assert ring(2, 1, 2, factors(2, links=[(0, 1, 5.0)]), latency=1.0) == 5 + 1 + 2


def test_a_link_is_slow_in_one_direction():
    """Three ranks turn 0 -> 1 -> 2 -> 0: nothing goes from 1 to 0."""
    assert ring(3, 1, 1) == 3
    assert ring(3, 1, 1, factors(3, links=[(1, 0, 5.0)])) == 3
    assert ring(3, 1, 1, factors(3, links=[(0, 1, 5.0)])) > 3


def test_a_slow_link_is_hidden_behind_compute():
    assert ring(4, 1, 8, factors(4, links=[(0, 1, 8.0)])) == 4 * 8


def test_jitter_is_drawn_anew_by_seed_and_has_its_mean_and_width():
    none = factors(4, jitter=0.0)
    assert ring(4, 1, 2, none) == ring(4, 1, 2)
    one, same, other = (ring(4, 1, 2, factors(4, jitter=0.1, seed=(s,))) for s in (1, 1, 2))
    assert one == same != other
    drawn = factors(1, jitter=0.2)._drawn(0, 200_000)
    assert drawn.mean() == pytest.approx(1, abs=2e-3)
    assert drawn.std() == pytest.approx(0.2, rel=0.02)
    assert drawn.min() > 0


def test_all_messages_of_an_all_to_all_are_waited_for():
    assert factors(3, links=[(0, 2, 3.0), (2, 1, 2.0)]).of_exchange() == 3.0
    assert factors(3, ranks=[(0, 9.0)]).of_exchange() == 1.0


# --- whom a fault of a cluster disturbs --------------------------------------------------------


def test_a_nic_is_slow_in_both_directions_and_between_nodes_only():
    """GPUs 6 to 9 of nodes of eight; GPU 7's NIC."""
    found = Faults(slow_links={7: 2.0}).links(CLUSTER, [6, 7, 8, 9])
    assert found.tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 1], [1, 2, 1, 1]]


def test_gpus_that_share_a_nic_are_slow_together():
    """Four NICs for eight GPUs: GPU 6 has that of 7."""
    shared = Cluster("a800", 64, nics=4)
    found = Faults(slow_links={7: 2.0}).links(shared, [5, 6, 8])
    assert found.tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 1]]


def test_nodes_and_pairs():
    assert Faults(slow_links={"node 1": 2.0}).links(CLUSTER, [0, 8, 9, 16]).tolist() == [
        [1, 2, 2, 1], [2, 1, 1, 2], [2, 1, 1, 2], [1, 2, 2, 1],
    ]  # fmt: skip
    found = Faults(slow_links={(1, 0): 3.0, (0, 8): 2.0, 0: 1.5}).links(CLUSTER, [0, 1, 8])
    assert found.tolist() == [[1, 1, 2], [3, 1, 1], [1.5, 1, 1]]


def test_ranks_are_numbered_as_megatron_numbers_them():
    """TP 2, CP 4, DP 2, PP 2: rank = tp + 2 cp + 8 dp + 16 pp."""
    run = Settings(1024, tp=2, cp=4, dp=2, pp=2)
    assert [tuple(each) for each in groups(run)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert list(Group(1, 1).members(run)[1::2]) == [25, 27, 29, 31]  # of TP rank 1
    assert Group(1, 1).members(run) == range(24, 32)


def test_only_rings_that_differ_are_simulated():
    """Two replicas of TP 2, CP 4: GPU 5 is in the second ring of the first. With heads shared by
    two ranks next to each other, rings have CP ranks 0 and 2, and 1 and 3: GPU 5 is CP rank 2."""
    run = Settings(1024, tp=2, cp=4, dp=2)
    cluster = Cluster("h100", 16)
    (rings,) = draws(Faults({5: 1.2}), cluster, run, Topology(4, 4))
    assert [each.passes[0] if each.passes[0] is None else each.passes[0].ranks.tolist()
            for each in rings] == [None, [1, 1, 1.2, 1]]  # fmt: skip
    shared = Settings(1024, tp=2, cp=4, dp=2, ulysses=2)
    (rings,) = draws(Faults({5: 1.2}), cluster, shared, Topology(4, 4, 2))
    slow = [each.passes[0].ranks.tolist() for each in rings if each.passes[0] is not None]
    assert slow == [[1, 1.2]]
    (rings,) = draws(Faults({7: 1.2}), cluster, shared, Topology(4, 4, 2))  # CP rank 3
    slow = [each.passes[0].ranks.tolist() for each in rings if each.passes[0] is not None]
    assert slow == [[1, 1.2]]
    (alone,) = draws(Faults({5: 1.2}), cluster, run, Topology(4, 4), Group(1, 0))
    assert [each.passes for each in alone] == [(None, None)]
    assert len(draws(Faults(jitter=0.1, draws=3), cluster, run, Topology(4, 4))) == 3


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ({"slow_ranks": {3: 0.5}}, "half the rate is 2.0"),
        ({"slow_ranks": {-1: 2.0}}, "no number of a GPU"),
        ({"slow_links": {"rack 1": 2.0}}, "node 3"),
        ({"slow_links": {(1, "a"): 2.0}}, "no number of a GPU"),
        ({"jitter": 5}, "fraction"),
        ({"seed": -1}, "seed"),
        ({"draws": 0}, "draws"),
    ],
)
def test_what_cannot_be_is_said(made, match):
    with pytest.raises(ValueError, match=match):
        Faults(**made)


@pytest.mark.parametrize("key", [64, (3, 64), "node 8"])
def test_a_fault_of_what_the_cluster_does_not_have(key):
    with pytest.raises(ValueError, match="there are"):
        attention_time(MODEL, CLUSTER, Settings(2**17, cp=64), Faults({}, {key: 2.0}))


# --- layers and steps --------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["attention", "layer", "step"])
@pytest.mark.parametrize("ulysses", [1, 8])
def test_no_fault_changes_nothing(part, ulysses):
    run = Settings(2**17, tp=1, cp=16, dp=2, pp=2, ulysses=ulysses, micro_batches=4)
    plain = simulate(MODEL, CLUSTER, run, part=part)
    assert simulate(MODEL, CLUSTER, run, part=part, faults=Faults()).seconds == plain.seconds


def test_where_compute_bounds_the_layer_a_slow_gpu_costs_its_factor():
    run = Settings(2**20, cp=64)
    plain, slow = (
        simulate(MODEL, CLUSTER, run, part="layer", faults=f) for f in (None, Faults({9: 1.5}))
    )
    assert slow.seconds / plain.seconds == pytest.approx(1.5, rel=0.03)


def test_the_parts_of_a_step_add_up_and_stragglers_are_one_of_them():
    run = Settings(2**16, tp=2, cp=8, dp=2, pp=2, micro_batches=8)
    plain = simulate(MODEL, CLUSTER, run)
    for faults in (Faults({33: 1.2}), Faults({}, {2: 4.0}), Faults(jitter=0.1)):
        slow = simulate(MODEL, CLUSTER, run, faults=faults)
        assert slow.seconds > plain.seconds
        assert sum(slow.parts.values()) == pytest.approx(slow.seconds, rel=1e-12)
        assert slow.parts["stragglers"] == pytest.approx(slow.seconds - plain.seconds)
        assert slow.mfu * slow.seconds == pytest.approx(plain.mfu * plain.seconds)


def test_a_second_slow_replica_costs_nothing_more():
    """Replicas wait for the slowest one only; a second slow stage of one replica does cost."""
    run = Settings(2**16, tp=2, cp=8, dp=2, pp=2, micro_batches=8)
    one, two, both = (
        simulate(MODEL, CLUSTER, run, faults=Faults(dict.fromkeys(gpus, 1.2))).seconds
        for gpus in ((0,), (0, 16), (0, 32))
    )
    assert one == two < both


def test_twelve_thousand_gpus():
    """TP 8 x CP 16 x PP 6 x DP 16 with a slow GPU, a slow NIC and jitter."""
    cluster = Cluster("h100", 12_288)
    run = Settings(2**17, tp=8, cp=16, pp=6, dp=16, micro_batches=16)
    found = simulate("llama3-405b", cluster, run, faults=Faults({5000: 1.2}, {700: 2.0}, 0.05))
    assert found.parts["stragglers"] > 0.05 * found.seconds
