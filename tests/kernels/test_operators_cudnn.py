"""Strides of the arguments of torch's cuDNN attention, on fake CUDA tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Full

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
    work = kernel.work_for(mask, spans, [Span(0, 1, S)])
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
