"""examples/launch.py: processes really start, and a failing one is reported in plain words."""

import os
from pathlib import Path

import launch
import pytest


@pytest.fixture(autouse=True)
def fake_script(monkeypatch):
    monkeypatch.setattr(launch, "SCRIPT", Path(__file__).with_name("fake_pretrain.py"))


def test_runs_and_reads_metrics_back(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    run = launch.train("two", 2, ["--train-iters", "4"], tmp_path)
    assert run.startup == "threads 1"  # 2 cores, 2 ranks
    assert run.curve("loss") == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25}
    assert run.seconds > 0


def test_failure_shows_the_reason_and_where_the_rest_is(tmp_path):
    with pytest.raises(launch.RunFailed) as failure:
        launch.train("two", 2, ["--fail-on-rank", "1"], tmp_path)
    message = str(failure.value)
    assert "The run 'two' on 2 ranks ended with exit status 1" in message
    assert "ValueError: --burst-side is 'left': use query, kv or auto" in message
    assert str(tmp_path / "logs" / "two") in message
    assert "ChildFailedError" not in message  # the launcher's own noise


def test_no_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert launch.environment(ranks=2)["OMP_NUM_THREADS"] == "4"
    assert launch.environment(ranks=16)["OMP_NUM_THREADS"] == "1"


def test_cause_prefers_the_rank_that_failed_first(tmp_path):
    for rank, (text, when) in enumerate(
        [("Traceback (most recent call last):\nRuntimeError: peer closed", 20),
         ("Traceback (most recent call last):\nValueError: the reason", 10),
         ("only a warning", 5)]
    ):  # fmt: skip
        (tmp_path / str(rank)).mkdir()
        log = tmp_path / str(rank) / "stderr.log"
        log.write_text(text)
        os.utime(log, (when, when))
    assert launch.cause(tmp_path).endswith("ValueError: the reason")


def test_cause_without_a_traceback_is_the_last_lines(tmp_path):
    (tmp_path / "launcher.log").write_text("".join(f"line {i}\n" for i in range(40)))
    assert launch.cause(tmp_path).splitlines() == [f"line {i}" for i in range(28, 40)]
    (tmp_path / "launcher.log").write_text("")
    assert launch.cause(tmp_path) == "(it printed nothing)"


def test_metrics_without_a_step(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"run": {"startup": "x"}}\n')
    with pytest.raises(ValueError, match="contains no step"):
        launch.read_metrics(tmp_path / "m.jsonl")
