"""Ranks that do not make the same calls: an error on the ranks concerned, never a number.

Each case runs on two gloo ranks, rank 1 out of step; every group made here waits two seconds.
"""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.groups import Calls

CAUSAL, FULL = mb.masks.Causal(), mb.masks.Full()
APART = mb.masks.Documents([0, 8, 16])  # one document per rank: nothing travels


class Rank:
    """What a case is told: the groups of this rank, and whether it is the one out of step."""

    def __init__(self, ulysses):
        parent = dist.new_group(timeout=timedelta(seconds=2))
        self.groups = mb.Groups.flat(parent, ulysses=ulysses)
        self.odd = dist.get_rank() == 1

    def qkv(self):
        return [torch.randn(8, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def plan(self, **choices):
        return mb.prepare(*self.qkv(), groups=self.groups, **choices)

    def call(self, plan, **more):
        return mb.attention(*self.qkv(), plan=plan, **more).sum()


def another_plan(rank, **choices):
    plans = rank.plan(), rank.plan(**choices)
    return rank.call(plans[rank.odd])


def other_order(rank):
    plans = [rank.plan(mask=CAUSAL), rank.plan(mask=FULL)]
    for plan in plans[::-1] if rank.odd else plans:
        rank.call(plan)


def backwards_in_another_order(rank):
    plan = rank.plan()
    losses = [rank.call(plan), rank.call(plan)]
    for loss in losses[::-1] if rank.odd else losses:
        loss.backward()


def another_layer(rank):
    """Stochastic depth: the ranks leave out as many calls, but not the same."""
    plan = rank.plan()
    for layer in (0, 2) if rank.odd else (0, 1):
        rank.call(plan, label=layer)


def another_line(rank):
    """Two calls without a label, of which each rank leaves out another."""
    plan = rank.plan()
    if rank.odd:
        rank.call(plan)
    else:
        mb.attention(*rank.qkv(), plan=plan)


def another_sink(rank):
    rank.call(rank.plan(), sink=torch.zeros(2) if rank.odd else None)


def forward_beside_backward(rank, side):
    plan = rank.plan(side=side)
    loss = rank.call(plan)
    if rank.odd:
        rank.call(plan)
    else:
        loss.backward()


def skipped(rank):
    plan = rank.plan()
    losses = [rank.call(plan) for _ in range(1 if rank.odd else 2)]
    for loss in losses[::-1]:
        loss.backward()


CASES = {
    "another mask": (another_plan, {"mask": FULL}, "another plan"),
    # Whose rows see others makes messages of other lengths.
    "another layout": (another_plan, {"layout": "contiguous"}, "not run the same plans"),
    "another scale": (another_plan, {"softmax_scale": 1.5}, "another plan"),
    "plans in another order": (other_order, {}, "another plan"),
    "backwards in another order": (backwards_in_another_order, {}, "got a message of call"),
    "another layer": (another_layer, {}, "another label or sink"),
    "another line": (another_line, {}, "was made by another line of the program"),
    "a sink on one rank": (another_sink, {}, "another label or sink"),
    "forward beside backward": (forward_beside_backward, {"side": "kv"}, "message of"),
    "forward beside a longer backward": (forward_beside_backward, {"side": "query"}, "message of"),
    "a call left out": (skipped, {}, "message of"),
}


def failure(case, ulysses):
    """The error of a case on this rank, or None."""
    run, choices, _ = CASES[case]
    rank = Rank(ulysses)
    try:
        run(rank, **choices)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def raised(case, ranks, ulysses=1):
    errors = ranks(2).run(failure, case, ulysses)
    assert all(errors), f"{case}: no error on some rank: {errors}"
    assert any(CASES[case][2] in error for error in errors), errors
    return errors


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_ring_that_are_out_of_step_get_an_error(ranks, case):
    raised(case, ranks)


@pytest.mark.parametrize("case", [case for case in CASES if "layout" not in case])
def test_ranks_that_share_heads_and_are_out_of_step_get_an_error(ranks, case):
    raised(case, ranks, ulysses=2)


def left_out_unnoticed():
    """Rank 1 leaves out a call in which nothing travels; what the next plan, and asking, say."""
    rank = Rank(1)
    plan = rank.plan(mask=APART, layout="contiguous")
    if not rank.odd:
        rank.call(plan)
    found = []
    for ask in (rank.plan, rank.groups.compare_calls):
        try:
            ask()
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_call_left_out_is_noticed_by_the_next_plan(ranks):
    """Also where no message says so: nothing travels, or the device cannot read envelopes."""
    for found in ranks(2).run(left_out_unnoticed):
        assert len(found) == 2
        for words in found:
            assert "rank 0 has calls so far 1 forward, 0 backward" in words
            assert "rank 1 has calls so far 0 forward, 0 backward" in words
            assert "make the same calls in the same order" in words


@pytest.mark.parametrize("label", [object(), 1.5, torch.ones(1), (1, [2])])
def test_labels_that_may_differ_between_processes_are_refused(label):
    """Their repr has addresses in it, or reads a device."""
    qkv = [[torch.zeros(4, 1, 1, 4)]] * 3
    groups = mb.Groups.in_process(intra=1)
    with pytest.raises(ValueError, match="label must be a string, an integer or a tuple"):
        mb.attention(*qkv, groups=groups, label=label)
    mb.attention(*qkv, groups=groups, label=("layer", 1))


def in_step():
    rank = Rank(1)
    plans = [rank.plan(mask=CAUSAL), rank.plan(mask=FULL)]
    losses = [rank.call(plan, label="same") for plan in plans]
    for loss in losses:
        loss.backward(retain_graph=True)
    losses[0].backward()
    rank.groups.compare_calls()
    return repr(rank.groups.calls)


def test_ranks_in_step_compare_equal(ranks):
    first, second = ranks(2).run(in_step)
    assert first == second
    assert first.startswith("2 forward, 3 backward, order ")


def warned(label):
    """What a loop over two layers is told, in three steps; how often, at which line."""
    rank = Rank(1)
    plan = rank.plan()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            losses = [rank.call(plan, label=layer if label else None) for layer in range(2)]
            sum(losses).backward()
        once = rank.call(plan)  # one call of a step is told apart
        once.backward()
    return [(str(one.message), one.filename == __file__) for one in found]


def test_a_loop_that_cannot_be_told_apart_is_warned_of_once(ranks):
    for found in ranks(2).run(warned, False):
        ((words, here),) = found
        assert "several times without label=" in words
        assert here
    assert ranks(2).run(warned, True) == [[], []]


def test_one_call_of_each_step_needs_no_label():
    calls = Calls(warns=True)
    for _ in range(3):
        calls.backward(calls.forward(1, None, False))  # -W error


def destroyed():
    rank = Rank(1)
    plan = rank.plan()
    dist.destroy_process_group(
        rank.groups._communicators.control
    )  # as destroy_process_group() does to all
    try:
        rank.call(plan)
    except ValueError as error:
        return str(error)
    return None


def test_groups_that_were_destroyed_say_so(ranks):
    pool = ranks(2)
    for words in pool.run(destroyed):
        assert "were destroyed" in words
        assert "make new mb.Groups" in words
    pool.close()
