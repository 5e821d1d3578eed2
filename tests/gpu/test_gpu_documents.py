"""20 packs of documents in cuDNN's few calls, against dense float64, and its graphs."""

import numpy as np
import oracle
import pytest
import torch
from problems import on

from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Documents

PACKS = 20
# device -> (kernel, tokens, heads, width, error relative to the largest value)
RUNS = {"cuda": ("aten_cudnn", 2048, (4, 2), 128), "cpu": ("aten", 96, (4, 2), 8)}
ERROR = 0.02  # bf16, as `doctor` allows


def ends(pack, tokens):
    """Lengths of a pack; every second pack has a document of one token."""
    cuts = np.random.default_rng(pack).choice(np.arange(1, tokens), 3 + pack, replace=False)
    return sorted({0, *cuts.tolist(), *([1] * (pack % 2)), tokens})


@pytest.mark.parametrize("visiting", [False, True], ids=["own", "visiting"])
@pytest.mark.parametrize("device", [on(device, first=True) for device in RUNS])
def test_packs(device, visiting):
    name, tokens, (h, k), width = RUNS[device]
    make = torch.Generator(device).manual_seed(7)
    inputs = [
        torch.randn(tokens, 1, n, width, generator=make, device=device, dtype=torch.bfloat16)
        for n in (h, k, k, h)
    ]
    q, key, value, dout = inputs
    kernel = registry.make(name, q, key, value)
    separate = getattr(kernel.operator, "separate", None)
    if separate is not None:
        pytest.skip(f"one call for all documents {separate}")
    place, spans, scoring = torch.arange(tokens, device=device), [Span(0, 1, tokens)], Scoring(0.1)
    for pack in range(PACKS):
        bounds = ends(pack, tokens)
        work = kernel.works_for(Documents(bounds) & Causal(), [(spans, spans)])[0]
        own = torch.bucketize(place, torch.tensor(bounds[1:], device=device), right=True)
        seen = (own[:, None] == own) & (place[:, None] >= place)
        truth_out, truth_lse, *truth = oracle.attention(*inputs, seen, scale=0.1)
        out, lse = empty_result(q, width)
        kernel.forward(q, key, value, work, scoring, out, lse)
        assert oracle.worst(lse, truth_lse) < 2e-3
        final = out.to(q.dtype)
        delta = (dout.float() * final.float()).sum(-1)
        sums = [torch.zeros(x.shape, device=device) for x in (q, key, value)]
        rows = Rows(q, dout, lse, delta, None if visiting else final)
        kernel.backward(rows, key, value, work, scoring, *sums)
        for mine, right in zip((final, *sums), (truth_out, *truth), strict=True):
            assert oracle.worst(mine, right) < ERROR * right.abs().max().item(), (pack, bounds)
    if device == "cuda":
        assert len(kernel.operator.graphs) <= 4, kernel.operator.graphs  # 2 shapes, both passes
