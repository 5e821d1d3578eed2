"""--log-max-attention-logit and --qk-clip: a split run records and clips like one rank."""

import clipping
import pytest

TOLERANCE = 1e-4
SMALL = "--init-method-std 0.02"  # of weights, for logits that grow beyond the threshold again
RUNS = {
    "rings": ("", "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"),
    "shared-heads": (
        "--num-query-groups 2",
        "--context-parallel-size 4 --context-parallel-algo ulysses",
    ),
    "latent": (
        "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 8",
        "--context-parallel-size 2 --burst-layout striped --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --burst-attention-store 0.5",
    ),
}


def worst(a, b):
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return max(abs(x - y) / abs(y) for x, y in pairs)


@pytest.fixture(scope="module")
def run(four, common):
    known = {}

    def train(flags, clip):
        if (flags, clip) not in known:
            argv = [*common, "--burst-kernel", "reference", *flags.split()]
            known[flags, clip] = four(clipping.train, argv, clip)
        return known[flags, clip]

    return train


@pytest.mark.parametrize("case", RUNS)
def test_a_split_run_clips_as_one_rank_does(run, case):
    model, split = f"{SMALL} {RUNS[case][0]}", RUNS[case][1]
    whole = run(model, True)[0]
    assert len(whole) == 2
    assert all(worst(rank, whole) < TOLERANCE for rank in run(f"{model} {split}", True))
    assert all(step[2] > clipping.THRESHOLD for step in whole)


def test_the_largest_logit_alone_changes_no_training(run, train):
    heads = f"{SMALL} --num-query-groups 2"
    whole = run(heads, False)[0]
    ranks = run(f"{heads} --context-parallel-size 2 --tensor-model-parallel-size 2", False)
    # A rank of a tensor-parallel group has heads of its own, and Megatron logs those of one rank.
    largest = [max(step[2] for step in steps) for steps in zip(*ranks, strict=True)]
    found = [(*step[:2], most) for step, most in zip(ranks[0], largest, strict=True)]
    assert worst(found, whole) < TOLERANCE
    assert len({tuple(step[2] for step in rank) for rank in ranks}) == 2
    assert worst([step[:2] for step in whole], train(heads)) < TOLERANCE
    # Clipped weights show in the logits of the next step, and hardly in the loss of four.
    assert worst(run(heads, True)[0][1:], whole[1:]) > 100 * TOLERANCE
