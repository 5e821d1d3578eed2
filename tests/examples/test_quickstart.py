"""examples/quickstart.py: what it launches, what counts as the same, and how it ends."""

import json
import math
import sys

import launch
import pytest
import quickstart
from launch import Run


def run_of(losses, norms=None, first=1):
    norms = norms or [1.0] * len(losses)
    rows = zip(losses, norms, strict=True)
    return Run(
        "burst | [2, 2] | side query",
        {
            step: {"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": 100.0}
            for step, (loss, norm) in enumerate(rows, first)
        },
    )


def test_relative_differences_by_hand():
    apart = quickstart.relative_differences(
        run_of([2.0, 4.0], first=2), run_of([9.0, 2.0, 5.0]), "loss"
    )
    assert apart == {2: 0.0, 3: 0.2}


def test_nan_is_never_the_same():
    apart = quickstart.relative_differences(run_of([math.nan]), run_of([1.0]), "loss")
    assert apart == {1: math.inf}
    assert not quickstart.compare("1 rank", run_of([math.nan]), run_of([1.0]))[0].passed


def test_steps_without_counterpart_are_an_error():
    with pytest.raises(ValueError, match=r"steps \[3\]"):
        quickstart.relative_differences(run_of([1.0] * 3), run_of([1.0] * 2), "loss")


@pytest.mark.parametrize(("apart", "passed"), [(0.9e-4, True), (1.1e-4, False)])
def test_tolerance_is_1e_4_on_loss_and_on_gradient_norm(apart, passed):
    reference = run_of([1.0, 1.0], [1.0, 1.0])
    loss, norm = quickstart.compare("x", run_of([1.0, 1.0 - apart]), reference)
    assert (loss.passed, norm.passed) == (passed, True)
    loss, norm = quickstart.compare("x", run_of([1.0, 1.0], [1.0 + apart, 1.0]), reference)
    assert (loss.passed, norm.passed) == (True, passed)


def test_learned_compares_the_last_ten_steps_with_the_entropy():
    run = run_of([9.0] + [2.2, 2.4, 2.6, 2.8, 3.0] * 2)  # the last ten: mean 2.6
    assert quickstart.final_loss(run) == pytest.approx(2.6)
    assert quickstart.learned(run, 3.11, required=True).passed
    assert not quickstart.learned(run, 3.09, required=True).passed
    assert quickstart.learned(run, 3.09, required=False).passed


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Run main() on a small text, with `runs[name]` in place of each training run."""
    text = tmp_path / "text.txt"
    text.write_text("some text of my own\n" * 20)
    losses = [5.0, 4.0, 3.0, 2.0, 1.0, 0.9]
    runs = {
        "burst": run_of(losses),
        "one_rank": run_of(losses[:2]),
        "resumed": run_of(losses[4:], first=5),
    }
    launched = {}

    def train(name, ranks, flags, folder):
        launched[name] = (ranks, flags)
        if isinstance(runs[name], Exception):
            raise runs[name]
        return runs[name]

    def main(*more):
        sizes = ["--seq-length", "64", "--steps", "6"]
        sizes += ["--compare-steps", "2", "--resume-steps", "2"]
        where = ["--data", str(text), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["quickstart", *where, *sizes, *more])
        return quickstart.main()

    monkeypatch.setattr(launch, "train", train)
    main.runs, main.launched, main.out = runs, launched, tmp_path / "out"
    return main


@pytest.mark.megatron
def test_whole_run_passes_and_leaves_picture_and_metrics(quick, capsys):
    assert quick() == 0
    assert (quick.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((quick.out / "metrics.json").read_text())
    assert metrics["passed"] is True
    assert metrics["final_loss"] == pytest.approx((5 + 4 + 3 + 2 + 1 + 0.9) / 6)
    assert [len(steps) for steps in metrics["steps"].values()] == [6, 2, 2]
    printed = capsys.readouterr().out
    assert printed.count("passed") == 5
    assert "burst | [2, 2] | side query" in printed  # brackets are not taken for markup
    assert quick() == 0  # a second time, over the first


@pytest.mark.megatron
def test_the_three_runs_are_launched_as_promised(quick):
    quick()
    ranks = {name: ranks for name, (ranks, _) in quick.launched.items()}
    flags = {name: " ".join(flags) for name, (_, flags) in quick.launched.items()}
    assert ranks == {"burst": 4, "one_rank": 1, "resumed": 2}
    assert "--context-parallel-algo burst --context-parallel-size 4" in flags["burst"]
    assert "--hierarchical-context-parallel-sizes 2 2 --save-interval 4 --save" in flags["burst"]
    assert "--context-parallel-algo megatron --exit-interval 2" in flags["one_rank"]
    assert "--context-parallel-size 2 --burst-layout striped" in flags["resumed"]
    assert "--ckpt-step 4 --load" in flags["resumed"]
    # One seed, one data order, one learning-rate schedule, whatever part of the run is made.
    for of_all in ("--seed 1234", "--train-iters 6", "--seq-length 64", quickstart.MODEL):
        assert all(of_all in text for text in flags.values())


@pytest.mark.megatron
def test_packed_runs_are_packed_and_the_first_is_balanced(quick):
    quick("--packed")
    flags = {name: flags for name, (_, flags) in quick.launched.items()}
    assert all("--packed" in each for each in flags.values())
    layouts = {name: each[each.index("--burst-layout") + 1] for name, each in flags.items()
               if "--burst-layout" in each}  # fmt: skip
    assert layouts == {"burst": "balanced", "resumed": "striped"}


@pytest.mark.megatron
def test_runs_that_differ_fail(quick, capsys):
    quick.runs["one_rank"] = run_of([5.0, 4.001])
    assert quick() == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 1
    assert "1 of 5 checks failed" in printed
    assert json.loads((quick.out / "metrics.json").read_text())["passed"] is False


@pytest.mark.megatron
def test_a_failing_child_ends_it_with_its_reason(quick, capsys):
    quick.runs["resumed"] = launch.RunFailed("The run [2, 2] failed: ValueError: because")
    assert quick() == 1
    assert "quickstart stopped. The run [2, 2] failed" in capsys.readouterr().out
    assert not (quick.out / "metrics.json").exists()


@pytest.mark.megatron
def test_too_little_text_ends_it_before_any_run(quick, capsys):
    assert quick("--seq-length", "4096") == 1
    assert "give more text with DATA" in capsys.readouterr().out
    assert quick.launched == {}


def test_what_is_not_ours_in_the_folder_stays(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    quickstart.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("flag", ["--compare-steps", "--resume-steps"])
def test_parts_longer_than_the_run_are_refused(monkeypatch, capsys, flag):
    monkeypatch.setattr(sys, "argv", ["quickstart", "--steps", "9", flag, "9"])
    with pytest.raises(SystemExit):
        quickstart.parse_args()
    assert f"{flag} is 9; use 1 to --steps - 1 (8)" in capsys.readouterr().err
