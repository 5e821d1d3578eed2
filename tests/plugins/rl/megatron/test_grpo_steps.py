"""examples/grpo_train.py: a step on four ranks, and its loss by hand."""

import math

import grpo_ranks
import pytest
import torch

WORDS = "--prompts 3 --samples 4 --warm-up 4 --steps 1 --kl 0.05 --entropy 0.01 --lr 5e-4"


@pytest.fixture(scope="module")
def found(four):
    results = four(grpo_ranks.learn, WORDS)
    assert all(result[1:] == results[0][1:] for result in results)
    return results[0]


def test_a_step_moves_the_policy_along_the_advantage(found):
    row, gain, apart, samples, _ = found
    assert gain > 1e-3
    assert apart == 0  # the reference is the policy before its first step
    assert row["reward"] == pytest.approx(sum(each.reward for each in samples) / 12)


def test_gradients_are_those_of_separate_trajectories(found):
    row = found[0]
    assert row["difference"] < 1e-10
    assert row["gradient"] > 1e-3
    assert row["rows"] == row["rows_merged"] < row["rows_separate"] == row["tokens"]


def test_log_probabilities_are_those_that_were_sampled_with(found):
    """Megatron's own attention without context parallelism gives the same log-probabilities."""
    assert found[0]["sampler"] < 1e-10


def test_samples_branch_and_are_marked_right(found):
    *_, samples, (first, second) = found
    for i, sample in enumerate(samples):
        assert sample.question == i // 4
        right = sorted(sample.tokens[first - 5 : first - 1])
        arguments = [sample.tokens[at : at + 4] for at in (first, second)]
        rights = [[a == b for a, b in zip(each, right, strict=True)] for each in arguments]
        assert sample.correct == [*map(sum, rights)]
        assert sample.tokens[first + 4 : second] == [12 if each else 13 for each in rights[0]] + [
            14
        ]
        assert sample.reward == (sum(rights[0]) + sum(rights[1])) / 8
        if i % 2:  # two second answers of one first
            assert sample.tokens[:second] == samples[i - 1].tokens[:second]


def test_the_loss_by_hand():
    from grpo_task import Sample
    from grpo_train import Grpo

    import megatron_burst as mb

    def logs(*values):
        return torch.tensor([0.0, *map(math.log, values)], dtype=torch.float64)

    samples = [Sample(0, [], [1, 2], [], [2, 2]), Sample(0, [], [1], [], [0, 0])]
    new = [logs(0.3, 0.22), logs(0.1)]
    before = {0: logs(0.2, 0.2), 1: logs(0.2)}  # ratios 1.5, which is clipped to 1.2; 1.1; 0.5
    part = mb.rl.TrajectoryLogProbs((0, 1), new, [torch.full((3,), 0.7), torch.full((2,), 0.9)])
    advantages = [torch.tensor([2.0, 3.0]), torch.tensor([-1.0])]
    loss = Grpo(samples, advantages, before)
    # A bad sample that became rarer gains no more than clipped: min(-0.5, -0.8).
    assert float(loss(part)) == pytest.approx(-(2 * 1.2 + 3 * 1.1 - 0.8) / 3)
    loss.entropy = 0.1
    assert float(loss(part)) == pytest.approx(-(5.7 - 0.8 + 0.1 * (2 * 0.7 + 0.9)) / 3)
    loss.entropy, loss.kl = 0.0, 0.5
    loss.reference = {0: new[0] + math.log(2), 1: new[1]}
    apart = 2 - math.log(2) - 1
    assert float(loss(part)) == pytest.approx(-(5.7 - 0.8 - 0.5 * 2 * apart) / 3)


def test_advantages_compare_samples_of_one_question_from_a_turn_on():
    from grpo_task import Sample
    from grpo_train import advantages

    played = ((0, [0, 1]), (0, [2, 1]), (1, [1, 2]), (1, [1, 0]))
    found = advantages([Sample(q, [], [1, 2], [], rights) for q, rights in played])
    want = [[-1, 0], [1, 0], [1, 1], [-1, -1]]
    assert torch.stack(found).tolist() == [pytest.approx(each, abs=1e-3) for each in want]
