"""Every algorithm and kernel on fake CUDA tensors.

Checks results' shapes, arguments of operators, that the host never waits, and launches per pair of
shards. It cannot check values or times of a GPU.
"""

from unittest import mock

import fake_cuda
import pytest
import torch
from fake_cuda import Call, Problem
from no_sync import NoSync
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_burst as mb
from megatron_burst.execution.function import StoredResults
from megatron_burst.kernels import registry, rowwise
from megatron_burst.kernels.packages import NotInstalled
from megatron_burst.planning import pipeline
from megatron_burst.plugins.testing import in_process

pytestmark = pytest.mark.skipif(not fake_cuda.READY, reason=fake_cuda.WHY)
TRITON = pytest.mark.skipif(fake_cuda.JITFunction is None, reason="Triton is not installed")
FULL, CAUSAL = mb.masks.Full(), mb.masks.Causal()
DOCUMENTS = mb.masks.Documents([0, 50, 51, 120, 512]) & CAUSAL
DOCUMENT_ZIGZAG = mb.layout.make("zigzag", cp_size=4, cu_seqlens=range(0, 72, 8))
GRIDS = {
    "flat": {"intra": 2},
    "nodes": {"inter": 2, "intra": 2},
    "heads": {"intra": 2, "ulysses": 2},
    "both": {"inter": 2, "intra": 2, "ulysses": 2},
}
WIDE = Problem(heads=4, kv_heads=4, width=96, value_width=64, batch=2)
# name -> (grid, options, problem)
CALLS = {
    "ring": ("flat", {"algorithm": "ring", "layout": "contiguous", "mask": FULL}, Problem()),
    "double ring": ("nodes", {"algorithm": "double_ring", "side": "query"}, WIDE),
    "burst": ("nodes", {"kernel": "aten_cudnn", "side": "query", "layout": "striped"}, Problem()),
    "all gather": ("flat", {"algorithm": "all_gather", "mask": mb.masks.Window(40, 0)}, Problem()),
    "ulysses": ("heads", {"algorithm": "ulysses", "mask": FULL}, WIDE),
    "shared heads": ("heads", {"algorithm": "ulysses", "kernel": "aten_cudnn", "mask": FULL},
                     Problem()),
    "hybrid": ("both", {"algorithm": "hybrid", "side": "query", "sink": True, "layout": "striped"},
               Problem()),
    "head chunks": ("flat", {"head_chunks": 2, "side": "query", "layout": "striped"}, Problem()),
    "bf16 wire": ("flat", {"grad_wire_dtype": "bf16", "side": "kv"}, Problem()),
    "documents": ("flat", {"layout": "contiguous", "mask": DOCUMENTS}, Problem(256)),
    "reference": ("flat", {"kernel": "reference", "softcap": 9.0, "mask": DOCUMENTS}, Problem(256)),
    "triton": ("flat", {"kernel": "triton", "softcap": 9.0, "mask": DOCUMENTS}, Problem(256)),
    "triton query": ("both", {"algorithm": "hybrid", "kernel": "triton", "side": "query",
                              "head_chunks": 2, "sink": True}, WIDE),
}  # fmt: skip
JOINED = "documents", "all gather", "hybrid"
NEEDS_TRITON = ("triton", "triton query")


