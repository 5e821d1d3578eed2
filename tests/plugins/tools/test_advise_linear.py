"""Linear attention in forecasts: work, exchange and groups, by hand figures."""

from dataclasses import replace
from functools import cache

import pytest

from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.rates import Rates
from megatron_burst.plugins.tools.advise.account.operators import LayerSizes
from megatron_burst.plugins.tools.advise.advice import advise
from megatron_burst.plugins.tools.advise.forecast import layer_time as linear_work
from megatron_burst.plugins.tools.advise.forecast import scan_time
from megatron_burst.plugins.tools.advise.forecast.layer_time import LINEAR, STATES, layer_time
from megatron_burst.plugins.tools.advise.forecast.step_time import model_operations
from megatron_burst.plugins.tools.advise.search.model_flags import script_of
from megatron_burst.plugins.tools.advise.search.pasted import burst_flags
from megatron_burst.plugins.tools.advise.search.search_space import (
    TrainingGoal,
    of_model,
    options_of,
)
from megatron_burst.plugins.tools.advise.settings import Settings, check
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.plugins.tools.advise.shapes.layer_kinds import gated_delta_net, mamba2
from megatron_burst.plugins.tools.advise.shapes.models import Mixer, Model
from megatron_burst.schedule.scans import SCANS

K = 1024
DELTA = Model("delta", 4, 1024, 8, 2, 4096, 32000, pattern="LLLF",
              mixer=gated_delta_net(16, 8, 128, 64, 4))  # fmt: skip
SSD = replace(DELTA, name="ssd", pattern="M-*-", mixer=mamba2(16, 8, 128, 64, 4))
STATE = 16 * 128 * 64 * 4  # bytes of a sequence's state


def cluster(gpus=16, per_node=4):
    """Links of 1 GB/s within nodes and 0.1 GB/s between them, 1 ms a message."""
    rates = Rates(intra=1e9, inter=1e8, latency=1e-3, compute=1e14)
    return Cluster("h100", gpus, per_node, rates=rates)


def scan_of(model, run=None):
    return LayerSizes.of(model, run or Settings(8 * K)).scan


# --- operations and bytes ----------------------------------------------------------------------


def test_operations_of_an_additive_form():
    """A row and a head: 64 keys of 128, 64 values of 64, a state read and written."""
    each = 2 * 64 * 128 + 2 * 64 * 64 + 2 * 2 * 128 * 64
    assert linear_work.output_operations(scan_of(SSD), 100) == 100 * 16 * each
    assert linear_work.state_operations(scan_of(SSD), 100) == 100 * 16 * 2 * 128 * 64


def test_operations_of_a_delta_rule():
    """Besides: 64 keys for the triangle, its solution of keys and values, the state read again;
    for maps the recurrence has 128 + 64 columns, of which none is read for queries."""
    solved = 64 * 64 / 3
    each = 3 * 2 * 64 * 128 + 2 * 2 * 64 * 64 + solved + 3 * 2 * 128 * 64
    found = linear_work.output_operations(scan_of(DELTA), 3)
    assert found == pytest.approx(3 * 16 * each)
    each = 2 * 64 * 128 + solved + 2 * 64 * 192 + 2 * 2 * 128 * 192
    assert linear_work.state_operations(scan_of(DELTA), 3) == pytest.approx(3 * 16 * each)


def test_bytes_of_a_delta_rule():
    """q, k (8 heads of 128), v and results in bf16; decay and beta in fp32; a state per 64 rows."""
    given = 2 * (2 * 8 * 128 + 2 * 16 * 64) + 4 * 2 * 16
    x = LayerSizes.of(DELTA, Settings(8 * K))
    assert linear_work.memory_traffic(x, x.scan, 640) == 640 * given + 2 * 10 * STATE // 2


def test_operations_that_the_model_needs():
    """The recurrence: a state of 128 x 64 per head written and read; delta rules read it twice."""
    plain = replace(DELTA, mixer=replace(DELTA.mixer, form=""))
    more = model_operations(DELTA, 8 * K) - model_operations(plain, 8 * K)
    assert more == pytest.approx(6 * 3 * 3 * 16 * 128 * 64)
    plain = replace(SSD, mixer=replace(SSD.mixer, form=""))
    more = model_operations(SSD, 8 * K) - model_operations(plain, 8 * K)
    assert more == pytest.approx(6 * 1 * 2 * 16 * 128 * 64)


