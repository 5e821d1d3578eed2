"""verl's own Megatron engine with BurstAttention: inference and training equal one rank."""

import numpy as np
import pytest
import torch

LIBRARY = "actor_rollout_ref.model.external_lib=megatron_burst.plugins.rl.verl"
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


def distinct(trajectories):
    """Return the rows in which verl's outputs differ: tokens up to the next one or the end."""
    return len(
        {(*one[: i + 2], i + 1 == len(one)) for one in trajectories for i in range(len(one))}
    )


FORWARDS = [distinct(BATCH[:3]), distinct(BATCH[3:])]  # of two micro-batches


@pytest.fixture(scope="module")
def one_rank(run):
    """Run stock verl on one rank."""
    code, log, results = run(1, [], BATCH, MICRO_BATCH)
    assert code == 0, log[-3000:]
    return results[0]


def equal(results, theirs):
    """Compare all tokens of a trajectory except the last, and weights that a rank holds whole."""
    ours = next(one for one in results if "loss" in one)  # of the last stage
    for kind in ("inferred", "trained"):
        for name in ("log_probs", "entropy"):
            for own, one in zip(ours[kind][name], theirs[kind][name], strict=True):
                torch.testing.assert_close(own[:-1], one[:-1], rtol=1e-6, atol=2e-6)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    compared = set()
    for rank in results:
        for name, own in rank["gradients"].items():
            if own.shape == theirs["gradients"][name].shape:
                difference = own - theirs["gradients"][name]
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
    if TREES in words:
        assert "first micro-batch: 3 trajectories with 76 tokens in total become 64 rows" in log
        assert results[0]["rows"] == [-(-n // world) for n in 2 * FORWARDS]


def test_trees_refuse_what_differs_between_trajectories_that_share_a_prefix(run):
    code, log, _ = run(1, [LIBRARY, TREES], BATCH, MICRO_BATCH, temperatures=[1.0, 1.0, 0.5] * 2)
    assert code != 0
    assert "trajectories with a common prefix have different values" in log


MEGATRON = "actor_rollout_ref.actor.megatron."
REFUSED = {
    f"{ENTRY}sore=0.5": "override_transformer_config.burst.sore: unknown field",
    f"{ENTRY}layout=striped": "burst.layout striped: verl cuts batches in zigzag order",
    f"{ENTRY}pack=documents": "burst.pack documents: verl makes micro-batches itself",
    f"{MEGATRON}use_remove_padding=False": "use override_transformer_config.burst.algorithm meg",
    f"{TREES} +{MEGATRON}override_transformer_config.hidden_dropout=0.1": "hidden_dropout 0.1",
    f"{TREES} {MEGATRON}router_replay.mode=R2": "router_replay.mode; remove one of them",
}


def test_what_was_never_run_is_refused_by_the_names_of_verl(run):
    cases = [[LIBRARY, CP.format(2), *words.split()] for words in REFUSED]
    code, log, results = run(2, [], BATCH, MICRO_BATCH, refused=cases)
    assert code == 0, log[-3000:]
    for saved in results:
        for message, expected in zip(saved, REFUSED.values(), strict=True):
            assert expected in message


@pytest.mark.filterwarnings("ignore")  # verl's own, when it is imported
def test_importing_installs_once_and_uninstall_restores():
    from verl.models.mcore import model_forward, registry, util
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    from megatron_burst.plugins.rl import verl as ours

    def now():
        return (
            util.preprocess_thd_engine, model_forward.preprocess_thd_engine,
            registry.gptmodel_forward_model_engine, MegatronEngine._build_tf_config,
        )  # fmt: skip

    patched = now()
    ours.install()
    assert now() == patched
    assert ours.uninstall()
    assert not set(now()) & set(patched)
    assert not ours.uninstall()
    ours.install()


@pytest.mark.filterwarnings("ignore")
def test_another_version_of_verl_is_refused(monkeypatch):
    import verl

    from megatron_burst.plugins.rl import verl as ours

    ours.uninstall()
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(ValueError, match=r"tested with verl 0\.9\.1, but verl 0\.10\.0 is"):
        ours.install()
    monkeypatch.undo()
    ours.install()