class Arguments(TorchDispatchMode):
    """Requirements of torch's attention operators; `seen` has the operators that ran."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def joined(self, name, args, ends, backward):
        """Return sequences end to end: [s, h, d], and the first row of each."""
        self.seen.add("joined")
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in ends), name
        assert all(x.device.type == "cuda" for x in ends), name
        q, k, v = args[1:4] if backward else args[:3]
        assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (q, k, v)), name
        assert k.shape == v.shape == (k.shape[0], v.shape[1], q.shape[2]), name
        if backward:
            dout, out, lse = args[0], args[4], args[5]
            assert dout.shape == out.shape == q.shape, name
            assert lse.shape == (q.shape[1], q.shape[0]), f"{name}: {lse.shape}"
            assert lse.is_contiguous(), f"{name}: {lse.stride()}"
            assert lse.dtype == torch.float32, name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "attention" in name:
            self.seen.add(name)
            backward = name.endswith("backward")
            tensors = args[1:4] if backward else args[:3]
            q, k, v = tensors
            ends = args[6:8] if backward else args[3:5]
            if name.startswith("_flash") and ends[0] is not None:
                self.joined(name, args, ends, backward)
                return func(*args, **(kwargs or {}))
            assert all(x.stride(-1) == 1 and x.dtype == torch.bfloat16 for x in tensors), name
            assert k.shape == v.shape == (*k.shape[:-1], q.shape[-1]), name
            if backward:
                dout, out, lse = args[0], args[4], args[5]
                rows, heads = (1, 2) if name.startswith("_flash") else (2, 1)
                assert dout.shape == out.shape == q.shape, name
                assert all(x.stride(-1) == 1 and x.dtype == q.dtype for x in (dout, out)), name
                wanted = q.shape[0], q.shape[heads], q.shape[rows]
                assert lse.shape in (wanted, (*wanted, 1)), f"{name}: {lse.shape}"
                assert lse.is_contiguous(), f"{name}: {lse.stride()}"
                assert lse.dtype == torch.float32, name
        return func(*args, **(kwargs or {}))


def is_one(x, shape, dtype):
    assert (tuple(x.shape), x.dtype, x.device.type) == (shape, dtype, "cuda")
    assert x.is_contiguous(), x.stride()


def judge(outs, dsink, grads, problem):
    """Check shape, dtype, strides and device of all results of a call."""
    s, b, h, k, d, w, dtype = problem
    for out in outs:
        is_one(out, (s, b, h, w), dtype)
    for shard in grads:
        for grad, shape in zip(shard, ((s, b, h, d), (s, b, k, d), (s, b, k, w)), strict=True):
            is_one(grad, shape, dtype)
    if dsink is not None:
        is_one(dsink, (h,), torch.float32)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=TRITON if n in NEEDS_TRITON else ()) for n in CALLS]
)
def test_a_whole_call(name):
    """The first call of a plan may copy tables to the device without a wait; later ones do not."""
    grid, options, problem = CALLS[name]
    options = {"kernel": "aten"} | options
    with fake_cuda.device() as mode:
        call = Call(mode, in_process.groups(**GRIDS[grid]), problem, **options)
        with fake_cuda.running(mode), NoSync() as sync, Arguments() as arguments:
            judge(*both(call), problem)
            first, sync.uploads = sync.uploads, 0
            both(call)
    assert sync.uploads == 0
    # of each rank: forward's tables and backward's; the reference kernel's of each pair; where
    # tiles are joined, where each begins
    most = {"triton": 2 * call.size, "reference": sum(call.pairs)}
    most |= {"aten": sum(call.pairs)} if name in JOINED else {}
    assert first <= most.get(options["kernel"], 0)
    operators = 2 if options["kernel"].startswith("aten") else 0
    assert len(arguments.seen) == operators + (name in JOINED)


def both(call, kept=None):
    context, outs = call.forward(kept)
    return outs, *call.backward(context)


class Keeper:
    """The results that a checkpoint keeps between a forward and its recomputation."""

    filled, entry = False, None

    def put(self, what, entry):
        self.filled, self.entry = True, entry

    def get(self, what):
        return self.entry


# Launches of a pair of shards, (forward, backward): what a pass does once is shared out among the
# four pairs of a rank. One tile a pair; the own pair of side query has its output.
LAUNCHES = {
    ("aten", "kv"): (2.5, 7.5),
    ("aten", "query"): (2.5, 7.5),
    ("aten_cudnn", "kv"): (2.5, 7.5),
    ("aten_cudnn", "query"): (2.5, 7.5),
    ("triton", "kv"): (1.75, 6.75),  # two of them copies of lse and delta
    ("triton", "query"): (1.75, 6.0),
}
WITHOUT_TRITON = {
    ("aten", "kv"): (6.25, 8.25),
    ("aten", "query"): (6.25, 18.0),
}


def launches(kernel, side):
    """Return (forward, backward) launches per pair in the second call of a plan, and by name."""
    with fake_cuda.device() as mode:
        options = {"kernel": kernel, "side": side, "layout": "contiguous", "mask": FULL}
        call = Call(mode, in_process.groups(intra=4), Problem(), algorithm="ring", **options)
        with fake_cuda.running(mode) as found:
            both(call)
            found.of.clear()
            context, _ = call.forward()
            there = dict(found.of)
            found.of.clear()
            call.backward(context)
    pairs, passes = call.pairs, (there, found.of)
    return tuple(sum(of.values()) / n for of, n in zip(passes, pairs, strict=True)), passes


@TRITON
@pytest.mark.parametrize(("kernel", "side"), LAUNCHES)
def test_a_pair_takes_so_many_launches(kernel, side):
    """If fewer are counted, tighten the table. Their time must be measured on a GPU."""
    found, of = launches(kernel, side)
    assert found == LAUNCHES[kernel, side], of


@pytest.mark.parametrize(("kernel", "side"), WITHOUT_TRITON)
def test_a_pair_takes_so_many_launches_without_triton(kernel, side, monkeypatch):
    monkeypatch.setattr(rowwise, "_code", lambda device: None)
    found, of = launches(kernel, side)
    assert found == WITHOUT_TRITON[kernel, side], of


@pytest.mark.parametrize("batch", [1, 2])
def test_documents_that_a_rank_holds_whole_take_one_launch(batch):
    """One launch of torch's operator for sixteen documents per rank; not with a batch."""
    mask = mb.masks.Documents(range(0, 260, 8)) & CAUSAL
    with fake_cuda.device() as mode:
        problem = Problem(rows=128, batch=batch)
        groups = in_process.groups(intra=2)
        call = Call(mode, groups, problem, kernel="aten", layout="contiguous", mask=mask)
        with fake_cuda.running(mode) as found:
            both(call)
    names = ("_flash_attention_forward", "_flash_attention_backward")
    ran = [sum(n for name, n in found.of.items() if part in name) for part in names]
    assert ran == [2 * (1 if batch == 1 else 16)] * 2, found.of


