"""State after a call: no leaked memory, consistent call counts, usable groups."""

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.groups import CallCounter
from megatron_burst.plugins.testing import in_process


def shards(size, rows=8):
    torch.manual_seed(0)
    return [[torch.randn(rows, 1, 2, 8, requires_grad=True) for _ in range(size)] for _ in range(3)]


@pytest.mark.parametrize("head_chunks", [1, 2])
def test_a_call_leaves_no_tensor_to_the_garbage_collector(head_chunks):
    """Buffers in a reference cycle live until garbage collection, which training may disable."""
    groups = in_process.groups(inter=2, intra=2)
    qkv = shards(4)
    plan = in_process.prepare(*qkv, groups=groups, head_chunks=head_chunks)

    def call():
        sum(out.sum() for out in in_process.attention(*qkv, plan=plan)).backward()

    call()
    while gc.collect():
        pass  # what tests before this one left may take more than one turn
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        call()
        gc.collect()
        left = [x for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def refused_then_right(how):
    """Return on every rank the error of a wrong call, and whether the next correct call works."""
    groups = mb.Groups.flat(dist.group.WORLD)
    q, k, v = (x[0] for x in shards(1))
    stored = mb.prepare(q, k, v, groups=groups, store=1.0)
    plain = mb.prepare(q, k, v, groups=groups)

    def spoilt():
        def layer(q):
            out = mb.attention(q, k, v, plan=stored)
            return out.mul_(2)  # what was kept is changed

        mb.checkpoint(layer, q, keep=1.0).sum().backward()

    bad = {
        "changed in place": spoilt,
        "another store": lambda: mb.checkpoint(
            lambda q: mb.attention(q, k, v, plan=plain), q, keep=0.25
        ),
        "lists": lambda: mb.attention([q], [k], [v], plan=plain),
        "another shape": lambda: mb.attention(q[:4], k[:4], v[:4], plan=plain),
    }[how]
    said = ""
    if how == "changed in place" or groups.rank == 0:
        try:
            bad()
        except (ValueError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    if how != "changed in place":
        groups.compare_calls()
        mb.prepare(q, k, v, groups=groups)
    else:
        groups.check()
    return said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("changed in place", "RuntimeError: checkpoint: the result of attention was changed"),
        ("another store", "ValueError: plan: store=None"),
        ("lists", "ValueError: q must be one tensor, the shard of this rank, got a list of 1"),
        ("another shape", "ValueError: plan: made for"),
    ],
)
def test_a_call_that_is_refused_leaves_groups_as_they_were(ranks, how, words):
    first, _ = ranks(2).run(refused_then_right, how)
    assert first.startswith(words)


def test_plans_of_one_process_can_be_copied_without_end():
    groups = in_process.groups(intra=2)
    plan = in_process.prepare(*shards(2), groups=groups)
    assert copy.copy(plan).side == plan.side
    with pytest.raises(AttributeError):
        _ = plan.no_such_thing


def test_schedules_serve_calls_that_differ_in_their_scale():
    groups = in_process.groups(intra=2)
    qkv = shards(2)
    first, second = (in_process.prepare(*qkv, groups=groups, softmax_scale=s) for s in (0.1, 0.2))
    assert first.rank_plan.forward.steps is second.rank_plan.forward.steps
    assert first.rank_plan.scoring != second.rank_plan.scoring


def labels_of_a_loop(turns, label=None, source="<string>"):
    """Return the labels in the tags of calls from one line, and the warnings."""
    calls = CallCounter(warns=True)
    scope = {"calls": calls, "turns": turns, "label": label}
    program = "found = [calls.forward(7, label, False).label for _ in range(turns)]"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        exec(compile(program, source, "exec"), scope)
    return scope["found"], [str(one.message) for one in said]


def test_a_line_that_calls_a_plan_again_is_warned_of_once():
    _, said = labels_of_a_loop(3)
    assert len(said) == 1
    assert "pass a label" in said[0]
    assert labels_of_a_loop(3, label=1)[1] == []
    assert labels_of_a_loop(1)[1] == []
    with torch.no_grad():  # an evaluation has no backward between its calls
        assert labels_of_a_loop(3)[1] == []


def test_a_call_without_a_label_bears_the_line_that_makes_it():
    (one,), _ = labels_of_a_loop(1, source="/here/train.py")
    (other,), _ = labels_of_a_loop(1, source="/elsewhere/train.py")
    (third,), _ = labels_of_a_loop(1, source="/here/model.py")
    assert one == other != third
    # Code that a program makes may have another number on each rank.
    assert labels_of_a_loop(1, source="<eval_with_key>.3")[0] == labels_of_a_loop(1)[0]
