"""The time of a layer and of a step, by hand. Rates are round, so that figures are: a GPU of 100
TFLOP/s whose large products reach half of that, memory and links as each test states."""

import math
from dataclasses import replace

import pytest

from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.gpus import Gpu
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.autotune.rates import Rates
from megatron_burst.plugins.tools.advise.account.memory import parameters
from megatron_burst.plugins.tools.advise.forecast import layer_time as layers
from megatron_burst.plugins.tools.advise.forecast import step_time as states
from megatron_burst.plugins.tools.advise.forecast import step_time as steps
from megatron_burst.plugins.tools.advise.forecast.attention_time import AttentionTime
from megatron_burst.plugins.tools.advise.forecast.layer_time import (
    Product,
    memory_bytes,
    product_seconds,
    products,
)
from megatron_burst.plugins.tools.advise.forecast.links import (
    all_to_all_seconds,
    ring_seconds,
    send_seconds,
)
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.model import Model
from megatron_burst.plugins.tools.advise.shapes.models import NAMED

GPU = Gpu("round", 10**11, 100e12, 2e10, "by hand", nvlink=1e11, memory_rate=math.inf,
          attention=0.5, linear=0.5, small=0.0)  # fmt: skip
SMALL = Model("small", 8, 1024, 8, 2, 4096, 1000)
RATE = 50e12  # of products
# Weights that a token is multiplied by in a layer: q, out 1024 x 1024 each, k and v 1024 x 256
# each, three of 1024 x 4096.
PROJECTIONS, OUT, MLP = 1024 * (1024 + 512), 1024 * 1024, 3 * 1024 * 4096


def cluster(gpus=8, **fields):
    rates = Rates(intra=1e11, inter=1e10, compute=RATE)
    return Cluster(GPU, gpus, rates=rates, **{"nics": 8, "nic_rate": 1e10, "overlap": 0.0} | fields)


def core(forward=1.0, backward=2.0, bound="compute", host=(0.0, 0.0), planning=0.0):
    """An attention call that takes a known time."""
    busy = {"compute": 1.0, "intra": 2.0 * (bound == "intra"), "inter": 0.0}
    return lambda *_, **__: AttentionTime(
        forward, backward, (0.0, 0.0), busy, host=host, planning=planning
    )


FREE = core(0.0, 0.0)


def layer(model=SMALL, where=None, attention=FREE, part=None, **fields):
    run = Settings(**{"seq": 8192, "lm_head_loss": "off"} | fields)
    return layers.layer_time(model, where or cluster(), run, part=part, attention=attention)


# --- products --------------------------------------------------------------------------------


def test_a_product_by_hand():
    assert product_seconds(GPU, Product(1000, 2000, 4000)) == 2 * 8e9 / RATE
    lossy = replace(GPU, small=100.0)
    assert product_seconds(lossy, Product(1000, 2000, 4000)) == pytest.approx(
        2 * 8e9 / RATE * (1 + 0.1 + 0.05 + 0.025)
    )
    bound = replace(GPU, memory_rate=1e9)
    assert product_seconds(bound, Product(1000, 2000, 4000)) == 2 * (2e6 + 8e6 + 4e6) / 1e9


def test_the_products_of_a_dense_layer():
    """Forward, the same again, and twice that in backward."""
    found = layer()
    forward = 2 * 8192 * (PROJECTIONS + OUT + MLP) / RATE
    assert found.forward[layers.PRODUCTS] == pytest.approx(forward)
    assert found.recompute[layers.PRODUCTS] == pytest.approx(forward)
    assert found.backward[layers.PRODUCTS] == pytest.approx(2 * forward)
    kept = layer(recompute="none")
    assert kept.recompute == {}
    assert kept.seconds == pytest.approx(3 * forward)


def test_tensor_and_context_parallel_ranks_share_products():
    one = layer().forward[layers.PRODUCTS]
    assert layer(tp=2, cp=4).forward[layers.PRODUCTS] == pytest.approx(one / 8)


def test_chunks_project_again():
    """Queries, keys and values twice in forward, and three times more in backward, with the output
    projection once more; tiles run the MLP once more in backward."""
    plain = layer(cp=2)
    rate = 2 * 4096 / RATE
    cut = layer(cp=2, sequence_chunks=4)
    extra = cut.forward[layers.PRODUCTS] - plain.forward[layers.PRODUCTS]
    assert extra == pytest.approx(rate * PROJECTIONS)
    extra = cut.backward[layers.PRODUCTS] - plain.backward[layers.PRODUCTS]
    assert extra == pytest.approx(rate * (3 * PROJECTIONS + OUT))
    tiled = layer(cp=2, mlp_tiles=8)
    assert tiled.forward[layers.PRODUCTS] == pytest.approx(plain.forward[layers.PRODUCTS])
    extra = tiled.backward[layers.PRODUCTS] - plain.backward[layers.PRODUCTS]
    assert extra == pytest.approx(rate * MLP)


