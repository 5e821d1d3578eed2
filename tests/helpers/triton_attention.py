"""A script: the Triton attention kernels through Triton's interpreter, against float64.

Prints one JSON line: case -> {tensor: (error, allowed)}. To be run with TRITON_INTERPRET=1, which
Triton reads when it is imported; needs no GPU. Inputs are fresh in every run; the seed is printed.
"""

import json
import math
import random
import sys

import numpy as np
import oracle
import torch
import torch.nn.functional as F

import megatron_burst as mb
from megatron_burst.kernels import triton_kernel
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.blocks import BlockSizes
from megatron_burst.kernels.triton_kernel import TritonKernel
from megatron_burst.layout import Span
from megatron_burst.plugins.testing import in_process

SMALL = BlockSizes(16, 32, 4, 1)
NAMES = ("out", "lse", "max_logits", "dq", "dk", "dv")
CAUSAL = mb.masks.Causal()


def pattern(blocks):
    table = np.random.default_rng(3).random((blocks, blocks)) < 0.4
    return table | np.eye(blocks, dtype=bool)


MASKS = {
    "full": mb.masks.Full(),
    "causal": CAUSAL,
    "window": mb.masks.Window(20, 3),
    "dilated": mb.masks.Dilated(3) & CAUSAL,
    "documents": mb.masks.Documents([0, 5, 41, 42, 90, 400]) & CAUSAL,
    "prefix": mb.masks.Prefix(23) | CAUSAL,
    "sparse": mb.masks.BlockSparse(pattern(50), 8),
}
SPANS = {
    "whole": ([Span(0, 1, 70)], [Span(0, 1, 70)]),
    "even": ([Span(32, 1, 64)], [Span(0, 1, 64)]),
    "zigzag": ([Span(0, 1, 30), Span(90, 1, 30)], [Span(30, 1, 20), Span(70, 1, 20)]),
    "striped": ([Span(1, 4, 50)], [Span(2, 4, 45)]),
    "shreds": ([Span(3 * i * i, 1, 2 * i + 1) for i in range(1, 7)], [Span(0, 2, 37)]),
}


FENCES = []  # (what lies behind a tensor) of the tensors of one run


def poisoned(shape, dtype, fill=None):
    """A tensor whose neighbours in memory are NaN: who reads beyond its end shows in the result,
    who writes there in `fences_stand`."""
    rows = torch.full((shape[0] + 40, *shape[1:]), math.nan, dtype=dtype)
    inside = rows[: shape[0]]
    FENCES.append(rows[shape[0] :])
    inside.copy_(torch.randn(shape, dtype=torch.float64) if fill is None else torch.tensor(fill))
    return inside


def fences_stand():
    """Is all that lies behind the tensors of this run still NaN?"""
    stands = all(fence.isnan().all() for fence in FENCES)
    FENCES.clear()
    return stands


def dense(q, k, v, dout, seen, scoring):
    """out, lse, max_logits, dq, dk, dv in float64; torch's autograd through the definition."""
    group = q.shape[2] // k.shape[2]
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(group, 2) for x in leaves[1:])]
    scores = torch.einsum("sbhd,tbhd->bhst", *wide[:2]) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    blind = ~seen.any(1)
    hidden = (~seen).clone()
    hidden[blind] = False  # whatever they get is taken away again
    p = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(blind[:, None], 0.0)
    out = torch.einsum("bhst,tbhw->sbhw", p, wide[2])
    visible = scores.detach().masked_fill(~seen, -math.inf)
    lse, largest = visible.logsumexp(-1).permute(2, 0, 1), visible.amax((0, 2, 3))
    return [out.detach(), lse, largest, *torch.autograd.grad(out, leaves, dout.double())]


