"""Arguments of torch's cuDNN attention, on fake CUDA tensors: strides, and many sequences."""

import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import Call, Problem
from no_sync import NoSync
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_burst as mb
from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Full
from megatron_burst.plugins.testing import in_process

BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
S, H, D = 32, 8, 16


class Calls(TorchDispatchMode):
    """Records the strides of (q, out, dout), and of the statistics, of every cuDNN backward."""

    def __init__(self):
        super().__init__()
        self.strides, self.stats = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is BACKWARD:
            dout, q, _, _, out, stats = args[:6]
            self.strides.append((q.stride(), out.stride(), dout.stride()))
            self.stats.append(stats.stride())
        return func(*args, **(kwargs or {}))


def backward(calls, mask, spans, q, out, dout, values=D):
    """Run one backward over keys of 4 heads; out None: side "query"."""
    k = torch.empty(S, q.shape[1], 4, D, dtype=q.dtype, device=q.device)
    v = k[..., :values]
    rows = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    totals = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)]
    kernel = registry.make("aten_cudnn", q, k, v)
    work = kernel.works_for(mask, [(spans, [Span(0, 1, S)])])[0]
    with calls:
        kernel.backward(Rows(q, dout, rows, rows, out), k, v, work, Scoring(1.0), *totals)


@pytest.mark.skipif(torch.version.cuda is None, reason="slices of fake tensors need torch for CUDA")
@pytest.mark.parametrize("batch", [1, 2])
def test_strides_of_out_and_dout_follow_from_those_of_q(batch, monkeypatch):
    """torch 2.9 to 2.14 caches a graph by q, k and v only: equal q must mean equal out and dout."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    calls, whole = Calls(), [Span(0, 1, S)]
    halves = [Span(0, 1, S // 2), Span(S, 1, S // 2)]  # two tiles, which are slices of rows
    with FakeTensorMode():
        chunk = torch.empty(S, batch, H // 2, D, dtype=torch.bfloat16, device="cuda:0")
        # a head chunk that is still a part of the tensor of a call
        large = torch.empty(S, batch, H, D, dtype=chunk.dtype, device="cuda:0")[:, :, : H // 2]
        for q in (chunk, large):
            for dout in (chunk, large):
                for out in (chunk, large, None):
                    backward(calls, Causal(), whole, q, out, dout)
                    backward(calls, Causal(), halves, q, out, dout)
        for dout in (chunk, large):
            backward(calls, Full(), whole, chunk, None, dout[..., :8], values=8)
    assert len(calls.strides) == 12 + 2 * 12 + 2
    narrow = [{out, dout} for _, out, dout in (calls.strides.pop(), calls.strides.pop())]
    assert narrow == [{(H // 2 * 8, 8, batch * H // 2 * 8, 1)}] * 2
    found = {}
    for q, out, dout in calls.strides:
        found.setdefault(q, set()).update((out, dout))
    # [b, h, s, d] of dense [s, b, h, d], whatever q is a slice of
    dense = {(H // 2 * D, D, batch * H // 2 * D, 1)}
    assert set(found) == {*dense, (H * D, D, batch * H * D, 1)}
    assert all(strides == dense for strides in found.values())


@pytest.mark.skipif(torch.version.cuda is None, reason="slices of fake tensors need torch for CUDA")
@pytest.mark.parametrize("rows", [1, 2, S])
def test_statistics_are_dense(rows, monkeypatch):
    """[b, h, s, 1], also of one row, which torch calls contiguous with any strides.

    On an H100 cuDNN refused a last stride that was not 1.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    calls = Calls()
    with FakeTensorMode():
        q = torch.empty(rows, 1, H, D, dtype=torch.bfloat16, device="cuda:0")
        backward(calls, Full(), [Span(0, 1, rows)], q, None, q)
    assert calls.stats == [(H * rows, rows, 1, 1)]


FORWARD, BACKWARD_OF_MANY = "_cudnn_attention_forward", "_cudnn_attention_backward"
MANY = pytest.mark.skipif(
    not fake_cuda.READY
    or not hasattr(torch.ops.aten, FORWARD)
    or "seqused_k" not in str(getattr(torch.ops.aten, FORWARD).default._schema),
    reason="needs torch 2.14 for CUDA",
)


class Many(TorchDispatchMode):
    """Records the calls with many sequences: (name, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in (FORWARD, BACKWARD_OF_MANY):
            self.calls.append((name, args))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def many():
    """Gives fake tensors the shapes, strides and dtypes of results that torch 2.14 allocates."""

    def forward(q, k, v, *given, **options):
        unused = [torch.empty(0, device=q.device) for _ in range(5)]
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
        return out, lse, *unused[:2], 0, 0, *unused[2:]

    def backward(dout, q, k, v, out, lse, *given, **options):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl(FORWARD, forward)
    library.impl(BACKWARD_OF_MANY, backward)
    yield Many()
    library._destroy()


@MANY
@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("head_chunks", [1, 2])
def test_packed_documents_of_two_ranks(layout, side, head_chunks, many):
    """Sizes that torch requires, and no wait of the host; head chunks are slices of tensors."""
    ends = np.cumsum([0, 200, 40, 800, 1, 399, 560])
    layout = mb.layout.make(layout, cp_size=2)
    with fake_cuda.device(cudnn=92501) as mode:
        problem = Problem(1000, heads=4, kv_heads=2, width=64, value_width=64)
        call = Call(
            mode, in_process.groups(intra=2), problem, kernel="aten_cudnn", side=side,
            algorithm="ring", layout=layout, mask=mb.masks.Documents(ends) & Causal(),
            head_chunks=head_chunks,
        )  # fmt: skip
        with fake_cuda.running(mode), NoSync(), many:
            context, outs = call.forward()
            call.backward(context)
    assert {name for name, _ in many.calls} == {FORWARD, BACKWARD_OF_MANY}
    for name, given in many.calls:
        tensors, given = (given[:3], given[3:]) if name == FORWARD else (given[:6], given[6:])
        q, k, v = tensors[:3] if name == FORWARD else tensors[1:4]
        assert q.shape == (1024, 4 // head_chunks, 64)
        assert k.shape == v.shape == (1024, 2 // head_chunks, 64)
        assert all(x.stride(2) == 1 and x.stride(0) % 8 == 0 for x in (q, k, v))
        rows, columns, *most = given[1:5] if name == FORWARD else given[3:7]
        assert rows.dtype == columns.dtype == torch.int32
        assert rows.shape == columns.shape
        assert (len(rows) - 1, *most) in {(2, 1024, 1024), (8, 256, 256)}
        if name == BACKWARD_OF_MANY:
            dout, _, _, _, out, lse = tensors
            assert out.is_contiguous()
            assert dout.is_contiguous()
            assert (dout.shape, out.shape) == (q.shape, q.shape)
            assert (lse.shape, lse.dtype) == ((q.shape[1], 1024), torch.float32)
            assert lse.is_contiguous()
    assert all(out.shape == (1000, 1, 4, 64) for out in outs)