def test_active_experts_only():
    """Eight experts, two of which see a row: twice an expert's MLP, the router, a shared part."""
    moe = replace(SMALL, experts=8, top_k=2, moe_layers=8, ffn=512, shared=256)
    for ep in (1, 4):
        run = Settings(8192, ep=ep, dp=4)
        work = sum(p.times * p.rows * p.inner * p.columns for p in products(moe, run, moe.parts[0]))
        seen = PROJECTIONS + OUT + 1024 * 8 + 3 * 1024 * (2 * 512 + 256)
        assert work == pytest.approx(8192 * seen)


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "gemma-3-12b", "qwen3-next-80b-a3b"])
def test_products_use_every_weight_once(name):
    """Of all layers: the active parameters without the LM head, norms and a mixer's own."""
    model = NAMED[name]
    run = Settings(seq=1 << 16)
    work = sum(
        p.times * p.rows * p.inner * p.columns
        for part in model.parts
        for p in products(model, run, part)
    )
    head = model.hidden * model.vocabulary
    assert work / run.seq == pytest.approx(model.active_parameters - head, rel=1e-3)


# --- memory, collectives, host ---------------------------------------------------------------


def test_bytes_of_a_dense_layer():
    """Rows of 1024 (norms 2, residuals 3, in two halves), queries 1024 and keys 256 through rope,
    8192 through the activation to 4096."""
    run = Settings(1000)
    there, back = memory_bytes(SMALL, run, SMALL.parts[0])
    assert there == 2 * 1000 * (10 * 1024 + 2 * 1280 + 8192 + 4096)
    assert back == 2 * 1000 * (12 * 1024 + 2 * 1280 + 2 * 8192 + 4096)


def test_collectives_by_hand():
    """Of 8 ranks in a node each sends 7/8 of all bytes. Over two nodes each node sends 15/16 of
    them by eight NICs. Every second rank: four NICs."""
    assert ring_seconds(cluster(), 8, 1, 8e9) == pytest.approx(7e9 / 1e11)
    assert ring_seconds(cluster(16), 16, 1, 16e9) == pytest.approx(15e9 / 8e10)
    assert ring_seconds(cluster(16), 8, 2, 16e9) == pytest.approx(14e9 / 4e10)
    assert ring_seconds(cluster(), 1, 1, 8e9) == 0
    assert all_to_all_seconds(cluster(), 4, 1, 4e9) == pytest.approx(3e9 / 1e11)
    assert all_to_all_seconds(cluster(16), 16, 1, 16e9) == pytest.approx(8e9 / 1e10)
    assert send_seconds(cluster(16), 4, 1e9) == 1e9 / 1e11
    assert send_seconds(cluster(16), 8, 1e9) == 1e9 / 1e10
    # Three of eight behind the busiest of three NICs, for which the others wait.
    three = cluster(16, nics=3)
    assert ring_seconds(three, 16, 1, 16e9) == pytest.approx(15e9 / (8 * 1e10 / 3))
    assert all_to_all_seconds(three, 16, 1, 16e9) == pytest.approx(8e9 / (1e10 / 3))
    # Two behind each NIC, which carries 1.5 times what one of them sends, or as much.
    shared = cluster(16, nics=4)
    assert send_seconds(shared, 8, 1e9) == 1e9 / 0.5e10
    shared = replace(shared, rates=replace(shared.rates, nic=1.5e10))
    assert send_seconds(shared, 8, 1e9) == 1e9 / 0.75e10
    assert send_seconds(replace(shared, nics=16), 8, 1e9) == 1e9 / 1e10


def test_tensor_parallel_collectives_of_a_layer():
    """Before and after each half, 4 in forward and 6 in backward: half of 8192 x 1024 x 2 bytes."""
    found, each = layer(tp=2), 8192 * 1024 * 2 / 2 / 1e11
    assert found.forward[layers.TENSOR] == pytest.approx(4 * each)
    assert found.backward[layers.TENSOR] == pytest.approx(6 * each)


