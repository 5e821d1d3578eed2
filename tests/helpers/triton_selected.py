"""A script: the Triton kernels of sparse attention through Triton's interpreter, against float64.

Prints one JSON line: case -> {tensor: (error, allowed)}. To be run with TRITON_INTERPRET=1, which
Triton reads when it is imported; needs no GPU. Inputs are fresh in every run; the seed is printed.
"""

import json
import math
import random
import sys

import sparse_oracle
import torch

import megatron_burst as mb
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.layout import Span
from megatron_burst.plugins.sparse import selected_triton
from megatron_burst.plugins.sparse.pairs import PairKernel
from megatron_burst.plugins.sparse.selected_triton import HeadBlocks, SelectedTriton
from megatron_burst.plugins.testing import in_process

S, SCALE = 8, 0.3
SMALL = HeadBlocks(16, 16, 4, 1)
CAUSAL = mb.masks.Causal()
T = torch.arange(S)
GAP = T[:, None] - T
OUT = [8, 4, 3, 4, 6, 6, 8, 8]  # a tree: bounds of its rows
SEEN = {
    "causal": (CAUSAL, GAP >= 0),
    "window": (mb.masks.Window(3, 1), (GAP <= 3) & (GAP >= -1)),
    "tree": (mb.masks.Tree(OUT), (GAP >= 0) & (T[:, None] < torch.tensor(OUT))),
}
# Chunks of keys, together all of them, and the rows that each has.
WHOLE = [[Span(0, 1, S)]]
ZIGZAG = [[Span(4, 1, 2), Span(0, 1, 2)], [Span(6, 1, 2), Span(2, 1, 2)]]
STRIPED = [[Span(1, 2, 4)], [Span(0, 2, 4)]]


