"""Local kernels: the reference against the oracle, torch's operators against float64.

The bound for low precision is the stock operator's own error on the same inputs: a kernel may
differ from float64 a few times as much as torch's scaled_dot_product_attention.
"""

import math
import types
from contextlib import nullcontext
from unittest import mock

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import HEADS, MASKS, assert_exact, run, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_burst as mb
from megatron_burst.kernels import flash, registry
from megatron_burst.kernels.aten import AtenKernel, TileWork, stand_in
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.operators import CpuFlash, TileVisibility
from megatron_burst.kernels.operators_cuda import CudaCudnn, CudaFlash
from megatron_burst.kernels.packages import NotInstalled
from megatron_burst.kernels.tile_grid import tile_grid
from megatron_burst.layout import Span
from megatron_burst.masks import (
    Causal,
    Dilated,
    Documents,
    Full,
    Mask,
    Prefix,
    SameSpan,
    Tree,
    Window,
)  # fmt: skip
from megatron_burst.masks.tiles import Tile

LOW = [torch.float32, torch.bfloat16, torch.float16]


class Blind(Mask):
    """Odd queries see nothing; even queries see earlier keys."""

    def visible(self, q, k):
        return (q >= k) & (q % 2 == 0)

    def cover(self, q_span, k_span):
        return mb.masks.Cover.PARTIAL


