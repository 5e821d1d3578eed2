"""The fused LM head changes nothing: loss and gradient norm of five steps with
`--burst-lm-head-loss`, against Megatron's own output layer and loss in the same run otherwise.

Documents are short, so loss masks are uneven; a warning (a second computation of the logits) in
any of these runs is an error of the test.
"""

import pytest
import session
from test_parity import TOLERANCE, worst

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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_the_fused_loss_changes_nothing(train, case, mode):
    plain = train(CASES[case])
    assert worst(train(f"{CASES[case]} --burst-lm-head-loss {mode}"), plain) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_bf16(train, mode):
    """Megatron rounds its logits to bf16; the fused loss on CPU does not."""
    plain = train("--bf16")
    assert worst(train(f"--bf16 --burst-lm-head-loss {mode}"), plain) < 0.02


def test_the_comparison_notices_a_wrong_mask(four, common, train):
    flags = [*common, "--burst-lm-head-loss", "single_pass"]
    assert worst(four(session.train_with_wrong_weights, flags)[0], train()) > 100 * TOLERANCE


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_which_logits_exist(four, common, mode):
    """What Megatron's own output layer has made in a forward with labels, and in one without."""
    flags = [*common, *ALL.split(), *MTP.split(), "--burst-lm-head-loss", mode]
    for found in four(session.logits_made, flags):
        assert found == {"labels": 3 if mode == "off" else 0, "no labels": 1, "equal": True}
