"""Every kernel under every mask at real shapes in bf16, against dense float64."""

import math
from itertools import product

import numpy as np
import oracle
import problems
import pytest
import torch
from problems import LAYOUTS, SHAPES, Two, judge, kernel_for, kernel_names, on, problem

from megatron_burst.kernels import flex_programs, registry
from megatron_burst.kernels.aten import stand_in
from megatron_burst.masks import Causal, Documents


def cases():
    """The kernel changes fastest: the truth of a problem is computed once."""
    pairs = [(mask, layout) for mask, layouts in LAYOUTS.items() for layout in layouts]
    for device, shape in SHAPES.items():
        every = [
            (mask, layout, shape.heads[head], shape.widths[width])
            for number, (mask, layout) in enumerate(pairs)
            for head, width in product(range(3), range(2))
            # On the CPU, heads and widths take turns.
            if device == "cuda" or (number + head) % 3 == width
        ]
        every += [("causal", "zigzag", shape.heads[1], widths) for widths in shape.more_widths]
        for case, kernel in product(every, kernel_names(device)):
            mask, layout, *rest = case
            first = FIRST.get(mask) == layout and rest == [shape.heads[1], shape.widths[0]]
            yield on(device, *case, kernel, first=first)


# What decides whether a kernel is right at all, of every kernel, before the rest of any.
FIRST = {"full": "contiguous", "causal": "zigzag", "window": "zigzag", "documents": "zigzag"}
SOFTCAPS = [on(device, name) for device in SHAPES for name in kernel_names(device)]


@pytest.mark.parametrize(("device", "mask", "layout", "heads", "widths", "name"), list(cases()))
def test_errs_no_more_than_torch(device, mask, layout, heads, widths, name):
    inputs, (out, lse, *grads), theirs = problem(device, mask, layout, heads, widths)
    kernel = kernel_for(device, name, inputs[:3])
    ring = Two(kernel, mask, layout, SHAPES[device], inputs)
    got, statistics = ring.forward()
    blind = lse == -math.inf
    assert torch.equal(statistics == -math.inf, blind)
    assert oracle.worst(statistics.masked_fill(blind, 0.0), lse.masked_fill(blind, 0.0)) < 2e-3
    final = got.to(inputs[0].dtype)
    for side, visiting in (("kv", False), ("query", True)):
        mine = ring.backward(final, statistics, visiting)
        judge((final, *mine), (out, *grads), theirs, f"{name}, side {side}")


@pytest.mark.parametrize(("device", "name"), SOFTCAPS)
def test_softcap_errs_no_more_than_torch_without(device, name):
    cap, shape = 2.0, SHAPES[device]
    heads, widths = shape.heads[1], shape.widths[0]
    inputs, (out, _, *grads), theirs = problem(device, "causal", "zigzag", heads, widths, cap)
    if not kernel_for(device, name, inputs[:3]).softcaps:
        pytest.skip(f"{name} has no softcap, and says so")
    kernel = kernel_for(device, name, inputs[:3], softcap=cap)
    ring = Two(kernel, "causal", "zigzag", shape, inputs, cap)
    got, statistics = ring.forward()
    final = got.to(inputs[0].dtype)
    mine = ring.backward(final, statistics, visiting=True)
    judge((final, *mine), (out, *grads), theirs, name)


