"""Ranks that make different calls without messages that show it; labels; destroyed groups.

`fuzz.faults`, run by `test_fuzz.py`, covers errors in messages and wrong numbers. Here two gloo
ranks run, rank 1 out of step; every group has a timeout of two seconds.
"""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.groups import CallCounter
from megatron_burst.plugins.testing import in_process

CAUSAL, FULL = mb.masks.Causal(), mb.masks.Full()
APART = mb.masks.Documents([0, 8, 16])  # one document per rank: nothing travels


class Rank:
    """Input of a case: the groups of this rank, and whether it is out of step."""

    def __init__(self, ulysses):
        parent = dist.new_group(timeout=timedelta(seconds=2))
        self.groups = mb.Groups.flat(parent, ulysses=ulysses)
        self.odd = dist.get_rank() == 1

    def qkv(self):
        return [torch.randn(8, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def plan(self, **choices):
        return in_process.prepare(*self.qkv(), groups=self.groups, **choices)

    def call(self, plan, **more):
        return in_process.attention(*self.qkv(), plan=plan, **more).sum()


def left_out_unnoticed():
    """Rank 1 skips a call that sends nothing; return the errors of later comparisons."""
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
    """Also without messages: nothing is sent, or the device cannot read envelopes."""
    for found in ranks(2).run(left_out_unnoticed):
        assert len(found) == 2
        for words in found:
            assert "rank 0 has calls so far 1 forward, 0 backward" in words
            assert "rank 1 has calls so far 0 forward, 0 backward" in words
            assert "make the same calls in the same order" in words


@pytest.mark.parametrize("label", [object(), 1.5, torch.ones(1), (1, [2])])
def test_labels_that_may_differ_between_processes_are_refused(label):
    """Their repr contains addresses, or reads a device."""
    qkv = [[torch.zeros(4, 1, 1, 4)]] * 3
    groups = in_process.groups(intra=1)
    with pytest.raises(ValueError, match="label must be a string, an integer, a tuple"):
        in_process.attention(*qkv, groups=groups, label=label)
    in_process.attention(*qkv, groups=groups, label=("layer", 1))


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
    """Return the warnings of a loop over two layers in three steps: number and line."""
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
    calls = CallCounter(warns=True)
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
