"""A ring of eight ranks in one process, on one device, against dense float64."""

import pytest
import torch
from problems import SHAPES, judge, kernel_for, kernel_names, on, problem

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

LAYOUTS = ("zigzag", "striped")
CASES = [
    on(device, layout, side, name, first=layout == "zigzag")
    for device in SHAPES
    for layout in LAYOUTS
    for name in kernel_names(device)
    for side in ("kv", "query")
]


@pytest.mark.parametrize(("device", "layout", "side", "name"), CASES)
def test_eight_ranks_err_no_more_than_torch(device, layout, side, name):
    shape = SHAPES[device]
    # in the order of positions: one rank's contiguous shard after the other
    inputs, (out, _, *grads), theirs = problem(
        device, "causal", "contiguous", shape.heads[1], shape.widths[0]
    )
    kernel_for(device, name, inputs[:3])
    groups = in_process.groups(inter=2, intra=4)
    order = mb.layout.make(layout, cp_size=groups.size)
    *qkv, douts = ([mb.shard(x, order, r) for r in range(groups.size)] for x in inputs)
    for shards in qkv:
        for x in shards:
            x.requires_grad_()
    outs = in_process.attention(*qkv, groups=groups, layout=layout, side=side, kernel=name)
    torch.autograd.backward(outs, douts)
    parts = [[x.detach() for x in outs], *([x.grad for x in shards] for shards in qkv)]
    judge([mb.unshard(part, order) for part in parts], (out, *grads), theirs, name)
