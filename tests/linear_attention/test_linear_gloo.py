"""Operations on chains on gloo ranks: equal to one process, and errors if ranks differ.

Groups that are made here to fail wait two seconds.
"""

import os
import random
import signal
from datetime import timedelta

import pytest
import random_trees
import torch
import torch.distributed as dist
from test_linear_reverse import Whole

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

ROWS, B, G, H, D, W = 8, 1, 1, 2, 2, 4  # rows of each rank
ALGORITHMS = ("all_gather", "scan", "two_level", "ring")


def tensors(rows, seed=0, delta=True):
    """Return q, k, v, decay and beta of a sequence, and weights of the loss."""
    make = torch.Generator().manual_seed(seed)
    sizes = [(G, D), (G, D), (H, W), (H,), (H,), (H, W)]
    q, k, v, decay, beta, weights = (
        torch.randn(rows, B, *size, generator=make, dtype=torch.float64) for size in sizes
    )
    return {
        "q": q, "k": k / 2, "v": v, "decay": -decay.abs(),
        "beta": beta.sigmoid() if delta else None,
    }, weights  # fmt: skip


def shards(named, layout, rank):
    return {
        name: None if t is None else mb.shard(t, layout, rank, dim=0).detach().requires_grad_()
        for name, t in named.items()
    }


def trained(algorithm, delta):
    """Return out, gradients, final states, counted bytes and planned bytes of this rank.

    Several micro-batches are in flight, inputs have any strides, and keys are frozen.
    """
    world = dist.get_world_size()
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2 if world == 4 else world)
    bounds = [0, 5, 5, ROWS * world]
    layout = mb.layout.make("zigzag", cp_size=world)
    named, weights = tensors(ROWS * world, delta=delta)
    own = shards(named, layout, groups.rank)
    own["k"].requires_grad_(False)
    weights = mb.shard(weights, layout, groups.rank, dim=0)
    plan = mb.prepare_linear(
        **own, groups=groups, layout=layout, cu_seqlens=bounds, algorithm=algorithm
    )
    strided = own | {"v": own["v"].mT.contiguous().mT}
    runs = [
        mb.linear_attention(**strided, plan=plan, return_final_state=label == 0, label=label)
        for label in range(3)
    ]
    sent = groups.counters.intra, groups.counters.inter
    leaves = [t for t in own.values() if t is not None and t.requires_grad]
    out, finals = runs[0]
    grads = [
        torch.autograd.grad((run * weights).sum(), leaves, retain_graph=True)
        for run in (runs[2], runs[1], out)
    ]
    for one, same, other in zip(*grads, strict=True):
        assert torch.equal(one, same)
        close(other, one)  # with final states more pieces have maps: other products, other bits
    spread = finals[0].numel() * 8 * (world - 1) * len(plan.job.finals.held_by(groups.rank))
    return out.detach(), grads[0], finals.detach(), sum(sent) - spread, 3 * sum(plan.traffic()[0])


def alone(world, delta):
    """Return the same on one rank: out, gradients except of the keys, final states."""
    named, weights = tensors(ROWS * world, delta=delta)
    layout = mb.layout.make("zigzag", cp_size=world)
    groups = in_process.groups(intra=1)
    whole = {n: None if t is None else t.requires_grad_(n != "k") for n, t in named.items()}
    lists = {n: None if t is None else [t] for n, t in whole.items()}
    (out,), (finals,) = in_process.linear_attention(
        **lists, groups=groups, layout="contiguous", cu_seqlens=[0, 5, 5, ROWS * world],
        return_final_state=True,
    )  # fmt: skip
    leaves = [t for t in whole.values() if t is not None and t.requires_grad]
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    cut = [[mb.shard(t, layout, rank, dim=0) for t in (out, *grads)] for rank in range(world)]
    return cut, finals


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one(world, algorithm, ranks):
    for delta in (True, False):
        expected, finals = alone(world, delta)
        results = ranks(world).run(trained, algorithm, delta)
        for (out, grads, ends, sent, planned), (wanted, *of_wanted) in zip(
            results, expected, strict=True
        ):
            close(out, wanted)
            close(ends, finals)
            for one, other in zip(grads, of_wanted, strict=True):
                close(one, other)
            assert sent == planned


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def over_a_tree(out, layout):
    """Return output and gradients of this rank over a tree with two micro-batches in flight."""
    groups, tree = mb.Groups.flat(dist.group.WORLD), mb.masks.Tree(out)
    own = shards(tensors(len(out))[0], layout, groups.rank)
    plan = mb.prepare_linear(**own, groups=groups, layout=layout, tree=tree)
    outs = [mb.linear_attention(**own, plan=plan, label=label) for label in range(2)]
    grads = [torch.autograd.grad(one.square().sum(), [*own.values()]) for one in reversed(outs)]
    assert all(torch.equal(one, same) for one, same in zip(*grads, strict=True))
    return outs[0].detach(), *grads[0]


