"""Saved tensors moved by hooks: each storage once, and only activations."""

import gc

import pytest
import torch
from torch import nn

import megatron_burst as mb


def memory():
    return mb.HostMemory(2**22, strict=True, device="cpu")


def same(found, wanted):
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def saving(host, fraction=1.0, **given):
    """Return gradients and bytes of a function that saves views of a storage, outputs, weights."""
    torch.manual_seed(1)
    w = nn.Parameter(torch.randn(6, 18))
    x = torch.randn(10, 6, requires_grad=True)

    def run():
        q, k, v = (x.sin() @ w).chunk(3, -1)  # slices of columns of one storage
        return ((q * k).tanh() * v).exp().t().contiguous().sum()

    wanted = torch.autograd.grad(run(), (x, w))
    with host.saved(fraction, **{"min_bytes": 0, **given}):
        out = run()
    held = host.used
    for again in (True, False):
        found = torch.autograd.grad(out, (x, w), retain_graph=again)
        assert same(found, wanted)
    return held


def test_views_of_one_storage_travel_once():
    host = memory()
    # sin's argument and result, q, k and v as one, tanh's and exp's results.
    elements = 10 * (6 + 6 + 18 + 6 + 6)
    assert saving(host) == 4 * elements
    assert host.bytes_out == 4 * elements
    assert host.bytes_back == 2 * 4 * elements
    gc.collect()
    assert (host.used, host.frames) == (0, 0)
    half = 4 * (5 * (6 + 6 + 6 + 6) + 90)
    assert saving(host, 0.5) == half


def test_what_hooks_leave():
    host = memory()
    assert saving(host, 0.0) == 0
    assert saving(host, min_bytes=10 * 18 * 4) == 0  # q, k and v are 240 bytes each
    assert saving(host, keep=lambda t: t.shape == (10, 6)) == 0
    assert host.bytes_out == 0


def test_a_few_columns_of_a_large_buffer_stay():
    host, buffer = memory(), torch.randn(4, 4096)
    x = torch.randn(4, 2, requires_grad=True)
    with host.saved(min_bytes=0):
        (x * buffer[:, 5:7]).sum().backward()
    assert host.bytes_out == 0


def test_a_saved_tensor_changed_in_place_is_noticed():
    host = memory()
    x = torch.randn(8, requires_grad=True)
    y = x * 2
    with host.saved(min_bytes=0):
        z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_blocks_inside_a_frame_belong_to_it():
    host = memory()
    x = torch.randn(8, requires_grad=True)
    with host.frame():
        with host.saved(min_bytes=0):
            y = x.sin()
        with host.saved(min_bytes=0):
            y = y.tanh()
    assert host.frames == 1
    with host.saved(min_bytes=0):
        y = y.exp()
    assert host.frames == 2
    y.sum().backward()
    assert (host.used, host.frames) == (0, 0)
