"""Hybrid models of Transformer Engine's layers, in the stack that Megatron gives them, train with
states that go from rank to rank: like themselves on one rank with Transformer Engine's attention,
and like Megatron's local layers on one.

Linear and norm modules compute with torch (`torch_forwards`), and kernels of states are those of
`plugins.testing.cpu`; all else is theirs.
"""

import pytest
from test_hybrid_model_training import (
    CP2,
    CP4,
    DELTA_NETS,
    EXPERTS,
    INTERLEAVED,
    MAMBA,
    MTP,
    PIPELINE,
    SHARDED,
    TP2,
    TWO_LAYOUTS,
)
from test_te_training import LATENT as GPT_LATENT
from test_te_training import TOLERANCE, worst
from test_training import RECOMPUTE

TE = (
    "--transformer-impl transformer_engine "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
)
LATENT = f"{MAMBA} {GPT_LATENT}"
# what is compared -> (model, ranks, flags, ranks of the same model that is not split)
CASES = {
    "delta-nets": (DELTA_NETS, 2, CP2, 1),
    "delta-nets-contiguous": (DELTA_NETS, 4, f"{CP4} {TWO_LAYOUTS}", 1),
    "mamba": (MAMBA, 2, CP2, 1),
    "mamba-four-ranks": (MAMBA, 4, f"{CP4} --burst-layout contiguous --burst-linear scan", 1),
    "tensor-parallel": (f"{MAMBA} {TP2}", 4, CP2, 2),
    "experts": (EXPERTS, 2, CP2, 1),
    "further-heads": (MTP, 2, f"{CP2} --burst-lm-head-loss single_pass", 1),
    "pipeline": (PIPELINE, 4, f"{CP2} {TWO_LAYOUTS}", 2),
    "interleaved": (INTERLEAVED, 4, f"{CP2} {RECOMPUTE} --burst-attention-store 0.5", 2),
    "sharded-optimizer": (MAMBA, 4, f"{CP2} {SHARDED}", 1),
    "latent": (LATENT, 2, CP2, 1),
    "offload": (MAMBA, 2, f"{CP2} --burst-offload 0.5", 1),
}
# Megatron's local attention takes only values as wide as keys; grouped experts, stages and parts of
# tensors start from weights of their own.
NOT_LOCAL = ("latent", "experts", "tensor-parallel", "pipeline", "interleaved")
NORMS = "of Transformer Engine computes with torch: TELayerNormColumnParallelLinear"


@pytest.mark.parametrize("case", CASES)
def test_split_like_one_rank(train, case):
    model, ranks, flags, whole = CASES[case]
    ours = train(ranks, f"{TE} {model} {flags}")
    if case != "interleaved":  # whose first stage, which logs, has no attention
        assert ours.lines("burst attention: algorithm burst")
    assert ours.lines("burst linear attention: algorithm ")
    assert ours.lines(NORMS)
    if case == "offload":
        assert ours.lines("> megatron_burst: --burst-offload ")
    assert worst(ours, train(whole, f"{TE} {model}")) < TOLERANCE
    if case not in NOT_LOCAL:
        assert worst(ours, train(whole, model)) < TOLERANCE


@pytest.mark.parametrize("model", [MAMBA, DELTA_NETS], ids=["mamba", "delta-nets"])
def test_packed_documents_like_each_alone(train, model):
    """On one rank each document by itself, in Transformer Engine's layers too."""
    ours = train(2, f"{TE} {model} --packed {CP2}")
    alone = train(1, f"{TE} {model} --packed --alone")
    assert worst(ours, alone) < TOLERANCE
    assert worst(ours, train(1, f"{TE} {model}")) > 100 * TOLERANCE


def test_megatrons_own_checkpoint_goes_on(train, tmp_path):
    """Saved by one rank with Transformer Engine's attention, resumed by four with ours."""
    stock = train(1, f"{TE} {MAMBA} --save {tmp_path} --save-interval 2")
    ours = train(4, f"{TE} {MAMBA} {CP4} {TWO_LAYOUTS} --load {tmp_path} --ckpt-step 2")
    assert min(ours.steps) == 3
    # Of what four steps leave; Megatron's line of the second after a start is an average over two.
    pairs = zip(ours.steps[3], stock.steps[3], strict=True)
    assert max(abs(a - b) / abs(b) for a, b in pairs) < TOLERANCE