def stock(q, k, v, dout, seen):
    """out, dq, dk, dv of torch's own operator in the dtype of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    first = [x.permute(1, 2, 0, 3) for x in leaves]
    out = F.scaled_dot_product_attention(*first, attn_mask=seen, enable_gqa=True).permute(
        2, 0, 1, 3
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run(case, spans, mask, dtype=torch.float32, heads=(2, 2), widths=(16, 16), batch=1,
        softcap=None, wanted=(True, True, True), deterministic=False, size=SMALL):  # fmt: skip
    """{tensor: (error, allowed)} of one pair of shards: forward, then backward of its result."""
    (n, t), (d, w) = (sum(s.length for s in side) for side in spans), widths
    q, k = poisoned((n, batch, heads[0], d), dtype), poisoned((t, batch, heads[1], d), dtype)
    v, dout = poisoned((t, batch, heads[1], w), dtype), poisoned((n, batch, heads[0], w), dtype)
    seen = torch.tensor(
        [[bool(mask.visible(a, b)) for b in positions(spans[1])] for a in positions(spans[0])]
    )
    scoring = Scoring(0.3, softcap)
    truth = dense(q, k, v, dout, seen, scoring)
    kernel = TritonKernel(size)
    assert kernel.refusal(q, k, v) is None
    work = kernel.works_for(mask, [spans])[0]
    out, lse = (
        poisoned((n, batch, heads[0], w), torch.float32, 0.0),
        poisoned((n, batch, heads[0]), torch.float32, -math.inf),
    )
    largest = poisoned((heads[0],), torch.float32, -math.inf)
    assert (work is not None) == bool(seen.any()), case
    sums = [poisoned(x.shape, torch.float32, 7.0) if want else None
            for x, want in zip((q, k, v), wanted, strict=True)]  # fmt: skip
    if work is not None:
        kernel.forward(q, k, v, work, scoring, out, lse, largest)
        delta = (dout.double() * truth[0]).sum(-1).float()
        torch.use_deterministic_algorithms(deterministic)
        stats = poisoned(truth[1].shape, torch.float32, 0.0).copy_(truth[1])
        delta = poisoned(delta.shape, torch.float32, 0.0).copy_(delta)
        adds = Adding()
        kernel.backward(Rows(q, dout, stats, delta), k, v, work, scoring, *sums)
        assert adds.ended() == (wanted[0] and not deterministic and any(wanted[1:])), case
        torch.use_deterministic_algorithms(False)
    assert fences_stand(), f"{case}: somebody wrote behind the end of a tensor"
    got = [out, lse, largest, *(None if x is None else x - 7.0 for x in sums)]
    limits = allowed(q, k, v, dout, seen, truth, softcap)
    return {
        name: (error(mine, right), limit)
        for name, mine, right, limit in zip(NAMES, got, truth, limits, strict=True)
        if mine is not None
    }


class Adding:
    """Was dq added to atomically, in any order, between this and `ended`?"""

    def __init__(self):
        self.found, self.launch = False, triton_kernel._launch
        triton_kernel._launch = self.spy

    def spy(self, code, *rest):
        call = self.launch(code, *rest)

        def made(*args, **constants):
            self.found |= constants.get("DQ", False)
            return call(*args, **constants)

        return made

    def ended(self):
        triton_kernel._launch = self.launch
        return self.found


def positions(spans):
    return [s.start + s.stride * i for s in spans for i in range(s.length)]


def error(mine, right):
    if not torch.equal(mine == -math.inf, right == -math.inf):
        return math.inf
    return oracle.worst(mine.masked_fill(mine == -math.inf, 0.0),
                        right.masked_fill(right == -math.inf, 0.0))  # fmt: skip


def allowed(q, k, v, dout, seen, truth, softcap):
    """float32: some roundings of the largest value, and more where wide heads have large scores,
    whose roundings are relative errors of weights; gradients have them twice, in weights and in
    what these are multiplied by. 16 bits: three times torch's own error."""
    largest = [x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0 for x in truth]
    if q.dtype == torch.float32:
        score = 0.3 * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item() / q.shape[-1] ** 0.5
        bounds = [4e-6 * max(1.0, value) * max(1.0, score / 4) for value in largest]
        return [*bounds[:3], *(2 * bound for bound in bounds[3:])]
    assert seen.any(1).all(), "torch gives NaN to blind rows"
    assert softcap is None, "torch has none"
    scale = 0.3 * math.sqrt(q.shape[-1])  # torch's own scale is 1 / sqrt(d)
    theirs = stock((q.float() * scale).to(q.dtype), k, v, dout, seen)
    theirs[1] = theirs[1] * scale
    errors = [oracle.worst(a, b) for a, b in zip(theirs, [truth[0], *truth[3:]], strict=True)]
    return [3 * errors[0], 2e-2, 2e-2, *(3 * x for x in errors[1:])]