def test_a_tree_over_ranks_equals_one_process(ranks):
    out, _, _ = random_trees.draw(random.Random(3), 32)
    tree = mb.masks.Tree(out)
    layout = mb.layout.make("balanced", cp_size=2, tree=tree)
    each = [shards(tensors(32)[0], layout, rank) for rank in range(2)]
    lists = {name: [one[name] for one in each] for name in each[0]}
    groups = in_process.groups(intra=2)
    outs = in_process.linear_attention(**lists, groups=groups, layout=layout, tree=tree)
    leaves = [t for one in each for t in one.values()]
    grads = torch.autograd.grad(sum(one.square().sum() for one in outs), leaves)
    wanted = [(outs[0], *grads[: len(each[0])]), (outs[1], *grads[len(each[0]) :])]
    for found, expected in zip(ranks(2).run(over_a_tree, out, layout), wanted, strict=True):
        for one, other in zip(found, expected, strict=True):
            close(one, other)


def in_direction(reverse):
    """Return out, gradients, counted and planned bytes of this rank; keys are frozen."""
    groups, world = mb.Groups.flat(dist.group.WORLD), dist.get_world_size()
    layout = mb.layout.make("zigzag", cp_size=world)
    whole = Whole("gated_delta_rule", [0, 5, 5, ROWS * world], reverse)
    own = shards(whole.tensors, layout, groups.rank)
    own["k"].requires_grad_(False)
    plan = mb.prepare_linear(
        **own, groups=groups, layout=layout, cu_seqlens=whole.bounds, reverse=reverse
    )
    outs = [mb.linear_attention(**own, plan=plan, label=label) for label in range(2)]
    sent = groups.counters.intra + groups.counters.inter
    leaves = [t for t in own.values() if t.requires_grad]
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in reversed(outs)]
    assert all(torch.equal(one, same) for one, same in zip(*grads, strict=True))
    return outs[0].detach(), *grads[0], sent, 2 * sum(plan.traffic()[0])


@pytest.mark.parametrize("reverse", [True, "both"])
@pytest.mark.parametrize("world", [2, 3])
def test_reverse_over_ranks_is_the_recurrence(world, reverse, ranks):
    whole = Whole("gated_delta_rule", [0, 5, 5, ROWS * world], reverse)
    whole.initial = torch.zeros_like(whole.initial)
    out, _ = whole.truth()
    leaves = [t for name, t in whole.tensors.items() if name != "k"]
    grads = torch.autograd.grad(out.square().sum(), leaves)
    layout = mb.layout.make("zigzag", cp_size=world)
    for rank, (*found, sent, planned) in enumerate(ranks(world).run(in_direction, reverse)):
        for one, other in zip(found, (out, *grads), strict=True):
            close(one, mb.shard(other, layout, rank, dim=0))
        assert sent == planned > 0


# --- arguments that differ -------------------------------------------------------------------

DIFFERENT = {
    "documents": ({"cu_seqlens": [0, 9, 16]}, "cu_seqlens (0, 9, 16)"),
    "tree": ({"tree": mb.masks.Tree([16] * 16), "algorithm": "auto"}, "tree Tree(<16 rows"),
    "algorithm": ({"algorithm": "ring"}, "algorithm 'ring'"),
    "direction": ({"reverse": True}, "rank 0 has reverse False, rank 1 has reverse True"),
    "both directions": ({"reverse": "both"}, "rank 1 has reverse 'both'"),
    "layout": ({"layout": "contiguous"}, "layout Contiguous"),
    "form": ({"decay": None, "form": "delta_rule"}, "decay None"),
    "width of keys": ({"width": 4}, "q ((8, 1, 1, 4)"),
    "dtype": ({"dtype": torch.float32}, "torch.float32"),
    "frozen": ({"freeze": True}, "needs_grad"),
    "final states": ({"return_final_state": True}, "return_final_state True"),
    "initial states": ({"initial_state": torch.zeros(1, B, H, D, W).double()}, "initial_state"),
    "a shape": ({"bad": True}, "rank 1: v must be [s, b, h, w]"),
    "an algorithm that is none": ({"algorithm": "best"}, "rank 1: algorithm must be one of auto"),
    "striped": ({"layout": "striped"}, "rank 1: layout striped: every row's predecessor"),
    "a label": ({"label": 1.5}, "rank 1: label must be a string"),
}


