"""Attention to selected keys on a device, two ranks in one process, against dense float64."""

import math

import oracle
import pytest
import torch
from problems import BOUND, on

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

# rows, (query heads, key heads), (d, w), block, units that a row selects
SHAPES = {
    "cuda": (1024, (16, 2), (128, 128), 16, 12),
    "cpu": (48, (4, 2), (16, 8), 4, 3),
}
KERNELS = {"cuda": ("triton", "aten"), "cpu": ("aten", "reference")}
CASES = [
    on(device, name, latent) for device in SHAPES for name in KERNELS[device]
    for latent in (False, True)
]  # fmt: skip
LATENT = {"cuda": ((16, 1), (576, 512), 1, 64), "cpu": ((4, 1), (24, 16), 1, 5)}


@pytest.mark.parametrize(("device", "name", "latent"), CASES)
def test_errs_no_more_than_torch_in_bf16(device, name, latent):
    rows, (h, k), (d, w), block, most = SHAPES[device]
    if latent:
        (h, k), (d, w), block, most = LATENT[device]
    make = torch.Generator(device).manual_seed(8)
    inputs = [
        torch.randn(rows, 1, n, m, generator=make, device=device).bfloat16()
        for n, m in ((h, d), (k, d), (k, w), (h, w))
    ]
    if latent:
        inputs[2] = inputs[1][..., :w]
    selections = 1 if latent else k
    ids = chosen(rows, selections, block, most).to(device)
    seen = table(ids.cpu(), rows, block).to(device)
    layout = mb.layout.make("zigzag", cp_size=2)
    groups = in_process.groups(intra=2)
    picked = [
        mb.Selection(mb.shard(ids, layout, r), layout, mb.masks.Causal(), block) for r in range(2)
    ]
    *qkv, douts = ([mb.shard(x, layout, r).contiguous() for r in range(2)] for x in inputs)
    if latent:
        qkv.pop()
    for shards in qkv:
        for x in shards:
            x.requires_grad_()
    values, more = (None, {"value_width": w}) if latent else (qkv[2], {})
    outs = in_process.sparse_attention(*qkv[:2], values, picked, kernel=name, groups=groups, **more)
    torch.autograd.backward(outs, douts)
    got = [[x.detach() for x in outs], *([x.grad for x in shards] for shards in qkv)]
    truth, theirs = (dense(*inputs, seen, latent, dtype) for dtype in (torch.double, None))
    for part, right, other in zip(got, truth, theirs, strict=True):
        error = oracle.worst(mb.unshard(part, layout), right)
        assert error <= BOUND * oracle.worst(other, right) + 1e-6


def chosen(rows, selections, block, most):
    """int32 [rows, 1, selections, most]: units up to a row's own, each at most once; -1: none."""
    make = torch.Generator().manual_seed(9)
    ids = torch.full((rows, 1, selections, most), -1, dtype=torch.int32)
    for row in range(rows):
        for n in range(selections):
            units = torch.randperm(row // block + 1, generator=make)[:most].sort().values
            ids[row, 0, n, : len(units)] = units.int()
    return ids


def table(ids, rows, block):
    """bool [selections, rows, rows]: what is selected and not later."""
    units = torch.zeros(ids.shape[2], rows, rows // block + 1, dtype=torch.bool)
    units.scatter_(2, ids[:, 0].permute(1, 0, 2).long() % (rows // block + 1), True)
    whole = units[..., : rows // block].repeat_interleave(block, 2)
    return whole & torch.ones(rows, rows, dtype=torch.bool).tril()


def dense(q, k, v, dout, seen, latent, dtype):
    """out and gradients of q, k and, if they are not columns of the keys, v; with `dtype` None in
    that of the inputs, as torch computes it."""
    q, k, v, dout = (x.detach().to(dtype or x.dtype) for x in (q, k, v, dout))
    leaves = [x.clone().requires_grad_() for x in ((q, k) if latent else (q, k, v))]
    values = leaves[1][..., : v.shape[-1]] if latent else leaves[2]
    h = q.shape[2]
    keys, values = (x[:, 0].repeat_interleave(h // k.shape[2], 1) for x in (leaves[1], values))
    scores = torch.einsum("rhd,chd->hrc", leaves[0][:, 0], keys) / math.sqrt(q.shape[-1])
    hidden = ~seen.repeat_interleave(h // len(seen), 0)
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("hrc,chw->rhw", p, values)[:, None]
    return out.detach(), *torch.autograd.grad(out, leaves, dout)
