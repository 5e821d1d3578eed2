"""The search behind `mb.advise`: what it finds is what trying everything finds, by its own code."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

import megatron_burst as mb
from megatron_burst.autotune import select
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.gpus import GPUS
from megatron_burst.plugins.tools.advise.account.memory import account, fit, least_bytes
from megatron_burst.plugins.tools.advise.account.steps import layers_of
from megatron_burst.plugins.tools.advise.advice import DoesNotFit, advise
from megatron_burst.plugins.tools.advise.forecast.step_time import step_time
from megatron_burst.plugins.tools.advise.report import stages_text
from megatron_burst.plugins.tools.advise.search.attention_choice import AttentionForecast
from megatron_burst.plugins.tools.advise.search.pasted import group_flags
from megatron_burst.plugins.tools.advise.search.search import Search, plainest, simplest_first
from megatron_burst.plugins.tools.advise.search.search_space import (
    TrainingGoal,
    check_wanted,
    groups_of,
)
from megatron_burst.plugins.tools.advise.settings import Settings, check, stage_layers
from megatron_burst.plugins.tools.advise.shapes.model import Model

K = 1024
GB = 10**9
TINY = Model("tiny", 4, 1024, 8, 2, 4096, 32000)
MOE = Model("moe", 4, 1024, 8, 4, 512, 32000, experts=8, top_k=2, moe_layers=4)


def cluster(gpus=8, memory=80, per_node=4):
    """H100 with so many GB of memory."""
    return Cluster(replace(GPUS["h100"], memory=int(memory * GB)), gpus, per_node)


def searched(model, where, want, top=3, prune=True):
    return Search(model, where, want, AttentionForecast(model, where, want.pinned)).run(
        top, prune=prune
    )


def shown(found):
    return [(one.run, one.seconds) for one in found.ranked]


@pytest.mark.parametrize(("model", "memory"), [(TINY, 9), (TINY, 80), (MOE, 12)])
def test_pruning_changes_nothing(model, memory):
    where, want = cluster(memory=memory), TrainingGoal(64 * K, 8)
    pruned, whole = (searched(model, where, want, prune=prune) for prune in (True, False))
    assert shown(pruned) == shown(whole)
    assert pruned.tried < whole.tried or memory == 9


def test_the_ways_are_all_divisions_of_the_gpus():
    found = {(run.tp, run.pp, run.cp, run.dp) for run in
             groups_of(TINY, cluster(), TrainingGoal(64 * K, 8))}  # fmt: skip
    by_hand = {
        (tp, pp, cp, dp)
        for tp, pp, cp, dp in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
        if tp * pp * cp * dp == 8 and tp <= 4 and pp <= 4
    }
    assert found == by_hand


def test_nothing_that_was_tried_by_hand_is_faster():
    """Every run of four GPUs without pipelines and chunks, with the attention that it names."""
    where, want = (
        cluster(4, memory=10, per_node=2),
        TrainingGoal(64 * K, 4, {"pp": 1, "mlp_tiles": 1}),
    )
    best = searched(TINY, where, want, top=1).ranked[0]
    assert step_time(TINY, where, best.run).seconds == pytest.approx(best.seconds, rel=1e-9)
    assert fit(account(TINY, best.run), where).fits
    assert best.seconds <= min(seconds_by_hand(where)) * (1 + select.TIE)


def seconds_by_hand(where):
    for tp, cp, dp in product((1, 2), (1, 2, 4), (1, 2, 4)):
        if tp * cp * dp != 4:
            continue
        for how in (
            {"recompute": "none"},
            *({"store": store, "offload": offload} for store in (0.0, 0.5, 1.0)
              for offload in (0.0, 1.0)),
        ):  # fmt: skip
            for side, name in product(("kv", "query"), ("ring", "burst")):
                layout = "striped" if how.get("store") == 0.5 else "zigzag"
                run = Settings(64 * K, tp=tp, cp=cp, dp=dp, micro_batches=4 // dp, side=side,
                               algorithm=name, layout=layout, intra=min(cp, 2 // tp),
                               **how)  # fmt: skip
                if fit(account(TINY, run, every=False), where).fits:
                    yield step_time(TINY, where, run).seconds


def test_remembered_schedules_are_those_that_would_be_made():
    """Of runs with other batches, layouts, lengths, groups and clusters, one after another."""
    small = cluster(4, per_node=2)
    kept, run = AttentionForecast(TINY, small), Settings(16 * K, cp=4)
    others = {"seq": 64 * K}, {"micro_batch": 2}, {"layout": "striped"}, {"seq": 64 * K, "tp": 2}
    for where in (small, replace(small, nics=1)):
        forecast, alone = kept.on(where), AttentionForecast(TINY, where)
        for other in ({}, *others):
            each = replace(run, **other)
            assert forecast.candidate(each) == alone.candidate(each)
            alone = AttentionForecast(TINY, where)


def test_more_on_the_host_is_never_faster():
    """What passes over fractions of the offload: of each store the least of them is the fastest."""
    where = cluster(8)
    for model, chunks, store in product((TINY, MOE), (1, 4), (0.0, 0.3, 1.0)):
        times = [
            step_time(model, where, Settings(
                256 * K, cp=8, intra=4, algorithm="ring", side="kv", store=store, offload=offload,
                sequence_chunks=chunks, optimizer_offload=0.5,
            )).seconds
            for offload in (0.0, 0.1, 0.4, 0.5, 1.0)
        ]  # fmt: skip
        assert times == sorted(times)


@pytest.mark.parametrize(("memory", "host"), [(13.7, 6.0), (13.2, 1600.0)])
def test_as_much_is_stored_and_offloaded_as_fits(memory, host):
    """All tenths of both by hand, the fastest first until one fits; and more than the ends give."""
    where = replace(cluster(4, memory=memory), host_memory=int(host * GB))
    fixed = {"tp": 2, "cp": 2, "sequence_chunks": 1, "mlp_tiles": 1, "optimizer_offload": 0.0}
    best = searched(TINY, where, TrainingGoal(512 * K, 1, fixed), top=1).ranked[0]
    assert best.fit.fits
    assert 0 < best.run.store < 1
    tenths = [tenth / 10 for tenth in range(11)]
    found = []
    for store, offload in product(tenths, tenths):
        layout = "striped" if 0 < store < 1 else "zigzag"
        run = Settings(512 * K, tp=2, cp=2, intra=2, algorithm="ring", side="kv", layout=layout,
                       store=store, offload=offload)  # fmt: skip
        found.append((step_time(TINY, where, run).seconds, run))
    ordered = sorted(found, key=lambda one: one[0])
    first = next(s for s, run in ordered if fit(account(TINY, run, every=False), where).fits)
    assert best.seconds <= first * (1 + select.TIE)


def test_the_longest_sequence_is_one_that_fits_beside_one_that_does_not():
    where = replace(cluster(2, memory=13), host_memory=30 * GB)
    fixed = {"pp": 1, "tp": 1, "sequence_chunks": 8, "mlp_tiles": 8}
    found = advise(TINY, where, seq="longest", top=1, **fixed)
    assert found.best.fit.fits
    with pytest.raises(DoesNotFit):
        advise(TINY, where, seq=-(-found.want.seq * 101 // 100 // 32768) * 32768, top=1, **fixed)


@pytest.mark.parametrize(("gpus", "fixed"), [
    (6, {"tp": 2, "pp": 1, "sequence_chunks": 8, "mlp_tiles": 8}),
    (4, {"tp": 1, "cp": 2, "dp": 2, "sequence_chunks": 8, "mlp_tiles": 8}),
], ids=str)  # fmt: skip
def test_a_longest_sequence_goes_with_what_is_fixed(gpus, fixed):
    """Sizes that are no powers of two, and data-parallel ranks."""
    where = replace(cluster(gpus, memory=13, per_node=gpus), host_memory=30 * GB)
    found = advise(TINY, where, seq="longest", top=1, **fixed)
    assert {name: getattr(found.best.run, name) for name in fixed} == fixed
    assert found.best.run.gpus == gpus


@pytest.mark.parametrize(("more", "words"), [
    ({"tokens_per_step": "8M"}, r"--longest .*remove --packed and --tokens-per-step"),
    ({"tp": 3}, "--tp 3 must divide"), ({"foo": 1}, "foo cannot be fixed"),
])  # fmt: skip
def test_a_longest_sequence_needs_what_a_given_one_does(more, words):
    with pytest.raises(ValueError, match=words):
        advise(TINY, cluster(4), seq="longest", **more)


def test_bounds_are_bounds():
    """Also where memory bars what is fastest."""
    want, roomy, small = TrainingGoal(64 * K, 8), cluster(), cluster(memory=6.5)
    for model, where in ((TINY, roomy), (MOE, roomy), (TINY, small)):
        search, barred = Search(model, where, want, AttentionForecast(model, where)), 0
        for groups in groups_of(model, where, want):
            best = search.best_of(groups, thorough=where is small)
            bound = search.at_least(groups)
            barred += bound > search.attention.step_at_least(plainest(groups)).seconds
            if best is not None:
                assert bound <= best.seconds
                assert least_bytes(model, best.run) <= best.account.peak.bytes
            assert best is not None or where is small
        assert bool(barred) == (where is small)


def test_a_bound_of_recomputed_layers_has_their_attention_stored():
    """Memory bars what recomputes nothing, and the best run keeps all results of attention."""
    where, want = cluster(memory=9), TrainingGoal(512 * K, 1, {"tp": 1, "pp": 1, "cp": 8})
    search = Search(TINY, where, want, AttentionForecast(TINY, where, want.pinned))
    (groups,) = groups_of(TINY, where, want)
    assert least_bytes(TINY, plainest(groups)) > where.room
    best = search.best_of(groups)
    assert best is not None
    assert (best.run.recompute, best.run.store) == ("full", 1.0)
    again = replace(plainest(groups), recompute="full")
    bound, alike = search.at_least(groups), search.attention.step_at_least(again).seconds
    assert bound <= best.seconds < alike


def test_a_bound_holds_where_attention_makes_another_stage_the_busiest():
    """Nine layers in stages of 2, 3, 3 and 1, the last with a large LM head: without traffic it is
    the busiest, with it the second is, whose gradients are a twentieth of the last's."""
    model, turned = Model("head", 9, 1024, 8, 8, 4096, 10**6), 0
    for rate, seq in product((0.05, 0.2, 1.0, 5.0), (4 * K, 16 * K)):
        where = Cluster("h100", 32, 4, nic_rate=rate * GB, overlap=0.0)
        attention = AttentionForecast(model, where)
        run = Settings(seq, cp=8, pp=4, micro_batches=4, intra=4, first_layers=2, last_layers=1,
                       algorithm="ring", distributed_optimizer=False)  # fmt: skip
        seconds, least = attention.step(run).seconds, attention.step_at_least(run).seconds
        assert least <= seconds
        turned += step_time(model, where, run, attention.at_least).seconds > seconds
    assert turned


