"""Accuracy with bf16 on the wire, over 2 to 16 ranks.

Sums are fp32 on every rank; only sent values are rounded. A gradient makes G - 1 hops on a flat
ring of G ranks and is rounded once before each hop, within 2^-9 of each entry. Independent
roundings add up to at most sqrt(G - 1) * 2^-9 of the gradient's root mean square.
`benchmarks/accuracy.py` measures the same at a larger size.
"""

import math
from functools import cache

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

NAMES = ("out", "dq", "dk", "dv")
TRAVELS = {"kv": ("dk", "dv"), "query": ("dq",)}
GRIDS = [(1, 2), (1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (4, 4)]


def problem(dtype):
    return cases.Problem("causal", (4, 2), 1, (32, 32), 256, dtype)


@cache
def run(nodes, per_node, side, dtype, wire):
    """Return name -> the whole tensor, in float64."""
    algorithm = "burst" if nodes > 1 else "ring"
    case = cases.Case(nodes, per_node, algorithm, "zigzag", side, "aten", problem(dtype))
    results, _ = cases.run_in_process(case, grad_wire_dtype=wire)
    layout = mb.layout.make("zigzag", cp_size=case.size)
    wholes = [mb.unshard(list(parts), layout) for parts in zip(*results, strict=True)]
    return {name: x.detach().double() for name, x in zip(NAMES, wholes, strict=True)}


def relative(error, truth):
    """Return the root mean square of an error divided by that of the truth."""
    return (error.norm() / truth.norm()).item()


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize(("nodes", "per_node"), GRIDS)
def test_each_hop_rounds_once(nodes, per_node, side, record_property):
    """Tensors are fp32, so only the wire dtype is rounded."""
    fine, coarse = (
        run(nodes, per_node, side, torch.float32, wire) for wire in (None, torch.bfloat16)
    )
    hops = (per_node - 1) + (nodes - 1)  # the longest way of a partial sum
    for name in NAMES:
        error = relative(coarse[name] - fine[name], fine[name])
        record_property(f"{name}: difference over sqrt(hops) * 2^-9", error / hops**0.5 * 2**9)
        if name in TRAVELS[side]:
            assert 2**-13 < error < math.sqrt(hops) * 2**-9, name
        else:  # with other bytes rings may go round the other way: another order of sums
            assert error < 1e-6, name


def test_copies_of_a_key_head_are_rounded_once_and_summed_in_fp32():
    """One key head is copied to each of 8 ranks that share the query heads.

    The expected result rounds every copy's gradient, by hand in float64, and sums without error.
    """
    size = 8
    everything = cases.Problem("causal", (size, 1), 1, (32, 32), 256, torch.float32)
    q, k, v, dout = inputs = cases.solve(everything)[0]
    groups = in_process.groups(intra=size, ulysses=size)
    layout = mb.layout.make("zigzag", cp_size=size)
    shards = [[mb.shard(x, layout, rank).clone() for rank in range(size)] for x in inputs]
    leaves = [x.requires_grad_() for xs in shards[:3] for x in xs]
    outs = in_process.attention(
        *shards[:3], groups=groups, algorithm="ulysses", mask=mb.masks.Causal(), kernel="aten",
        grad_wire_dtype=torch.bfloat16,
    )  # fmt: skip
    grads = torch.autograd.grad(outs, leaves, shards[3])
    seen = oracle.visible("causal", everything.length)
    parts = [oracle.attention(q[:, :, h : h + 1], k, v, dout[:, :, h : h + 1], seen)[3:]
             for h in range(size)]  # fmt: skip
    for i, copies in enumerate(zip(*parts, strict=True)):
        truth = sum(copies)
        once = relative(sum(x.bfloat16().double() for x in copies) - truth, truth)
        got = mb.unshard(list(grads[(i + 1) * size : (i + 2) * size]), layout).double()
        assert 2**-11 < once < 2**-9
        assert relative(got - truth, truth) < 1.01 * once, NAMES[i + 2]


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize(("nodes", "per_node"), GRIDS)
def test_bf16_gradients_in_bf16_stay_near_the_stock_operator(nodes, per_node, side):
    """bf16 tensors against float64: at most twice the error of torch's operator on one rank."""
    inputs, truth = cases.solve(problem(torch.bfloat16))
    got = run(nodes, per_node, side, torch.bfloat16, torch.bfloat16)
    for name, theirs, right in zip(NAMES, stock(*inputs), truth, strict=True):
        ours = relative(got[name] - right, right)
        assert ours < 2 * relative(theirs.double() - right, right), name


def stock(q, k, v, dout):
    """Return out, dq, dk, dv of torch's own causal attention in the dtype of the inputs."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    first = [x.permute(1, 2, 0, 3) for x in leaves]
    out = F.scaled_dot_product_attention(*first, is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    return out, *torch.autograd.grad(out, leaves, dout)