def test_tensor_parallel_ranks_share_it_out():
    half = scan_of(DELTA, Settings(8 * K, tp=2))
    assert 2 * linear_work.output_operations(half, 64) == linear_work.output_operations(
        scan_of(DELTA), 64
    )


# --- what travels ------------------------------------------------------------------------------


def test_bytes_of_states_and_of_maps():
    assert scan_time.sizes_of(scan_of(DELTA), 1).state == STATE
    assert scan_time.sizes_of(scan_of(DELTA), 1).map == STATE + 16 * 128 * 128 * 4
    assert scan_time.sizes_of(scan_of(SSD), 1).map == STATE + 16 * 4
    assert scan_time.sizes_of(scan_of(SSD), 2).map == 2 * (STATE + 16 * 4)
    half = scan_of(DELTA, Settings(8 * K, tp=2))
    assert 2 * scan_time.sizes_of(half, 1).map == scan_time.sizes_of(scan_of(DELTA), 1).map


def test_links_are_those_of_a_rank_among_others():
    """Two NICs for four ranks; folding in reads two states and writes one."""
    halved = replace(cluster(), nics=2)
    links = scan_time.links_of(halved)
    assert (links.intra, links.inter, links.intra_latency) == (1e9, 5e7, 1e-3)
    assert links.combine == halved.gpu.memory_rate / 3


@pytest.mark.parametrize(("layout", "hops", "crossings"),
                         [("zigzag", 30, 6), ("contiguous", 15, 3)])  # fmt: skip
def test_seconds_of_a_ring_of_states(layout, hops, crossings):
    """16 ranks on 4 nodes, up and back or up only; each rank folds in what it gets."""
    where, run = cluster(), Settings(64 * K, cp=16, intra=4, layout=layout, linear="ring")
    x = LayerSizes.of(replace(DELTA, mixer=replace(DELTA.mixer, taps=0)), run)
    each = hops * (1e-3 + STATE * 3 / where.gpu.memory_rate)
    each += (hops - crossings) * STATE / 1e9 + crossings * STATE / 1e8
    assert scan_time.scan_seconds(where, run, x) == pytest.approx(each)
    auto = scan_time.scan_seconds(where, replace(run, linear="auto"), x)
    named = [scan_time.scan_seconds(where, replace(run, linear=name), x) for name in SCANS]
    assert auto == min(named) < each


def test_heads_and_rows_of_a_layer():
    """Megatron's exchange moves 4 K rows of all projections and of results, whatever the state."""
    run = Settings(64 * K, cp=16, intra=4, linear="megatron")
    x = LayerSizes.of(SSD, run)
    rows = 4 * K * 2 * (2 * 1024 + 2 * 8 * 128 + 16 + 1024)
    found = scan_time.scan_seconds(cluster(), run, x)
    assert found == pytest.approx(rows * 12 / 16 / 1e8, rel=1e-6)
    # three rows of 8 + 8 heads of 128 and 16 of 64, for both pieces
    run = replace(run, linear="ring")
    before = 1e-3 + 2 * 3 * 2 * (2 * 1024 + 1024) / 1e8
    dry = LayerSizes.of(replace(SSD, mixer=replace(SSD.mixer, taps=0)), run)
    states = scan_time.scan_seconds(cluster(), run, dry)
    assert scan_time.scan_seconds(cluster(), run, x) == pytest.approx(states + before)
    assert scan_time.scan_seconds(cluster(), replace(run, cp=1), x) == 0


def test_scans_are_found_once():
    found = []
    timed = cache(lambda *scan: found.append(scan) or 1.0)
    run = Settings(64 * K, cp=16, intra=4)
    for one in (run, replace(run, store=1.0), replace(run, tp=2, cp=8), replace(run, cp=8)):
        scan_time.scan_seconds(cluster(), one, LayerSizes.of(SSD, one), timed)
    assert len(found) == 3


def test_a_layer_computes_maps_only_where_states_are_passed_on():
    part, run = DELTA.parts[0], Settings(64 * K, cp=4, intra=4)
    passed, shared, alone = (
        layer_time(DELTA, cluster(), one, part=part).forward
        for one in (run, replace(run, linear="megatron"), Settings(16 * K))
    )
    assert passed[LINEAR] > shared[LINEAR] == alone[LINEAR] > 0
    assert passed[STATES] > 0
    assert STATES not in alone
    assert layer_time(DELTA, cluster(), run, part=DELTA.parts[3]).forward[LINEAR] == 0


