"""Models of Transformer Engine's layers train on two ranks, with our attention, like the local
layers on one with Megatron's own, and like themselves on one with Transformer Engine's own.

Their linear and norm modules compute with torch (`torch_forwards`); all else is theirs.
"""

import pytest

TOLERANCE = 1e-5  # relative, fp32
SHORT = ("--train-iters", "4", "--eval-iters", "1")
TE = "--transformer-impl transformer_engine"
SPLIT = "--context-parallel-size 2 --context-parallel-algo burst"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"

GQA = "--group-query-attention --num-query-groups 2"
WINDOW = "--window-size 12,0"

# what the model has -> (its flags, those of the split run)
MODELS = {
    "mha": ("", SPLIT),
    "gqa": (GQA, SPLIT),
    "gqa-qknorm": (f"{GQA} --qk-layernorm", f"{SPLIT} --burst-layout striped"),
    "tp-sp": (GQA, f"{SPLIT} --tensor-model-parallel-size 2 --sequence-parallel"),
    "spec": (
        "",
        "--context-parallel-size 2 --spec megatron_burst.megatron.specs burst_layer_spec",
    ),
    "window": (WINDOW, SPLIT),
    "window-skip-striped": (
        f"{WINDOW} --window-attn-skip-freq 2",
        f"{SPLIT} --burst-layout striped",
    ),
    "sink-learnable": ("--softmax-type learnable", SPLIT),
    "sink-off-by-one": ("--softmax-type off-by-one", SPLIT),
    "mla": (LATENT, SPLIT),
    "mla-qknorm": (f"{LATENT} --qk-layernorm --q-lora-rank 16", SPLIT),
    "mtp": ("--mtp-num-layers 1", SPLIT),
    "moe": (EXPERTS, SPLIT),
    "moe-grouped": (f"{EXPERTS} --moe-grouped-gemm", SPLIT),
    "packed": ("--packed", SPLIT),
    "recompute": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        f"{SPLIT} --burst-attention-store 0.5",
    ),
    "recompute-selective": ("--recompute-granularity selective", SPLIT),
}
# Megatron's local attention takes only values as wide as keys; grouped experts start from weights
# of their own.
NOT_LOCAL = ("mla", "mla-qknorm", "moe-grouped")
# Transformer Engine's learnable sinks start as zeros, and those of Megatron's local attention and
# ours as weights do; it knows packs as arguments, the script gives one rank a mask.
NOT_ALONE = ("sink-learnable", "packed")


def worst(run, reference):
    """Largest relative difference in loss or gradient norm over the steps."""
    assert run.steps.keys() == reference.steps.keys() == set(range(1, 5))
    return max(
        abs(a - b) / abs(b)
        for step in run.steps
        for a, b in zip(run.steps[step], reference.steps[step], strict=True)
    )


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_like_one(train, model):
    flags, split = MODELS[model]
    ours = train(4 if "tensor" in split else 2, f"{TE} {flags} {split}")
    assert ours.lines("burst attention: algorithm burst")
    assert ours.lines("of Transformer Engine computes with torch: TELayerNormColumnParallelLinear")
    if model not in NOT_LOCAL:
        assert worst(ours, train(1, flags)) < TOLERANCE
    if model not in NOT_ALONE:
        assert worst(ours, train(1, f"{TE} {flags}")) < TOLERANCE


def test_the_comparison_notices_another_model(train):
    other = train(2, f"{TE} {WINDOW} {SPLIT}")
    assert worst(other, train(1, "")) > 100 * TOLERANCE
    assert worst(other, train(1, TE)) > 100 * TOLERANCE
