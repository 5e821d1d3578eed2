"""benchmarks/gpu, a whole run: order, budget and what comes out, on the CPU and tiny."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import everything, jobs, packs, ring, sizes, tables
from benchmarks.gpu.__main__ import main as command_line
from benchmarks.gpu.clock import Clock, Run, interleaved
from benchmarks.gpu.journal import Journal
from megatron_burst.kernels import registry

ROOT = Path(__file__).resolve().parents[2]
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


def stages(sizes, device="cuda", **changes):
    """The stages, of which no job is run: no device is needed."""
    parts = ["tests", "attention", "ring", "lm_head", "store"]
    plain = {"parts": parts, "masks": None, "device": device}
    return jobs.stages(SimpleNamespace(**plain | changes), sizes, torch.device(device))


def test_what_matters_most_comes_first():
    few, early, other, late = stages(sizes.GPU)
    assert few.marks == "gpu and first"
    assert few.share < 0.5
    assert other.marks == "gpu and not first"
    names = [job.name for job in early.jobs]
    plain, own = ", 32:8 heads, 32768 rows", "causal zigzag, own keys"
    assert names[:4] == [
        f"attention, full{plain}", f"attention, {own}{plain}", "LM head", "ring of 1 x 8 ranks",
    ]  # fmt: skip
    assert all(name.startswith("attention, ") and name.endswith(plain) for name in names[4:11])
    assert all(name.startswith("compiled rivals, ") for name in names[11:20])
    assert names[20:] == [*packs.KINDS, "attention store", "ring of 4 x 8 ranks"]
    rest = [job.name for job in late.jobs]
    assert not any(plain in name for name in rest)
    assert len({*names, *rest}) == len(names) + len(rest) == 2 * 9 * 2 * 4 + 6
    assert "compiled rivals" not in rest[7 * 9 - 1]  # what compiles comes last
    assert "32:32 heads, 8192 rows" in rest[-1]


def test_the_few_tests_that_come_first_see_every_kernel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    module = importlib.import_module("test_gpu_kernels")
    every = [case for case in module.cases() if case.id.startswith("cuda")]
    first = [case.id for case in every if "first" in {mark.name for mark in case.marks}]
    assert len(first) < len(every) / 10
    for kernel in set(registry.KERNELS) - {"reference"}:
        ids = " ".join(name for name in first if name.endswith(f"-{kernel}"))
        assert all(mask in ids for mask in ("full", "causal", "window", "documents")), kernel


def test_parts_are_only_those_that_were_asked_for():
    (stage,) = stages(sizes.CPU, "cpu", parts=["lm_head"])
    assert [job.name for job in stage.jobs] == ["LM head"]
    blocks = stages(sizes.CPU, "cpu", parts=["blocks"])
    assert [stage.name for stage in blocks] == ["blocks"]


def test_an_unknown_mask_is_refused():
    with pytest.raises(ValueError, match=r"--masks .*'full'"):
        stages(sizes.CPU, "cpu", masks=["cosal"])


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
    words = ["x", "--out", "/a/b", "--seconds", "60", "--out=/a/c", "--fresh"]
    monkeypatch.setattr(sys, "argv", words)
    assert everything.command() == "benchmarks/gpu.sh --seconds 60 --fresh"


@pytest.mark.slow
def test_a_whole_run_on_the_cpu(tmp_path):
    out = tmp_path / "out"
    words = ["--device", "cpu", "--tokens", "64", "--heads", "4:2", "--out", str(out)]
    words += ["--masks", "own keys", "window", "documents"]
    done = run(*words, "--tests", "tests/gpu/test_gpu_lm_head.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = Journal(out / "results.jsonl").results()
    kinds = [record["kind"] for record in found["jobs"].values()]
    assert [kinds.count(kind) for kind in ("test", "attention", "ring", "lm head", "store")] == [
        2, 3, 2, 1, 1,
    ]  # fmt: skip
    assert kinds[:2] == ["test", "test"]
    assert found["left out"] == []
    text = (out / "tables.md").read_text()
    assert text.strip() in done.stdout
    for some in (
        "2 passed", "| causal zigzag, own keys ", "**Backward, side query**", "| 2 x 2 | 64 ",
        "| single pass ", "| three products ", "| 0.5  |", "a CPU: this tests the script",
        "- aten_cudnn: kernel aten_cudnn runs on",
    ):  # fmt: skip
        assert some in text, some
    assert str(tmp_path) not in text


def test_the_whole_call_ends_in_its_time_and_says_what_it_left_out(tmp_path):
    """Nothing that it waits for, here a test without an end, keeps it."""
    (tmp_path / "test_some.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    words = ["--out", str(tmp_path), "--tests", str(tmp_path / "test_some.py"), "--seconds", "8"]
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.first)\n"
    )
    begun = time.monotonic()
    done = run("--device", "cpu", *words, "--limit", "500")
    assert time.monotonic() - begun < 40
    assert "left out; results.jsonl has it all" in done.stdout
    text = (tmp_path / "tables.md").read_text()
    # Besides the test: measurements, of which ones depends on how busy the machine is.
    listed = text.split("Left out when the time was spent", 1)[1]
    assert "test_hangs" in listed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "no CUDA device here" in done.stdout
    assert "nothing was run or measured" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--heads", "4:3"], "--heads: like 32:8"),
        (["--tokens", "40"], "--tokens: multiples of 32"),
        (["--seconds", "0"], "--seconds: seconds above 0, got 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, told, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    files = ["--out", "r"]
    monkeypatch.setattr(sys, "argv", ["gpu.sh", "--device", "cpu", *files, *words])
    assert command_line() == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["machine", "versions", "sources"])
def test_results_of_another_machine_or_code_are_not_added_to(name, monkeypatch, tmp_path, capsys):
    words = ["gpu.sh", "--device", "cpu", "--out", str(tmp_path), "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == 0  # nothing begins
    assert command_line() == 0
    path = tmp_path / "results.jsonl"
    head, *rest = path.read_text().splitlines()
    found = json.loads(head)
    found["head"][name] = "another"
    path.write_text("\n".join([json.dumps(found), *rest]) + "\n")
    assert command_line() == 2
    assert f"results.jsonl is of {name} another" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--fresh"])
    assert command_line() == 0


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
