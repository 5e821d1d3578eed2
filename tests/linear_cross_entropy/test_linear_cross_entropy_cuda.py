"""LM head with CUDA's behaviour: host synchronizations, and the fallbacks for older torch.

The tests use fake CUDA tensors, which have no values, and skip the Triton kernels.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.linear_cross_entropy import function, rows, tiled_loop
from megatron_burst.linear_cross_entropy.formula import Formula
from megatron_burst.linear_cross_entropy.function import LinearCrossEntropy
from megatron_burst.linear_cross_entropy.rows import Columns
from megatron_burst.linear_cross_entropy.split import Split

TOKENS, WIDTH, VOCABULARY = 24, 16, 64
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="slices of fake tensors need torch for CUDA"
)


class Log(TorchDispatchMode):
    """Names of all operators and host synchronizations; reading a number is `answer`."""

    def __init__(self, answer=True):
        super().__init__()
        self.answer, self.names = answer, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").removesuffix(".default")
        kwargs = kwargs or {}
        if name == "_to_copy" and str(kwargs.get("device")) == "cpu":
            name = "copy to host" if kwargs.get("non_blocking") else "waits: copy to host"
        if name in ("nonzero", "_local_scalar_dense"):
            assert name == "_local_scalar_dense", "the device must catch up"
            name = f"waits: read on {args[0].device.type}"
        self.names.append(name)
        return self.answer if name.startswith("waits: read") else func(*args, **kwargs)

    @property
    def waits(self):
        return [name for name in self.names if name.startswith("waits")]


@pytest.fixture
def log(monkeypatch):
    """Return a log with CUDA events, and an autograd engine that needs all gradients once."""
    actual = Log()

    class Event:
        def record(self):
            actual.names.append("record")

        def synchronize(self):
            actual.names.append("waits: event")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(rows, "_has_triton", lambda z: False)
    monkeypatch.setattr(tiled_loop, "adds_wide", lambda device: True)
    monkeypatch.setattr(function, "_needs_weight_gradient", lambda ctx: True)
    monkeypatch.setattr(function, "_keeps_graph", lambda: False)
    return actual


def tensors(dtype=torch.bfloat16):
    """Return hidden, weight, labels and weights as the autograd function takes them."""
    shapes = (TOKENS, WIDTH), (VOCABULARY, WIDTH)
    hidden, weight = (torch.empty(s, dtype=dtype, device="cuda:0") for s in shapes)
    labels = torch.zeros((1, TOKENS), dtype=torch.int64, device="cuda:0")
    return hidden, weight, labels, torch.ones((1, TOKENS), device="cuda:0")


def both_passes(log, single_pass):
    """Return forward operators, backward operators and gradients of one call with two tiles."""
    head = tiled_loop.Head(
        Formula(VOCABULARY), Split(), Columns(0, VOCABULARY), -100, TOKENS // 2, torch.float32
    )
    ctx = SimpleNamespace(needs_input_grad=(True, True), set_materialize_grads=lambda on: None)
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    arguments = tensors()
    with log, torch.no_grad():
        loss, _ = LinearCrossEntropy.forward(ctx, *arguments, head, single_pass, None)
        forward = log.names.copy()
        gradients = LinearCrossEntropy.backward(ctx, torch.empty_like(loss), None)
    for gradient, tensor in zip(gradients, arguments[:2], strict=False):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        assert gradient.device == tensor.device
    return forward, log.names[len(forward) :]


@needs_cuda_build
def test_a_single_pass_reads_one_flag_while_the_device_scales(log):
    with FakeTensorMode():
        forward, backward = both_passes(log, True)
    assert not [name for name in forward if name.startswith("waits")]
    assert log.waits == ["waits: event", "waits: read on cpu"]
    order = [backward.index(name) for name in ("copy to host", "record", "mul_.Tensor", *log.waits)]
    assert order == sorted(order)
    assert backward[: order[-2]].count("mul_.Tensor") == 2  # both gradients


@needs_cuda_build
def test_another_gradient_than_forward_expected_is_computed(log):
    log.answer = False
    with FakeTensorMode(), pytest.warns(UserWarning, match="not a multiple of loss_mask"):
        _, backward = both_passes(log, True)
    assert log.waits == ["waits: event", "waits: read on cpu"]
    assert [name for name in backward if "mm" in name][-1] == "addmm.dtype_out"


@needs_cuda_build
def test_recompute_reads_nothing(log):
    with FakeTensorMode():
        both_passes(log, False)
    assert log.waits == []


@needs_cuda_build
@pytest.mark.parametrize(
    ("wide", "sums"),
    [(False, "mm.dtype_out"), (True, "addmm.dtype_out")],
)
def test_weight_gradients_add_up_in_float32(wide, sums, log, monkeypatch):
    monkeypatch.setattr(tiled_loop, "adds_wide", lambda device: wide)
    with FakeTensorMode():
        forward, _ = both_passes(log, True)
    assert [name for name in forward if "dtype_out" in name] == 2 * [sums]


class FloatProducts(TorchDispatchMode):
    """mm(out_dtype=float32) written out by hand, which the CPU does not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.dtype_out:
            a, b, dtype = args
            assert dtype == torch.float32
            return kwargs["out"].copy_((a.double()[:, :, None] * b.double()).sum(1))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows_at_once", [1, 5, 13, 100])
def test_products_that_are_added_by_panels(rows_at_once, monkeypatch):
    monkeypatch.setattr(tiled_loop, "adds_wide", lambda device: False)
    monkeypatch.setattr(tiled_loop, "SUMMAND_BYTES", rows_at_once * 3 * 4)
    make = torch.Generator().manual_seed(2)
    z, hidden = (torch.randn(7, width, generator=make).bfloat16() for width in (13, 3))
    start = torch.randn(13, 3, generator=make)
    truth = start.double() + (z.double()[:, :, None] * hidden.double()[:, None]).sum(0)
    with FloatProducts():
        tiled_loop.weight_gradient_(start, z, hidden)
    assert (start.double() - truth).abs().max() < 1e-6