def test_a_fixed_fraction_of_the_optimizer_has_its_own_bound():
    """Where memory bars the whole optimizer on the GPU, and not half of it."""
    want, bound_by_memory = TrainingGoal(K, 8, {"optimizer_offload": 0.5}), 0
    for memory in (6.2, 6.6, 7.0, 8.0):
        where = cluster(1, memory=memory, per_node=1)
        search = Search(TINY, where, want, AttentionForecast(TINY, where))
        for groups in groups_of(TINY, where, want):
            best = search.best_of(groups, thorough=True)
            if best is not None:
                assert search.at_least(groups) <= best.seconds
                whole = replace(plainest(groups), optimizer_offload=0.0)
                bound_by_memory += least_bytes(TINY, whole) > where.room
    assert bound_by_memory


@pytest.mark.parametrize(("pinned", "words"), [
    ({"first_layers": 3, "pp": 1}, "^--first-layers 3: .* require several pipeline stages"),
    ({"first_layers": 3, "pp": 2, "vpp": 2}, "--first-layers 3: .*--vpp 1"),
    ({"first_layers": 3, "last_layers": 4}, "is impossible with every --pp .* set --pp"),
    ({"first_layers": 3, "pp": 3}, "^--pp 3 x --vpp 1, --first-layers 3 cannot share"),
])  # fmt: skip
def test_ends_that_no_stages_have_are_told(pinned, words):
    """Of 20 layers ends of 3 and 4 leave 13, for 1 or 13 stages."""
    with pytest.raises(ValueError, match=words):
        check_wanted(replace(TINY, layers=20), cluster(36), TrainingGoal(64 * K, 36, pinned))


