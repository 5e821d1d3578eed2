"""The Triton kernels of the LM head, run by Triton's interpreter: what torch's operators give."""

import importlib.util

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
    mine = {case: pair for case, pair in differences.items() if f" {dtype} " in case}
    assert len(mine) == 12
    for case, pair in mine.items():
        for difference, tolerance in zip(pair, TOLERANCE[dtype], strict=True):
            assert difference <= tolerance, case
