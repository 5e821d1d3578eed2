"""Megatron-LM's own loop on a GPT of three gated delta nets and one softmax layer.

Losses are compared as Megatron prints them, to seven digits, and gradient norms, to three decimals;
tests/megatron/test_gdn.py has all digits.
"""

import pytest
from ranks import COMMON, STEPS
from test_training import CP2, CP4, PP2, RECOMPUTE, TP2

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
from megatron.core.ssm import gated_delta_net
from test_hybrid_model_training import DELTA_NETS as HYBRID

# Four value heads of two key heads.
GDN = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --num-layers 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 16 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --train-iters 4 --eval-iters 1 --eval-interval 4"
)
STAGED = PP2.replace("--num-layers 2 ", "")


def same(ours, stock, steps=range(1, 5)):
    for step in steps:
        (loss, norm), (expected, stock_norm) = ours.steps[step], stock.steps[step]
        assert loss == pytest.approx(expected, rel=1e-6), step
        assert norm == pytest.approx(stock_norm, abs=1.1e-3), step
    assert ours.evaluations == pytest.approx(stock.evaluations, rel=1e-6)


@pytest.mark.parametrize(
    ("world", "flags", "stock"),
    [
        (2, f"{CP2} --burst-linear megatron", ""),
        (2, CP2, ""),
        (4, f"{CP4} --burst-layout contiguous", ""),
        pytest.param(4, f"{CP2} {TP2}", TP2, marks=pytest.mark.slow),
        pytest.param(4, f"{CP2} {STAGED} {RECOMPUTE}", STAGED, marks=pytest.mark.slow),
        pytest.param(
            4, f"{CP4} --burst-layout contiguous --burst-attention-layout zigzag", "",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["headwise", "cp2", "contiguous-2x2", "tp2", "pp2-recompute", "two-layouts"],
)  # fmt: skip
def test_ranks_train_like_one(train, world, flags, stock):
    run = train(world, f"{GDN} {flags}")
    same(run, train(1 + ("-size 2" in stock), f"{GDN} {stock}"))
    passed = run.lines("> megatron_burst: burst linear attention: algorithm ")
    assert len(passed) == ("--burst-linear megatron" not in flags)


def test_the_loss_falls_and_depends_on_the_states(train):
    losses = [loss for loss, _ in train(1, GDN).steps.values()]
    assert losses[-1] < losses[0] - 0.1
    assert abs(train(1, f"{GDN} --packed --alone").steps[4][0] - losses[-1]) > 1e-3


@pytest.mark.parametrize(
    ("world", "flags"),
    [(2, CP2), pytest.param(4, f"{CP4} --burst-layout balanced", marks=pytest.mark.slow)],
    ids=["zigzag", "balanced"],
)
def test_packed_documents_are_each_alone(train, world, flags):
    same(train(world, f"{GDN} --packed {flags}"), train(1, f"{GDN} --packed --alone"))


def test_a_checkpoint_of_megatrons_own_layers_goes_on(train, tmp_path):
    stock = train(1, f"{GDN} --save {tmp_path} --save-interval 2")
    run = train(4, f"{GDN} {CP4} --load {tmp_path} --ckpt-step 2")
    assert min(run.steps) == 3
    (loss, norm), (expected, stock_norm) = run.steps[3], stock.steps[3]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert norm == pytest.approx(stock_norm, abs=1.1e-3)


@pytest.mark.slow  # Megatron compiles an extension for it
def test_norms_of_outputs_recomputed(train):
    selective = "--recompute-granularity selective --recompute-modules gdn_norm_out"
    same(train(2, f"{GDN} {CP2} {selective}"), train(1, GDN))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--burst-layout striped", "every row's predecessor is on another rank"),
        ("--burst-linear megatron --burst-layout contiguous", "heads requires zigzag"),
        ("--burst-linear lasp", "linear (--burst-linear) must be one of auto, all_gather, scan, "),
    ],
)
def test_what_does_not_work_ends_every_rank(ranks, flags, words):
    run = ranks.run(2, [*COMMON, *f"{GDN} {CP2} {flags}".split()])
    assert run.codes == [2, 2]
    (line,) = run.lines(words)  # of all ranks, once
    assert "error (all ranks): " in line


def test_a_flag_without_such_layers_is_told(train):
    (line,) = train(2, f"{CP2} --burst-linear scan --train-iters 1").lines("has no effect")
    assert "--burst-linear scan has no effect: the model has no linear-attention" in line


# Of Megatron-Core 0.20 and newer: gates of channels.
GDN2 = GDN.replace("gated_delta_net", "gdn2")
second = pytest.mark.skipif(
    not hasattr(gated_delta_net, "GatedDeltaNet2"), reason="GatedDeltaNet2 is there from 0.20 on"
)


@second
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{CP2} --burst-linear megatron"),
        (2, CP2),
        (4, f"{CP4} --burst-layout contiguous"),  # more ranks than key heads
        pytest.param(4, f"{CP2} {TP2}", marks=pytest.mark.slow),
    ],
    ids=["headwise", "cp2", "contiguous-2x2", "tp2"],
)
def test_gates_of_channels_train_like_on_one_rank(train, world, flags):
    one = TP2 if TP2 in flags else ""
    same(train(world, f"{GDN2} {flags}"), train(2 if one else 1, f"{GDN2} {one}"))


@second
def test_gates_of_channels_on_packed_documents(train):
    same(train(2, f"{GDN2} --packed {CP2}"), train(1, f"{GDN2} --packed --alone"))


@second
def test_gates_of_channels_in_a_hybrid_model(train):
    model = f"{HYBRID} --experimental-attention-variant gdn2"
    same(train(4, f"{model} {CP4}"), train(1, model), range(1, STEPS + 1))