def told(case):
    """Return this rank's ValueError if rank 1 differs."""
    change = dict(DIFFERENT[case][0]) if dist.get_rank() == 1 else {}
    groups = mb.Groups.flat(dist.group.WORLD)
    named, _ = tensors(ROWS)
    width, dtype = change.pop("width", D), change.pop("dtype", torch.float64)
    named = {n: t.to(dtype).requires_grad_(n == "q") for n, t in named.items()}
    for name in "qk":
        named[name] = torch.zeros(ROWS, B, G, width, dtype=dtype, requires_grad=name == "q")
    if change.pop("freeze", False):
        named["q"] = named["q"].detach()
    if change.pop("bad", False):
        named["v"] = named["v"][:3]
    keywords = {"layout": "zigzag", "cu_seqlens": None, "algorithm": "scan", **change}
    try:
        mb.linear_attention(**named | keywords, groups=groups)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", DIFFERENT)
def test_arguments_that_differ_are_the_same_error_everywhere(case, ranks):
    first, second = ranks(2).run(told, case)
    assert first is not None
    assert first == second
    assert DIFFERENT[case][1] in first


CONVOLUTIONS = {"bias": {"bias": torch.zeros(3)}, "activation": {"activation": "silu"}}


def told_of_a_convolution(case):
    """Return this rank's ValueError if only rank 1 has a keyword."""
    groups = mb.Groups.flat(dist.group.WORLD)
    change = CONVOLUTIONS[case] if groups.rank else {}
    with pytest.raises(ValueError, match="ranks disagree") as error:
        mb.short_convolution(torch.ones(ROWS, 1, 3), torch.ones(3, 4), groups=groups, **change)
    return str(error.value)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_is_the_same_on_all_ranks(case, ranks):
    first, second = ranks(2).run(told_of_a_convolution, case)
    assert first == second
    assert f"rank 0 has {case}" in first


# --- out of step -----------------------------------------------------------------------------


def begin(**choices):
    groups = mb.Groups.flat(dist.new_group(timeout=timedelta(seconds=2)))
    named, _ = tensors(ROWS)
    own = {n: t.requires_grad_() for n, t in named.items()}
    return groups, own, mb.prepare_linear(**own, groups=groups, algorithm="scan", **choices)


def another_plan():
    groups, own, first = begin()
    second = in_process.prepare_linear(**own, groups=groups, algorithm="scan", scale=2.0)
    in_process.linear_attention(**own, plan=second if groups.rank else first).sum().backward()


def another_direction():
    groups, own, first = begin()
    second = in_process.prepare_linear(**own, groups=groups, algorithm="scan", reverse=True)
    in_process.linear_attention(**own, plan=second if groups.rank else first).sum().backward()


def another_label():
    groups, own, plan = begin()
    in_process.linear_attention(**own, plan=plan, label=groups.rank).sum().backward()


def final_states_on_one_rank():
    groups, own, plan = begin()
    found = in_process.linear_attention(**own, plan=plan, return_final_state=groups.rank == 0)
    (found[0] if groups.rank == 0 else found).sum().backward()


def forward_beside_backward():
    groups, own, plan = begin()
    out = in_process.linear_attention(**own, plan=plan)
    out.sum().backward() if groups.rank else in_process.linear_attention(**own, plan=plan)


def another_convolution():
    groups, _, plan = begin()
    in_process.short_convolution(torch.ones(ROWS, 1, 3), torch.ones(3, 3 + groups.rank), plan=plan)


def a_bias_on_one_rank():
    groups, _, plan = begin()
    bias = torch.zeros(3) if groups.rank else None
    in_process.short_convolution(torch.ones(ROWS, 1, 3), torch.ones(3, 4), bias, plan=plan)


OUT_OF_STEP = {
    "a bias on one rank": (a_bias_on_one_rank, "another label"),
    "another plan": (another_plan, "another plan"),
    "another direction": (another_direction, "another plan"),
    "another label": (another_label, "another label or sink"),
    "final states on one rank": (final_states_on_one_rank, "another label or sink"),
    "forward beside backward": (forward_beside_backward, "message of"),
    "another convolution": (another_convolution, "message of"),
}


def failure(case):
    try:
        OUT_OF_STEP[case][0]()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_ranks_out_of_step_get_an_error(case, ranks):
    errors = ranks(2).run(failure, case)
    assert all(errors), errors
    assert any(OUT_OF_STEP[case][1] in error for error in errors), errors


def killed():
    groups, own, plan = begin()
    out = in_process.linear_attention(**own, plan=plan)
    if groups.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for again in (out.sum().backward, lambda: in_process.linear_attention(**own, plan=plan)):
        try:
            again()
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_rank_that_dies_is_named(ranks):
    first, _ = ranks(2).run(killed, may_die=(1,))
    assert "RuntimeError: exchange failed: round" in first[0]
    assert "rank 1" in first[0]
    assert "ValueError: groups: an earlier call failed" in first[1]
