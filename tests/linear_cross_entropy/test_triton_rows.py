"""Triton kernels of the LM head: equal to torch's operators in Triton's interpreter.

They are also compiled for GPUs that are not available here.
"""

import importlib.util
import subprocess
import sys

import interpreted
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
# (statistics, gradient): a rounding or two, of values up to 30 and up to 2
TOLERANCE = {"float64": (1e-10, 1e-10), "float32": (2e-5, 1e-6), "bfloat16": (2e-5, 1e-2)}


@pytest.fixture(scope="module")
def differences():
    return interpreted.run("triton_rows.py", timeout=300)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernels_do_what_the_operators_do(differences, dtype):
    own = {case: pair for case, pair in differences.items() if f" {dtype} " in case}
    assert len(own) == 12
    for case, pair in own.items():
        for difference, tolerance in zip(pair, TOLERANCE[dtype], strict=True):
            assert difference <= tolerance, case


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["--dtypes", "bf16", "fp32", "--softcaps", "30"], marks=pytest.mark.slow),
    ],
    ids=["plain", "softcap"],
)
def test_they_compile_for_gpus_that_are_not_here_without_spills(words):
    """Without a cap they leave room for 16 warps on a multiprocessor."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.triton_compile_rows", *words],
        cwd=interpreted.ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [line.split("│") for line in done.stdout.splitlines() if "sm_" in line]
    actual = {tuple(cell.strip() for cell in row[1:5]): int(row[7]) for row in rows}
    assert {device for device, *_ in actual} == {"sm_80", "sm_90", "sm_100"}
    assert {kernel for _, kernel, *_ in actual} == {
        "statistics", "with entropy", "gradient", "of entropy",
    }  # fmt: skip
    assert len(actual) == len(rows) == (24 if words else 12)
    if not words:
        assert max(actual.values()) <= 65536 // (32 * 16), actual