def chosen(selections, batch, block, top_k):
    """int32 [S, b, H, top_k]: some units of each row, and of no row more than there are."""
    ids = torch.full((S, batch, selections, top_k), -1, dtype=torch.int32)
    for row in ids.flatten(0, 2):
        count = random.randint(0, min(top_k, S // block))
        row[:count] = torch.randperm(S // block)[:count].sort().values
    return ids


def run(mask="causal", chunks=ZIGZAG, heads=(2, 2), selections=1, block=1, top_k=5, widths=(5, 3),
        batch=1, dtype=torch.float64, latent=False, wanted=(True, True, True),
        far=0.0):  # fmt: skip
    """{tensor: (error, allowed)} of all chunks one after the other, forward and backward. far: so
    large that the exponential of a score that is zero overflows beside the others."""
    (h, n), (d, w) = heads, widths
    mask, seen = SEEN[mask]
    ids = chosen(selections, batch, block, top_k)
    tensors = [torch.randn(S, batch, *s, dtype=torch.float64)
               for s in ((h, d), (n, d), (n, w), (h, w))]  # fmt: skip
    q, k, v, dout = (x.to(dtype) for x in tensors)
    q, k = q + far, k - far
    if latent:
        v = k[..., :w]
    listed = [[[u for u in row if u >= 0] for row in t.flatten(0, 1).tolist()] for t in ids]
    hidden = ~sparse_oracle.table(listed, seen, block, batch, h)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    values = leaves[1][..., :w] if latent else leaves[2]
    right, _ = sparse_oracle.attention(*leaves[:2], values, hidden, SCALE)
    truth = torch.autograd.grad(right, leaves[: 2 if latent else 3], dout.double())

    kernel = SelectedTriton(mb.Selection(ids, None, mask, block), latent, SMALL)
    pairs = PairKernel(kernel, None, selections, top_k)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.zeros(S, batch, h, w, dtype=wide)
    lse = torch.full((S, batch, h), -math.inf, dtype=wide)
    own = k[..., w:] if latent else k
    dq, dk, dv = (torch.full(x.shape, 7.0, dtype=wide) if want else None
                  for x, want in zip((q, own, v), wanted, strict=True))  # fmt: skip
    parts = []
    for spans in chunks:
        rows = torch.tensor([p for span in spans for p in span.positions().tolist()])
        work = pairs.works_for(mask, [([Span(0, 1, S)], spans)])[0]
        assert work is not None
        parts.append((rows, work))
    for rows, work in parts:
        kernel.forward(q, own[rows], v[rows], work, Scoring(SCALE), out, lse)
    delta = (dout.to(wide) * right.detach().to(wide)).sum(-1)
    for rows, work in parts:
        sums = [None if x is None else x[rows] for x in (dk, dv)]
        given = Rows(q, dout, lse, delta), own[rows], v[rows], work, Scoring(SCALE)
        kernel.backward(*given, dq, *sums)
        for whole, part in zip((dk, dv), sums, strict=True):
            if whole is not None:
                whole[rows] = part
    grads = [None if x is None else x - 7.0 for x in (dq, dk, dv)]
    if latent:
        grads = [grads[0], torch.cat([grads[2], grads[1]], -1)]
    limit = 1e-10 if dtype == torch.float64 else 1e-2
    pairs = zip(("out", "dq", "dk", "dv"), [out, *grads], [right.detach(), *truth], strict=False)
    return {name: ((mine.double() - wanted).abs().max().item(), limit)
            for name, mine, wanted in pairs if mine is not None}  # fmt: skip


def layer():
    """The whole operation on two ranks of one process, one latent and a sink."""
    layout, groups = mb.layout.make("zigzag", cp_size=2), in_process.groups(intra=2)
    ids = chosen(1, 1, 1, 4).masked_fill_(chosen(1, 1, 1, 4) > S, -1)
    q, k, dout = (torch.randn(S, 1, *s, dtype=torch.float64) for s in ((2, 6), (1, 6), (2, 4)))
    sink = torch.randn(2, dtype=torch.float64)
    found = {}
    for kernel in ("triton", "reference"):
        mine = [[mb.shard(x, layout, r).requires_grad_() for r in range(2)] for x in (q, k)]
        each = [mb.Selection(mb.shard(ids, layout, r), layout, CAUSAL) for r in range(2)]
        outs = in_process.sparse_attention(
            *mine, None, each, value_width=4, scale=SCALE, sink=sink, kernel=kernel, groups=groups
        )
        torch.autograd.backward(outs, [mb.shard(dout, layout, r) for r in range(2)])
        found[kernel] = [mb.unshard(outs, layout).detach(),
                         *(mb.unshard([x.grad for x in t], layout) for t in mine)]  # fmt: skip
    names = zip(("out", "dq", "dk"), *found.values(), strict=True)
    return {name: ((a - b).abs().max().item(), 1e-10) for name, a, b in names}


def cases():
    yield "tokens causal zigzag", run()
    yield "tokens tree striped", run("tree", STRIPED, heads=(4, 2), selections=2)
    yield "tokens window batch", run("window", heads=(2, 1), selections=2, batch=2)
    yield "tokens far", run(chunks=WHOLE, far=30.0)
    yield "blocks causal", run(heads=(4, 2), selections=4, block=2, top_k=3)
    yield "blocks window", run("window", WHOLE, heads=(3, 1), block=4, top_k=2, widths=(16, 32))
    yield "latent causal", run(heads=(2, 1), widths=(9, 6), latent=True)
    yield "latent 20 heads", run(heads=(20, 1), widths=(48, 32), latent=True, top_k=8)
    yield "dtype float16", run(heads=(2, 1), widths=(24, 16), dtype=torch.float16, latent=True)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        yield f"wanted {wanted}", run(chunks=WHOLE, wanted=wanted)
    listed, selected_triton.LISTED = selected_triton.LISTED, 4 * 4 * 3  # three rows at a time
    yield "lists of some rows", run()
    selected_triton.LISTED = listed
    yield "layer", layer()


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    torch.manual_seed(seed)
    random.seed(seed)
    print(json.dumps({"seed": seed, "found": dict(cases())}))


if __name__ == "__main__":
    main()