def test_a_layer_takes_at_least_what_its_launches_take():
    """1 s for a layer but for attention, half of it for each chunk and each tile; 3 and 5 s for
    attention, whose forward runs again in backward unless all of it is stored."""
    where = cluster(host_time=HostTime(0.0, 0.0, 0.0, layer=1.0))

    def waited(forward=0.0, backward=0.0, **fields):
        found = layer(where=where, attention=core(forward, backward, host=(3.0, 5.0)), **fields)
        return found, found.forward.total, found.backward.total + found.recompute.total

    found, forward, backward = waited()
    assert (forward, backward) == pytest.approx((1 + 3, 1 + 5 + 1 + 3))
    assert found.bottleneck == layers.LAUNCHES
    assert waited(store=1.0)[1:] == pytest.approx((1 + 3, 1 + 5 + 1))
    assert waited(recompute="none")[1:] == pytest.approx((1 + 3, 1 + 5))
    pieces = waited(cp=2, sequence_chunks=4, mlp_tiles=6)
    assert pieces[1:] == pytest.approx((5 + 3, 5 + 5 + 5 + 3))
    assert layers.LAUNCHES not in waited(10.0, 20.0)[0].parts
    half = waited(10.0, 0.0, recompute="none")  # forward hides its own launches only
    assert half[0].forward.total > 10
    assert half[2] == pytest.approx(1 + 5)


def test_a_pack_is_planned_for_before_the_first_layer():
    """Launching a layer takes 4 s in forward and 6 in backward, and a plan 20: it is made once a
    micro-batch on each of two stages, and four layers of 8 are one's. A layer that computes for 15
    s in forward hides 15 of 24, and one of 30 s hides all."""
    where = cluster(host_time=HostTime(0.0, 0.0, 0.0, layer=1.0))
    run = Settings(8192, pp=2, micro_batches=3, lm_head_loss="off", recompute="none")

    def waited(forward, planning):
        attention = core(forward, 0.0, host=(3.0, 5.0), planning=planning)
        return steps.step_time(SMALL, where, run, attention).seconds

    products = layer().forward.total  # beside attention
    # Three micro-batches of the busiest stage, and the other's once.
    assert waited(0.0, 20.0) - waited(0.0, 0.0) == pytest.approx(4 * 20)
    assert waited(15.0, 20.0) - waited(15.0, 0.0) == pytest.approx(4 * (24 - 15 - products))
    assert waited(30.0, 20.0) == waited(30.0, 0.0)


@pytest.mark.parametrize(("name", "plans"), [("deepseek-v2-lite", 1), ("gpt-oss-20b", 2)])
def test_layers_of_one_attention_share_the_plans_of_a_pack(name, plans):
    """Layers with and without experts have one mask, those with a window another."""
    run = Settings(65536, cp=8, tp=1, intra=8, layout="balanced")

    def seconds(plan):
        where = cluster(host_time=HostTime(0.0, 0.0, 0.0, plan=plan))
        forecast = PackedForecast(NAMED[name], where, None, [8192] * 8)
        return forecast.step(forecast.settled(run)).seconds

    assert seconds(1000.0) - seconds(0.0) == pytest.approx(plans * 1000, abs=10)


def test_copies_to_the_host_cost_what_computing_does_not_hide():
    where = cluster(host_rate=1e6)
    taken = 8192 * 1024 * 2 / 1e6
    found = layer(where=where, offload=1.0)
    computing = 2 * 8192 * (PROJECTIONS + OUT + MLP) / RATE
    assert found.forward[layers.HOST] == pytest.approx(taken - computing)
    assert found.backward[layers.HOST] == pytest.approx(taken - 3 * computing)
    assert layers.HOST not in layer(offload=1.0, attention=core(10.0, 10.0)).parts


# --- attention and its recompute -------------------------------------------------------------


@pytest.mark.parametrize("store", [0.0, 0.25, 0.5, 1.0])
def test_what_is_stored_is_not_computed_again(store):
    found = layer(attention=core(8.0, 20.0), store=store, layout="striped", cp=4)
    assert found.forward[layers.ATTENTION] == 8.0
    assert found.backward[layers.ATTENTION] == 20.0
    assert found.recompute[layers.ATTENTION] == pytest.approx(8.0 * (1 - store) ** 2)


