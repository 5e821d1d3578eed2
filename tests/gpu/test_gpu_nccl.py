"""Attention over four ranks that are processes: on one GPU through NCCL, tiny through gloo.

What a device may get wrong here and nowhere else: a kernel that does not wait for a message, a
buffer that is used again too early, an order of messages in which NCCL stops. One rank is late, and
three micro-batches are in flight.
"""

import functools

import oracle
import pytest
import torch
import torch.distributed as dist
from problems import on
from workers import Workers

import megatron_burst as mb

RANKS = 4
ROWS = {"cuda": 1024, "cpu": 8}  # of a rank
HEADS = {"cuda": ((8, 4), 64), "cpu": ((4, 4), 8)}
LATE = 20_000_000  # cycles that the late rank's device is busy before each call: about 10 ms
# (ranks per node, ranks that share heads)
GRIDS = {
    "ring": (4, 1), "double_ring": (2, 1), "burst": (2, 1), "all_gather": (2, 1),
    "multicast": (2, 1), "prefetch": (2, 1), "tile": (2, 1), "two_way": (4, 1),
    "token_ring": (4, 1), "ulysses": (4, 4), "hybrid": (2, 2),
}  # fmt: skip
# largest error over the largest value
KINDS = {"cuda": {"triton": (torch.float32, 1e-5), "aten": (torch.bfloat16, 2e-2)},
         "cpu": {"aten": (torch.float64, 1e-10)}}  # fmt: skip
LAYOUTS = {"causal": "zigzag", "causal, striped": "striped", "documents": "zigzag"}
CASES = [
    on(device, algorithm, mask, side, kernel)
    for device in ROWS
    for algorithm in GRIDS
    for mask in (LAYOUTS if device == "cuda" else ("documents",))
    for kernel in KINDS[device]
    for side in ("kv", "query")
]


@pytest.fixture(scope="module")
def ranks():
    """device -> its four processes, made once."""
    pools = {}

    def of(device):
        if device not in pools or not pools[device].alive:
            backend = "nccl" if device == "cuda" else "gloo"
            pools[device] = Workers(RANKS, backend=backend)
        return pools[device]

    yield of
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(("device", "algorithm", "mask", "side", "kernel"), CASES)
def test_ranks_equal_one(ranks, device, algorithm, mask, side, kernel):
    dtype, bound = KINDS[device][kernel]
    worst = ranks(device).run(on_rank, device, algorithm, mask, side, kernel, dtype, timeout=90)
    assert max(worst) < bound, worst


def on_rank(device, algorithm, mask, side, kernel, dtype):
    """How far this rank's rows of out, dq, dk, dv are off, at most, over the largest value."""
    length, ends = problem(device, mask, 0, dtype)[2:]
    rule = mb.masks.Causal()
    if ends is not None:
        rule = mb.masks.Documents(ends) & rule
    rows = oracle.permutation(LAYOUTS[mask], RANKS, length)[dist.get_rank()]
    given = {"groups": grid(*GRIDS[algorithm]), "algorithm": algorithm, "layout": LAYOUTS[mask],
             "mask": rule, "side": side, "kernel": kernel}  # fmt: skip
    flying = []
    for seed in range(3):
        inputs = [x[rows].to(dtype).contiguous() for x in problem(device, mask, seed, dtype)[0]]
        *qkv, dout = inputs
        late(device)
        leaves = [x.requires_grad_() for x in qkv]
        flying.append((mb.attention(*leaves, label=seed, **given), leaves, dout, seed))
    worst = 0.0
    for out, leaves, dout, seed in reversed(flying):
        late(device)
        grads = torch.autograd.grad(out, leaves, dout)
        for mine, right in zip((out, *grads), problem(device, mask, seed, dtype)[1], strict=True):
            worst = max(worst, oracle.worst(mine, right[rows]) / right.abs().max().item())
    return worst


def late(device):
    if device == "cuda" and dist.get_rank() == 1:
        torch.cuda._sleep(LATE)


@functools.cache
def grid(intra, ulysses):
    return mb.Groups.from_topology(dist.group.WORLD, intra=intra, ulysses=ulysses)


@functools.lru_cache(maxsize=6)
def problem(device, mask, seed, dtype):
    """((q, k, v, dout), (out, dq, dk, dv), rows, ends of documents or None), in float64, of numbers
    that `dtype` has."""
    length, ((h, k), d) = RANKS * ROWS[device], HEADS[device]
    make = torch.Generator(device).manual_seed(seed)
    inputs = [
        torch.randn(length, 1, n, d, generator=make, device=device).to(dtype).double()
        for n in (h, k, k, h)
    ]
    at = torch.arange(length, device=device)
    ends, document = None, torch.zeros_like(at)
    if mask == "documents":
        ends = [0, length // 7, length // 3, length // 3 + 5, length]
        document = torch.bucketize(at, torch.tensor(ends[1:], device=device), right=True)
    seen = (document[:, None] == document).tril()
    out, _, *grads = oracle.attention(*inputs, seen)
    return inputs, (out, *grads), length, ends
