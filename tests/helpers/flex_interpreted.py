"""A script: the kernel flex as Inductor compiles it for an H100, in Triton's interpreter.

Prints one JSON line: case -> {tensor: (error, largest value)}, and the number of compiled programs.
To be run with TRITON_INTERPRET=1, which Triton reads when it is imported; needs a torch with CUDA,
and no GPU. Errors are against float64 formulas.
"""

import functools
import json
import math

import inductor_without_gpu
import numpy as np
import oracle
import torch

import megatron_burst as mb
from megatron_burst.kernels import flex, flex_programs
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.layout import Span

NAMES = ("out", "lse", "max_logits", "dq", "dk", "dv")
N = 150
P = np.arange(N)
QUERY, KEY = P[:, None], P[None, :]
OUT = np.array([90] * 30 + [60] * 30 + [90] * 30 + [150] * 60)
BOUNDS = (0, 20, 21, 140, 150)
NUMBER = np.searchsorted(BOUNDS, P, side="right")
BLIND = np.random.default_rng(0).random((N, N)) < 0.3
BLIND[40:60], BLIND[:, 130:] = False, False
CASES = {
    "full": (mb.masks.Full(), np.ones((N, N), dtype=bool), {}),
    "causal": (mb.masks.Causal(), KEY <= QUERY, {"heads": (2, 1)}),
    "window": (mb.masks.Window(30, 0), (KEY <= QUERY) & (QUERY - KEY <= 30), {"batch": 2}),
    "documents": (
        mb.masks.Documents(BOUNDS) & mb.masks.Causal(),
        (NUMBER[:, None] == NUMBER) & (KEY <= QUERY),
        {"widths": (16, 24)},
    ),
    "table": (mb.masks.Dense(BLIND), BLIND, {}),
    "softcap": (mb.masks.Tree(OUT), (KEY <= QUERY) & (OUT[None, :] > QUERY), {"softcap": 0.7}),
    "half": (mb.masks.Causal(), KEY <= QUERY, {"dtype": torch.float16}),
}
programs = []


@functools.cache
def program(kind, shape):
    """Stands in for `flex_programs.program`."""
    made = kind(shape._replace(device=torch.device("cuda:0")))
    programs.append(made)
    code = inductor_without_gpu.code_for_hopper(lambda: flex_programs.compiled(made))
    return inductor_without_gpu.interpreted(code)


def run(mask, seen, heads=(1, 1), widths=(16, 16), batch=1, softcap=None, dtype=torch.float32):
    """{tensor: (error, largest value)}: the last 128 keys, which are one block, then the others."""
    torch.manual_seed(0)
    (h, k), (d, w) = heads, widths
    q, k, v, dout = (
        torch.randn(N, batch, n, m).to(dtype) for n, m in ((h, d), (k, d), (k, w), (h, w))
    )
    scoring, cut = Scoring(0.3, softcap), 22
    kernel = flex.FlexKernel()
    whole, parts = [Span(0, 1, N)], [slice(cut, N), slice(0, cut)]
    works = [
        kernel.works_for(mask, [(whole, [Span(p.start, 1, p.stop - p.start)])])[0] for p in parts
    ]
    out, lse = empty_result(q, w)
    largest = torch.full((h,), -math.inf)
    for part, work in zip(parts, works, strict=True):
        kernel.forward(q, k[part], v[part], work, scoring, out, lse, largest)
    seen = torch.from_numpy(seen)
    truth = oracle.attention(q, k, v, dout, seen, scoring.scale, softcap)
    delta = (dout.double() * truth[0]).sum(-1).float()
    rows = Rows(q, dout, truth[1].float(), delta)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for part, work in zip(parts, works, strict=True):
        kernel.backward(rows, k[part], v[part], work, scoring, dq, dk[part], dv[part])
    scores = torch.einsum(
        "sbhd,tbhd->hbst", q.double(), k.double().repeat_interleave(h // k.shape[2], 2)
    )
    scores = scores * scoring.scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    highest = scores.masked_fill(~seen, -math.inf).amax((1, 2, 3))
    wanted = [*truth[:2], highest, *truth[2:]]
    found = {}
    for name, got, right in zip(NAMES, (out, lse, largest, dq, dk, dv), wanted, strict=True):
        blind = right == -math.inf
        assert torch.equal(got == -math.inf, blind), name
        error = oracle.worst(got.double().masked_fill(blind, 0), right.masked_fill(blind, 0))
        found[name] = float(error), float(right.masked_fill(blind, 0).abs().max())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    flex.program = program
    found = {name: run(mask, seen, **more) for name, (mask, seen, more) in CASES.items()}
    print(json.dumps({"found": found, "programs": len(programs)}))
