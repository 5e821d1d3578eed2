"""Unsupported settings raise a ValueError that names the flag, the same on every rank."""

import pytest
import session

CP4 = "--context-parallel-size 4"
BAD_FLAGS = {
    "--seq-length 68 --context-parallel-size 4": "--seq-length 68 is not divisible by 2 x",
    f"{CP4} --hierarchical-context-parallel-sizes 2 2 --burst-intra-size 4": "contradicts",
    f"{CP4} --burst-intra-size 3": "--burst-intra-size 3 does not divide",
    f"{CP4} --num-query-groups 3": "--num-query-groups 3 does not divide",
    f"{CP4} --context-parallel-algo bursts": "--context-parallel-algo",
    f"{CP4} --burst-layout zagzig": "--burst-layout",
    f"{CP4} --burst-side both": "--burst-side",
    f"{CP4} --burst-kernel cuda": "--burst-kernel",
    f"{CP4} --context-parallel-algo ulysses --num-attention-heads 2": (
        "--context-parallel-algo hybrid --burst-ulysses-size 2"
    ),
    f"{CP4} --burst-attention-store 0.5": "nothing is recomputed",
    f"{CP4} --burst-attention-store 1.5": "--burst-attention-store",
    f"{CP4} --packed --micro-batch-size 2": "--packed requires --micro-batch-size 1",
    "--packed --window-size 8,0": "ignores the documents in sliding-window layers",
    f"{CP4} --attention-dropout 0.1": "--attention-dropout 0",
    f"{CP4} --context-parallel-algo megatron": "--context-parallel-algo megatron",
    "--context-parallel-size 3": "does not divide the 4 processes",
    "--global-batch-size 6": "--global-batch-size 6",
    "--num-virtual-stages-per-pipeline-rank 2": "--pipeline-model-parallel-size 1: an interleaved",
    "--num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2 --num-layers 4": (
        "does not divide --num-layers 4"
    ),
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 4 "
    "--global-batch-size 2": "1 micro-batches per step",
    "--seq-length 65536": "but one sequence of --seq-length",
    "--load nowhere --use-distributed-optimizer": "Apex or Transformer Engine",
    "--load nowhere": "--load nowhere contains no checkpoint",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_flag_is_named_on_every_rank(four, common, flags):
    errors = four(session.error, [*common, *flags.split()])
    assert set(errors) == {errors[0]}
    assert errors[0].startswith(("ValueError: ", "SettingsError: "))
    assert BAD_FLAGS[flags] in errors[0]


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("sequence", "ranks disagree"),
        ("dtype", "ranks disagree"),
        ("attention_mask", "call the model with attention_mask=None, which is causal"),
        ("attention_bias", "attention_bias is not supported"),
        ("packed_seq_params", "it must be 'thd'"),
        ("cross-attention", "only self-attention is supported"),
        ("documents", "ranks disagree"),
        ("attn_mask_type", "use causal or no_mask"),
    ],
)
@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)])
def test_ranks_that_are_called_differently_all_learn_it(four, keyword, message, ranks):
    if len(ranks) == 4 and message == "ranks disagree":
        return
    errors = four(session.differently_called, keyword, ranks)
    assert all(error.startswith("ValueError: ") and message in error for error in errors)


def test_a_proper_call_has_no_error(four):
    assert four(session.differently_called, "nothing", ()) == [None] * 4
