"""Triton kernels of sparse attention in Triton's interpreter, in float64.

They are also compiled for GPUs that are not available here.
"""

import importlib.util

import interpreted
import pytest

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.mark.slow
@NEEDS_TRITON
def test_the_kernels_attend_to_what_was_selected():
    found = interpreted.run("triton_selected.py", timeout=600)
    assert len(found["found"]) == 14
    for case, tensors in found["found"].items():
        for name, (error, allowed) in tensors.items():
            assert error <= allowed, f"seed {found['seed']}: {case}: {name}"


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("device", [90, 100])
@pytest.mark.parametrize("kernel", ["find", "forward", "backward_queries", "backward_keys"])
def test_the_kernels_compile_for_latents_of_576_columns(device, kernel):
    """Nothing spills. The benchmark covers other models."""
    from benchmarks.triton_compile import SHARED
    from benchmarks.triton_compile_selected import Launch, build

    _, made = build(Launch(device, "dsa", kernel, "bf16", None))
    assert made.spills == 0, made
    assert made.shared <= SHARED[device]
