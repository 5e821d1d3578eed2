"""verl's own Megatron engine with BurstAttention: what it infers and learns is that of one rank."""

import numpy as np
import pytest
import torch

LIBRARY = "actor_rollout_ref.model.external_lib=megatron_burst.integrations.verl"
CP = "actor_rollout_ref.actor.megatron.context_parallel_size={}"
TP2 = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
PP2 = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
ENTRY = "+actor_rollout_ref.actor.megatron.override_transformer_config.burst."
TREES = f"{ENTRY}pack=trees"
FUSED = "actor_rollout_ref.model.use_fused_kernels=True"


def tokens(length, seed):
    return np.random.default_rng(seed).integers(1, 128, length).tolist()


PROMPT, TURN = tokens(13, 0), tokens(6, 1)
# Four answers to one prompt, two of which share a turn, and two trajectories of their own.
BATCH = [
    [*PROMPT, *TURN, *tokens(9, 2)], tokens(31, 3), [*PROMPT, *tokens(4, 4)],
    [*PROMPT, *TURN, *tokens(22, 5)], tokens(5, 6), [*PROMPT, *tokens(17, 7)],
]  # fmt: skip
MICRO_BATCH = 3


@pytest.fixture(scope="module")
def one_rank(run):
    """verl as it is, on one rank."""
    code, log, results = run(1, [], BATCH, MICRO_BATCH)
    assert code == 0, log[-3000:]
    return results[0]


def equal(results, theirs):
    """Per token of each trajectory but the last, which predicts nothing; and every weight that a
    rank has whole."""
    ours = next(one for one in results if "loss" in one)  # of the last stage
    for kind in ("inferred", "trained"):
        for name in ("log_probs", "entropy"):
            for mine, one in zip(ours[kind][name], theirs[kind][name], strict=True):
                torch.testing.assert_close(mine[:-1], one[:-1], rtol=1e-6, atol=2e-6)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    compared = set()
    for rank in results:
        for name, mine in rank["gradients"].items():
            if mine.shape == theirs["gradients"][name].shape:
                difference = mine - theirs["gradients"][name]
                assert difference.norm() < 2e-6 * theirs["gradients"][name].norm(), name
                compared.add(name)
    return len(compared), len(theirs["gradients"])


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, [CP.format(2)]),
        (4, [CP.format(2), TP2, FUSED]),
        (4, [CP.format(2), PP2, f"{ENTRY}algorithm=ring"]),
        (1, [TREES]),
        (2, [CP.format(2), TREES]),
        (4, [CP.format(2), TP2, FUSED, TREES]),
    ],
    ids=["cp2", "cp2-tp2-fused-head", "cp2-pp2", "trees", "cp2-trees", "cp2-tp2-fused-head-trees"],
)
def test_an_engine_infers_and_learns_like_one_rank(run, one_rank, world, words):
    code, log, results = run(world, [LIBRARY, *words], BATCH, MICRO_BATCH)
    assert code == 0, log[-3000:]
    assert "burst attention: algorithm" in log
    compared, weights = equal(results, one_rank)
    assert compared == weights - 10 * (TP2 in words)