@pytest.mark.parametrize(
    ("capability", "kernel", "words"),
    [
        ((9, 0), "auto", "aten_cudnn (auto: kernel flash3: not there)"),
        ((8, 0), "auto", "aten (auto: the first choice here)"),
        ((9, 0), "aten", "aten"),
    ],
)
def test_the_start_up_line_says_why_auto_took_a_kernel(capability, kernel, words, monkeypatch):
    def absent(device, beside_rings):
        raise NotInstalled("kernel flash3: not there; install it")

    monkeypatch.setitem(registry.KERNELS, "flash3", absent)
    with fake_cuda.device(capability) as mode:
        call = Call(mode, in_process.groups(intra=2), Problem(), kernel=kernel, mask=CAUSAL)
    assert f"| kernel {words} |" in call.plan.ranks[0].describe()


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_a_checkpoint(keep):
    problem, sync = Problem(), NoSync()
    with fake_cuda.device() as mode:

        def to_device(*args, own=pipeline.to_device):
            with sync:
                return own(*args)

        with mock.patch.object(pipeline, "to_device", to_device):
            call = Call(mode, in_process.groups(intra=2), problem, kernel="aten", store=keep)
        assert sync.uploads == call.size
        kept = [StoredResults(Keeper(), "layer") for _ in range(call.size)]
        with fake_cuda.running(mode), sync:
            call.forward(kept)
            judge(*both(call, kept), problem)
        assert sync.uploads == call.size


@pytest.mark.parametrize(
    "layout",
    ["contiguous", "zigzag", "striped", DOCUMENT_ZIGZAG],
    ids=["contiguous", "zigzag", "striped", "documents"],
)  # fmt: skip
def test_shards_are_cut_and_joined_without_waiting(layout):
    layout = mb.layout.make(layout, cp_size=4) if isinstance(layout, str) else layout
    with fake_cuda.device() as mode, fake_cuda.running(mode), NoSync():
        x = torch.empty(2, 64, 3, device="cuda")
        parts = [mb.shard(x, layout, rank, dim=-2) for rank in range(4)]
        for part in parts:
            is_one(part, (2, 16, 3), torch.float32)
        is_one(mb.unshard(parts, layout, dim=1), (2, 64, 3), torch.float32)
