"""Short convolution over ranks that share a process, against sums written out by hand."""

from itertools import pairwise

import nccl_rules
import pytest
import torch
from state_chains import GRIDS, LAYOUTS, documents

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

B, C = 2, 3


def problem(rows, width, bias):
    make = torch.Generator().manual_seed(0)
    shapes = [(rows, B, C), (C, width), (C,) if bias else None]
    return [
        None if s is None else torch.randn(s, generator=make, dtype=torch.float64).requires_grad_()
        for s in shapes
    ]


def by_hand(x, weight, bias, activation, bounds):
    width, rows = weight.shape[1], []
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            total = torch.zeros(B, C, dtype=x.dtype) + (0 if bias is None else bias)
            for back in range(min(width, t - start + 1)):
                total = total + x[t - back] * weight[:, width - 1 - back]
            rows.append(total / (1 + torch.exp(-total)) if activation else total)
    return torch.stack(rows)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def check(groups, layout, width, packed=True, bias=True, activation="silu"):
    """Compare values and gradients; some documents and pieces are shorter than the width."""
    bounds = documents(layout, groups.size, packed)
    cut = LAYOUTS[layout](groups.size, bounds)
    x, weight, shift = problem(bounds[-1], width, bias)
    truth = by_hand(x, weight, shift, activation, bounds)
    shards = [mb.shard(x, cut, rank, dim=0) for rank in range(groups.size)]
    own = mb.unshard(
        in_process.short_convolution(
            shards, weight, shift, activation=activation, groups=groups, layout=cut,
            cu_seqlens=bounds if packed else None,
        ), cut, dim=0,
    )  # fmt: skip
    close(own, truth)
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).double()
    leaves = [t for t in (x, weight, shift) if t is not None]
    found = torch.autograd.grad((own * weights).sum(), leaves)
    for one, other in zip(found, torch.autograd.grad((truth * weights).sum(), leaves), strict=True):
        close(one, other)


@pytest.mark.parametrize("width", [1, 2, 4, 11])
@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_gradients(layout, world, width):
    inter, intra = GRIDS[world]
    check(in_process.groups(inter=inter, intra=intra), layout, width)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_document_and_shared_heads(bias, activation):
    groups = in_process.groups(inter=2, intra=2, ulysses=2)
    traces = nccl_rules.record(groups)
    check(groups, "zigzag", 4, packed=False, bias=bias, activation=activation)
    for communicator in nccl_rules.COMMUNICATORS.values():
        assert not nccl_rules.faults(traces, communicator(groups.topology))


def test_one_message_of_few_rows_per_neighbour():
    groups = in_process.groups(intra=4)
    check(groups, "contiguous", 4, packed=False)
    row = B * C * 8
    assert [rank.counters.intra for rank in groups.ranks] == [3 * row, 6 * row, 6 * row, 3 * row]


def test_a_plan_of_linear_attention_serves():
    groups = in_process.groups(intra=2)
    q = [torch.randn(6, B, 1, 2, dtype=torch.float64) for _ in range(2)]
    plan = in_process.prepare_linear(
        q, q, q, groups=groups, cu_seqlens=[0, 5, 12], layout="contiguous"
    )
    x, weight, _ = problem(12, 4, False)
    for _ in range(2):
        own = torch.cat(in_process.short_convolution([x[:6], x[6:]], weight, plan=plan))
    close(own, by_hand(x, weight, None, None, [0, 5, 12]))
    in_process.linear_attention(q, q, q, plan=plan)


def test_weights_wider_than_the_rows_are_not_rounded():
    make = torch.Generator().manual_seed(2)
    x = torch.randn(8, 1, C, generator=make).bfloat16()
    weight = torch.randn(C, 3, generator=make)
    groups = in_process.groups(intra=1)
    (out,) = in_process.short_convolution([x], weight, activation="silu", groups=groups)
    exact = torch.zeros(8, 1, C, dtype=torch.float64)
    for row in range(8):
        for back in range(min(row, 2) + 1):
            exact[row] += weight[:, 2 - back].double() * x[row - back].double()
    exact = exact * torch.sigmoid(exact)
    assert torch.equal(out, exact.bfloat16())  # rounded once, at the end


def test_the_result_has_the_dtype_of_the_rows():
    groups = in_process.groups(intra=2)
    x = [torch.ones(4, 1, C, dtype=torch.bfloat16) for _ in range(2)]
    weight = torch.ones(C, 4, requires_grad=True)
    out = in_process.short_convolution(x, weight, groups=groups)
    assert out[0].dtype == torch.bfloat16
    sum(t.sum() for t in out).backward()
    assert weight.grad.dtype == torch.float32


WRONG = {
    "x": ({"x": [torch.ones(4, C)] * 2}, r"x must be \[s, b, c\]"),
    "lists": ({"x": [torch.ones(4, 1, C)]}, "x: groups hold 2 ranks .*, got 1 in a"),
    "rows": ({"x": [torch.ones(3, 1, C)] * 2}, "over 2 ranks needs a positive multiple of 4"),
    "weight": ({"weight": torch.ones(C + 1, 4)}, r"weight must be \[c, width\]"),
    "bias": ({"bias": torch.ones(1)}, r"bias must be \[c\], here \[3\], got \[1\]"),
    "activation": ({"activation": "gelu"}, "activation, if not None, must be one of silu"),
    "layout": ({"layout": "striped"}, "use layout zigzag, contiguous or balanced"),
    "documents": ({"cu_seqlens": [0, 7]}, "cu_seqlens must end at 8, .* of the 2 ranks, got 7"),
    "groups": ({"groups": None}, "groups must be made with mb.Groups, got None"),
    "integers": ({"x": [torch.ones(4, 1, C, dtype=torch.int32)] * 2}, "one of the dtypes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    wrong, words = WRONG[case]
    arguments = {"x": [torch.ones(4, 1, C)] * 2, "weight": torch.ones(C, 4),
             "groups": in_process.groups(intra=2)} | wrong  # fmt: skip
    with pytest.raises(ValueError, match=words):
        in_process.short_convolution(
            arguments.pop("x"), arguments.pop("weight"), arguments.pop("bias", None), **arguments
        )