def test_the_busiest_rank_of_a_recompute():
    """Zigzag, CP 4, half stored: rank 3 has piece 3 of 8 early, 7 of 64 units of pairs, where each
    rank has 16 of a full forward. Contiguous: rank 1 has 3 of 16, and rank 3 had 7."""
    assert layers.recomputed_pairs("zigzag", 4, 0.5) == pytest.approx(7 / 16)
    assert layers.recomputed_pairs("contiguous", 4, 0.5) == pytest.approx(3 / 7)
    assert layers.recomputed_pairs("zigzag", 1024, 0.5) == pytest.approx(0.5, rel=1e-3)
    for layout in ("zigzag", "contiguous", "striped"):
        assert layers.recomputed_pairs(layout, 8, 0.0) == pytest.approx(1.0)
        assert layers.recomputed_pairs(layout, 8, 1.0) == 0.0


def test_a_recompute_that_waits_for_links():
    """Keys of the early rows travel again: half of them, not a quarter."""
    found = layer(attention=core(8.0, 20.0, "intra"), store=0.5, layout="striped", cp=4)
    assert found.recompute[layers.ATTENTION] == 4.0


def test_a_window_sees_fewer_keys():
    """Of 100 tokens, a window of 10: 10 x 100 - 45 pairs of 5050. A layer times what it sees."""
    assert layers.visible(100, 10) == pytest.approx(955 / 100)
    assert layers.visible(100) == pytest.approx(5050 / 100)
    model = replace(SMALL, pattern="WF" * 4, window=10)

    def timed(*_, window):
        return core(float(window))()

    for part, window in zip(model.parts[:2], (10.0, 0.0), strict=True):
        found = layer(model, attention=timed, part=part, seq=100)
        assert found.forward[layers.ATTENTION] == window


# --- states ----------------------------------------------------------------------------------


def test_gradients_and_parameters_over_data_and_context_parallel_ranks():
    """Four ranks: 3/4 of 4-byte gradients and of 2-byte parameters pass each rank."""
    run = Settings(8192, cp=2, dp=2)
    found = states.states_seconds(cluster(), run, (1e9, 0.0), (0.0, 0.0))
    assert found[states.GRADIENTS] == pytest.approx(3e9 / 1e11)
    assert found[states.GATHERING] == pytest.approx(1.5e9 / 1e11)
    plain = replace(run, distributed_optimizer=False, gradients="bf16")
    found = states.states_seconds(cluster(), plain, (1e9, 0.0), (0.0, 0.0))
    assert found[states.GRADIENTS] == pytest.approx(2 * 1.5e9 / 1e11)
    assert found[states.GATHERING] == 0


def test_overlap_hides_a_fraction_where_there_is_time():
    run = Settings(8192, cp=2, dp=2)
    where = cluster(overlap=0.8)
    found = states.states_seconds(where, run, (1e9, 0.0), (1.0, 0.01))
    assert found[states.GRADIENTS] == pytest.approx(0.03 - 0.01)  # only 10 ms to hide behind
    assert found[states.GATHERING] == pytest.approx(0.2 * 0.015)


def test_fsdp_gathers_twice_in_every_micro_batch():
    run = Settings(8192, cp=2, dp=2, fsdp=True, micro_batches=3, gradients="bf16")
    found = states.states_seconds(cluster(), run, (1e9, 0.0), (9.0, 9.0))
    assert found[states.GATHERING] == pytest.approx(3 * 2 * 1.5e9 / 1e11)
    assert found[states.GRADIENTS] == pytest.approx(3 * 1.5e9 / 1e11)


def test_the_optimizer_by_hand():
    """12 bytes of states read and written, 4 of a gradient, 2 of a parameter: 30 per parameter."""
    gpu = replace(GPU, memory_rate=1e12)
    where = replace(cluster(), gpu=gpu, host_rate=1e10, host_update=4e11)
    run = Settings(8192, cp=2, dp=2)
    assert states.optimizer_seconds(where, run, (4e9, 0.0)) == pytest.approx(30e9 / 1e12)
    host = replace(run, optimizer_offload=1.0)
    expected = 6e9 / 1e10 + 8 * 30e9 / 4e11  # copies; eight ranks share the host's memory
    assert states.optimizer_seconds(where, host, (4e9, 0.0)) == pytest.approx(expected)
    experts = replace(run, ep=2)
    assert states.optimizer_seconds(where, experts, (0.0, 4e9)) == pytest.approx(60e9 / 1e12)


# --- steps -----------------------------------------------------------------------------------

NO_HEAD = replace(SMALL, vocabulary=1)
RESIDENT = {"seq": 8192, "recompute": "none", "lm_head_loss": "off"}


def step(model=NO_HEAD, where=None, attention=FREE, **fields):
    run = Settings(**RESIDENT | fields)
    return steps.step_time(model, where or cluster(max(8, run.gpus)), run, attention)


