"""The memory account: cases added up by hand, what must not shrink or grow, and bad input."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_burst.autotune import clusters
from megatron_burst.plugins.tools.advise.account.memory import account, fit, parameters
from megatron_burst.plugins.tools.advise.account.operators import (
    Core,
    LayerSizes,
    attention_half,
    mlp_half,
)
from megatron_burst.plugins.tools.advise.account.tape import Half, Op, Tape
from megatron_burst.plugins.tools.advise.search.longest import best, layouts_of, longest_of
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import models

SMALL = models.Model("small", 4, 64, 4, 2, 224, 256)
LLAMA = models.named("llama3-8b")
MEGA = 2**20
CHUNKED = {"sequence_chunks": 32, "mlp_tiles": 64, "offload": 1.0}


# --- the tape --------------------------------------------------------------------------------


def bytes_over_time(tape):
    return [moment.bytes for moment in tape.moments]


def test_an_operator_chain_by_hand():
    """x -> a (saved) -> b -> y: a stays for backward, b goes when y is there."""
    ops = [Op("one", ("x",), {"a": 10}, ("a",)), Op("two", ("a",), {"b": 20}),
           Op("three", ("b",), {"y": 5}, during={"work": 7})]  # fmt: skip
    half, tape = Half("work", ops, {"x": 10}), Tape()
    half.forward(tape, grad=True)
    assert max(bytes_over_time(tape)) == 10 + 20 + 5 + 7
    assert tape.moments[-1].bytes == 10 + 5
    half.backward(tape)
    assert max(bytes_over_time(tape)[-12:]) == 10 + 5 + 20 + 10  # a, y, d b and d a
    assert tape.moments[-1].bytes == 5 + 10  # the result and the gradient of x
    alone = Tape()
    half.forward(alone, grad=False)
    assert alone.moments[-1].bytes == 5


def test_a_residual_has_no_gradient_of_its_own():
    """y = x + f(x): what arrives is the gradient of both; only their sum at x is made."""
    ops = [Op("f", ("x",), {"f": 10}), Op("add", ("x", "f"), {"y": 10}, adds=True)]
    half, tape = Half("work", ops, {"x": 10}), Tape()
    half.forward(tape, grad=True)
    half.backward(tape)
    assert tape.moments[-1].bytes == 10 + 10  # y and the gradient of x
    assert max(bytes_over_time(tape)) == 10 + 20  # beside f's part of it, the sum


# --- a layer ---------------------------------------------------------------------------------


def saved(half):
    tape = Tape()
    half.forward(tape, grad=True)
    return tape.moments[-1].bytes - half.sizes[half.result]


def test_what_modules_save_on_a_gpu():
    """TE: normed, q, k, v, out in bf16, lse and 1 / std in fp32; and normed, fc1, activation."""
    x = LayerSizes.of(SMALL, Settings(seq=128))
    rows, hidden, query, kv = 128, 64, 64, 64
    half = attention_half(x, rows, Core(keys=rows))
    assert saved(half) == rows * (2 * (hidden + query + kv + query) + 4 * 4 + 4)
    assert saved(mlp_half(x, rows)) == rows * (2 * (hidden + 2 * 224 + 224) + 4)


def test_sequence_parallelism_shares_rows_outside_of_products():
    one, four = (
        LayerSizes.of(replace(SMALL, kv_heads=4), Settings(seq=128, tp=tp)) for tp in (1, 4)
    )
    each = [saved(mlp_half(x, 128)) for x in (one, four)]
    assert each[0] == 4 * each[1]


# --- states ----------------------------------------------------------------------------------


def test_parameters_of_llama_3_8b():
    assert LLAMA.parameters == 8_030_261_248
    assert sum(parameters(LLAMA, Settings(seq=2), 0)) == LLAMA.parameters
    assert models.named("llama3-70b").parameters == 70_553_706_496
    assert models.named("mixtral-8x7b").parameters == pytest.approx(46.7e9, rel=0.001)
    assert models.named("qwen3-30b-a3b").active_parameters == pytest.approx(3.0e9, rel=0.1)


def test_states_are_shared_by_the_distributed_optimizer():
    found = account(LLAMA, Settings(seq=8192, cp=8, dp=2), every=False).states
    assert found["parameters"] == 2 * LLAMA.parameters
    assert found["gradients"] == 4 * LLAMA.parameters
    assert found["optimizer"] == pytest.approx(12 * LLAMA.parameters / 16, abs=1)
    whole = Settings(seq=8192, cp=8, dp=2, distributed_optimizer=False, gradients="bf16")
    states = account(LLAMA, whole, every=False).states
    assert states["optimizer"] == 12 * LLAMA.parameters
    assert states["gradients"] == 2 * LLAMA.parameters


# --- a step ----------------------------------------------------------------------------------


def test_layer_inputs_and_store_of_a_step():
    run = Settings(seq=MEGA, tp=2, cp=4, store=1.0)
    found = account(LLAMA, run)
    rows = MEGA // 4
    top = next(m for m in found.peaks if m.phase == "recompute of layer 31")
    assert top.items["layer inputs"] == 32 * rows // 2 * 4096 * 2
    assert top.items["attention store"] == 32 * rows * (2048 * 2 + 16 * 4)
    gone = account(LLAMA, replace(run, offload=1.0))
    top = next(m for m in gone.peaks if m.phase == "recompute of layer 31")
    assert top.items["layer inputs"] == 2 * rows // 2 * 4096 * 2  # this layer's and the next one's
    assert gone.host_bytes == 32 * rows * (4096 + 2048 * 2 + 16 * 4)


def test_a_search_sees_the_same_peak():
    for extra in ({}, {"store": 0.5}, CHUNKED, {"pp": 2, "vpp": 2, "micro_batches": 8}):
        run = Settings(seq=MEGA, tp=2, cp=2, **extra)
        every, some = (account(LLAMA, run, every=each) for each in (True, False))
        assert every.peak.bytes == some.peak.bytes
        assert every.host == some.host


@pytest.mark.parametrize("offload", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", ["kimi-linear-48b-a3b", "nemotron-h-8b", "gemma-3-4b"])
def test_a_search_sees_the_peak_of_layers_of_several_kinds(name, offload):
    """A layer without a store is fuller while that of the one before it comes back."""
    model = models.NAMED[name]
    run = Settings(seq=2**17, tp=4, cp=8, store=1.0, offload=offload)
    every, some = (account(model, run, every=each) for each in (True, False))
    assert every.peak.bytes == some.peak.bytes


def test_one_f_one_b_keeps_what_is_in_flight():
    one = account(LLAMA, Settings(seq=MEGA, cp=4, pp=4, micro_batches=8)).peak.items
    each = MEGA // 4 * 4096 * 2
    assert one["other micro-batches"] == 3 * 8 * each


sizes = st.fixed_dictionaries({
    "seq": st.sampled_from([2**k for k in range(13, 22)]),
    "tp": st.sampled_from([1, 2, 4]),
    "cp": st.sampled_from([1, 2, 4]),
    "store": st.sampled_from([0.0, 0.5, 1.0]),
    "offload": st.sampled_from([0.0, 0.5, 1.0]),
    "sequence_chunks": st.sampled_from([1, 8]),
    "mlp_tiles": st.sampled_from([1, 8]),
})  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(sizes)
def test_more_never_takes_less(fields):
    assume(fields["cp"] > 1 or fields["sequence_chunks"] == 1)
    run, model = Settings(**fields), replace(SMALL, heads=8, kv_heads=4, vocabulary=1024)

    def peak(**other):
        return account(model, replace(run, **other), every=False).peak.bytes

    here = peak()
    assert peak(seq=2 * run.seq) > here
    assert peak(offload=min(1.0, run.offload + 0.5)) <= here
    assert peak(gradients="bf16") <= here
    if run.sequence_chunks == 1 and run.mlp_tiles > 1:
        assert account(replace(model, layers=8), run, every=False).peak.bytes > here


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1500))
def test_more_memory_never_shortens(device, host):
    there = clusters.Cluster(clusters.GPUS["h100"], 8, host_memory=10**9 * (100 + host))
    more = replace(there, gpu=replace(there.gpu, memory=there.gpu.memory + device * 10**9))
    roomier = replace(there, host_memory=there.host_memory + 10**11)
    run = Settings(seq=1, tp=4, cp=2, **CHUNKED)
    here = longest_of(LLAMA, there, run).run.seq
    assert longest_of(LLAMA, more, run).run.seq >= here
    assert longest_of(LLAMA, roomier, run).run.seq >= here


def test_the_longest_fits_and_the_next_does_not():
    cluster = clusters.Cluster(clusters.GPUS["h100"], 8)
    found = longest_of(LLAMA, cluster, Settings(seq=1, tp=4, cp=2, **CHUNKED))
    assert found.left.fits
    assert found.run.seq > 5 * 10**6
    beyond = replace(found.run, seq=found.run.seq * 102 // 100 // 16 * 16)
    assert not fit(account(LLAMA, beyond), cluster).fits
    every = list(layouts_of(LLAMA, cluster, Settings(seq=1, **CHUNKED)))
    assert [(run.tp, run.cp) for run in every] == [(1, 8), (2, 4), (4, 2)]
    assert best(LLAMA, cluster, every[1:]).run.seq >= found.run.seq


# --- input -----------------------------------------------------------------------------------


def test_what_does_not_fit_says_what_would_help():
    cluster = clusters.Cluster(clusters.GPUS["a100-40g"], 8)
    words = r"GiB of it for .* but only 35\.4 GiB are available; it fits with \d+ GPUs and --tp 8"
    with pytest.raises(ValueError, match=words):
        longest_of(models.named("llama3-70b"), cluster, Settings(seq=1, cp=8))
