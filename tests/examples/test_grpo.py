"""examples/grpo.py: what it refuses, and what it says of what ranks found."""

import json
import sys

import grpo
import launch
import pytest
from launch import Run
from ranks import Ranks

COMPARED = {
    "difference": 1e-15, "gradient": 0.1, "rows_merged": 40.0, "rows_separate": 100.0,
    "seconds_merged": 0.2, "seconds_separate": 0.3, "processor_merged": 0.5,
    "processor_separate": 1.0,
}  # fmt: skip


def run_of(rewards, sampler=1e-14):
    rows = {"solved": 0.1, "tokens": 100.0, "rows": 40.0, "seconds": 0.5, "sampler": sampler}
    return Run("", {i: {"step": i, "reward": r} | rows for i, r in enumerate(rewards, 1)})


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Runs main() with ranks that find what it is given."""

    def call(*words, run=None, **compared):
        def train(name, ranks, flags, folder, script):
            (folder / "comparison.json").write_text(json.dumps(COMPARED | compared))
            (folder / "trajectories.jsonl").write_text("[1, 2, 3]\n[1, 2, 4, 5]\n")
            return run

        monkeypatch.setattr(launch, "train", train)
        monkeypatch.setattr(sys, "argv", ["grpo", "--out", str(tmp_path / "out"), *words])
        return grpo.main()

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--samples 3", "--samples must be a multiple of 2"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--digits 11", "--digits must be 2 to 10, got 11"),
        ("--ranks 3", "--ranks must be a multiple of --context-parallel-size 2, got 3"),
        ("--warm-up -1", "--warm-up must be at least 0"),
    ],
)
def test_what_cannot_run_is_said_without_a_traceback(main, capsys, words, said):
    assert main(*words.split()) == 1
    out = capsys.readouterr().out
    assert f"grpo stopped. {said}" in out
    assert "Traceback" not in out


def test_the_summary_and_its_pictures(main, capsys, tmp_path):
    rising = [0.3 + i / 200 for i in range(100)]
    assert main(run=run_of(rising)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the reward rises 0.323 to 0.772; solved 10% to 10% (at least 0.1 higher)" in said
    assert (
        "separate trajectories 100 0.300 1.000 prefixes merged 40 0.200 0.500 ratio 2.50 1.50 2.00"
        in said
    )
    assert "megatron-burst show tree --ranks 2 --trajectories" in said
    for name in ("reward.png", "tree.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("run", "compared"),
    [
        (run_of([0.5] * 100), {}),
        (run_of([0.3, 0.9], sampler=1e-9), {}),
        (run_of([0.3, 0.9]), {"difference": 1e-9}),
        (run_of([0.3, 0.9]), {"rows_merged": 100.0}),
    ],
)
def test_what_does_not_hold_fails(run, compared):
    assert [each.passed for each in grpo.checks(run, COMPARED | compared)].count(False) == 1


def test_few_steps_need_not_learn():
    assert all(each.passed for each in grpo.checks(run_of([0.5] * 3), COMPARED))


def test_a_short_run_passes_all_checks(monkeypatch, capsys, tmp_path):
    """Real ranks: gradients and log-probabilities equal those of separate trajectories."""
    server = Ranks(tmp_path, ["grpo_train"], launch.SCRIPT.parent)

    def train(name, ranks, flags, folder, script):
        metrics = folder / f"{name}.jsonl"
        done = server.run(ranks, [*flags, "--metrics", str(metrics)], script=script)
        assert done.codes == [0] * ranks, "\n".join(done.texts)[-4000:]
        return launch.read_metrics(metrics)

    words = ["--steps", "1", "--warm-up", "1", "--prompts", "4", "--samples", "4", "--out"]
    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(sys, "argv", ["grpo", *words, str(tmp_path)])
    assert grpo.main() == 0
    server.close()
    assert capsys.readouterr().out.count("passed ") == 4
    compared = json.loads((tmp_path / "comparison.json").read_text())
    assert compared["difference"] <= 1e-14 * compared["gradient"]