@pytest.mark.parametrize(("device", "name"), SOFTCAPS)
def test_the_same_bits_twice(device, name):
    """Where torch is asked for determinism, and the kernel says it can."""
    shape = SHAPES[device]
    inputs, _, _ = problem(device, "causal", "zigzag", shape.heads[1], shape.widths[0])
    kernel_for(device, name, inputs[:3])
    torch.use_deterministic_algorithms(True)
    try:
        kernel = registry.make(name, *inputs[:3])
    except ValueError:
        pytest.skip(f"{name} is not deterministic, and says so")
    else:
        found = []
        for _ in range(2):
            ring = Two(kernel, "causal", "zigzag", shape, inputs)
            out, lse = ring.forward()
            found.append((out, lse, *ring.backward(out.to(inputs[0].dtype), lse, True)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("device", "name", "widths"),
    [on("cpu", "aten", (24, 16)), *(on("cuda", "triton", (w, w)) for w in (64, 128, 256))],
)
def test_float32(device, name, widths):
    shape, (h, k), (d, w) = SHAPES[device], SHAPES[device].heads[1], widths
    make = torch.Generator(device).manual_seed(6)
    inputs = [
        torch.randn(shape.length, 1, n, m, generator=make, device=device)
        for n, m in ((h, d), (k, d), (k, w), (h, w))
    ]
    order = problems.arrangement("zigzag", shape)
    rows = [int(p) for rank in range(2) for p in order.positions(rank, shape.length)]
    rows = torch.tensor(rows, device=device)
    out, _, *grads = oracle.attention(*inputs, rows[:, None] >= rows[None, :])
    ring = Two(registry.make(name, *inputs[:3]), "causal", "zigzag", shape, inputs)
    got, lse = ring.forward()
    for mine, right in zip((got, *ring.backward(got, lse, True)), (out, *grads), strict=True):
        assert oracle.worst(mine, right) < 1e-5 * right.abs().max().item()


@pytest.mark.parametrize("device", [on(device) for device in SHAPES])
def test_the_stand_in_is_nearer_to_delta_than_the_output_in_bf16(device):
    """What a stock backward makes of D = rowsum(dO * O) with either, by its error in float64."""
    shape = SHAPES[device]
    make = torch.Generator(device).manual_seed(4)
    size = (shape.length, 1, *shape.widths[0])
    out, dout = (torch.randn(size, generator=make, device=device) for _ in range(2))
    dout = dout.bfloat16()
    delta = (dout.double() * out.double()).sum(-1)

    def error(output):
        implied = (dout.double() * output.double()).sum(-1)
        return (implied - delta).square().mean().sqrt().item()

    made = stand_in(dout, delta.float())
    assert made.dtype == torch.bfloat16
    assert error(made) < error(out.bfloat16())
    assert not stand_in(torch.zeros_like(dout), torch.zeros_like(delta)).any()


@pytest.mark.parametrize("device", [on(device) for device in SHAPES])
def test_twenty_packs_of_documents_compile_two_flex_programs(device):
    shape, (h, k), (d, w) = SHAPES[device], (2, 1), SHAPES[device].widths[1]
    make, random = torch.Generator(device).manual_seed(7), np.random.default_rng(7)
    inputs = [
        torch.randn(shape.length, 1, n, m, generator=make, device=device, dtype=torch.bfloat16)
        for n, m in ((h, d), (k, d), (k, w), (h, w))
    ]
    order = problems.arrangement("zigzag", shape)
    places = np.concatenate([order.positions(rank, shape.length) for rank in range(2)])
    flex_programs.program.cache_clear()
    for _ in range(20):
        cuts = random.choice(np.arange(1, shape.length), size=random.integers(1, 12), replace=False)
        bounds = [0, *sorted(cuts.tolist()), shape.length]
        number = np.searchsorted(bounds, places, side="right")
        seen = (number[:, None] == number) & (places[:, None] >= places)
        truth = oracle.attention(*inputs, torch.from_numpy(seen).to(device))
        ring = Two(registry.make("flex", *inputs[:3]), Documents(bounds) & Causal(), "zigzag",
                   shape, inputs)  # fmt: skip
        out, lse = ring.forward()
        got = (out, *ring.backward(out.to(inputs[0].dtype), lse, True))
        for mine, right in zip(got, (truth[0], *truth[2:]), strict=True):
            assert oracle.worst(mine, right) < 2e-2 * right.abs().max().item()
    assert flex_programs.program.cache_info().misses == 2


def test_the_operator_that_judges_survives_rows_that_see_nothing():
    _, _, theirs = problem("cpu", "blind", "zigzag", (4, 2), (24, 16))
    assert all(0 < error < 1 for error in theirs)
    assert problems.made("blind", SHAPES["cpu"]).a.table[3].sum() == 0
