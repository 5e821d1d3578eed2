"""Algorithm "auto" of sparse operations: its cost model, its choice, and equal results."""

import numpy as np
import pytest
import torch

import megatron_burst as mb
from megatron_burst.autotune.candidates import FixedSettings, Workload, on_grid
from megatron_burst.autotune.pair_counts import pairs_attended, pairs_seen
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.topology import Topology

S, RANKS, B, D, W, TOP_K = 64, 4, 1, 8, 6, 5
SLOW = mb.Rates(50e6, 12.5e6, latency=1e-4, compute=1e9)


def case(seed=0):
    """Return whole tensors index_q, index_k, weights, q, k; latents are D wide with W values."""
    make = torch.Generator().manual_seed(seed)
    sizes = (3, D), (1, D), (3,), (8, D), (1, D)
    return [torch.randn(S, B, *size, generator=make, dtype=torch.float64) for size in sizes]


def run(groups, **named):
    """Return the results of a layer on every rank, with gradients."""
    layout = mb.layout.make("zigzag", cp_size=RANKS)
    cut = [[mb.shard(x, layout, r).requires_grad_() for r in range(RANKS)] for x in case()]
    *index, q, k = cut
    if named.pop("planned", False):
        named = {"plan": in_process.prepare(q, k, k, groups=groups, layout=layout, **named)}
    else:
        named["groups"] = groups
    found = in_process.select(*index, rule="dsa", top_k=TOP_K, **named)
    outs = in_process.sparse_attention(q, k, None, found, value_width=W, **named)
    loss = in_process.indexer_loss(*index, q, k, found, rule="dsa", **named)
    torch.autograd.backward([x.square().sum() for x in (*outs, *loss)])
    grads = [x.grad for each in cut for x in each]
    return [*(one.ids for one in found), *outs, *loss, *grads]


def kinds(groups):
    """Return the algorithms of the cached sparse plans."""
    return {plan.algorithm for plan in groups.ranks[0].cache["sparse"].values()}


def grid():
    return in_process.groups(inter=2, intra=2)


def equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_plan_that_was_chosen_lets_each_operation_choose_its_own():
    wanted = run(grid(), algorithm="burst")
    groups = grid()
    found = run(groups, planned=True, algorithm="auto", rates=SLOW)
    equal(found, wanted)
    # Between slow nodes every row crosses once; queries, which a tile sends, stay.
    assert kinds(groups) <= {"multicast", "burst", "ring"}
    chosen = list(groups.ranks[0].cache["sparse"].values())
    assert {each.choice.rates for each in chosen} == {SLOW}
    assert "(auto: " in chosen[0].describe()
    assert all(o.algorithm in ("multicast", "burst", "ring", "all_gather") for each in chosen
               for o in (each.choice.taken, *each.choice.others))  # fmt: skip
    # Fast links and no latency: nothing to choose by but simplicity.
    fast = grid()
    run(fast, planned=True, algorithm="auto", rates=mb.Rates(1e15, 1e15, compute=1e6))
    assert "all_gather" not in kinds(fast)


def test_a_named_plan_is_followed():
    groups = grid()
    run(groups, planned=True, algorithm="all_gather")
    assert kinds(groups) == {"all_gather"}


def test_without_a_plan_links_and_kernels_are_measured_once():
    wanted = run(grid(), algorithm="burst")
    groups = grid()
    found = run(groups, algorithm="auto")
    equal(found, wanted)
    speeds = dict(groups.ranks[0].cache["speeds"])
    # The rule's scores, attention over latents, and attention of the loss without values.
    assert len(speeds) == 3
    assert all(speed > 0 for speed, _ in speeds.values())
    run(groups, algorithm="auto")
    assert groups.ranks[0].cache["speeds"] == speeds


@pytest.mark.parametrize("rule", ["moba", "msa"])
def test_rules_of_blocks_are_timed_too(rule):
    groups, layout = grid(), mb.layout.make("contiguous", cp_size=RANKS)
    make = [torch.randn(2048, 1, heads, D) for heads in (4, 2)]
    q, k = ([mb.shard(x, layout, r) for r in range(RANKS)] for x in make)
    named = {"rule": rule, "top_k": 2, "layout": layout, "groups": groups}
    wanted = in_process.select(q, k, algorithm="ring", **named)
    found = in_process.select(q, k, algorithm="auto", **named)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.ids, other.ids)


def test_faults_are_told_before_anything_is_measured():
    groups = grid()
    with pytest.raises(ValueError, match="top_k must be a positive integer, got 0"):
        run_select(groups, top_k=0)
    with pytest.raises(ValueError, match=r"that sends keys \(burst, .*, or auto\), got 'tile'"):
        run_select(groups, algorithm="tile")
    assert "speeds" not in groups.cache


def run_select(groups, top_k=TOP_K, algorithm="auto"):
    cut = [[mb.shard(x, mb.layout.make("zigzag", cp_size=RANKS), r) for r in range(RANKS)]
           for x in case()[:3]]  # fmt: skip
    return in_process.select(*cut, rule="dsa", top_k=top_k, groups=groups, algorithm=algorithm)


# --- what is counted, against matrices made by hand ----------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 20, S])
@pytest.mark.parametrize("name", ["zigzag", "contiguous", "striped"])
def test_a_query_attends_to_so_many_of_what_it_sees(most, name):
    layout = mb.layout.make(name, cp_size=RANKS)
    spans = [layout.spans(r, S) for r in range(RANKS)]
    rows = [[np.arange(s.length) * s.stride + s.start for s in each] for each in spans]
    visible = np.tril(np.ones((S, S)))
    wanted = np.zeros((RANKS, RANKS))
    for i, pieces in enumerate(rows):
        for piece in pieces:
            seen = visible[piece].sum() / len(piece)
            part = visible[piece] * min(1.0, most / seen)
            for j, keys in enumerate(rows):
                wanted[i, j] += part[:, np.concatenate(keys)].sum()
    found = pairs_attended(mb.masks.Causal(), spans, most)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    exact = np.minimum(most, np.arange(S) + 1).sum()
    assert exact <= found.sum() * (1 + 1e-12) <= exact * 1.25
    if most == S:
        np.testing.assert_allclose(found, pairs_seen(mb.masks.Causal(), spans))


def test_flops_of_latents_and_bytes_of_chunks():
    sizes = Sizes(S // RANKS, 2, 8, 1, D - W, W, 4, 4, 4, (True, True, True))
    layout = mb.layout.make("striped", cp_size=RANKS)
    workload = Workload(sizes, mb.masks.Full(), layout, attended=TOP_K, latent=True)
    fixed = FixedSettings("all_gather", "kv", 1)
    (found,) = on_grid(workload, Topology(RANKS, 2), SLOW, fixed)
    flops = S // RANKS * TOP_K * 2 * 8 * 2.0 * (D + W)  # scores of D columns, values of W
    assert found.forward.compute == pytest.approx(flops / 1e9)
    chunk = S // RANKS * 2 * D * 4
    assert found.sent.total == RANKS * (RANKS - 1) * chunk * 3  # keys twice, gradients once