def test_ends_are_of_those_stages_that_have_them():
    model, where = replace(TINY, layers=20), cluster(20)
    for pinned, stages in (({}, {5, 10}), ({"first_layers": 4}, {5})):
        found = groups_of(model, where, TrainingGoal(64 * K, 64, pinned))
        assert {run.pp for run in found} == stages


def test_stages_of_unequal_layers_are_tried_where_layers_do_not_divide():
    """20 layers on 8 stages: 1, 3 x 6, 1; with 32 micro-batches, or --pp."""
    model, where = replace(TINY, layers=20), cluster(16)
    uneven = {"first_layers": 1, "last_layers": 1}
    for sequences, pinned, tried in ((64, {}, {1, 2, 4, 5, 8, 10}), (8, {}, {1, 2, 4, 5, 10}),
                                     (8, {"pp": 8}, {8})):  # fmt: skip
        found = list(groups_of(model, where, TrainingGoal(64 * K, sequences, pinned)))
        assert {run.pp for run in found} <= tried
        assert (8 in tried) == any(run.pp == 8 for run in found)
        for run in found:
            assert run.uneven == (run.pp == 8)
            assert run.vpp == 1 or not run.uneven
            if run.uneven:
                assert {name: getattr(run, name) for name in uneven} == uneven
                assert stage_layers(model, run) == [1, 3, 3, 3, 3, 3, 3, 1]
    best = searched(model, where, TrainingGoal(64 * K, 64, {"pp": 8})).ranked[0]
    stages = [len(layers_of(model, best.run, stage)) for stage in range(8)]
    assert stages == [1, 3, 3, 3, 3, 3, 3, 1]
    whole = account(model, best.run, every=False).peak.bytes
    assert whole == best.account.peak.bytes
    assert "--decoder-first-pipeline-num-layers 1" in group_flags(model, best.run)
    assert stages_text(model, best.run) == "8 of 1, 6 x 3, 1"