# --- groups, flags -----------------------------------------------------------------------------


def test_only_megatrons_exchange_is_capped_by_heads():
    many = Settings(1024 * K, cp=64)
    check(DELTA, many)
    with pytest.raises(ValueError, match=r"cannot share the 16 heads and 8 of keys .* auto"):
        check(DELTA, replace(many, linear="megatron"))
    check(DELTA, replace(many, cp=8, linear="megatron"))
    with pytest.raises(ValueError, match="cannot share"):
        check(DELTA, replace(many, cp=16, linear="megatron"))
    check(SSD, replace(many, cp=16, linear="megatron"))  # Mamba copies its groups
    with pytest.raises(ValueError, match="cannot share"):
        check(SSD, replace(many, cp=32, linear="megatron"))
    with pytest.raises(ValueError, match="use one of 1, 2, 4, 8"):
        check(replace(DELTA, heads=32, kv_heads=16), Settings(64 * K, tp=16))
    with pytest.raises(ValueError, match=r"--layout striped puts .* attention of delta"):
        check(DELTA, replace(many, layout="striped"))
    check(DELTA, Settings(64 * K, layout="striped"))


def test_a_search_goes_beyond_the_heads_and_pastes_the_flag():
    here = cluster(gpus=64, per_node=8)
    found = advise(DELTA, here, seq="64K", tokens_per_step="64K", tp=1, pp=1, top=1)
    assert found.best.run.cp == 64
    assert "--burst-linear auto" in burst_flags(found.best.run, carries=True)
    assert not found.model.uncounted
    with pytest.raises(ValueError, match="use --cp 1, 2, 4 or 8, or --linear auto"):
        advise(DELTA, here, seq="64K", tokens_per_step="64K", tp=1, cp=64, linear="megatron")
    with pytest.raises(ValueError, match="--layout striped puts"):
        advise(DELTA, here, seq="64K", layout="striped")
    found = advise(DELTA, here, seq="64K", tokens_per_step="512K", tp=1, pp=1, linear="megatron")
    assert {each.run.cp for each in found.ranked} <= {1, 2, 4, 8}


def test_a_partial_store_stays_in_zigzag():
    found = advise(SSD, cluster(), seq="64K", tokens_per_step="64K", tp=1, store=0.5,
                   recompute="full", top=3)  # fmt: skip
    assert {each.run.layout for each in found.ranked} == {"zigzag"}


def test_what_a_hybrid_model_refuses_is_not_tried():
    tried = {
        hybrid: {each.offload for each in options_of(Settings(64 * K, cp=2), want, False)}
        for hybrid in (True, False)
        for want in [TrainingGoal(64 * K, 1, hybrid=hybrid)]
    }
    assert tried == {True: {0.0}, False: {0.0, 1.0}}


def test_a_mamba_layer_with_an_mlp_makes_a_hybrid_model():
    blocks = replace(SSD, pattern="L" * SSD.layers)
    assert script_of(blocks) == "pretrain_hybrid.py"
    assert of_model(blocks)["hybrid"]
    assert not of_model(replace(blocks, mixer=DELTA.mixer))["hybrid"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"form": "lightning"}, "form 'lightning' must be one of linear, "),
     ({"form": "kda", "key_heads": 3}, "key_heads that divide the 16 heads, got 3"),
     ({"form": "kda", "key_heads": 8}, "a width and a value_width >= 1, got 0 and 0")],
)  # fmt: skip
def test_mixers_that_cannot_be(fields, words):
    with pytest.raises(ValueError, match=words):
        Mixer("x", 100, 10, 16, **fields)


def test_what_no_form_is_known_of_is_named():
    plain = replace(SSD, mixer=Mixer("other", 100, 10, 16))
    assert plain.uncounted == ("scans and states of 1 other layers",)
    assert layer_time(plain, cluster(), Settings(8 * K), part=plain.parts[0]).forward[LINEAR] == 0


def test_named_models_have_their_forms():
    forms = {name: model.mixer.form for name, model in models.NAMED.items() if model.mixer}
    assert forms == {"qwen3-next-80b-a3b": "gated_delta_rule", "nemotron-h-8b": "scalar_decay",
                     "kimi-linear-48b-a3b": "kda", "minimax-text-01": "scalar_decay"}  # fmt: skip
