"""Attention store: exact gradients, bytes and rows by formula, and the lifetime of stores."""

import gc
import sys
import weakref
from collections import Counter
from functools import partial

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.layout import Span
from megatron_burst.plugins.testing import in_process
from megatron_burst.recompute import selection
from megatron_burst.recompute.selection import Interval

GRIDS = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
MASKS = {
    "causal": masks.Causal(),
    "full": masks.Full(),
    "window": masks.Window(9, 0),
    "documents": masks.Documents([0, 7, 20, 48]) & masks.Causal(),
    "dilated": masks.Causal() & masks.Dilated(3),
}
CHOICES = [("burst", "query"), ("ring", "kv"), ("double_ring", "kv"), ("all_gather", "kv")]
KEEPS = (0.25, 0.5, 0.6, 1.0)
LENGTH = 48


def layers(groups, choices):
    """Return two attention layers of a rank with a function between, and q, k, v of all ranks."""
    torch.manual_seed(0)
    rows = LENGTH // groups.size

    def leaves(heads, width):
        return [
            torch.randn(rows, 2, heads, width, dtype=torch.float64, requires_grad=True)
            for _ in range(groups.size)
        ]

    inputs = [*leaves(4, 8), *leaves(2, 8), *leaves(2, 4)]

    def run(group, q, k, v, sink=None):
        out = mb.attention(1.5 * q, k, v, groups=group, sink=sink, **choices)
        again = torch.cat([out, out], dim=-1).sin()
        return mb.attention(again, k, v, groups=group, sink=sink, **choices)

    return run, inputs


def by_rank(groups, inputs):
    """Return q, k and v of all ranks as three lists."""
    return [inputs[i * groups.size : (i + 1) * groups.size] for i in range(3)]


def on_ranks(groups, run, inputs, keep=None):
    """Return the results of `run` on all ranks, each in its own checkpoint with `keep`."""
    arguments = groups.ranks, *by_rank(groups, inputs)
    if keep is None:
        return in_process.on_ranks(groups, run, *arguments)
    return in_process.checkpoint(groups, run, *arguments, keep=keep)


def results(groups, run, inputs, sink, keep):
    """Return output and all gradients, with a checkpoint with `keep`, or without a checkpoint."""
    arguments = [*by_rank(groups, inputs)] + ([] if sink is None else [[sink] * groups.size])
    call = run if keep is None else lambda *arguments: mb.checkpoint(run, *arguments, keep=keep)
    out = torch.stack(in_process.on_ranks(groups, call, groups.ranks, *arguments))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    expected = [*inputs] if sink is None else [*inputs, sink]
    grads = torch.autograd.grad((out * weights).sum(), expected, retain_graph=True)
    twice = torch.autograd.grad((out * weights).sum(), expected)
    assert all(torch.equal(x, y) for x, y in zip(grads, twice, strict=True))  # a second backward
    return out, *grads