@pytest.mark.parametrize(
    ("fields", "layers"),
    [({"pp": 4, "first_layers": 15, "last_layers": 14}, [15, 16, 16, 14]),
     ({"pp": 2, "first_layers": 31}, [31, 30]), ({"pp": 2, "last_layers": 1}, [60, 1])],
)  # fmt: skip
def test_layers_of_unequal_stages(fields, layers):
    model = replace(TINY, layers=61)
    run = Settings(64 * K, **fields)
    assert stage_layers(model, run) == layers
    every = [each for stage in range(run.pp) for each in layers_of(model, run, stage)]
    assert every == list(range(61))


@pytest.mark.parametrize(
    "fields", [{"pp": 4}, {"pp": 4, "first_layers": 15}, {"pp": 1, "first_layers": 61},
               {"pp": 2, "first_layers": 61}, {"pp": 2, "first_layers": 30, "last_layers": 30},
               {"pp": 2, "vpp": 2, "first_layers": 31}],
)  # fmt: skip
def test_stages_that_do_not_come_out_even_are_refused(fields):
    with pytest.raises(ValueError, match=r"cannot share the 61 layers of .* equally; use --pp"):
        check(replace(TINY, layers=61), Settings(64 * K, **fields))


@pytest.mark.parametrize("pinned", [
    {"algorithm": "ring", "side": "query"}, {"ulysses": 2}, {"algorithm": "hybrid"},
    {"tp": 2, "store": 0.5, "head_chunks": 1}, {"pp": 2, "recompute": "none"},
    {"sequence_chunks": 4, "mlp_tiles": 8}, {"ep": 1, "offload": 1.0},
], ids=str)  # fmt: skip
def test_what_is_fixed_stays_fixed(pinned):
    found = searched(TINY, cluster(), TrainingGoal(64 * K, 8, {"cp": 4, **pinned}))
    for one in found.ranked:
        for name, value in {"cp": 4, **pinned}.items():
            assert getattr(one.run, name) == value


def test_of_a_tie_the_simplest_is_taken():
    found = searched(TINY, cluster(memory=12), TrainingGoal(64 * K, 8), top=8)
    one = found.ranked[1]
    plain = replace(one, run=replace(one.run, offload=0.0, store=0.0, recompute="none"),
                    time=replace(one.time, seconds=one.seconds * 1.014))  # fmt: skip
    late = replace(plain, time=replace(one.time, seconds=one.seconds * 1.016))
    moved = replace(one, run=replace(one.run, offload=1.0, recompute="full"))
    assert simplest_first([moved, plain])[0] is plain
    assert simplest_first([moved, late])[0] is moved
    shared = replace(plain, run=replace(plain.run, ep=2), time=replace(one.time, seconds=1e-3))
    assert simplest_first([shared, plain])[0] is shared  # no tie
    near = replace(shared, time=plain.time)
    assert simplest_first([replace(one, run=near.run), plain])[0] is plain


def test_gradients_travel_in_bf16_only_if_that_is_allowed():
    where, goal = cluster(16, per_node=2), {"seq": "64K", "tokens_per_step": "512K", "cp": 8}
    assert {one.run.wire for one in advise(MOE, where, **goal).ranked} == {"fp32"}
    for dtype in ("bf16", "fp32"):
        allowed = advise(MOE, where, **goal, wire=dtype)
        assert allowed.best.run.wire == dtype
        assert ("--burst-wire-dtype bf16" in allowed.flags()) is (dtype == "bf16")


