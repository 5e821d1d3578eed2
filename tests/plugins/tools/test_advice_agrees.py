"""`algorithm="auto"` in a run and `mb.advise` take the same settings: they ask the same code.

On the same groups, with the rates of the cluster's ranks: real groups in this process and tensors
of one layer on one side, the advisor's plain numbers on the other.
"""

from dataclasses import replace

import pytest
import torch

import megatron_burst as mb
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools.advise.advice import advise
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.search.attention_choice import AttentionForecast
from megatron_burst.plugins.tools.advise.search.pasted import burst_flags
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model

ROWS = 32  # of a rank: few, so that tensors are small; rates are as slow accordingly
HOST = HostTime()  # what `Cluster` has where nobody measured
LINKS = {
    "slow links": mb.Rates(2e8, 2e7, 1e-5, 1e10, 1e-5, host=HOST),
    "slow device": mb.Rates(2e8, 1e8, 1e-6, 1e8, 1e-6, host=HOST),
    "late messages": mb.Rates(1e10, 1e10, 1e-3, 1e11, 1e-5, posting=1e-4, host=HOST),
    "one node is fast": mb.Rates(1e10, 1e7, 1e-5, 1e10, 1e-5, half_rows=8, slowdown=0.1, host=HOST),
}


def model(heads, kv_heads):
    return Model("small", layers=4, hidden=heads * 16, heads=heads, kv_heads=kv_heads,
                 ffn=256, vocabulary=512)  # fmt: skip


def planned(model, run, rates, nodes):
    """What "auto" takes for a run's layer on its groups, on all its ranks."""
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    groups = in_process.groups(
        inter=nodes, intra=run.cp // nodes, ulysses=run.ulysses, placement=run.placement
    )

    def tensors(count):
        shape = run.seq // run.cp, run.micro_batch, count, model.head_dim
        one = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        return [one] * run.cp

    q, k = tensors(heads), tensors(kv_heads)
    return in_process.prepare(
        q,
        k,
        k,
        groups=groups,
        algorithm="auto",
        rates=rates,
        layout=run.layout,
        sequence_chunks=run.sequence_chunks,
    )


def settings_of(taken):
    return taken.algorithm, taken.side, taken.head_chunks


@pytest.mark.parametrize("rates", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize(
    ("cp", "per_node", "heads", "kv_heads", "ulysses", "placement", "layout"),
    [
        (8, 4, 8, 8, 1, "head_first", "zigzag"),
        (8, 4, 8, 2, 1, "head_first", "striped"),
        (8, 4, 8, 4, 2, "head_first", "zigzag"),
        (8, 4, 8, 4, 2, "context_first", "zigzag"),
        (8, 8, 8, 2, 4, "head_first", "contiguous"),
        (4, 4, 8, 8, 4, "head_first", "zigzag"),
        (16, 4, 4, 2, 1, "head_first", "zigzag"),
    ],
)
def test_on_given_groups_both_take_the_same(
    rates, cp, per_node, heads, kv_heads, ulysses, placement, layout
):
    small = model(heads, kv_heads)
    cluster = Cluster("a100", cp, per_node, rates=rates)
    run = Settings(cp * ROWS, cp=cp, ulysses=ulysses, placement=placement, layout=layout)
    attention = AttentionForecast(small, cluster, {"ulysses": ulysses, "placement": placement})
    advised = attention.settled(run)
    plan = planned(small, advised, rates, cp // per_node)
    assert settings_of(plan) == settings_of(advised)
    taken = attention.candidate(run)
    assert (taken.forward, taken.backward) == (
        plan.choice.taken.forward, plan.choice.taken.backward
    )  # fmt: skip
    timed = attention_time(small, cluster, advised)
    passes = zip((timed.forward, timed.backward), timed.host, strict=True)
    assert sum(map(max, passes)) == pytest.approx(taken.seconds, rel=1e-9)


@pytest.mark.parametrize("rates", LINKS.values(), ids=LINKS)
def test_what_is_advised_is_what_auto_takes_in_the_run(rates):
    """Every configuration of a whole search, with the groups that it says."""
    small = model(8, 4)
    cluster = Cluster("a100", 8, 4, rates=rates)
    advice = advise(small, cluster, seq=256, tokens_per_step=256 * 16, top=30, tp=1, pp=1)
    seen = 0
    for each in advice.ranked:
        run = each.run
        if run.cp > 1:
            plan = planned(small, run, rates, max(1, run.cp // 4))
            assert settings_of(plan) == settings_of(run)
            seen += 1
    assert seen >= 2


def test_tensor_parallel_ranks_share_heads_before_either_chooses():
    """TP 2 of 4 GPUs a node: two context-parallel ranks each, with half of the heads."""
    rates, small = LINKS["slow links"], model(8, 4)
    run = Settings(8 * ROWS, tp=2, cp=8)
    cluster = Cluster("a100", 16, 4, rates=rates)
    advised = AttentionForecast(small, cluster, {"ulysses": 1}).settled(run)
    assert settings_of(planned(small, advised, rates, 4)) == settings_of(advised)


@pytest.mark.parametrize("rates", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_where_ranks_share_nics_the_rates_say_so(rates, tp, ulysses):
    """Two NICs for the four GPUs of a node, which tensor-parallel ranks share too."""
    small, here = model(8, 8), 4 // tp
    cluster = Cluster("a100", 8 * tp, 4, nics=2, rates=rates)
    attention = AttentionForecast(small, cluster, {"ulysses": ulysses, "placement": "head_first"})
    run = Settings(8 * ROWS, tp=tp, cp=8, ulysses=ulysses)
    plan = planned(small, run, cluster.run_rates(here), 8 // here)
    taken = attention.candidate(run)
    assert settings_of(plan) == settings_of(attention.settled(run))
    assert (taken.forward, taken.backward) == (
        plan.choice.taken.forward, plan.choice.taken.backward
    )  # fmt: skip


def test_other_rates_would_make_them_differ():
    """The check sees a difference: rates with which something else is taken."""
    small, run = model(8, 8), Settings(8 * ROWS, cp=8)
    taken = {
        settings_of(
            AttentionForecast(small, Cluster("a100", 8, 4, rates=r), {"ulysses": 1}).settled(run)
        )
        for r in LINKS.values()
    }
    assert len(taken) >= 2


def test_flags_name_what_is_advised_for_chunks_of_rows():
    """The search times them by one chunk, "auto" in a run by all: it may take something else there,
    so the flags leave it nothing to choose."""
    run = replace(Settings(8 * ROWS, cp=8, algorithm="multicast", side="query"), sequence_chunks=4)
    flags = burst_flags(replace(run, head_chunks=2))
    assert {"--context-parallel-algo multicast", "--burst-side query", "--burst-head-chunks 2",
            "--burst-sequence-chunks 4"} <= set(flags)  # fmt: skip
