"""Gated delta nets over several ranks, with all digits: a step equals a step of one rank.

The model is in fp64 except for gates, rotary angles and the loss, which Megatron computes in fp32.
Runs of Megatron's own loop are in tests/megatron_lm/test_hybrid_training.py.
"""

import delta_net_ranks as ranks
import pytest

from megatron_burst.megatron.patching import HYBRID_SINCE, core_version

pytestmark = pytest.mark.skipif(
    core_version() < HYBRID_SINCE, reason="states are passed from 0.19 on"
)


@pytest.fixture(scope="module")
def single_rank(four):
    """Return the steps of one rank."""
    return four(ranks.train, "zigzag", 1)[0][0]


@pytest.fixture(scope="module")
def alone(four):
    """Return the steps of one rank that runs every document of a pack separately."""
    return four(ranks.train, "zigzag", 1, None, None, True, True)[0][0]


def same(found, expected):
    """Compare losses with the precision of fp32, and gradient norms with the precision of fp64."""
    for history, _ in found:
        for (loss, norm), (wanted, stock) in zip(history, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=3e-7)
            assert norm == pytest.approx(stock, rel=1e-9)


def test_megatrons_own_exchange_of_heads_is_one_rank_too(four, single_rank):
    same(four(ranks.train, "zigzag", 2, {"linear": "megatron"}), single_rank)


@pytest.mark.parametrize(
    ("layout", "cp", "algorithm", "sizes"),
    [
        ("zigzag", 2, "auto", None),
        ("contiguous", 2, "all_gather", None),
        ("zigzag", 4, "scan", [2, 2]),  # twice the key heads
        ("contiguous", 4, "ring", None),
        pytest.param("zigzag", 4, "two_level", [2, 2], marks=pytest.mark.slow),
    ],
)
def test_states_passed_are_one_rank(four, single_rank, layout, cp, algorithm, sizes):
    found = four(ranks.train, layout, cp, {"linear": algorithm}, sizes)
    same(found, single_rank)
    (line,) = [line for line in found[0][1] if line.startswith("burst linear")]
    assert f"layout {layout}" in line
    if algorithm != "auto":
        assert f"algorithm {algorithm}" in line


@pytest.mark.parametrize(
    ("layout", "cp"),
    [
        ("zigzag", 2),
        ("balanced", 4),
        pytest.param("contiguous", 4, marks=pytest.mark.slow),
    ],
)
def test_documents_of_a_pack_are_each_alone(four, alone, layout, cp):
    same(four(ranks.train, layout, cp, None, None, True), alone)


def test_recomputed_with_two_micro_batches_in_flight(four, single_rank):
    same(four(ranks.recomputed), single_rank)


@pytest.mark.parametrize(("changes", "calls"), [({}, 3), (ranks.RECOMPUTE, 6)])
def test_one_plan_per_micro_batch(four, changes, calls):
    assert four(ranks.plans_made, changes) == [(1, calls)] * 4


def test_parameters_and_checkpoints_are_those_of_megatron(four):
    stock, ours = four(ranks.described, 2, "megatron"), four(ranks.described, 2, "auto")
    assert stock == ours
    assert len(stock[0][1]) > 8


def test_ranks_with_other_documents_are_told(four):
    found = four(ranks.refused, "contiguous", 4, {"packed": True}, {"packed": False})
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: ranks")


def test_a_wrong_call_on_one_rank_is_told_to_all(four):
    found = four(ranks.called_differently, "local_cp_size", 1)
    assert len(set(found)) == 1
    assert "use the group with which the model was built" in found[0]


def test_a_call_that_the_leading_layer_never_saw_is_refused(four):
    (error, *_) = four(ranks.called_differently, "follower", None)
    assert "the first layer of the same type on this rank did not get" in error


def test_a_prefix_tree_equals_separate_trajectories(four):
    for apart, gap, largest, (rows, all_rows), told in four(ranks.over_a_tree):
        assert apart < 1e-7  # gates are in fp32
        assert gap < 1e-6 * largest
        assert rows < all_rows
        assert (
            "and --burst-linear auto or all_gather, got 2 ranks and megatron; use tree=False"
            in told
        )


@pytest.mark.parametrize(
    ("layout", "packed"),
    [
        ("zigzag", False),
        ("balanced", True),
        pytest.param("contiguous", True, marks=pytest.mark.slow),
    ],
)
def test_gates_of_channels_against_the_rule_written_out(four, layout, packed):
    for errors in four(ranks.errors_with_gates_of_channels, layout, packed):
        assert len(errors) == 7
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