def test_the_oracle_is_torch_attention_with_autograd():
    """The only test of the oracle itself, against torch's own attention."""
    q, k, v, dout = tensors(10, 2, (4, 2), (5, 3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    first = [x.permute(1, 2, 0, 3) for x in leaves]
    out = F.scaled_dot_product_attention(*first, is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    truth = oracle.attention(q, k, v, dout, oracle.visible("causal", 10))
    assert_exact((out, *torch.autograd.grad(out, leaves, dout)), (truth[0], *truth[2:]))


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("widths", [(4, 4), (5, 3), (3, 5)], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
def test_float64_is_the_oracle(name, mask, heads, widths, travelling):
    inputs = tensors(12, 2, heads, widths)
    truth = oracle.attention(*inputs, oracle.visible(mask, 12))
    got = run(name, MASKS[mask], *inputs, travelling=travelling)
    assert_exact(got, (truth[0], *truth[2:]))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
def test_the_scale_applies_to_scores_and_gradients(name, scale):
    inputs = tensors(8, 1, (2, 1), (4, 4))
    truth = oracle.attention(*inputs, oracle.visible("causal", 8), scale)
    assert_exact(run(name, Causal(), *inputs, scale=scale), (truth[0], *truth[2:]))


@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
def test_tensors_need_not_be_contiguous(name):
    inputs = tensors(8, 2, (4, 2), (4, 4))
    strided = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    for got, wanted in zip(
        run(name, Causal(), *strided), run(name, Causal(), *inputs), strict=True
    ):
        assert oracle.worst(got, wanted) < 1e-14


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
def test_blind_rows_of_the_reference(travelling):
    inputs = tensors(9, 2, (4, 2), (4, 3))
    seen = oracle.visible("causal", 9)
    seen[1::2] = False
    truth = oracle.attention(*inputs, seen)
    got = run("reference", Blind(), *inputs, travelling=travelling)
    assert_exact(got, (truth[0], *truth[2:]))
    assert not got[0][1::2].any()
    assert not got[1][1::2].any()


@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)])
def test_gradients_nobody_wants_are_left_alone(name, wanted):
    q, k, v, dout = tensors(8, 1, (2, 1), (4, 3))
    kernel = registry.make(name, q, k, v)
    spans = [Span(0, 1, 8)]
    work = kernel.works_for(Causal(), [(spans, spans)])[0]
    out, lse, *truth = oracle.attention(q, k, v, dout, oracle.visible("causal", 8))
    rows = Rows(q, dout, lse, (dout * out).sum(dim=-1), out)
    sums = [
        torch.zeros_like(x) if want else None for x, want in zip((q, k, v), wanted, strict=True)
    ]
    kernel.backward(rows, k, v, work, Scoring(0.5), *sums)
    for got, right in zip(sums, truth, strict=True):
        assert got is None or oracle.worst(got, right) < 1e-11


@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
def test_backward_adds_to_what_is_there(name):
    q, k, v, dout = tensors(8, 1, (2, 1), (4, 3))
    kernel = registry.make(name, q, k, v)
    work = kernel.works_for(Full(), [([Span(0, 1, 8)], [Span(0, 1, 8)])])[0]
    out, lse, *truth = oracle.attention(q, k, v, dout, oracle.visible("full", 8))
    sums = [torch.full_like(x, 7.0) for x in (q, k, v)]
    kernel.backward(
        Rows(q, dout, lse, (dout * out).sum(dim=-1), None), k, v, work, Scoring(0.5), *sums
    )
    for got, right in zip(sums, truth, strict=True):
        assert oracle.worst(got - 7.0, right) < 1e-11


WHOLE, TRIANGLE = torch.ones(12, 12, dtype=torch.bool), torch.ones(12, 12).tril().bool()
SEVERAL = TRIANGLE.clone()
SEVERAL[5:, :5] = False
UNSEEING = TRIANGLE & (torch.arange(12) % 3 > 0)[:, None]
SUMS = {  # tiles of several shapes, rows that see nothing
    "full": (Full(), WHOLE),
    "causal": (Causal(), TRIANGLE),
    "documents": (mb.masks.Documents([0, 5, 12]) & Causal(), SEVERAL),
    "rows that see nothing": (mb.masks.Dense(UNSEEING.numpy()), UNSEEING),
}


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("widths", [(4, 4), (5, 3), (3, 5)], ids=str)
@pytest.mark.parametrize("case", SUMS)
def test_new_sums_are_written_whatever_they_contain(case, widths, travelling):
    mask, seen = SUMS[case]
    inputs = tensors(12, 2, (4, 2), widths)
    truth = oracle.attention(*inputs, seen)
    got = run("aten", mask, *inputs, travelling=travelling, new=True)
    assert_exact(got, (truth[0], *truth[2:]))


@pytest.mark.parametrize("new", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("case", SUMS)
def test_only_the_sums_that_are_new_are_written(case, new):
    q, k, v, dout = tensors(12, 1, (2, 1), (4, 3))
    (mask, seen), kernel = SUMS[case], registry.make("aten", q, k, v)
    work = kernel.works_for(mask, [([Span(0, 1, 12)], [Span(0, 1, 12)])])[0]
    out, lse, *truth = oracle.attention(q, k, v, dout, seen)
    rows = Rows(q, dout, lse, (dout * out).sum(dim=-1), out)
    sums = [torch.full_like(x, math.nan if n else 7.0) for x, n in zip((q, k, v), new, strict=True)]
    kernel.backward(rows, k, v, work, Scoring(0.5), *sums, new=tuple(map(bool, new)))
    for got, right, n in zip(sums, truth, new, strict=True):
        assert oracle.worst(got - 7.0 * (not n), right) < 1e-11


def test_a_tile_of_every_second_row_leaves_the_other_rows_of_new_sums_empty():
    q, k, v, dout = tensors(5, 1, (2, 1), (4, 4))
    kernel, work = (
        registry.make("aten", q, k, v),
        [TileWork.of(Tile(slice(0, 5, 2), slice(0, 5, 1)))],
    )
    out, lse = torch.full_like(q, math.nan), torch.full((5, 1, 2), math.nan).double()
    kernel.forward(q, k, v, work, Scoring(0.5), out, lse, new=True)
    assert not out[1::2].any()
    assert (lse[1::2] == -math.inf).all()
    assert out[::2].isfinite().all()
    sums = [torch.full_like(x, math.nan) for x in (q, k, v)]
    rows = Rows(q, dout, lse, lse.clamp_min(0.0), out)
    kernel.backward(rows, k, v, work, Scoring(0.5), *sums, new=(True, True, True))
    assert not sums[0][1::2].any()
    assert all(x.isfinite().all() for x in sums)


def test_new_sums_are_empty_if_there_is_no_call():
    q, k, v, dout = tensors(8, 1, (2, 1), (4, 3))
    kernel, sums = registry.make("aten", q, k, v), [torch.full_like(x, math.nan) for x in (q, k, v)]
    out, lse = (torch.full(shape, math.nan).double() for shape in ((8, 1, 2, 3), (8, 1, 2)))
    kernel.forward(q, k, v, (), Scoring(0.5), out, lse, new=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    kernel.backward(Rows(q, dout, lse, lse), k, v, (), Scoring(0.5), *sums, new=(True, True, True))
    assert not any(x.any() for x in sums)


# --- keys that are no numbers ---------------------------------------------------------------


def beyond(tensors, rows):
    """Return the `rows` of each tensor that are not finite."""
    return [{r for r in rows if not x[r].isfinite().all()} for x in tensors]


@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
def test_rows_that_do_not_see_a_bad_key(name, bad, what):
    """As in docs/kernels.md: no row beyond the tile of the key is affected.

    Within the tile, dq is, and out if the value is bad, because 0 times NaN is NaN.
    """
    q, k, v, dout = tensors(600, 1, (1, 1), (8, 8), torch.float32)
    {"key": k, "value": v}[what][500] = bad
    out, dq, *_ = run(name, Causal(), q, k, v, dout, travelling=True)
    tile, hidden = set(range(600)), set(range(500))
    if name == "aten":
        tiles = registry.make(name, q, k, v).cutter.tiles(Causal(), *[[Span(0, 1, 600)]] * 2)
        tile = {r for t in tiles if t.columns.start <= 500 < t.columns.stop
                for r in range(t.rows.start, t.rows.stop)}  # fmt: skip
        assert len(tile & hidden) < 200
    wanted = [tile & hidden if what == "value" else set(), tile & hidden]
    assert beyond((out, dq), hidden) == wanted


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["reference", "aten"])
def test_a_key_that_nobody_sees_may_be_anything(name, bad):
    """Padding at the end, under a mask that needs a table."""
    q, k, v, dout = tensors(64, 1, (2, 1), (8, 8))
    table = np.tri(64, dtype=bool) & (np.random.default_rng(0).random((64, 64)) < 0.5)
    table[:, 0], table[:, 50:] = True, False
    k[50:], v[50:] = bad, bad
    got = run(name, mb.masks.Dense(table), q, k, v, dout, travelling=True)
    k[50:], v[50:] = 0, 0
    truth = oracle.attention(q, k, v, dout, torch.from_numpy(table))
    assert_exact(got, (truth[0], *truth[2:]))


# --- low precision -------------------------------------------------------------------------


def stock(q, k, v, dout, causal):
    """Return out, dq, dk, dv of torch's own operator in the dtype of the inputs."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    first = [x.permute(1, 2, 0, 3) for x in leaves]
    out = F.scaled_dot_product_attention(*first, is_causal=causal, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["reference", "aten", "flex"])
def test_low_precision_errs_no_more_than_torch(name, dtype, mask, heads, travelling):
    inputs = tensors(96, 1, heads, (32, 32), dtype)
    truth = oracle.attention(*inputs, oracle.visible(mask, 96))
    got = run(name, MASKS[mask], *inputs, travelling=travelling)
    theirs = stock(*inputs, causal=mask == "causal")
    for part, mine, other, right in zip(
        ("out", "dq", "dk", "dv"), got, theirs, (truth[0], *truth[2:]), strict=True
    ):
        mine, other = oracle.worst(mine, right), oracle.worst(other, right)
        assert mine <= 3 * other + 1e-7, f"{part}: {mine:.3g}, torch {other:.3g}"


@pytest.mark.parametrize("size", [1e-25, 1e-30, 1e20])
@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
def test_tiny_and_huge_gradients_keep_their_accuracy(size, travelling):
    """float32 rows of |dO| about 1e-25: their squares underflow."""
    inputs = tensors(16, 1, (2, 2), (8, 8), torch.float32, size)
    truth = oracle.attention(*inputs, oracle.visible("causal", 16))
    got = run("aten", Causal(), *inputs, travelling=travelling)
    for mine, right in zip(got[1:], truth[2:], strict=True):
        assert oracle.worst(mine, right) < 1e-5 * right.abs().max().item()


# --- the stand-in for an output that did not travel ----------------------------------------


@given(
    st.sampled_from([1e-30, 1e-25, 1e-10, 1.0, 1e10, 1e25]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
def test_the_stand_in_gives_delta(size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    dout = (torch.randn(4, 1, 2, 8, generator=generator, dtype=torch.float64) * size).to(dtype)
    out = torch.randn(4, 1, 2, 8, generator=generator, dtype=torch.float64)
    delta = (dout.double() * out).sum(dim=-1).to(dtype)
    got = (dout.double() * stand_in(dout, delta).double()).sum(dim=-1)
    bound = 1e-5 if dtype == torch.float32 else 1e-13
    assert oracle.worst(got / size, delta.double() / size) < bound


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
def test_gradients_of_large_float16_values_are_as_good_as_torch_has_them(travelling):
    """Gradients with one large element: a stand-in in their direction would need 1.3e5."""
    q, k, v, dout = tensors(16, 1, (2, 2), (64, 64), torch.float16)
    v, dout = 3e4 + 16 * v, torch.full_like(dout, 0.1)
    dout[..., 0] = 1
    truth = oracle.attention(q, k, v, dout, oracle.visible("causal", 16))
    got = run("aten", Causal(), q, k, v, dout, travelling=travelling)
    theirs = stock(q, k, v, dout, causal=True)
    for mine, other, right in zip(got[1:], theirs[1:], truth[2:], strict=True):
        assert oracle.worst(mine, right) <= 3 * oracle.worst(other, right)


@given(st.floats(1, 65504), st.floats(1e-4, 1), st.integers(0, 2**31))
def test_a_stand_in_in_float16_is_no_larger_than_the_output_may_be(size, flat, seed):
    """For any gradient of a row: finite, delta to half a unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(4, 1, 2, 16, generator=generator) * flat
    dout[..., 0] = 1
    dout = dout.half()
    out = (size * (dout.sign() + 1e-3 * torch.randn(dout.shape, generator=generator))).half()
    out = out.clamp(-65504, 65504)
    delta = (dout.float() * out.float()).sum(dim=-1)
    got = (dout.double() * stand_in(dout, delta).double()).sum(dim=-1)
    assert oracle.worst(got / delta, torch.ones_like(delta)) <= 2**-11 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stand_in_of_a_zero_row_is_zero(dtype):
    dout = torch.zeros(2, 1, 1, 4, dtype=dtype)
    dout[1, 0, 0, 2] = 5.0
    got = stand_in(dout, torch.tensor([[[0.0]], [[10.0]]]))
    assert got.dtype == dtype
    assert torch.equal(got[0], torch.zeros(1, 1, 4, dtype=dtype))
    assert got[1].flatten().tolist() == [0.0, 0.0, 2.0, 0.0]


# --- which kernel serves what --------------------------------------------------------------


def test_the_table_and_auto():
    q, k, v, _ = tensors(4, 1, (2, 2), (4, 4))
    assert set(registry.KERNELS) == {
        "aten", "aten_cudnn", "flash3", "flash4", "flex", "triton", "reference",
    }  # fmt: skip
    assert registry.make("auto", q, k, v).name == "aten"
    assert registry.make("reference", q, k, v).name == "reference"


@pytest.mark.parametrize(
    ("capability", "cudnn", "mask", "order"),
    [
        ((9, 0), 91900, Causal(), "flash3 aten_cudnn aten triton"),
        ((10, 3), 91600, Full(), "flash4 aten_cudnn aten triton"),
        ((9, 0), 91500, Causal(), "flash3 aten triton"),
        ((10, 0), None, Causal(), "flash4 aten triton"),
        ((8, 0), 91900, Causal(), "aten triton"),
        ((12, 0), 91900, Causal(), "aten triton"),
        ((9, 0), 91900, Documents([0, 4, 9]) & Causal(), "flash3 aten triton"),
        ((10, 0), 91900, Documents([0, 4, 9]) & Causal(), "flash4 aten triton"),
        ((9, 0), 91900, Causal() | Prefix(3), "flash3 aten_cudnn aten triton"),
        ((9, 0), 91900, Causal() | SameSpan([(1, 3)]), "flash3 aten triton"),
        ((10, 0), 91900, Causal() | SameSpan([(1, 3)]), "aten triton"),
        ((10, 0), 91900, Tree([4, 3, 3, 4]), "aten triton"),
        ((10, 0), 91900, Window(3, 0), "triton aten"),
        ((9, 0), 91900, Window(3, 0), "triton aten"),
        ((9, 0), 91900, Window(3, 0) & Documents([0, 9]), "triton aten"),
        ((9, 0), 91900, Dilated(2), "triton aten"),
    ],
    ids=str,
)
def test_auto_on_a_gpu(capability, cudnn, mask, order, monkeypatch):
    """The package made for the device first, then torch's own choice.

    Masks that flash kernels cannot compute in a few tiles use the kernel for any mask.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    assert " ".join(registry.automatic(torch.device("cuda:0"), mask)) == order


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, None),
        (NotInstalled("kernel flash3: FlashAttention 3 is not installed; install it"),
         "kernel flash3: FlashAttention 3 is not installed"),
        (ValueError("kernel flash3: it has no parameter q, found 1.0; install another"),
         "kernel flash3: it has no parameter q, found 1.0"),
    ],
)  # fmt: skip
def test_auto_takes_the_package_that_is_installed_and_says_why_not(
    error, words, hopper, monkeypatch
):
    taken = AtenKernel("flash3", CudaFlash())

    def make(device, beside_rings):
        if error:
            raise error
        return taken

    monkeypatch.setitem(registry.KERNELS, "flash3", make)
    with FakeTensorMode():
        x = torch.empty(4, 1, 2, 8, dtype=torch.bfloat16, device="cuda:0")
        kernel = registry.make("auto", x, x, x)
        if error:
            with pytest.raises(ValueError, match=words):
                registry.make("flash3", x, x, x)
    assert kernel.name == ("aten_cudnn" if error else "flash3")
    assert kernel.passed_over == ((words,) if error else ())


def test_auto_takes_what_deterministic_mode_permits(hopper):
    with FakeTensorMode():
        x = torch.empty(4, 1, 2, 8, dtype=torch.bfloat16, device="cuda:0")
        assert registry.make("auto", x, x, x).name == "aten_cudnn"
        torch.use_deterministic_algorithms(True)
        try:
            kernel = registry.make("auto", x, x, x)
        finally:
            torch.use_deterministic_algorithms(False)
    assert kernel.name == "aten"
    assert "kernel aten_cudnn is not deterministic" in kernel.passed_over[-1]


@pytest.mark.parametrize(
    ("capability", "cudnn", "widths", "served"),
    [
        ((8, 0), 90000, (128, 128), True),
        ((8, 0), 90000, (128, 64), True),
        ((9, 0), 91000, (256, 256), True),
        ((9, 0), 90900, (192, 192), False),
        ((9, 0), 91900, (192, 192), False),
        ((9, 0), 91100, (192, 128), True),
        ((10, 3), 91100, (192, 128), True),
        ((9, 0), 91000, (192, 128), False),
        ((8, 0), 91900, (192, 128), False),
        ((9, 0), 91900, (128, 192), False),
        ((10, 0), 91900, (256, 256), False),
        ((9, 0), 91900, (264, 264), False),
    ],
)
def test_widths_that_cudnn_serves(capability, cudnn, widths, served, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    reason = CudaCudnn().unfit(torch.device("cuda:0"), widths)
    assert (reason is None) == served
    assert served or f"got {widths}" in reason


@pytest.mark.skipif(torch.version.cuda is None, reason="slices of fake tensors need torch for CUDA")
@pytest.mark.parametrize(
    ("operator", "pads"),  # forward: v; backward: v, dout and out or its stand-in
    [(CudaFlash(), 1 + 3), (CudaCudnn(), 0), (CpuFlash(), 1 + 3)],
    ids=lambda value: type(value).__name__,
)
def test_values_of_another_width_are_padded_where_the_operator_takes_one(operator, pads, hopper):
    """Widths of multi-head latent attention, (192, 128). `test_flash` tests the packages."""
    shapes, padded = [(4, 192), (4, 192), (4, 128), (4, 128)], []
    count = lambda *args, own=F.pad: padded.append(args) or own(*args)  # noqa: E731
    kernel, spans = AtenKernel("some", operator), [Span(0, 1, 8)]
    with FakeTensorMode(), mock.patch.object(F, "pad", count):
        q, k, v, dout = (
            torch.empty(8, 1, *shape, dtype=torch.bfloat16, device=operator.device)
            for shape in shapes
        )
        assert kernel.refusal(q, k, v) is None
        work = kernel.works_for(Causal(), [(spans, spans)])[0]
        out, lse = empty_result(q, 128)
        kernel.forward(q, k, v, work, Scoring(1.0), out, lse)
        sums = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)]
        rows = Rows(q, dout, lse, lse, out.to(q.dtype))
        kernel.backward(rows, k, v, work, Scoring(1.0), *sums)
    assert len(padded) == pads


@pytest.mark.parametrize("name", ["aten", "aten_cudnn", "flash3", "flash4"])
def test_a_zigzag_rank_attends_to_itself_in_one_call(name, monkeypatch):
    """Both halves form one lower triangle, for operators with and without sequences."""
    operators = {"aten": CudaFlash(), "aten_cudnn": CudaCudnn()}
    if name not in operators:
        loaded = types.SimpleNamespace(windows=True, joins=True, deterministic=True)
        operators[name] = flash.Flash(name, flash.PACKAGES[name], loaded)
    spans = mb.layout.make("zigzag", cp_size=4).spans(1, 64)
    (work,) = AtenKernel(name, operators[name]).works_for(Causal(), [(spans, spans)])[0]
    assert work.tile.triangle
    assert work.tile.shape == (16, 16)


def test_a_zigzag_rank_attends_to_itself_in_two_launches_of_triton():
    """One for tiles below the diagonal, one for tiles on it, like a contiguous shard."""
    for spans in (mb.layout.make("zigzag", cp_size=4).spans(1, 1024), [Span(256, 1, 256)]):
        grid = tile_grid(Causal(), spans, spans, 32, 32)
        assert (len(grid.full), len(grid.partial), len(grid.bits)) == (28, 8, 2)
        assert [len(work.programs) for work in grid.by_rows] == [7, 8]


@pytest.mark.parametrize(
    ("name", "device", "dtype", "width", "words"),
    [
        ("aten_cudnn", "cpu", torch.bfloat16, 8, "aten_cudnn runs on cuda tensors, got cpu"),
        (
            "aten",
            "cuda:0",
            torch.float32,
            8,
            "supports torch.bfloat16, .*, got .*float32",
        ),
        ("aten", "cuda:0", torch.bfloat16, 12, r"widths that are multiples of 8, got \(12, 12\)"),
        ("aten", "cuda:0", torch.bfloat16, 264, "supports widths up to 256, got 264"),
        ("flash", "cpu", torch.float32, 8, "kernel must be one of auto, aten, .*got 'flash'"),
    ],
)
def test_what_a_kernel_cannot_serve_is_refused(name, device, dtype, width, words):
    with FakeTensorMode():
        x = torch.empty(4, 1, 2, width, dtype=dtype, device=device)
        with pytest.raises(ValueError, match=words):
            registry.make(name, x, x, x)


@pytest.mark.parametrize(("name", "refused"), [("aten_cudnn", True), ("aten", False)])
def test_deterministic_mode_refuses_kernels_that_are_not(name, refused):
    with FakeTensorMode():
        x = torch.empty(4, 1, 2, 8, dtype=torch.bfloat16, device="cuda:0")
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(ValueError, match="not deterministic") if refused else nullcontext():
                registry.make(name, x, x, x)
        finally:
            torch.use_deterministic_algorithms(False)
        registry.make(name, x, x, x)


@pytest.mark.parametrize(
    ("operator", "causal", "window"),
    [
        (CudaFlash(), False, None),
        (CudaFlash(), True, None),
        (CudaFlash(), False, (3, 0)),
        (CudaCudnn(), False, None),
        (CudaCudnn(), True, None),
    ],
    ids=lambda value: str(value) if not hasattr(value, "device") else type(value).__name__,
)
def test_cuda_operators_take_the_arguments_we_pass(operator, causal, window):
    """On fake tensors without a device: torch checks the call against the operator's schema."""
    with FakeTensorMode():
        # as dense [s, b, h, d] becomes [b, h, s, d]
        q, k = (
            torch.empty_strided(
                (2, h, 16, 8), (8 * h, 8, 16 * h, 1), dtype=torch.bfloat16, device="cuda:0"
            )
            for h in (4, 2)
        )
        shown = TileVisibility(causal, window=window)
        out, lse = operator.forward(q, k, k, shown, 0.5)
        grads = operator.backward(out, q, k, k, out, lse, shown, 0.5)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 16), torch.float32)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


def test_nothing_visible_is_no_work():
    q, k, v, _ = tensors(4, 1, (2, 2), (4, 4))
    for name in ("reference", "aten"):
        work = registry.make(name, q, k, v).works_for(
            Causal(), [([Span(0, 1, 4)], [Span(4, 1, 4)])]
        )[0]
        assert work is None


def test_lse_is_the_natural_logarithm():
    q = torch.zeros(4, 1, 1, 4)
    kernel = registry.make("aten", q, q, q)
    work = kernel.works_for(Causal(), [([Span(0, 1, 4)], [Span(0, 1, 4)])])[0]
    out, lse = empty_result(q, 4)
    kernel.forward(q, q, q, work, Scoring(1.0), out, lse)
    assert lse.flatten().tolist() == pytest.approx([math.log(n) for n in (1, 2, 3, 4)])
