"""A CUDA graph of dense attention, replayed on the CPU.

The operators of a call run again without the Python code around them, on other numbers in the same
memory, and give the results of a call.
"""

from itertools import product
from typing import Any

import oracle
import pytest
import torch
from capture_rules import Graph

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

CAUSAL = mb.masks.Causal()
FLAT: dict[str, Any] = {"intra": 2}
NODES: dict[str, Any] = {"inter": 2, "intra": 2}
# algorithm -> grid
ALGORITHMS = {
    "ring": FLAT, "double_ring": NODES, "burst": NODES, "all_gather": FLAT,
    "ulysses": {"intra": 2, "ulysses": 2}, "hybrid": NODES | {"ulysses": 2}, "two_way": FLAT,
    "tile": NODES,
}  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "side"), [*product(ALGORITHMS, ("kv", "query")), ("head chunks", "query")]
)
def test_a_replay_on_other_numbers(algorithm, side):
    more = {"head_chunks": 2} if algorithm == "head chunks" else {}
    grid = ALGORITHMS.get(algorithm, FLAT)
    groups = in_process.groups(**grid)
    size, (h, k, d) = groups.size, (4, 4 if "ulysses" in grid else 2, 4)
    length, layout = 8 * size, mb.layout.make("zigzag", cp_size=size)
    shapes = (length, 1, h, d), (length, 1, k, d), (length, 1, k, d), (length, 1, h, d)

    def numbers(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def cut(x):
        return [mb.shard(x, layout, rank).clone() for rank in range(size)]

    *qkv, douts = (cut(x) for x in numbers(0))
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    name = algorithm if algorithm in ALGORITHMS else "ring"
    plan = in_process.prepare(
        *qkv, groups=groups, layout="zigzag", mask=CAUSAL, algorithm=name, side=side,
        kernel="aten", **more,
    )  # fmt: skip

    def attend():
        outs = in_process.attention(*qkv, plan=plan, label="layer")
        return outs, torch.autograd.grad(outs, leaves, douts)

    attend()
    with Graph() as graph:
        outs, grads = attend()
    for seed in (1, 2):
        fresh = numbers(seed)
        with torch.no_grad():
            for shards, x in zip((*qkv, douts), fresh, strict=True):
                for mine, new in zip(shards, cut(x), strict=True):
                    mine.copy_(new)
        graph.replay()
        out, _, *truth = oracle.attention(*fresh, oracle.visible("causal", length))
        parts = [outs, *(grads[i : i + size] for i in range(0, 3 * size, size))]
        for part, right in zip(parts, (out, *truth), strict=True):
            mine = mb.unshard([x.detach() for x in part], layout)
            assert oracle.worst(mine, right) < 1e-10
