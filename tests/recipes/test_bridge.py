"""Megatron-Bridge's own recipe, overrides and `pretrain()`, on one rank and on several."""

import re

import numpy as np
import pytest
from shrunk import PRETRAIN

NODES = "model.hierarchical_context_parallel_sizes=[2,2]"
ALL = {"intra": 2, "lm_head_loss": "single_pass", "store": 0.5}


@pytest.fixture(scope="module")
def stock(train):
    """Return three steps of the unchanged recipe on one rank."""
    steps, _ = train(1)
    return np.array(steps)


def close(steps, reference):
    """Compare with the precision of fp32 sums over tokens in another order."""
    np.testing.assert_allclose(np.array(steps), reference, rtol=3e-6)


def test_the_losses_are_those_of_training(stock):
    assert stock.shape == (3, 2)
    assert stock[0, 0] == pytest.approx(np.log(512), rel=0.02)  # nothing is learned yet
    assert (stock[:, 1] > 0.1).all()


@pytest.mark.parametrize(
    ("world", "choices", "overrides"),
    [
        (1, {"lm_head_loss": "single_pass"}, ()),
        (2, {}, ()),
        (4, {}, (NODES,)),
        (4, ALL, ()),
    ],
    ids=["cp1-fused", "cp2", "cp2x2", "cp2x2-fused-store"],
)
def test_a_split_recipe_trains_like_one_rank(train, stock, world, choices, overrides):
    steps, log = train(world, choices=choices, overrides=overrides)
    close(steps, stock)
    if world == 4:
        assert log.count("burst attention: algorithm burst | 2 per node x 2 nodes") == 1
    assert ("LM head loss: single_pass" in log) == ("lm_head_loss" in choices)


def test_an_attention_that_ignores_the_other_ranks_trains_differently(train, stock):
    """Shows that the comparison above can fail."""
    steps, _ = train(2, attention="blind")
    assert abs(np.array(steps)[0] / stock[0] - 1).max() > 1e-4


def test_a_recipe_survives_its_yaml_file(train, stock):
    steps, log = train(2, choices=ALL, reload=True)
    close(steps, stock)
    assert "layout striped" in log
    assert "store 0.5" in log
    assert "LM head loss: single_pass" in log


def test_beside_tensor_parallelism_and_evaluation(train):
    """TP 2 with sequence parallelism, distributed optimizer, evaluation in between."""
    sizes = [
        "model.tensor_model_parallel_size=2", "model.sequence_parallel=True",
        "ddp.use_distributed_optimizer=True", "train.eval_interval=2", "train.eval_iters=1",
    ]  # fmt: skip
    stock, _ = train(2, overrides=[*sizes, "model.context_parallel_size=1"])
    steps, log = train(4, choices=ALL, overrides=[*sizes, "model.context_parallel_size=2"])
    close(steps, np.array(stock))
    assert "| 2 ranks |" in log
    assert "validation loss at iteration 2" in log


def test_the_launcher_trains_a_ready_recipe(recipe, stock):
    small = " ".join(PRETRAIN)
    words = f"llama3_8b_pretrain_32gpu_h100_1m {small} model.context_parallel_size=2"
    code, text = recipe(words, ranks=2)
    assert code == 0, text[-3000:]
    steps = re.findall(r"lm loss: ([\d.E+-]+) .*?grad norm: ([\d.]+)", text)
    steps = np.array(steps, float)
    np.testing.assert_allclose(steps[:, 0], stock[:, 0], rtol=1e-6)  # as they are printed
    np.testing.assert_allclose(steps[:, 1], stock[:, 1], atol=6e-4)
    assert "the recipe's model now has cross_entropy_loss_fusion=False, recompute_gran" in text
    assert "store 0.5" in text
