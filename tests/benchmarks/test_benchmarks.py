"""benchmarks/: the quick mode of each script runs and prints its tables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import markdown

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "accuracy": ["| one device", "| fp32 wire, side query | 4 ", "| emulated 16-bit ring"],
    "host": ["| 8     | dense ", "| 100 documents, padded ", "| 2 head chunks ", "| ulysses "],
    "lm_head": ["| single_pass ", "| torch_chunked ", "| linear_logprobs ",
                "| logprobs_checkpointed "],
    "prepare": ["| one all-gather of headers", "| 100 documents, causal"],
}  # fmt: skip
LONG = ("lm_head", "prepare")


@pytest.mark.parametrize(
    "script", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONG)) for x in SCRIPTS]
)
def test_quick_mode_prints_its_tables(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "benchmarks" / f"{script}.py"), "--quick"],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"python benchmarks/{script}.py --quick" in run.stdout
    for words in SCRIPTS[script]:
        assert words in run.stdout, words


def test_a_table_is_markdown_that_lines_up():
    """Brackets are quartiles and links here, not rich's markup."""
    rows = [["`a_b`", "1.00 [0.9, 1.1]"], ["[bold]x", "[link](x.md)"]]
    assert markdown(["", "ms [quartiles]"], rows).splitlines() == [
        "|         | ms [quartiles]  |",
        "|---------|-----------------|",
        "| `a_b`   | 1.00 [0.9, 1.1] |",
        "| [bold]x | [link](x.md)    |",
    ]


def test_every_script_has_a_make_target():
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\nbench-{script.replace('_', '-')}: " in makefile for script in SCRIPTS)
