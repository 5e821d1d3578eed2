"""benchmarks/gpu: what survives a limit, a crash, a kill and a second call; with children that do
nothing, and once with the script itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import everything, tables
from benchmarks.gpu.jobs import Stage
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.supervise import Budget, follow

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.journal import Journal
journal, ended = Journal(Path(sys.argv[1])), None
ended = journal.ended()
for word in sys.argv[2:]:
    name, _, what = word.partition("=")
    if name in ended:
        continue
    journal.begin(name)
    if what == "crash":
        os.kill(os.getpid(), 11)
    if what == "torn":  # killed in the middle of a line
        with open(sys.argv[1], "ab") as file:
            file.write(b'{"end": "' + name.encode())
        os._exit(9)
    if what.startswith("fault"):
        journal.end(name, {"kind": "test", "failed": {"all": "a fault"}})
        sys.exit(75)
    if what:
        time.sleep(float(what))
    journal.end(name, {"kind": "test", "failed": {}})
"""


def watched(folder, *items, seconds=60.0, limit=20.0):
    """(results, names in the order in which they were told, seconds that it took)."""
    journal, told = Journal(folder / "results.jsonl"), []
    journal.write(stage="cells", items=[item.partition("=")[0] for item in items])
    command = [sys.executable, "-c", CHILD, str(journal.path), *items]
    begun = time.monotonic()
    follow("cells", command, journal, Budget(seconds), limit, lambda name, _: told.append(name))
    return journal.results(), told, time.monotonic() - begun


def failed(results):
    return {name: record["failed"] for name, record in results["jobs"].items() if record["failed"]}


def test_an_item_that_overruns_costs_itself_and_a_new_child_does_the_rest(tmp_path):
    results, told, took = watched(tmp_path, "a", "b=60", "c", limit=3.0)
    assert told == ["a", "b", "c"]
    assert failed(results) == {"b": {"all": "did not end within 3 s"}}
    assert results["left out"] == []
    assert took < 20


@pytest.mark.parametrize(("how", "status"), [("crash", -11), ("torn", 9)])
def test_a_crash_costs_the_item_that_crashed(tmp_path, how, status):
    results, told, _ = watched(tmp_path, "a", f"b={how}", "c")
    assert told == ["a", "b", "c"]
    assert failed(results) == {"b": {"all": f"ended with status {status}: no output"}}


def test_a_device_that_no_longer_answers_gets_a_new_child(tmp_path):
    results, told, _ = watched(tmp_path, "a=fault", "b=fault", "c")
    assert told == ["a", "b", "c"]
    assert failed(results) == {"a": {"all": "a fault"}, "b": {"all": "a fault"}}


def test_the_time_is_kept_and_a_further_call_does_what_was_cut_off(tmp_path):
    results, told, took = watched(tmp_path, "a", "b=60", "c", seconds=4.0)
    assert took < 9
    assert told == ["a"]
    assert results["left out"] == ["b", "c"]  # not a failure: it had too little time
    assert not failed(results)
    results, told, _ = watched(tmp_path, "a=60", "b", "c")
    assert told == ["b", "c"]
    assert results["left out"] == []


def test_a_child_that_cannot_begin_is_told_once(tmp_path):
    journal, told = Journal(tmp_path / "results.jsonl"), []
    command = [sys.executable, "-c", "raise ImportError('no such module')"]
    follow("cells", command, journal, Budget(30), 20, lambda *each: told.append(each))
    ((name, record),) = told
    assert name == "cells, outside its items"
    assert record["failed"]["all"] == "ended with status 1: ImportError: no such module"


def test_a_child_that_did_not_begin_in_time_is_forgotten_when_it_begins_again(tmp_path):
    journal = Journal(tmp_path / "results.jsonl")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    follow("cells", command, journal, Budget(30), 0.3, lambda *_: None)
    assert failed(journal.results()) == {
        "cells, outside its items": {"all": "did not end within 0 s"}
    }
    results, _, _ = watched(tmp_path, "a")
    assert list(results["jobs"]) == ["a"]
    assert journal.ended() == {"a"}