def worst(groups, run, inputs, sink, keep):
    actual, alone = (results(groups, run, inputs, sink, each) for each in (keep, None))
    pairs = zip(actual, alone, strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_gradients_are_those_without_a_checkpoint(layout, name):
    """Each pair of mask, layout, grid, algorithm and fraction occurs."""
    number = [*MASKS].index(name) * 3 + ["zigzag", "striped", "contiguous"].index(layout)
    for turn in range(3):
        inter, intra = GRIDS[(number + turn) % 5]
        algorithm, side = CHOICES[(number + 2 * turn) % 4]
        keep = KEEPS[(number + turn + number % 3) % 4]
        groups = in_process.groups(inter=inter, intra=intra)
        sink = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        choices = {"layout": layout, "mask": MASKS[name], "algorithm": algorithm, "side": side}
        run, inputs = layers(groups, choices)
        assert worst(groups, run, inputs, sink, keep) < 1e-10


def test_all_kept_is_the_same_bits():
    groups = in_process.groups(inter=2, intra=2)
    run, inputs = layers(groups, {})
    actual, alone = (results(groups, run, inputs, None, keep) for keep in (1.0, None))
    pairs = zip(actual, alone, strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def sent_again(groups, layout, keep, mask, algorithm="burst", dtype=torch.bfloat16):
    """Return the bytes that rank 0 sends in a recomputation with side kv, and the store's bytes."""
    rows = LENGTH // groups.size
    heads = {"q": (2, 8), "k": (1, 8), "v": (1, 8)}
    q, k, v = (
        [torch.randn(rows, 1, *shape, dtype=dtype, requires_grad=True) for _ in range(groups.size)]
        for shape in heads.values()
    )
    plan = in_process.prepare(
        q, k, v, groups=groups, layout=layout, mask=mask, algorithm=algorithm, store=keep
    )

    def sent():
        return groups.ranks[0].counters.intra + groups.ranks[0].counters.inter

    runs = [_checkpoint().storing(partial(mb.attention, plan=one), keep) for one in plan.ranks]

    def run():
        in_process.on_ranks(groups, lambda call, *arguments: call(*arguments), runs, q, k, v)

    run()
    before = sent()
    run()
    return sent() - before, sum(each.store.nbytes for each in runs), plan


def _checkpoint():
    """Return the module, whose name in the package is that of its public function."""
    return sys.modules["megatron_burst.recompute.checkpoint"]


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("algorithm", ["ring", "burst", "all_gather"])
def test_causal_bytes_rows_and_memory_by_formula(algorithm, keep):
    """With striped, each rank recomputes queries, and sends keys, of the first (1 - f) S."""
    groups = in_process.groups(inter=2, intra=2)
    sent, held_bytes, plan = sent_again(groups, "striped", keep, masks.Causal(), algorithm)
    rows, first = LENGTH // 4, round((1 - keep) * LENGTH)
    # Striped: rank r has the positions r, r + 4, ...; later ranks see all of them that are there.
    users = [
        Counter(
            frozenset(r for r in range(4) if any(q >= key for q in range(r, first, 4)))
            for key in range(owner, first, 4)
        )
        for owner in range(4)
    ]
    name = "direct" if algorithm == "all_gather" else algorithm
    assert sent == sum(cases.cheapest(name, (2, 2), users, ((8 + 8) * 2, 0))[0].values())
    stored = round(keep * rows)
    assert plan.store_bytes == stored * 2 * (2 * 8 + 4)  # out in bf16, lse in fp32, two heads
    assert held_bytes == 4 * plan.store_bytes  # all four ranks are in this process
    assert sum(len(one.recompute.rank_pass.kept) for one in plan.ranks) == keep * LENGTH
    pairs = sum(
        tile.tile.visible
        for one in plan.ranks
        for step in one.recompute.rank_pass.forward.steps
        for call in step.calls
        for tile in call.work
    )
    first = round((1 - keep) * LENGTH)
    assert pairs == first * (first + 1) // 2


def test_zigzag_is_unbalanced_and_says_so():
    groups = in_process.groups(inter=2, intra=2)
    _, _, zigzag = sent_again(groups, "zigzag", 0.5, masks.Causal())
    # Rank r recomputes its first piece: 6 queries from 6 r on, of 24; rank 3 the most.
    by_hand = [sum(range(6 * r + 1, 6 * r + 7)) for r in range(4)]
    assert zigzag.recompute.imbalance() == max(by_hand) * 4 / sum(by_hand)
    assert f"busiest rank {max(by_hand) * 4 / sum(by_hand):.2f} x the mean" in zigzag.describe()
    _, _, striped = sent_again(groups, "striped", 0.5, masks.Causal())
    assert striped.recompute.imbalance() < 1.15
    assert "store 0.5" in striped.describe()


@pytest.mark.parametrize("name", ["causal", "full", "window"])
def test_which_positions_are_kept(name):
    stored, remaining = selection.split_positions(MASKS[name], LENGTH, LENGTH, 0.5, 4)
    assert stored == [Interval(24, 48)]
    assert remaining == [Interval(0, 24)]


def test_in_documents_the_costliest_rows_are_kept():
    mask, actual = (
        MASKS["documents"],
        selection.split_positions(MASKS["documents"], LENGTH, LENGTH, 0.25, 4),
    )
    seen = mask.visible(np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :])
    stored, remaining = (
        sorted(p for a, b in intervals for p in range(a, b)) for intervals in actual
    )
    dear = sorted(range(LENGTH), key=lambda p: (seen[p].sum(), p))[-LENGTH // 4 :]
    assert stored == sorted(dear)
    assert sorted(stored + remaining) == list(range(LENGTH))


def test_rows_of_a_shard():
    some = [Span(1, 2, 5), Span(20, 1, 4)]
    rows, spans = selection.rows_in(some, [Interval(4, 8), Interval(22, 30)])
    assert rows.tolist() == [2, 3, 7, 8]  # of 1 3 5 7 9 20 21 22 23
    assert spans == (Span(5, 2, 2), Span(22, 1, 2))
    assert not len(selection.rows_in([Span(0, 1, 4)], []).rows)


def test_calls_in_flight_keep_their_own():
    groups = in_process.groups(inter=1, intra=2)
    run, inputs = layers(groups, {})
    batches = [[(x * scale).detach().requires_grad_() for x in inputs] for scale in (1, 2, 3)]

    def outputs(batch, keep):
        return torch.stack(on_ranks(groups, run, batch, keep))

    alone = [torch.autograd.grad(outputs(batch, None).square().sum(), batch) for batch in batches]
    outs = [outputs(batch, 0.5) for batch in batches]
    for i in (1, 0, 2):
        grads = torch.autograd.grad(outs[i].square().sum(), batches[i])
        pairs = zip(grads, alone[i], strict=True)
        assert max((x - y).abs().max().item() for x, y in pairs) < 1e-10


@pytest.mark.parametrize("end", ["dropped", "no_grad", "exception"])
def test_a_store_is_freed_with_its_call(end):
    groups = in_process.groups(inter=1, intra=2)
    run, inputs = layers(groups, {})
    stores = []

    def watched(*tensors):
        store = _checkpoint().current_store()
        stores.extend([] if store is None else [weakref.ref(store)])
        out = run(*tensors)
        if end == "exception":
            raise KeyError("on purpose")
        return out

    if end == "exception":
        with pytest.raises(KeyError):
            on_ranks(groups, watched, inputs, 0.5)
    else:
        with torch.set_grad_enabled(end != "no_grad"):
            out = on_ranks(groups, watched, inputs, 0.5)
        del out
    gc.collect()
    # Where no backward can come nothing is kept.
    assert len(stores) == (0 if end == "no_grad" else groups.size)
    assert all(store() is None for store in stores)
    assert _checkpoint().current_store() is None


def test_a_function_that_does_something_else_the_second_time_is_told():
    groups = in_process.groups(inter=1, intra=2)
    run, inputs = layers(groups, {})
    calls = []

    def fickle(group, *tensors):
        calls.append(1)
        first = len(calls) <= groups.size
        return run(group, *(tensors if first else [torch.cat([t, t]) for t in tensors]))

    outs = on_ranks(groups, fickle, inputs, 1.0)
    with pytest.raises(ValueError, match="must make the same attention calls"):
        sum(out.sum() for out in outs).backward()


def test_a_function_with_another_mask_the_second_time_is_told():
    groups = in_process.groups(inter=1, intra=2)
    _, inputs = layers(groups, {})
    seen = [iter([masks.Causal(), masks.Full()]) for _ in range(2)]

    def run(group, q, k, v):
        return mb.attention(q, k, v, groups=group, mask=next(seen[group.rank]), layout="striped")

    outs = on_ranks(groups, run, inputs, 0.5)
    with pytest.raises(ValueError, match="must make the same attention calls"):
        sum(out.sum() for out in outs).backward()


def test_labelled_calls_that_swap_places_the_second_time_are_told():
    """Only the label distinguishes the calls."""
    groups = in_process.groups(inter=1, intra=2)
    _, inputs = layers(groups, {})
    labels = [iter(["a", "b", "b", "a"]) for _ in range(2)]

    def both(group, *qkv):
        label = labels[group.rank]
        return [
            mb.attention(*qkv, groups=group, label=next(label), layout="striped") for _ in range(2)
        ]

    outs = on_ranks(groups, both, inputs, 1.0)
    with pytest.raises(ValueError, match="must make the same attention calls"):
        sum(out.sum() for both in outs for out in both).backward()


@pytest.mark.parametrize(("layout", "keep"), [("zigzag", 1.0), ("contiguous", 0.5)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_result_changed_in_place_is_noticed_where_it_is_what_was_kept(layout, keep, inside):
    groups = in_process.groups(inter=1, intra=2)
    _, inputs = layers(groups, {})

    def run(group, *qkv):
        out = mb.attention(*qkv, groups=group, layout=layout)
        return out.mul_(2) if inside else out

    outs = on_ranks(groups, run, inputs, keep)
    if not inside:
        outs = [out.mul_(2) for out in outs]
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        sum(out.pow(3).sum() for out in outs).backward()


def test_what_cannot_be_is_refused():
    def attend(plan, *qkv):
        return mb.attention(*qkv, plan=plan)

    groups = in_process.groups(inter=1, intra=2)
    run, inputs = layers(groups, {})
    for keep in (-0.1, 1.1, "half", True):
        with pytest.raises(ValueError, match="keep must be a fraction from 0 to 1"):
            on_ranks(groups, run, inputs, keep)
    q, k, v = inputs[:2], inputs[2:4], inputs[4:]
    with pytest.raises(ValueError, match="store must be a fraction"):
        in_process.prepare(q, k, v, groups=groups, store=2)
    plan = in_process.prepare(q, k, v, groups=groups, store=0.25)
    with pytest.raises(
        ValueError, match=r"store=0\.25 differs from the checkpoint around this call"
    ):
        in_process.checkpoint(groups, attend, plan.ranks, q, k, v, keep=0.5)


def on_real_ranks(keep):
    """Return the largest difference of this rank's gradients from those without a checkpoint."""
    groups = cases.groups_on_rank(2, 2)
    torch.manual_seed(dist.get_rank())
    q, k, v = (torch.randn(12, 2, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")

    def run(q, k, v):
        return mb.attention(q.sin(), k, v, groups=groups, layout="striped")

    alone = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    stored = torch.autograd.grad(mb.checkpoint(run, q, k, v, keep=keep).square().sum(), (q, k, v))
    return max((x - y).abs().max().item() for x, y in zip(stored, alone, strict=True))


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_on_real_ranks(ranks, keep):
    assert max(ranks(4).run(on_real_ranks, keep)) < 1e-10


def test_a_plan_that_told_its_bytes_keeps_no_tables_of_all_ranks():
    groups = in_process.groups(inter=2, intra=2)
    shards = [[torch.randn(8, 1, 2, 4) for _ in range(4)] for _ in "qkv"]
    plan = in_process.prepare(*shards, groups=groups, algorithm="multicast", store=0.5).ranks[0]
    assert plan.describe()
    schedules = *plan.schedules, plan.recompute.schedule
    assert not any("tables" in vars(schedule) for schedule in schedules)
