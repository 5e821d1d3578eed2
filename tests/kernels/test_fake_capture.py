"""Dense attention as part of a CUDA graph, on fake CUDA tensors.

The second call of a plan does nothing that a capture forbids, and the third does the same as the
second. No graph was captured on a GPU here. `execution/test_graph_replay` replays the operators.
"""

from typing import Any

import fake_cuda
import pytest
import torch
from capture_rules import NotCapturable, capturing
from fake_cuda import Call, Problem
from no_sync import HostSync

import megatron_burst as mb
from megatron_burst.execution import ring
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.testing.local import LocalEndpoint

pytestmark = pytest.mark.skipif(not fake_cuda.READY, reason=fake_cuda.WHY)
TRITON = pytest.mark.skipif(fake_cuda.JITFunction is None, reason="Triton is not installed")
CAUSAL = mb.masks.Causal()
FLAT: dict[str, Any] = {"intra": 2}
NODES = {"inter": 2, "intra": 2}
HEADS, BOTH = {"intra": 2, "ulysses": 2}, {"inter": 2, "intra": 2, "ulysses": 2}
WIDE = Problem(heads=4, kv_heads=4, width=96, value_width=64, batch=2)
ALGORITHMS = {
    "ring": (FLAT, "query"), "double_ring": (NODES, "kv"), "burst": (NODES, "query"),
    "all_gather": (FLAT, "kv"), "ulysses": (HEADS, "kv"), "hybrid": (BOTH, "query"),
    "two_way": (FLAT, "kv"), "tile": (NODES, "kv"),
}  # fmt: skip
QUICK = "burst", "ulysses"
MORE = {
    "head chunks": (FLAT, {"head_chunks": 2, "side": "query", "layout": "striped"}, Problem()),
    "bf16 wire": (FLAT, {"side": "kv", "grad_wire_dtype": "bf16"}, Problem()),
    "window": (FLAT, {"mask": mb.masks.Window(40, 0) & CAUSAL}, Problem()),
    "sink, cudnn": (HEADS, {"algorithm": "ulysses", "kernel": "aten_cudnn", "sink": True,
                            "mask": mb.masks.Full()}, Problem()),
    "unequal widths": (FLAT, {"layout": "contiguous"}, WIDE),
}  # fmt: skip


def once(call):
    """Run forward and backward; return the tensors that a caller of a graph keeps."""
    context, outs = call.forward()
    return outs, call.backward(context)


def judge(grid, problem, **options):
    """Compare the operators in a capture after one call with one more call."""
    with fake_cuda.device() as mode:
        groups = in_process.groups(**grid)
        call = Call(mode, groups, problem, **{"kernel": "aten", "mask": CAUSAL} | options)
        with fake_cuda.running(mode):
            once(call)  # what a plan puts on the device, it does now
            with capturing() as first:
                once(call)
            with capturing() as second:
                once(call)
            assert first.kept() == second.kept() == []
    assert len(first.ran) > 10
    assert first.ran == second.ran


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in ALGORITHMS],
)
def test_an_algorithm(algorithm):
    grid, side = ALGORITHMS[algorithm]
    judge(grid, Problem(), algorithm=algorithm, side=side)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_an_option(name):
    grid, options, problem = MORE[name]
    judge(grid, problem, **options)


@TRITON
def test_the_triton_kernel():
    judge(FLAT, WIDE, algorithm="ring", kernel="triton", sink=True)


# --- each rule, seen broken ---------------------------------------------------------------------


def plant(monkeypatch, home, name, before):
    """Run `before` at the beginning of a method."""
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


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_capture_forbids_is_noticed(fault, monkeypatch):
    with monkeypatch.context() as planted, fake_cuda.device() as mode:
        call = Call(mode, in_process.groups(**FLAT), Problem(), kernel="aten", mask=CAUSAL)
        with fake_cuda.running(mode):
            once(call)
            plant(planted, ring.Ring, "_post", FAULTS[fault])
            with pytest.raises(HostSync), capturing():
                once(call)


def test_what_is_never_joined_or_kept_is_noticed(monkeypatch):
    class Lost:
        def __init__(self, pending):
            self.wait = pending.pending.wait  # past the one that notes it

    def unjoined(call):
        inner = LocalEndpoint.exchange
        with monkeypatch.context() as planted:
            planted.setattr(LocalEndpoint, "exchange", lambda *given: Lost(inner(*given)))
            once(call)

    with fake_cuda.device() as mode:
        call = Call(mode, in_process.groups(**FLAT), Problem(), kernel="aten", mask=CAUSAL)
        with fake_cuda.running(mode):
            once(call)
            with pytest.raises(NotCapturable, match="nobody waited for attention"), capturing():
                unjoined(call)
            with capturing() as rules:
                plant(monkeypatch, ring.Ring, "_post", lambda *_: KEPT.append(on_device()))
                once(call)
            assert set(rules.kept()) == {(4,)}
            KEPT.clear()
