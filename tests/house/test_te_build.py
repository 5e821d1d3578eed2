"""`make test-te`: what it needs before it downloads anything, and what it keeps of what ran."""

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import compatibility  # noqa: E402

DAY = date(2031, 2, 3)


def test_another_cuda_is_skipped_before_anything_is_made(tmp_path):
    home, folder = tmp_path / "cuda", tmp_path / "environment"
    for name, text in (("bin/nvcc", "#!/bin/sh\necho release 12.8, V12.8.93"), (
        "include/cuda_runtime.h", "")):  # fmt: skip
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(text + "\n")
    (home / "bin" / "nvcc").chmod(0o755)
    nothing = {"PIP_NO_INDEX": "1", "CUDA_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "te" / "build.py"), str(folder)],
        env=os.environ | nothing, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 77, done.stderr
    assert "SKIPPED: needs the CUDA 13 toolkit" in done.stdout
    assert f"{home} has 12.8" in done.stdout
    assert not folder.exists()


def ran(*features, end="passed"):
    return {test: end for feature in features for test in feature.tests}


def test_only_rows_that_ran_get_a_new_day():
    one, other = compatibility.TE_FEATURES[:2]
    assert compatibility.te_entry(None, {}, "2.0", DAY) is None
    assert compatibility.te_entry(None, ran(one, end="skipped"), "2.0", DAY) is None
    assert compatibility.te_entry(None, {one.tests[0]: "passed"}, "2.0", DAY) is None  # of four
    both = compatibility.te_entry(None, ran(one, other), "2.0", date(2030, 1, 1))
    part = compatibility.te_entry(both, ran(one, end="failed"), "2.0", DAY)
    assert part["dates"] == {one.name: "2031-02-03", other.name: "2030-01-01"}
    assert part["tests"] == ran(one, end="failed") | ran(other)
    assert compatibility._days(part["dates"]) == "2030-01-01 to 2031-02-03"
    newer = compatibility.te_entry(both, ran(one), "2.1", DAY)
    assert newer["dates"] == {one.name: "2031-02-03"}  # the other ran with another release
    assert newer["tests"] == ran(one)


def test_without_results_nothing_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compatibility.metadata, "version", lambda name: "0.19.2")
    monkeypatch.setattr(compatibility, "keep", lambda known: pytest.fail("it was kept"))
    assert compatibility.record_te([tmp_path / "found.xml"]) == 0
    assert "nothing is kept" in capsys.readouterr().out


def test_make_help_lists_every_variable():
    head = (ROOT / "Makefile").read_text().partition("PYTHON ?=")[0]
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = re.findall(r"([A-Z]+) \(", head)
    assert len(names) == 7
    shown = done.stdout.partition("Variables:")[2]
    assert set(names) <= set(re.findall(r"([A-Z]+)=", shown))
