"""A script: Triton kernels on tensors that reach over more than 2^31 elements, by its interpreter.

Prints one JSON line: case -> whether the result is bit for bit that of neighbouring memory. To be
run with TRITON_INTERPRET=1, which Triton reads when it is imported; needs no GPU. An offset in 32
bits reads zeros from elsewhere, or ends the process.
"""

import json

import torch
import triton  # noqa: F401  what runs on a CPU runs there because it was imported
from far import APART, AXES, B, H, S, W, far

from megatron_burst.kernels.aten import stand_in
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.blocks import BlockSizes
from megatron_burst.kernels.native import LogitGradient
from megatron_burst.kernels.online_softmax import merge_, row_delta
from megatron_burst.kernels.triton_kernel import TritonKernel
from megatron_burst.layout import Span
from megatron_burst.linear_cross_entropy.triton_rows import row_stats, softmax_gradient_
from megatron_burst.masks import Causal


def rowwise(axis):
    out, part = torch.randn(2, S, B, H, W)
    lse, new = torch.randn(2, S, B, H)
    near, apart = (out.clone(), lse.clone()), (far(out, axis), far(lse, axis))
    merge_(*near, part, new)
    merge_(*apart, far(part, axis), far(new, axis))
    yield "merge", all(map(torch.equal, near, apart))
    delta = row_delta(out, part, torch.float32)
    yield "delta", torch.equal(delta, row_delta(far(out, axis), far(part, axis), torch.float32))
    mine = stand_in(far(out, axis), far(delta, axis))
    yield "stand-in", torch.equal(mine, stand_in(out, delta))


def attention(axis):
    """Forward with a far lse, backward with a far dq: what kernels reach by pointers."""
    q, k, v, dout = torch.randn(4, S, B, H, W)
    kernel, spans, scoring = (
        TritonKernel(BlockSizes(16, 32, 4, 1)),
        [Span(0, 1, S)],
        Scoring(0.3, None),
    )
    work = kernel.works_for(Causal(), [(spans, spans)])[0]
    assert work is not None
    empty = torch.zeros(S, B, H, W), torch.full((S, B, H), -torch.inf)
    results = []
    for place in (torch.clone, lambda x: far(x, axis)):
        out, lse = empty[0].clone(), place(empty[1])
        kernel.forward(q, k, v, work, scoring, out, lse)
        delta, dq = (dout * out).sum(-1), place(empty[0])
        sums = torch.zeros(2, S, B, H, W)
        kernel.backward(Rows(q, dout, lse, delta), k, v, work, scoring, dq, *sums)
        results.append((out, lse, dq, *sums))
    names = "out", "lse", "dq", "dk", "dv"
    yield from zip(names, map(torch.equal, *results), strict=True)


def head():
    """Statistics and gradient of tiles of logits with far rows."""
    z, labels = torch.randn(S, 40), torch.tensor([0, 39, 7, -100])
    near, apart = z.clone(), far(z, 0)
    columns = 0, 40, 1.0, None
    stats = [row_stats(x, labels, *columns, torch.float32) for x in (near, apart)]
    yield "statistics", torch.equal(*stats)
    for x in (near, apart):
        given = LogitGradient(labels, stats[0][0], *torch.rand(3, S).fill_(0.5))
        softmax_gradient_(x, given, 40, 1.0, None)
    yield "gradient", torch.equal(near, apart)


def main():
    torch.manual_seed(0)
    assert APART < 1 << 31 < 3 * APART
    found = {f"{name} {axis}": same for axis in AXES for name, same in rowwise(AXES[axis])}
    found |= {f"{name} {axis}": same for axis in AXES for name, same in attention(AXES[axis])}
    print(json.dumps(found | dict(head())))


if __name__ == "__main__":
    main()