def pairs():
    """Every mask and every kind of span, then each feature on its own."""
    for mask in MASKS:
        for name, spans in SPANS.items():
            yield f"{mask} {name}", run(f"{mask} {name}", spans, MASKS[mask])
    whole, zigzag = SPANS["whole"], SPANS["zigzag"]
    for heads in ((4, 4), (4, 2), (4, 1), (3, 1)):
        yield f"heads {heads}", run("", zigzag, CAUSAL, heads=heads, batch=2)
    for widths in ((32, 16), (16, 32), (24, 20), (64, 64)):
        yield f"widths {widths}", run("", whole, CAUSAL, widths=widths, heads=(2, 1))
    # The interpreter multiplies the bits of bfloat16 as integers: it has to be left out here.
    yield "dtype float16", run("", whole, CAUSAL, torch.float16, heads=(4, 2), widths=(32, 32))
    for softcap in (1.0, 30.0):
        yield f"softcap {softcap}", run("", zigzag, CAUSAL, softcap=softcap)
    for wanted in ((True, False, False), (False, True, False), (False, False, True),
                   (False, True, True), (True, True, False), (True, False, True)):  # fmt: skip
        yield f"wanted {wanted}", run("", whole, CAUSAL, wanted=wanted)
    window = mb.masks.Window(20, 3)
    for n, features in enumerate((
        {"heads": (4, 2), "batch": 2}, {"softcap": 1.0}, {"softcap": 30.0, "batch": 2},
        {"mask": window, "heads": (3, 1)}, {"wanted": (True, False, True)},
        {"dtype": torch.float16, "heads": (4, 2), "widths": (32, 32), "spans": whole},
    )):  # fmt: skip
        call = {"spans": zigzag, "mask": CAUSAL, "deterministic": True} | features
        yield f"deterministic {n}", run("", **call)
    # Far below the cap tanh is nearly its argument, and must not lose it.
    yield "softcap 1e6", run("", zigzag, CAUSAL, softcap=1e6)
    for widths in ((128, 128), (192, 128), (256, 256)):
        yield f"wide {widths}", run("", whole, CAUSAL, widths=widths, heads=(2, 1))
    for size in (BlockSizes(32, 32, 4, 1), BlockSizes(64, 32, 4, 1), BlockSizes(16, 64, 4, 1)):
        yield f"blocks {size.rows} {size.columns}", run("", zigzag, CAUSAL, size=size)


def leaks():
    """A key that is NaN, at position 60 of 70: which rows get one that do not see it. As
    docs/kernels.md has it: none beyond their tile; within it dq, and out where it is the value."""
    whole, tile, hidden = SPANS["whole"], range(32, 64), range(60)
    for bad in ("key", "value"):
        q, k, v, dout = (torch.randn(70, 1, 1, 16) for _ in range(4))
        {"key": k, "value": v}[bad][60] = math.nan
        kernel, scoring = TritonKernel(SMALL), Scoring(0.3)
        work = kernel.works_for(CAUSAL, [whole])[0]
        out, lse = torch.zeros(70, 1, 1, 16), torch.full((70, 1, 1), -math.inf)
        kernel.forward(q, k, v, work, scoring, out, lse)
        sums = [torch.zeros(70, 1, 1, 16) for _ in range(3)]
        delta = (dout * out).sum(-1)
        kernel.backward(Rows(q, dout, lse, delta), k, v, work, scoring, *sums)
        reached = {"out": set(tile) & set(hidden) if bad == "value" else set()}
        reached["dq"] = set(tile) & set(hidden)
        found = {"out": out, "dq": sums[0]}
        rows = {n: {r for r in hidden if not found[n][r].isfinite().all()} for n in found}
        yield f"leak {bad}", {n: (len(rows[n] ^ reached[n]), 0) for n in found}


def rings():
    """The whole package with this kernel: 2 x 2 ranks in one process."""
    q, dout = (torch.randn(80, 2, 4, 16) for _ in range(2))
    k, v = (torch.randn(80, 2, 2, 16) for _ in range(2))
    seen = torch.tensor([[b <= a for b in range(80)] for a in range(80)])
    out, _, dq, dk, dv = oracle.attention(q, k, v, dout, seen)
    groups = in_process.groups(inter=2, intra=2)
    for layout, side in (("zigzag", "kv"), ("striped", "query")):
        order = oracle.permutation(layout, 4, 80)
        shards = [[x[rows].clone().requires_grad_() for rows in order] for x in (q, k, v)]
        outs = in_process.attention(
            *shards, groups=groups, layout=layout, side=side, kernel="triton"
        )
        torch.autograd.backward(outs, [dout[rows] for rows in order])
        grads = [[x.grad for x in some] for some in shards]
        truth = zip(("out", "dq", "dk", "dv"), [outs, *grads], (out, dq, dk, dv), strict=True)
        found = {name: worst(mine, right, order) for name, mine, right in truth}
        yield f"ring {layout} {side}", found


def worst(parts, right, order):
    """(error, allowed) of the shards of one tensor."""
    pairs = zip(parts, order, strict=True)
    error = max(oracle.worst(mine, right[rows]) for mine, rows in pairs)
    return error, 4e-6 * right.abs().max().item()


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    torch.manual_seed(seed)
    print(json.dumps({"seed": seed, "found": {**dict(pairs()), **dict(leaks()), **dict(rings())}}))


if __name__ == "__main__":
    main()