STUCK = """
import os, signal, time
from pathlib import Path

def test_is_stuck():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(120)
"""


@pytest.mark.slow
def test_ended_by_a_signal_it_ends_its_child(tmp_path):
    (tmp_path / "test_stuck.py").write_text(STUCK)
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--parts", "tests"]
    command += ["--tests", str(tmp_path / "test_stuck.py"), "--out", str(tmp_path / "out")]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    pid, until = tmp_path / "pid", time.monotonic() + 90
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    running.terminate()
    status = running.wait(20)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert status == 128 + signal.SIGTERM


def test_a_line_is_on_disk_when_it_is_written_and_a_torn_one_never_was(tmp_path):
    """Cut after every byte: whole lines are read, and the next writer begins a line of its own."""
    journal = Journal(tmp_path / "results.jsonl")
    journal.begin("a")
    journal.end("a", {"kind": "test", "failed": {}})
    whole = journal.path.read_bytes()
    for cut in range(len(whole) + 1):
        journal.path.write_bytes(whole[:cut])
        assert len(journal.lines()) == whole[:cut].count(b"\n")
        journal.mend()
        journal.begin("b")
        assert journal.lines()[-1] == {"begin": "b"}
        assert len(journal.lines()) == whole[:cut].count(b"\n") + 1


TESTS = """
import os
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_skips(): pytest.skip("no such device")
def test_crashes(): os._exit(7)
def test_comes_after(): pass
@pytest.mark.slow
def test_is_not_chosen(): pass
"""


def test_every_test_is_an_item_and_none_ends_the_others(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    journal, stage = Journal(tmp_path / "results.jsonl"), Stage("tests", marks="not slow")
    args = SimpleNamespace(tests=[str(tmp_path / "test_some.py")])
    command = everything._pytest(args, stage, journal)
    follow("tests", command, journal, Budget(60), 30, lambda *_: None, everything.NO_TEST_LEFT)
    results = journal.results()
    jobs = {name.partition("::")[2]: record for name, record in results["jobs"].items()}
    assert list(jobs) == [f"test_{word}" for word in (
        "passes", "fails", "skips", "crashes", "comes_after",
    )]  # fmt: skip
    assert "one is not two" in jobs["test_fails"]["failed"]["call"]
    assert jobs["test_crashes"]["failed"]["all"].startswith("ended with status 7")
    assert results["left out"] == []
    text = tables.markdown({**results, "machine": "m", "versions": "v"})
    assert "2 passed, 1 failed, 1 skipped" in text
    assert "- 1: Skipped: no such device" in text
    assert "test_crashes: all: ended with status 7" in text


@pytest.mark.slow
def test_killed_at_any_moment_the_cells_that_ended_are_on_disk_and_are_not_done_again(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tokens", "64"]
    command += ["--heads", "4:2", "--masks", "full", "--parts", "attention", "lm_head", "store"]
    command += ["--out", str(tmp_path)]
    journal = Journal(tmp_path / "results.jsonl")
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not journal.ended() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    time.sleep(1)  # its child sees that nobody watches
    before = journal.results()
    assert next(iter(before["jobs"])).startswith("attention, full")
    assert before["left out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    after = journal.results()
    assert after["left out"] == []
    assert len(after["commands"]) == 2
    assert {name: after["jobs"][name] for name in before["jobs"]} == before["jobs"]
    ends = [line["end"] for line in journal.lines() if "end" in line]
    assert sorted(ends) == sorted(after["jobs"])
    assert {"LM head", "attention store"} < {*ends}
    assert "| single pass " in (tmp_path / "tables.md").read_text()
    assert json.loads(journal.path.read_text().splitlines()[0])["head"]["device"] == "cpu"
