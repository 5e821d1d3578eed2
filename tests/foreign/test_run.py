"""The harness for Megatron-LM's unit tests, without Megatron: comparing verdicts, and hanging."""

import json
import time

import pytest
from foreign import run, watch

RULE = """
[[difference]]
mode = "burst"
change = "failed -> passed"
tests = ["a/test_b.py::test_c[[]cp*"]
reason = "Megatron's local attention has no context parallelism."
"""


def results(**verdicts):
    found = run.Results()
    for mode, tests in verdicts.items():
        for test, verdict in tests.items():
            name = f"{run.UNIT_TESTS}/a/test_b.py::{test}"
            found.add(mode, {"name": name, "verdict": verdict, "error": "E"})
    return found


@pytest.fixture
def expected(tmp_path):
    (tmp_path / "expected.toml").write_text(RULE)
    return run.Expected(tmp_path / "expected.toml")


def test_an_expected_difference_is_no_failure(expected, capsys):
    found = results(
        stock={"test_c[cp2]": "failed", "test_d": "passed"},
        installed={"test_c[cp2]": "failed", "test_d": "passed"},
        burst={"test_c[cp2]": "passed", "test_d": "passed"},
    )
    assert run.compare(found, run.MODES, ["a/test_b.py"], expected) == 0
    assert "installed 0 (0), burst 1 (0)" in capsys.readouterr().out
    assert expected.absent() == []


@pytest.mark.parametrize(
    ("installed", "burst"),
    [
        ({"test_c[cp2]": "passed"}, {"test_c[cp2]": "failed"}),
        ({"test_c[cp2]": "failed"}, {"test_c[cp2]": "skipped"}),
        ({"test_c[cp2]": "failed"}, {}),
        ({"test_c[cp2]": "failed"}, {"test_c[cp2]": "failed", "test_d": "failed"}),
    ],
)
def test_any_other_difference_is_a_failure(expected, installed, burst, capsys):
    found = results(stock={"test_c[cp2]": "failed"}, installed=installed, burst=burst)
    assert run.compare(found, run.MODES, ["a/test_b.py"], expected) == 1
    assert "UNEXPECTED" in capsys.readouterr().out
    assert [rule["mode"] for rule in expected.absent()] == ["burst"]


def test_a_file_without_tests_is_a_failure(capsys):
    found = results(stock={"test_d": "passed"}, installed={})
    files = ["a/test_b.py"]
    assert run.without_tests(found, ["stock"], files) == 0
    assert run.without_tests(found, ["stock", "installed"], files) == 1
    assert "NO TESTS installed: a/test_b.py" in capsys.readouterr().out


def test_the_handed_rules_are_complete():
    for rule in run.Expected().rules:
        assert set(rule) == {"mode", "change", "tests", "reason"}
        assert rule["mode"] in run.MODES[1:]
        assert rule["reason"].strip()


def write(path, *events):
    with path.open("a") as out:
        for event, verdict, ago in events:
            line = {"event": event, "name": "t", "verdict": verdict, "error": verdict}
            out.write(json.dumps(line | {"time": time.time() - ago}) + "\n")


@pytest.fixture
def two_ranks(tmp_path):
    return watch.Watch(tmp_path, 2, 1), [tmp_path / f"1-{rank}.jsonl" for rank in (0, 1)]


def test_verdicts_of_ranks_are_one(two_ranks):
    watched, (first, second) = two_ranks
    write(first, ("start", "", 0), ("end", "passed", 0))
    watched.read()
    assert list(watched.complete()) == []
    write(second, ("start", "", 0), ("end", "failed", 0))
    watched.read()
    (line,) = watched.complete()
    assert (line["verdict"], line["ranks"]) == ("failed", ["passed", "failed"])
    assert list(watched.complete()) == []
    assert watched.stuck(1) is None


def test_a_rank_that_waits_for_a_failed_one_is_stuck(two_ranks):
    watched, (first, second) = two_ranks
    write(first, ("start", "", 99), ("end", "failed", 99))
    write(second, ("start", "", 99))
    watched.read()
    assert watched.stuck(300) is None
    watched.last -= watch.PATIENCE + 1
    line = watched.stuck(300)
    assert (line["verdict"], line["error"]) == ("failed", "failed")


def test_a_test_has_a_limit(two_ranks):
    watched, (first, second) = two_ranks
    write(first, ("start", "", 0))
    write(second, ("start", "", 0))
    watched.read()
    assert watched.stuck(300) is None
    watched.last -= 301
    assert watched.stuck(300)["error"] == "no end after 300 s"
