"""One kernel over one pair of chunks, as the ring would use it."""

import oracle
import torch

from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import accumulation_dtype, empty_result
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Full

HEADS = [(4, 4), (4, 2), (4, 1), (3, 1)]
MASKS = {"full": Full(), "causal": Causal()}


def tensors(length, batch, heads, widths, dtype=torch.float64, size=1.0):
    """Random q, k, v, dout."""
    generator = torch.Generator().manual_seed(5)
    (h, k), (d, w) = heads, widths
    shapes = [(length, batch, n, m) for n, m in ((h, d), (k, d), (k, w), (h, w))]
    *qkv, dout = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [x.to(dtype) for x in (*qkv, dout * size)]


def run(
    name, mask, q, k, v, dout, spans=None, scale=None, travelling=False, k_spans=None, new=False
):
    """out, dq, dk, dv of one kernel (or its name) over one pair, as the ring would use it.

    `travelling`: backward gets no out, only lse and delta, as where the queries travelled.
    `new`: the kernel gets sums with undefined content.
    """
    kernel = registry.make(name, q, k, v) if isinstance(name, str) else name
    spans = spans or [Span(0, 1, q.shape[0])]
    work = kernel.works_for(mask, [(spans, k_spans or spans)])[0]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = empty_result(q, v.shape[-1])
    more = {"new": True} if new else {}  # not every kernel has this argument
    if new:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
    kernel.forward(q, k, v, work, Scoring(scale), out, lse, **more)
    final = out.to(q.dtype)
    delta = (dout.to(lse.dtype) * final.to(lse.dtype)).sum(dim=-1)
    sums = [torch.zeros(x.shape, dtype=accumulation_dtype(q.dtype)) for x in (q, k, v)]
    known = None if travelling else final
    if new:
        more = {"new": (True, True, True)}
        for total in sums:
            total.fill_(float("nan"))
    rows = Rows(q, dout, lse, delta, known)
    kernel.backward(rows, k, v, work, Scoring(scale), *sums, **more)
    return final, *sums


def assert_exact(got, wanted, tolerance=1e-11):
    for name, mine, right in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert oracle.worst(mine, right) < tolerance, name
