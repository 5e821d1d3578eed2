"""Attention on a device: every mask over two ranks by hand, judged by torch's own error.

The same checks at real shapes on CUDA and, tiny, on the CPU, where they are tested themselves.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatron_burst as mb
from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.masks import BlockSparse, Causal, Dilated, Documents, Full, Prefix, Tree, Window

RANKS = 2
BOUND = 4  # times the error of torch's own operator on the same inputs; 3.4 was the most on an H100
PARTS = ("out", "dq", "dk", "dv")


class Shape(NamedTuple):
    length: int  # of the whole sequence
    heads: tuple  # (query heads, key/value heads), ...
    widths: tuple  # (d, w), ..., under every mask
    more_widths: tuple  # under one
    window: int
    block: int


HEADS = {"cuda": ((16, 16), (16, 4), (16, 1)), "cpu": ((4, 4), (4, 2), (4, 1))}
SHAPES = {
    "cuda": Shape(4096, HEADS["cuda"], ((128, 128), (192, 128)), ((64, 64), (256, 256)), 700, 256),
    "cpu": Shape(64, HEADS["cpu"], ((16, 16), (24, 16)), ((8, 8),), 20, 8),
}
LAYOUTS = {
    "full": ("contiguous",),
    "causal": ("contiguous", "zigzag", "striped"),
    "window": ("contiguous", "zigzag", "striped"),
    "window both ways": ("zigzag",),
    "documents": ("zigzag", "striped"),
    "documents, window": ("zigzag",),
    "many documents, window": ("zigzag", "striped"),
    "prefix": ("zigzag",),
    "blocks": ("zigzag", "block_striped"),
    "blind": ("zigzag",),
    "dilated": ("zigzag",),
    "tree": ("zigzag",),
}
OPTIONAL = ("flash3", "flash4")  # packages that may be absent, or not fit the device
NO_CUDA = "no CUDA device here"


def made(mask, shape):
    length, window, block = shape.length, shape.window, shape.block
    random = np.random.default_rng(0)
    table = random.random((length // block,) * 2) < 0.25
    np.fill_diagonal(table, True)
    blind = table.copy()
    blind[3], blind[:, 5] = False, False
    out = np.full(length, length)  # a prompt, then answers
    for first in range(length // 4, length, length // 5):
        out[first : first + length // 5] = min(first + length // 5, length)
    documents = Documents([0, length // 7, length // 3, length // 3 + 5, length])
    cuts = random.choice(np.arange(1, length), min(40, length // 4), replace=False)
    many = Documents([0, *sorted(cuts.tolist()), length])
    return {
        "full": Full(),
        "causal": Causal(),
        "window": Window(window - 1, 0),
        "window both ways": Window(window, window // 3),
        "documents": documents & Causal(),
        "documents, window": documents & Window(window - 1, 0),
        "many documents, window": many & Window(window // 3, window // 9),
        "prefix": Causal() | Prefix(length // 5),
        "blocks": BlockSparse(table, block),
        "blind": BlockSparse(blind, block) & Causal(),
        "dilated": Dilated(4) & Causal(),
        "tree": Tree(out),
    }[mask]


def arrangement(layout, shape):
    block = shape.block if layout == "block_striped" else None
    return mb.layout.make(layout, cp_size=RANKS, block=block)


def on(device, *values, first=False):
    """A test parameter of a device: CUDA ones are marked, and skipped where there is none; the
    `first` of them are marked too."""
    marks = [pytest.mark.first] * first
    if device == "cuda":
        reason = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
        marks += [pytest.mark.gpu, reason]
    name = "-".join(str(value).replace(" ", "_") for value in (device, *values))
    return pytest.param(device, *values, id=name, marks=marks)


def kernel_names(device):
    if device == "cpu":
        return ("aten", "flex", "reference")
    return tuple(name for name in registry.KERNELS if name != "reference")


def kernel_for(device, name, tensors, softcap=None):
    """The kernel; the test is skipped where one of an optional package is refused, or where cuDNN
    has no such width."""
    try:
        return registry.make(name, *tensors, softcap=softcap)
    except ValueError as reason:
        too_wide = name == "aten_cudnn" and "supports widths" in str(reason)
        if name not in OPTIONAL and not too_wide:
            raise
        pytest.skip(f"{name} on {device}: {reason}")


def plan(kernel, mask, shards, rank, other):
    """The work of a pair; windows are to be refused by operators that have none, and nothing else
    by anybody."""
    try:
        return kernel.works_for(mask, [(shards[rank], shards[other])])[0]
    except ValueError as reason:
        if "Window" not in repr(mask) or getattr(kernel, "operator", kernel).windows:
            raise
        pytest.skip(str(reason))


@lru_cache(maxsize=1)
def problem(device, mask, layout, heads, widths, softcap=None):
    """(inputs, truth, errors of torch's operator): q, k, v, dout in bf16 and in rank order; out,
    lse, dq, dk, dv in float64; per part the largest error of torch, which knows no softcap."""
    shape = SHAPES[device]
    make = torch.Generator(device).manual_seed(3)
    (h, k), (d, w) = heads, widths
    inputs = [
        torch.randn(shape.length, 1, n, m, generator=make, device=device, dtype=torch.bfloat16)
        for n, m in ((h, d), (k, d), (k, w), (h, w))
    ]
    order = arrangement(layout, shape)
    positions = np.concatenate([order.positions(r, shape.length) for r in range(RANKS)])
    rule = made(mask, shape)
    seen = np.array(rule.visible(positions[:, None], positions[None, :]))
    seen = torch.from_numpy(seen).to(device)
    truth = oracle.attention(*inputs, seen, softcap=softcap)
    plain = truth if softcap is None else oracle.attention(*inputs, seen)
    theirs = zip(stock(*inputs, seen), (plain[0], *plain[2:]), strict=True)
    return inputs, truth, [oracle.worst(mine, right) for mine, right in theirs]


def stock(q, k, v, dout, seen):
    """out, dq, dk, dv of torch's own operator in bf16: keys repeated for every query head, their
    gradients summed in float32, values widened with zeros, so that there is an operator that
    computes in 16 bits. Blind rows see something here and are given no gradient."""
    group = q.shape[2] // k.shape[2]
    blind = ~seen.any(dim=1)
    seen = seen.clone()
    seen[blind, 0] = True
    dout = dout.masked_fill(blind[:, None, None, None], 0)
    width = v.shape[3]
    v, dout = (F.pad(x, (0, q.shape[3] - width)) for x in (v, dout))
    leaves = [
        x.permute(1, 2, 0, 3).contiguous().requires_grad_()
        for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    ]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=seen)
        grads = torch.autograd.grad(out, leaves, dout.permute(1, 2, 0, 3))
    out, dq, dk, dv = (x.detach().permute(2, 0, 1, 3) for x in (out, *grads))
    out = out.masked_fill(blind[:, None, None, None], 0)
    dk, dv = (x.float().unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return out[..., :width], dq, dk, dv[..., :width]


class Two:
    """Two ranks of a kernel over two chunks of keys, as a ring would call it."""

    def __init__(self, kernel, mask, layout, shape, inputs, softcap=None):
        order = arrangement(layout, shape)
        spans = [order.spans(rank, shape.length) for rank in range(RANKS)]
        pairs = [(i, j) for i in range(RANKS) for j in range(RANKS)]
        mask = made(mask, shape) if isinstance(mask, str) else mask
        works = [plan(kernel, mask, spans, i, j) for i, j in pairs]
        self.works = [
            (*pair, work) for pair, work in zip(pairs, works, strict=True) if work is not None
        ]
        self.kernel, self.inputs = kernel, inputs
        self.scoring = Scoring(inputs[0].shape[-1] ** -0.5, softcap)

    def forward(self):
        """out, lse of all rows."""
        q, k, v, _ = (x.chunk(RANKS) for x in self.inputs)
        results = [empty_result(rows, v[0].shape[-1]) for rows in q]
        for i, j, work in self.works:
            self.kernel.forward(q[i], k[j], v[j], work, self.scoring, *results[i])
        return [torch.cat(x) for x in zip(*results, strict=True)]

    def backward(self, out, lse, visiting):
        """dq, dk, dv; `visiting`: without the output."""
        q, k, v, dout = (x.chunk(RANKS) for x in self.inputs)
        delta = (self.inputs[3].float() * out.float()).sum(dim=-1)
        parts = zip(q, dout, lse.chunk(RANKS), delta.chunk(RANKS), out.chunk(RANKS), strict=True)
        rows = [Rows(*each[:4], None if visiting else each[4]) for each in parts]
        dq, dk, dv = ([torch.zeros_like(x, dtype=torch.float32) for x in y] for y in (q, k, v))
        for i, j, work in self.works:
            self.kernel.backward(rows[i], k[j], v[j], work, self.scoring, dq[i], dk[j], dv[j])
        return [torch.cat(x) for x in (dq, dk, dv)]


def judge(got, truth, theirs, who):
    """Every part as near to float64 as torch's own operator comes, within BOUND."""
    for part, mine, right, other in zip(PARTS, got, truth, theirs, strict=True):
        error = oracle.worst(mine, right)
        assert error <= BOUND * other + 1e-7, f"{who}: {part}: {error:.3g}, torch {other:.3g}"
