"""The kernel flex as Inductor compiles it for an H100: its Triton code, in Triton's interpreter.

Needs Triton and a torch built for CUDA, and no GPU.
"""

import importlib.util

import interpreted
import pytest
import torch

HAS_BOTH = importlib.util.find_spec("triton") is not None and torch.version.cuda is not None
ALLOWED = {"half": 4e-3}  # of the largest value


@pytest.fixture(scope="module")
def found():
    return interpreted.run("flex_interpreted.py", timeout=900)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BOTH, reason="there is no Triton, or torch is not built for CUDA")
@pytest.mark.parametrize(
    "case", ["full", "causal", "window", "documents", "tree", "table", "softcap", "half"]
)
def test_what_inductor_writes_for_a_gpu_is_attention(found, case):
    """Two pairs of unequal shards, with the log-sum-exp of both and delta in backward."""
    for name, (error, largest) in found["found"][case].items():
        assert error <= ALLOWED.get(case, 2e-6) * max(largest, 1.0), name
