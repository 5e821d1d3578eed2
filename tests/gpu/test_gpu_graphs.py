"""Dense attention inside a CUDA graph: replays of one capture compute what plain calls compute."""

import pytest
import torch
from problems import on

from megatron_burst.plugins.testing import in_process

ROWS, HEADS, WIDTH = 512, (8, 4), 128
GRIDS = {
    "burst": ({"inter": 2, "intra": 2}, "query"), "ring": ({"intra": 4}, "kv"),
    "all_gather": ({"intra": 4}, "kv"), "ulysses": ({"intra": 4, "ulysses": 4}, "kv"),
}  # fmt: skip
CASES = [
    on("cuda", kernel, algorithm) for kernel in ("aten", "triton", "aten_cudnn")
    for algorithm in GRIDS
]  # fmt: skip


@pytest.mark.parametrize(("device", "kernel", "algorithm"), CASES)
def test_a_replay_is_a_call(device, kernel, algorithm):
    grid, side = GRIDS[algorithm]
    groups = in_process.groups(**grid)
    shards = [
        [torch.randn(ROWS, 1, n, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(4)]
        for n in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    ]
    *qkv, douts = shards
    inputs = [x.requires_grad_() for some in qkv for x in some]
    plan = in_process.prepare(*qkv, groups=groups, algorithm=algorithm, side=side, kernel=kernel)

    def call():
        outs = in_process.attention(*qkv, plan=plan)
        return [*outs, *torch.autograd.grad(outs, inputs, douts)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # as torch asks for before a capture
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (*inputs, *douts):
                x.normal_()
        graph.replay()
        right = call()
        assert kept[0].abs().max() > 0
        for mine, plain in zip(kept, right, strict=True):  # dq may add up in another order
            assert (mine.double() - plain.double()).abs().max() <= 0.02 * plain.abs().max()
