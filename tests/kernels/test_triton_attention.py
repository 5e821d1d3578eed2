"""The Triton attention kernels in Triton's interpreter: exact for every mask, pair and feature."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import interpreted
import pytest
import torch

from megatron_burst.kernels import blocks, registry

HAS_TRITON = importlib.util.find_spec("triton") is not None
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    return interpreted.run("triton_attention.py", timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("kind", "cases"),
    [("full", 5), ("causal", 5), ("window", 5), ("dilated", 5), ("documents", 5), ("prefix", 5),
     ("sparse", 5), ("heads", 4), ("widths", 4), ("dtype", 1), ("softcap", 3), ("wanted", 6),
     ("deterministic", 6), ("wide", 3), ("blocks", 3), ("leak", 2), ("ring", 2)],
)  # fmt: skip
def test_the_kernels_compute_attention(found, kind, cases):
    mine = {case: x for case, x in found["found"].items() if case.split()[0] == kind}
    assert len(mine) == cases
    for case, tensors in mine.items():
        for name, (error, allowed) in tensors.items():
            assert error <= allowed, f"seed {found['seed']}: {case}: {name}"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("device", "width", "dtype"),
    [(80, 64, "bf16"), (90, 128, "bf16"), (100, 64, "bf16"), (120, 128, "bf16"), (86, 256, "bf16"),
     (90, 128, "fp32")],
)  # fmt: skip
def test_the_kernels_compile_for_gpus_that_are_not_here(device, width, dtype):
    """They fit into shared memory and load a mask once; `.ci/run` prints registers and spills."""
    words = ["-m", "benchmarks.triton_compile", "--devices", str(device), "--widths", str(width)]
    words += ["--dtypes", dtype]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(f"sm_{device}") == 8


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("kernel", ["forward", "backward_keys", "backward_queries"])
def test_a_masked_tile_loads_the_bits_of_its_table(kernel):
    """A table of 128 x 128 pairs has 2 KB, one copy by each of 256 threads, and the table's number.

    A table of 64 x 64 pairs has half a KB, which half of the threads copy.
    """
    from benchmarks.triton_compile import Launch, build, most

    size = blocks.blocks(90, kernel.split("_")[0], 128)
    made = build(Launch(90, kernel, 128, "bf16", size))
    bits = size.rows * size.columns // 8 // (32 * size.warps)
    assert made[True].loads - made[False].loads == max(bits, 4) + 4 <= most(size)
    assert made[True].shared - made[False].shared <= 4096  # two stages


def test_on_a_cpu_it_is_refused():
    x = torch.zeros(16, 1, 1, 16)
    wanted = "runs on cuda tensors, got cpu" if HAS_TRITON else "needs the package triton"
    with pytest.raises(ValueError, match=f"kernel triton {wanted}"):
        registry.make("triton", x, x, x)


def test_a_device_or_width_that_is_not_in_the_table_takes_the_next_entry():
    table = blocks.BLOCKS
    assert blocks.blocks(90, "forward", 128) == table[90, "forward", 128]
    assert blocks.blocks(103, "forward", 96) == table[100, "forward", 128]
    assert blocks.blocks(86, "backward", 192) == table[80, "backward", 256]
    assert blocks.blocks(70, "backward", 16) == table[80, "backward", 64]
    assert blocks.blocks(121, "forward", 128) == table[80, "forward", 128]
    assert blocks.blocks(90, "forward", 96, 4) == blocks.FLOAT32_BLOCKS["forward", 128]
