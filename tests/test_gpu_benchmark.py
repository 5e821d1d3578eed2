"""benchmarks/gpu, a whole run: order, budget and what comes out, on the CPU and tiny."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import benchmarks.gpu.__main__
from benchmarks.gpu import everything, jobs, ring, sizes, tables
from benchmarks.gpu.__main__ import main as command_line
from benchmarks.gpu.clock import Clock, Run, interleaved

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ["bash", str(ROOT / "benchmarks" / "gpu.sh")]
CPU = torch.device("cpu")


def run(*words, **more):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | more
    return subprocess.run(
        [*SCRIPT, *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


# --- order, budget, memory -----------------------------------------------------------------

RESULTS = {
    "device": "cpu", "machine": "a device", "versions": "torch", "commands": ["benchmarks/gpu.sh"],
    "jobs": {}, "left out": [],
}  # fmt: skip


def fresh():
    return {**RESULTS, "jobs": {}, "left out": []}


def test_no_job_begins_after_the_budget_and_what_was_left_out_is_told():
    now = [0.0]
    results, said, saved = fresh(), [], []

    def job(seconds):
        def work():
            now[0] += seconds
            return {"kind": "tests", "summary": "fine", "failed": {}}

        return work

    todo = [jobs.Job(f"job {i}", job(seconds)) for i, seconds in enumerate((4, 7, 1, 1))]
    budget = jobs.Budget(10, now=lambda: now[0])
    jobs.work(todo, results, budget, said.append, lambda: saved.append(1))
    assert list(results["jobs"]) == ["job 0", "job 1"]
    assert [record["took"] for record in results["jobs"].values()] == [4, 7]
    assert results["left out"] == ["job 2", "job 3"]
    assert len(saved) == 3
    assert "Left out" in tables.markdown(results)
    assert "- job 3" in tables.markdown(results)


def test_a_job_that_breaks_is_a_failure_and_the_next_one_runs():
    results = fresh()

    def broken():
        raise RuntimeError("no such thing\nsecond line")

    todo = [
        jobs.Job("a", broken),
        jobs.Job("b", lambda: {"kind": "tests", "summary": "1 passed", "failed": {}}),
    ]
    jobs.work(todo, results, jobs.Budget(10), lambda text: None, lambda: None)
    assert jobs.failures(results) == ["a: all: RuntimeError: no such thing"]
    assert results["left out"] == []
    assert "1 passed" in tables.markdown(results)


def arguments(**changes):
    plain = {"parts": ["attention", "ring", "lm_head", "store"], "masks": None}
    return SimpleNamespace(**plain | changes)


def test_the_first_size_comes_under_every_mask_then_the_rest():
    todo = jobs.listed(arguments(), sizes.GPU, Clock(CPU), fresh(), jobs.Budget(1))
    names = [job.name for job in todo]
    assert len(names) == len(set(names)) == 8 * 2 * 4 + 4
    assert all("32:8 heads, 32768 rows" in name for name in names[:8])
    assert names[8:12] == [
        "LM head", "attention store", "ring of 1 x 8 ranks", "ring of 4 x 8 ranks",
    ]  # fmt: skip
    assert "32:32 heads, 8192 rows" in names[-1]


def test_what_the_results_have_is_not_measured_again():
    results = fresh()
    results["jobs"]["LM head"] = {}
    todo = jobs.listed(arguments(), sizes.CPU, Clock(CPU), results, jobs.Budget(1))
    assert "LM head" not in [job.name for job in todo]


def test_an_unknown_mask_is_refused():
    with pytest.raises(ValueError, match=r"--masks .*'full'"):
        jobs.listed(arguments(masks=["cosal"]), sizes.CPU, Clock(CPU), fresh(), jobs.Budget(1))


def test_a_larger_ring_takes_the_fastest_kernel_and_as_many_tokens_as_there_is_time_for():
    def found(kernel, side, seconds):
        times = {"seconds": [seconds, seconds + 1], "calls": [], "operators": []}
        found = {"forward": times, "backward": times, "first": 2 * seconds}
        return {"kernel": kernel, "side": side, **found}

    runs = [found("slow", "kv", 4.0), found("fast", "kv", 0.5), found("fast", "query", 1.0)]
    earlier = {"nodes": 1, "per_node": 8, "tokens": 32768, "runs": runs}
    # a first round and two that count, 1 + 2 s each: 9 s, over 32 ranks 144 s
    assert ring.next_size((4, 8), earlier, sizes.GPU, 500.0) == (16384, ["fast"])
    assert ring.next_size((4, 8), earlier, sizes.GPU, 30.0) == (8192, ["fast"])
    assert ring.next_size((4, 8), earlier, sizes.GPU, 0.1) == (2048, ["fast"])
    assert ring.next_size((4, 8), None, sizes.GPU, 500.0) == (32768, None)


def test_a_ring_that_does_not_fit_is_made_smaller(monkeypatch):
    class Small(ring.Ring):
        def __init__(self, grid, tokens, *rest):
            if tokens > 32:
                raise torch.OutOfMemoryError("no room")
            super().__init__(grid, tokens, *rest)

    monkeypatch.setattr(ring, "Ring", Small)
    record = ring.measure((1, 2), ["aten"], 64, sizes.CPU, Clock(CPU))
    assert record["tokens"] == 32
    assert len(record["runs"]) == 2
    results = {**fresh(), "jobs": {"ring": record}}
    assert "32 rows each instead of 64, for want of memory" in tables.markdown(results)


def test_runs_take_turns_after_a_round_that_does_not_count():
    order = []
    runs = {name: Run(lambda name=name: order.append(name)) for name in "ab"}
    times = interleaved(runs, Clock(CPU), repeats=2)
    assert order == list("ababab")
    assert [len(each) for each in times.values()] == [2, 2]


# --- what comes out ------------------------------------------------------------------------


def test_the_table_says_medians_quartiles_and_the_ratio_of_each_round():
    record = {
        "kind": "attention", "case": "full", "heads": [4, 2], "tokens": 2048, "refused": {},
        "failed": {}, "matmul": {"flops": 8e12, "seconds": [1.0, 2.0, 4.0]},
        "runs": [{"who": "aten", "pass": "forward", "flops": 4e12, "seconds": [2.0, 4.0, 4.0],
                  "extra": 3 << 20, "error": 0.001}],
    }  # fmt: skip
    text = tables.markdown({**fresh(), "jobs": {"x": record}})
    # rates 2, 1, 1; the product 8, 4, 2; ratios 0.25, 0.25, 0.5
    assert "| full | 4:2   | 2K   | 4       | 1 [1, 1.5] (0.25) |" in text
    assert "| aten | 3            |" in text


def test_the_share_outside_is_what_no_call_accounts_for():
    found = {"seconds": [2.0, 4.0, 2.0], "calls": [1.9, 3.0, 1.8], "operators": []}
    assert tables._outside(found, "calls") == "10.0 %"
    assert tables._outside(found, "operators") == "-"


def test_the_command_is_told_without_the_files_of_this_machine(monkeypatch):
    words = ["x", "--results", "/a/b.json", "--budget", "60", "--doc=/a/c.md", "--append"]
    monkeypatch.setattr(sys, "argv", words)
    assert everything.command() == "benchmarks/gpu.sh --budget 60 --append"


@pytest.mark.slow
def test_a_whole_run_on_the_cpu(tmp_path, monkeypatch, capsys):
    results, doc = tmp_path / "results.json", tmp_path / "out" / "gpu.md"
    words = ["--device", "cpu", "--tokens", "64", "--heads", "4:2", "--results", str(results)]
    words += ["--masks", "own keys", "window", "documents"]
    done = run(*words, "--doc", str(doc), "--tests", "tests/gpu/test_gpu_lm_head.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    kinds = [record["kind"] for record in found["jobs"].values()]
    assert [kinds.count(kind) for kind in ("tests", "attention", "ring", "lm head", "store")] == [
        1, 3, 2, 1, 1,
    ]  # fmt: skip
    assert found["left out"] == []
    text = doc.read_text()
    for some in (
        "2 passed", "| causal zigzag, own keys ", "**Backward, side query**", "| 2 x 2 | 64 ",
        "| single pass ", "| three products ", "| 0.5  |", "a CPU: this tests the script",
        "![](gpu-attention.png)", "![](gpu-rest.png)", "- aten_cudnn: kernel aten_cudnn runs on",
    ):  # fmt: skip
        assert some in text, some
    assert str(tmp_path) not in text
    for name in ("gpu-attention.png", "gpu-rest.png"):
        assert (doc.parent / name).read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(sys, "argv", ["gpu.sh", *words, "--append", "--parts", "lm_head"])
    assert command_line() == 0
    assert "; 0 cells" in capsys.readouterr().out
    shown = tmp_path / "shown" / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "--show", str(results), "--doc", str(shown)])
    assert command_line() == 0
    assert "| single pass " in shown.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so_and_changes_nothing():
    document = ROOT / "docs" / "performance.md"
    before = document.read_bytes()
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "no CUDA device here" in done.stdout
    assert "nothing was run or measured" in done.stdout
    assert document.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--heads", "4:3"], "--heads: like 32:8"),
        (["--tokens", "40"], "--tokens: multiples of 32"),
        (["--doc", "gpu.md"], "its section is of GPUs, and this is a CPU"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, told, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmarks.gpu.__main__, "DOC", tmp_path / "gpu.md")
    files = ["--results", "r.json"]
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "--device", "cpu", *files, *words])
    assert command_line() == 2
    assert told in capsys.readouterr().err


def test_results_of_another_machine_are_not_added_to(monkeypatch, tmp_path, capsys):
    other = tmp_path / "r.json"
    other.write_text(json.dumps({**fresh(), "machine": "another"}))
    words = ["--device", "cpu", "--append", "--results", str(other)]
    monkeypatch.setattr(sys, "argv", ["gpu.sh", *words])
    assert command_line() == 2
    assert "--append: r.json is of another" in capsys.readouterr().err


def test_a_missing_module_is_named(tmp_path):
    """An interpreter without site-packages has none of them."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run("--device", "cpu", PYTHON=str(bare), PYTHONPATH="")
    assert done.returncode == 1
    assert "missing: the Python modules torch, numpy, rich" in done.stderr
    none = run(PYTHON=str(tmp_path / "nothing"))
    assert none.returncode == 1
    assert "name an interpreter" in none.stderr


def test_the_documentation_claims_no_gpu_figure_that_nobody_measured():
    text = (ROOT / "docs" / "performance.md").read_text()
    section = text.partition("<!-- begin GPU: generated -->")[2].partition("<!-- end GPU -->")[0]
    assert "benchmarks/gpu.sh" in section
    assert "Measured on" in section or "Nothing has been measured" in section
