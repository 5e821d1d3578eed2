"""Iterations of Megatron-LM's own loop on hybrid models.

They have attention and layers that carry a state. Split runs equal one rank, and Megatron's own
all-to-all of heads.
"""

import pytest
from ranks import MIDDLE, STEPS
from test_training import RECOMPUTE, same

pytest.importorskip("megatron.training.models.hybrid")

# Two key heads, so that four ranks are more than heads; four heads of Mamba in two groups.
DELTA_NETS = (
    "--hybrid-layer-pattern GGG*- --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4"
)
SIZES = "--mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2"
MAMBA = f"--hybrid-layer-pattern M*M- {SIZES}"
BURST = "--context-parallel-algo burst"
CP2 = f"{BURST} --context-parallel-size 2"
CP4 = f"{BURST} --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
TWO_LAYOUTS = "--burst-layout contiguous --burst-attention-layout zigzag"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = (
    f"--hybrid-layer-pattern M*E {SIZES} --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall"
)
SPLIT = "--pipeline-model-parallel-size 2 --global-batch-size 4"
PIPELINE = f"--hybrid-layer-pattern M*-|M*- {SIZES} {SPLIT}"
# Two segments of each stage.
INTERLEAVED = f"--hybrid-layer-pattern M-|*|M-|* {SIZES} {SPLIT}"
# Two further heads of attention and of a mixer, whose steps are those of the sequence too.
MTP = f"--hybrid-layer-pattern M*M-/M*/M* {SIZES}"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp"
HALF = "--burst-attention-store 0.5"
# what is compared -> (model, ranks, flags); stages and parts of tensors draw their own weights
CASES = {
    "delta-nets": (DELTA_NETS, 2, CP2),
    "delta-nets-more-ranks-than-heads": (DELTA_NETS, 4, f"{CP4} {TWO_LAYOUTS}"),
    "delta-nets-contiguous": (DELTA_NETS, 4, f"{CP4} --burst-layout contiguous"),
    "delta-nets-scan": (DELTA_NETS, 4, f"{CP4} --burst-linear scan"),
    "mamba": (MAMBA, 2, f"{CP2} --burst-lm-head-loss single_pass"),
    "mamba-four-ranks": (MAMBA, 4, f"{CP4} --burst-linear ring"),
    "mamba-contiguous": (MAMBA, 2, f"{CP2} --burst-layout contiguous --burst-linear all_gather"),
    "mamba-auto-layout": (MAMBA, 4, f"{CP4} --burst-layout auto"),
    # Megatron draws each tensor-parallel rank's convolution for itself: compared with TP, unsplit.
    "mamba-tensor-parallel": (f"{MAMBA} {TP2}", 4, f"{CP2} {TWO_LAYOUTS}"),
    "mamba-recompute": (MAMBA, 2, f"{CP2} {TWO_LAYOUTS} {RECOMPUTE} --burst-attention-store 1.0"),
    "mamba-experts": (EXPERTS, 2, CP2),
    "mamba-selective": (MAMBA, 2, f"{CP2} {SELECTIVE} {HALF}"),
    "mamba-pipeline": (PIPELINE, 4, f"{CP2} {TWO_LAYOUTS}"),
    "mamba-interleaved": (INTERLEAVED, 4, f"{CP2} {RECOMPUTE} {HALF}"),
    "mamba-sharded-optimizer": (MAMBA, 4, f"{CP2} {SHARDED}"),
    "mamba-further-heads": (MTP, 2, CP2),
    "mamba-further-heads-contiguous": (
        MTP, 4, f"{CP4} --burst-layout contiguous --burst-lm-head-loss single_pass",
    ),
    "mamba-tiles": (MAMBA, 2, f"{CP2} --burst-sequence-chunks 2 --burst-mlp-tiles 2"),
    "megatrons-delta-nets": (DELTA_NETS, 2, f"{CP2} --burst-linear megatron"),
    "megatrons-mamba": (MAMBA, 2, f"{CP2} --burst-linear megatron"),
}  # fmt: skip
QUICK = ("delta-nets-more-ranks-than-heads", "mamba-contiguous", "megatrons-mamba")


@pytest.mark.parametrize(
    "case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_split_like_one_rank(train, case):
    model, ranks, flags = CASES[case]
    one = 2 if TP2 in model or SPLIT in model else 1
    same(train(ranks, f"{model} {flags}"), train(one, model))


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (MAMBA, f"{CP2} {TWO_LAYOUTS}"),
        pytest.param(DELTA_NETS, CP2, marks=pytest.mark.slow),
        pytest.param(MAMBA, f"{CP2} --burst-layout balanced", marks=pytest.mark.slow),
    ],
    ids=["mamba-contiguous", "delta-nets", "mamba-balanced"],
)
def test_packed_documents_like_each_alone(train, model, flags):
    alone = train(1, f"{model} --packed --alone")
    same(train(2, f"{model} --packed {flags}"), alone)
    assert alone.steps[STEPS] != train(1, model).steps[STEPS]


def test_the_log_says_how_states_and_rows_travel(train):
    model, ranks, flags = CASES["delta-nets-more-ranks-than-heads"]
    run = train(ranks, f"{model} {flags}")
    assert run.lines("tokens are contiguous and attention is zigzag")
    assert run.lines("linear attention")


@pytest.mark.slow
def test_a_stage_that_has_such_layers_says_so(train):
    """The first of two stages has no attention, and both have layers that carry a state."""
    run = train(4, f"--hybrid-layer-pattern M-|M* {SIZES} {SPLIT} {CP2}")
    assert len(run.lines("burst attention: ")) == 1
    assert len(run.lines("linear attention: ")) == 1


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_size_and_layout(train, tmp_path):
    whole = train(2, f"{MAMBA} {CP2} --save {tmp_path} --save-interval {MIDDLE}")
    same(whole, train(1, MAMBA))
    resumed = train(4, f"{MAMBA} {CP4} {TWO_LAYOUTS} --load {tmp_path} --ckpt-step {MIDDLE}")
    assert min(resumed.steps) == MIDDLE + 1
    # Megatron's line of the second iteration after a start is an average over two.
    same(resumed, whole, [MIDDLE + 1])