@pytest.mark.parametrize(("pp", "m", "vpp"), [(2, 4, 1), (4, 8, 1), (4, 8, 2), (8, 16, 1)])
def test_the_bubble_of_a_pipeline(pp, m, vpp):
    """(p - 1) / (m + p - 1) of 1F1B's time; v chunks per rank divide the bubble by v."""
    where = replace(cluster(pp), rates=Rates(math.inf, math.inf, compute=RATE))
    found = step(where=where, pp=pp, vpp=vpp, micro_batches=m)
    forward = 2 * 8192 * (PROJECTIONS + OUT + MLP) / RATE
    stage = 8 / pp * 3 * forward
    assert found.parts[steps.BUBBLE] == pytest.approx((pp - 1) * stage / vpp, rel=1e-3)
    assert found.seconds == pytest.approx((m + (pp - 1) / vpp) * stage, rel=1e-3)
    if vpp == 1:
        share = found.parts[steps.BUBBLE] / found.seconds
        assert share == pytest.approx((pp - 1) / (m + pp - 1), rel=1e-3)


def test_unequal_stages_wait_for_the_longest():
    """The last of four stages has a large LM head. 1F1B by hand: three forwards until its first
    micro-batch arrives, eight forwards and backwards there, three backwards at the end."""
    model = replace(SMALL, vocabulary=40_000)
    run = Settings(**RESIDENT, pp=4, micro_batches=8)

    def timed(part):
        return layers.layer_time(model, cluster(), run, part=part, attention=FREE)

    stages = steps.stages_of(model, cluster(), run, timed)
    passes = [(s.forward.total, s.backward.total) for s in stages]
    assert passes[3][0] > 2 * passes[0][0]
    where = replace(cluster(), rates=Rates(math.inf, math.inf, compute=RATE))
    found = steps.step_time(model, where, run, FREE)
    assert found.seconds == pytest.approx(sum(map(sum, passes[:3])) + 8 * sum(passes[3]), rel=2e-3)


def test_sends_between_stages():
    """1F1B waits for each micro-batch's activation and gradient; interleaved for those at the
    ends."""
    each = 8192 * 1024 * 2 / 1e11
    assert step(pp=2, micro_batches=5).parts[steps.SENDS] == pytest.approx(10 * each)
    assert step(pp=4, vpp=2, micro_batches=8).parts[steps.SENDS] == pytest.approx(12 * each)


@pytest.mark.parametrize(("loss", "count"), [("single_pass", 3), ("recompute", 4), ("off", 3)])
def test_the_products_of_the_lm_head(loss, count):
    run = Settings(8192, lm_head_loss=loss)
    there, back = steps.head_seconds(SMALL, cluster(), run)
    each = 2 * 8192 * 1024 * 1000 / RATE
    assert there + back == pytest.approx(count * each)
    assert (back == 0) == (loss == "single_pass")


def test_parts_add_up_and_the_largest_is_the_bottleneck():
    where = replace(cluster(32), gpu=replace(GPU, memory_rate=1e12))
    found = step(SMALL, where, core(0.01, 0.02), tp=2, cp=4, pp=2, dp=2, micro_batches=4,
                 recompute="full", store=0.5, offload=1.0)  # fmt: skip
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.bottleneck == max(found.parts, key=found.parts.__getitem__)
    assert min(found.parts.values()) > 0
    assert found.tokens == 8192 * 4 * 2
    assert found.tokens_per_gpu(32) == pytest.approx(found.tokens / found.seconds / 32)


def test_the_mfu_of_llama3_8b_by_hand():
    """7,504,924,672 parameters without the embedding; 12 x 32 x 4096 per token and key, half of
    the keys seen."""
    seq = 1 << 20
    expected = 6 * 7_504_924_672 + 12 * 32 * 4096 * (seq + 1) / 2
    assert steps.model_operations(NAMED["llama3-8b"], seq) == pytest.approx(expected, rel=1e-12)
    where = cluster()
    found = steps.step_time(NAMED["llama3-8b"], where, Settings(seq, cp=8), core(1.0, 2.0))
    assert found.mfu == pytest.approx(expected * seq / (found.seconds * 8 * 100e12))


def test_stages_hold_the_parameters_that_are_reduced():
    """An eighth of the layers each; the embedding on the first, the LM head on the last."""
    run = Settings(**RESIDENT, pp=8)
    dense = [sum(parameters(SMALL, run, stage)) for stage in (0, 3, 7)]
    each = PROJECTIONS + OUT + MLP + 2 * 1024
    assert dense == [each + 1_024_000, each, each + 1_024_000 + 1024]
