"""Merge, delta and stand-in by Triton: exact in its interpreter, and compiled for other GPUs."""

import importlib.util

import interpreted
import pytest
import torch

from megatron_burst.kernels import native, rowwise
from megatron_burst.kernels.online_softmax import merge_

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(scope="module")
def found():
    return interpreted.run("triton_rowwise.py", timeout=300)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("work", "cases"), [("merge", 48), ("delta", 16), ("stand_in", 18), ("none", 2)]
)
def test_the_kernels_do_what_is_written(found, work, cases):
    mine = {case: x for case, x in found["found"].items() if case.split()[0] == work}
    assert len(mine) == cases
    for case, tensors in mine.items():
        for name, (error, allowed) in tensors.items():
            assert error <= allowed, f"{case}: {name}"


@NEEDS_TRITON
def test_the_kernels_ran(found):
    """torch's operators did not replace them."""
    assert found["launches"] == len(found["found"]) + 2  # both of `none` merge and sum


def test_on_a_cpu_torch_does_it(monkeypatch):
    monkeypatch.setattr(native, "FILE", "no csrc")
    monkeypatch.setattr(rowwise, "_launch", None)  # must not be called
    out, lse = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1)
    merge_(out, lse, torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1))
    assert torch.equal(out, torch.full((2, 1, 1, 4), 0.5))
    assert torch.allclose(lse, torch.tensor(2.0).log())


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize(
    ("device", "width", "dtype"),
    [(80, 64, "bf16"), (90, 128, "bf16"), (90, 256, "fp16"), (100, 128, "fp32")],
)
def test_the_kernels_compile_for_gpus_that_are_not_here(device, width, dtype):
    """They do not spill."""
    from triton.compiler import ASTSource

    from benchmarks import triton_compile
    from megatron_burst.kernels import rowwise_code

    sizes = {"R": rowwise.ELEMENTS // width, "W": width}
    largest = {"LARGEST": 65504.0 if dtype == "fp16" else 0}
    for kernel, types, constants in (
        ("merge", {"out": "fp32", "lse": "fp32", "part": dtype, "part_lse": "fp32"}, sizes),
        ("delta", {"dout": dtype, "out": dtype, "result": "fp32"}, sizes),
        ("stand_in", {"dout": dtype, "delta": "fp32", "target": dtype}, sizes | largest),
    ):
        code = getattr(rowwise_code, kernel)
        signature = dict.fromkeys(code.arg_names, "i32")
        signature |= {name: f"*{kind}" for name, kind in types.items()}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(code, signature, constants)
        made = triton_compile.compiled(source, device, {"enable_fp_fusion": True})
        assert made.spills == 0, f"{kernel}: {made}"
