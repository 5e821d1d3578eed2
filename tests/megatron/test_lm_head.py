"""The fused LM head changes nothing: loss and gradient norm of two steps.

The reference is the same run with Megatron's own output layer and loss. Documents are short, so
loss masks are uneven. A warning (a second computation of the logits) in any of these runs is an
error of the test.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import session
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from test_parity import TOLERANCE, worst

import megatron_burst as mb
from megatron_burst.megatron.checks.features import lm_head_problems
from megatron_burst.megatron.checks.problem import refuse
from megatron_burst.megatron.lm_head import fused_loss
from megatron_burst.megatron.lm_head.fused_loss import LazyLogits

MODES = ["single_pass", "recompute"]
TP = "--tensor-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"
MTP = "--mtp-num-layers 2"
# Everything at once: tensor, context and sequence parallel.
ALL = f"{TP} --context-parallel-size 2 --sequence-parallel"
CASES = {
    "one-rank": "",
    "untied": UNTIED,
    "tp2": TP,
    "tp2-cp2": f"{TP} --context-parallel-size 2 {UNTIED}",
    "tp2-cp2-sp": ALL,
    "tp2-cp2-sp-untied": f"{ALL} {UNTIED} --use-distributed-optimizer",
    "pp2": "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 8",
    "mtp": MTP,
    "mtp-untied": f"{MTP} {UNTIED}",
    "mtp-tp2-cp2-sp": f"{MTP} {ALL}",
    "two-micro-batches": f"{ALL} --global-batch-size 8 --micro-batch-size 2",
}


# Each kind of model and split in one of the modes; the others are the long tail.
QUICK = {
    "tp2-cp2-sp-untied": "single_pass", "pp2": "recompute", "mtp-tp2-cp2-sp": "single_pass",
    "two-micro-batches": "recompute",
}  # fmt: skip


def modes(keys, quick):
    """Return every key in both modes; slow except in its quick mode, if it has one."""
    return [
        pytest.param(key, mode, marks=[] if quick.get(key) == mode else [pytest.mark.slow])
        for key in keys
        for mode in MODES
    ]


@pytest.mark.parametrize(("case", "mode"), modes(CASES, QUICK))
def test_the_fused_loss_changes_nothing(train, case, mode):
    plain = train(CASES[case])
    assert worst(train(f"{CASES[case]} --burst-lm-head-loss {mode}"), plain) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_bf16(train, mode):
    """Megatron rounds its logits to bf16; the fused loss on CPU does not."""
    plain = train("--bf16")
    assert worst(train(f"--bf16 --burst-lm-head-loss {mode}"), plain) < 0.02


@pytest.mark.parametrize(
    ("model", "mode"),
    modes(["", UNTIED, MTP], {"": "single_pass", MTP: "recompute"}),
)
def test_fused_gradient_accumulation(four, common, train, model, mode):
    """Tied and MTP weights have other uses, whose gradients must be added exactly once."""
    flags = [*common, *TP.split(), *model.split(), "--burst-lm-head-loss", mode]
    fused = four(session.train_with_fused_accumulation, flags)[0]
    assert worst(fused, train(f"{TP} {model}")) < TOLERANCE


def test_the_comparison_notices_a_wrong_mask(four, common, train):
    flags = [*common, "--burst-lm-head-loss", "single_pass"]
    assert worst(four(session.train_with_wrong_weights, flags)[0], train()) > 100 * TOLERANCE


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_which_logits_exist(four, common, mode):
    """Megatron's own output layer makes logits in a forward with labels, and in one without."""
    flags = [*common, *ALL.split(), "--burst-lm-head-loss", mode]
    for found in four(session.logits_made, flags):
        assert found == {"labels": int(mode == "off"), "no labels": 1, "equal": [True, True]}
    for found in four(session.logits_made, [*flags, *MTP.split()]):
        assert found == {"labels": 3 * (mode == "off")}


def test_right_predictions_of_further_heads_are_counted_without_logits():
    stock = lambda *given: "stock"  # noqa: E731
    counts = partial(fused_loss._counting, stock)
    logits = LazyLogits(None, None, None, None)
    labels, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 1, 1, 0]])
    assert counts(logits, labels, mask, None, None) == "stock"  # nothing is known yet
    logits.argmax = torch.tensor([[1], [9], [3], [4]])
    assert counts(logits, labels, mask, None, None) == (2, 3)


REFUSED = {
    "--cross-entropy-loss-fusion": {"cross_entropy_loss_fusion": True},
    "--defer-embedding-wgrad-compute": {"defer_embedding_wgrad_compute": True},
    "--fp16": {"fp16": True},
    "--fp8-output-proj": {"fp8_output_proj": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "full iterations": {"cuda_graph_impl": "full_iteration"},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_cannot_be_honoured_is_refused(flag):
    config = SimpleNamespace(**REFUSED[flag])
    assert not list(lm_head_problems(config, mb.BurstConfig()))
    with pytest.raises(ValueError, match=rf"--burst-lm-head-loss recompute .*{flag}"):
        refuse(lm_head_problems(config, mb.BurstConfig(lm_head_loss="recompute")))


def test_an_unknown_mode_is_refused():
    with pytest.raises(
        ValueError, match=r"lm_head_loss \(--burst-lm-head-loss\) must be one of off"
    ):
        mb.BurstConfig(lm_head_loss="on")


@pytest.mark.parametrize(
    ("what", "message"),
    {
        "gathered": "build the model with parallel_output=True",
        "bias": "requires an output layer that is a ColumnParallelLinear without bias",
        "model": "supports GPTModel",
    }.items(),
)
def test_models_it_does_not_know_are_refused(what, message):
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    vars(layer).update(bias="bias" if what == "bias" else None, gather_output=what == "gathered")
    model = SimpleNamespace() if what == "model" else GPTModel.__new__(GPTModel)
    vars(model)["output_layer"] = layer
    with pytest.raises(ValueError, match=message):
        fused_loss._check_model(model, "single_pass")