@pytest.mark.parametrize(("change", "words"), [
    ({"tp": 3}, "--tp 3 must divide the 8 heads"),
    ({"tp": 16}, "use 1, 2 or 4"),
    ({"pp": 5}, "--pp 5 x --vpp 1 cannot share the 4 layers"),
    ({"cp": 16}, "--gpus 8 is not a multiple of the 16 ranks of --cp 16"),
    ({"seq": "1X"}, "--seq must be a whole number of tokens .*, got 1X"),
    ({"tokens_per_step": "100K"}, "not a multiple of --seq 65,536; use"),
    ({"cp": 1, "store": 1.0}, "requires --cp above 1"),
    ({"top": 0}, "--top must be an integer >= 1"),
    ({"ulysses": 7, "cp": 4}, "--ulysses 7"),
    ({"speed": 9}, "speed cannot be fixed; use one of tp"),
    ({"packed": "128K"}, "a document of 131,072 tokens does not fit into a pack of --seq 65,536"),
    ({"packed": "no-such"}, "must be lengths such as 8K,32K,128K"),
    ({"seq": 3001}, "can share 1397 sequences of 3,001 tokens equally"),
], ids=str)  # fmt: skip
def test_bad_input_is_refused_with_what_would_do(change, words):
    given = {"seq": "64K", **change}
    with pytest.raises(ValueError, match=words):
        advise(TINY, cluster(), **given)


def test_what_fits_nowhere_says_what_would():
    with pytest.raises(DoesNotFit, match=r"does not fit: a GPU needs .* GiB with TP .* GPUs"):
        advise(TINY, cluster(2, memory=6), seq="512K")


def test_documents_take_less_time_and_are_laid_out_in_balance():
    where = cluster()
    whole = advise(TINY, where, seq="64K", tokens_per_step="512K", cp=4)
    packed = advise(TINY, where, seq="64K", tokens_per_step="512K", cp=4, packed="1k-to-32k")
    assert sum(packed.lengths) == 64 * K
    assert packed.best.seconds < whole.best.seconds
    slow = replace(where, host_time=replace(where.host_time, plan=100.0))
    found = advise(TINY, slow, seq="64K", tokens_per_step="512K", cp=4, packed="1k-to-32k")
    # One plan a micro-batch, of one pack of 64K tokens, on each of dp replicas.
    count = 8 // found.best.run.dp
    assert found.best.seconds == pytest.approx(100 * count, rel=0.01)
    assert advise(TINY, slow, seq="64K", tokens_per_step="512K", cp=4).best == whole.best
    assert {"--burst-pack documents", "--calculate-per-token-loss"} <= set(packed.flags())
    assert "--calculate-per-token-loss" not in whole.flags()
    halves = advise(
        TINY, where, seq="64K", tokens_per_step="512K", cp=1, tp=1, dp=8, packed=[32 * K]
    )
    alone = advise(TINY, where, seq="64K", tokens_per_step="512K", cp=1, tp=1, dp=8)
    part = [one.best.time.parts["attention"] for one in (halves, alone)]
    # Half the pairs, at 585 for 643 TFLOP/s forward and 425 for 553 backward, 2.5 times as much.
    rates = (1 / 585 + 2.5 / 425) / (1 / 642.85 + 2.5 / (0.86 * 642.85))
    assert part[0] / part[1] == pytest.approx(0.5 * rates, rel=0.02)


def test_it_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import megatron_burst as mb\n"
        "found = mb.advise('llama3-8b', 'h100', gpus=8, seq='64K', top=1, tp=4, cp=2)\n"
        "assert found.best.run.tp == 4 and found.flags() and found.why\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert mb.advise is advise


@pytest.mark.parametrize("pinned", [{"ulysses": 2}, {"algorithm": "hybrid"}, {"head_chunks": 2}])
def test_packs_take_what_is_fixed_for_several_ranks(pinned):
    advice = mb.advise("llama3-8b", "h100", gpus=8, seq="64K", packed="8K,32K", top=1, **pinned)
    for name, value in pinned.items():
        assert getattr(advice.best.run, name) == value


@pytest.mark.parametrize("pinned", [{"layout": "striped"}, {"sequence_chunks": 4}])
def test_packs_refuse_what_they_cannot_have(pinned):
    flag = "--" + next(iter(pinned)).replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} .*remove .*--packed"):
        mb.advise("llama3-8b", "h100", gpus=8, seq="64K", packed="8K,32K", **pinned)
