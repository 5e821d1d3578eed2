"""Dense attention as part of a CUDA graph, without a GPU.

On fake CUDA tensors: the second call of a plan does nothing that a capture forbids, and the third
does the same as the second. On the CPU: what ran is run again without Python, on other numbers.
Nothing here was captured on a GPU.
"""

from contextlib import nullcontext
from itertools import product

import fake_cuda
import oracle
import pytest
import torch
from capture_rules import Graph, NotCapturable, capturing
from fake_cuda import Call, Problem
from no_sync import HostSync

import megatron_burst as mb
from megatron_burst.comm.local import LocalEndpoint
from megatron_burst.comm.packing import room
from megatron_burst.execution import ring

FAKE = pytest.mark.skipif(not fake_cuda.READY, reason=fake_cuda.WHY)
TRITON = pytest.mark.skipif(fake_cuda.JITFunction is None, reason="Triton is not installed")
CAUSAL = mb.masks.Causal()
FLAT, NODES = {"intra": 2}, {"inter": 2, "intra": 2}
HEADS, BOTH = {"intra": 2, "ulysses": 2}, {"inter": 2, "intra": 2, "ulysses": 2}
WIDE = Problem(heads=4, kv_heads=4, width=96, value_width=64, batch=2)
# algorithm -> grid
ALGORITHMS = {
    "ring": FLAT, "double_ring": NODES, "burst": NODES, "all_gather": FLAT, "ulysses": HEADS,
    "hybrid": BOTH, "two_way": FLAT, "tile": NODES,
}  # fmt: skip
MORE = {
    "head chunks": (FLAT, {"head_chunks": 2, "side": "query", "layout": "striped"}, Problem()),
    "kept keys": (FLAT, {"kv_cache": 0.5, "side": "kv"}, Problem()),
    "bf16 wire": (NODES, {"grad_wire_dtype": "bf16"}, Problem()),
    "window": (FLAT, {"mask": mb.masks.Window(40, 0) & CAUSAL}, Problem()),
    "sink": (BOTH, {"algorithm": "hybrid", "sink": True}, Problem()),
    "unequal widths": (FLAT, {}, WIDE),
    "cudnn": (NODES, {"kernel": "aten_cudnn"}, Problem()),
    "contiguous": (FLAT, {"layout": "contiguous"}, Problem()),
}


def once(call):
    """Forward and backward; the tensors that stay with a caller of a graph."""
    context, outs = call.forward()
    return outs, call.backward(context)


def judge(grid, problem, **options):
    """What runs in a capture after one call, compared with one more."""
    with fake_cuda.device() as mode:
        groups = mb.Groups.in_process(**grid)
        call = Call(mode, groups, problem, **{"kernel": "aten", "mask": CAUSAL} | options)
        with fake_cuda.running(mode):
            once(call)  # what a plan puts on the device, it does now
            ran = []
            for _ in range(2):
                with capturing() as rules:
                    once(call)
                assert rules.kept() == []
                ran.append(rules.ran)
    assert len(ran[0]) > 10
    assert ran[0] == ran[1]


@FAKE
@pytest.mark.parametrize(("algorithm", "side"), product(ALGORITHMS, ("kv", "query")))
def test_an_algorithm(algorithm, side):
    judge(ALGORITHMS[algorithm], Problem(), algorithm=algorithm, side=side)


@FAKE
@pytest.mark.parametrize("name", MORE)
def test_an_option(name):
    grid, options, problem = MORE[name]
    judge(grid, problem, **options)


@FAKE
@TRITON
@pytest.mark.parametrize("side", ["kv", "query"])
def test_the_triton_kernel(side):
    judge(BOTH, WIDE, algorithm="hybrid", kernel="triton", side=side, sink=True)


# --- each rule, seen broken ---------------------------------------------------------------------


def plant(monkeypatch, home, name, before):
    """`before` runs at the beginning of a method."""
    own = getattr(home, name)
    monkeypatch.setattr(home, name, lambda *given: (before(*given), own(*given))[1])


def on_device():
    return torch.ones(4, device="cuda")


KEPT = []
FAULTS = {
    "reads": lambda *_: on_device().sum().item(),
    "uploads": lambda *_: torch.arange(3).to("cuda", non_blocking=True),
    "random": lambda *_: on_device().normal_(),
    "stream": lambda *_: torch.cuda.Stream(),
    "event": lambda *_: torch.cuda.Event(),
    "synchronize": lambda *_: torch.cuda.synchronize(),
    "pinned": lambda *_: torch.arange(3).pin_memory(),
    "host": lambda self, *_: self.endpoint.switch.all_gather(0, 1, None),
}


@FAKE
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_capture_forbids_is_noticed(fault, monkeypatch):
    with monkeypatch.context() as planted, fake_cuda.device() as mode:
        call = Call(mode, mb.Groups.in_process(**FLAT), Problem(), kernel="aten", mask=CAUSAL)
        with fake_cuda.running(mode):
            once(call)
            plant(planted, ring.Ring, "_post", FAULTS[fault])
            with pytest.raises(HostSync), capturing():
                once(call)


@FAKE
def test_what_is_never_joined_or_kept_is_noticed(monkeypatch):
    class Lost:
        def __init__(self, pending):
            self.wait = pending.pending.wait  # past the one that notes it

    exchange = LocalEndpoint.exchange
    with fake_cuda.device() as mode:
        call = Call(mode, mb.Groups.in_process(**FLAT), Problem(), kernel="aten", mask=CAUSAL)
        with fake_cuda.running(mode):
            once(call)
            with pytest.raises(NotCapturable, match="nobody waited for attention"), capturing():
                inner = LocalEndpoint.exchange
                with monkeypatch.context() as planted:
                    planted.setattr(
                        LocalEndpoint, "exchange", lambda *given: Lost(inner(*given))
                    )
                    once(call)
            assert LocalEndpoint.exchange is not exchange  # of `running`
            with capturing() as rules:
                plant(monkeypatch, ring.Ring, "_post", lambda *_: KEPT.append(on_device()))
                once(call)
            assert set(rules.kept()) == {(4,)}
            KEPT.clear()


# --- a replay gives what a call gives -----------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "side"), [*product(ALGORITHMS, ("kv", "query")), ("head chunks", "query")]
)
def test_a_replay_on_other_numbers(algorithm, side):
    more = {"head_chunks": 2} if algorithm == "head chunks" else {}
    grid = ALGORITHMS.get(algorithm, FLAT)
    groups = mb.Groups.in_process(**grid)
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
    plan = mb.prepare(
        *qkv, groups=groups, layout="zigzag", mask=CAUSAL, algorithm=name, side=side,
        kernel="aten", **more,
    )  # fmt: skip

    def attend():
        outs = mb.attention(*qkv, plan=plan, label="layer")
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
