"""`csrc/narrow.h`: attention of narrow heads against the formula in float64, beside torch's own."""

import math
import shutil

import pytest
import torch
from csrc_library import as_good_as, error, randn

import megatron_burst as mb
from megatron_burst.kernels import native, registry
from megatron_burst.kernels.operators import CpuFlash, CpuNarrow, Shown
from megatron_burst.layout import Span

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler c++ here to build csrc/ with"
)
FAR = 1 << 40
# Rows, columns, and the band in which rows see columns. More and fewer than there are lanes or rows
# of a block; edges that cross blocks; rows that see nothing.
CASES = {
    "all": (130, 300, FAR, FAR),
    "triangle": (200, 200, FAR, 0),
    "few": (5, 7, FAR, FAR),
    "window": (257, 257, 40, 0),
    "both sides": (300, 400, 5, 60),
    "far off": (90, 200, -80, 140),
    "blind rows": (150, 40, 10, 0),
}


def inputs(s, t, d, heads=(4, 2), spread=1.0):
    """q, k, v, dout [b, h, s, d] in float32."""
    h, g = heads
    shapes = (h, s), (g, t), (g, t), (h, s)
    q, *rest = (randn(2, n, m, d, dtype=torch.float32, seed=i) for i, (n, m) in enumerate(shapes))
    return [q * spread, *rest]


def exact(q, k, v, dout, left, right):
    """out, lse, dq, dk, dv in float64, by a dense matrix."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    ahead = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
    hidden = (ahead < -left) | (ahead > right)
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).masked_fill(hidden, 0)  # NaN in rows that see nothing
    out = weights @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    return [out.detach(), scores.logsumexp(-1).detach(), *(x.nan_to_num() for x in grads)]


def compiled(q, k, v, dout, left, right, vector=0):
    scale = q.shape[-1] ** -0.5
    out, lse = native.narrow_forward(q, k, v, (left, right), scale, vector)
    given = dout, q, k, v, lse, (dout * out).sum(-1)
    return [out, lse, *native.narrow_backward(*given, (left, right), scale, vector)]


def served(vector):
    x = torch.zeros(1, 1, 1, 8)
    try:
        native.narrow_forward(x, x, x, (0, 0), 1.0, vector)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("vector", [0, 4, 8, 16])
@pytest.mark.parametrize("d", [3, 8, 16])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula(built, case, d, vector):
    s, t, *band = CASES[case]
    given = inputs(s, t, d)
    if not served(vector):
        pytest.skip("this processor has no such vectors")
    found = compiled(*given, *band, vector)
    wanted = exact(*given, *band)
    seen = wanted[1] > -math.inf
    assert torch.equal(found[1] > -math.inf, seen)
    assert not found[0][~seen].any()
    found[1], wanted[1] = found[1][seen], wanted[1][seen]
    assert max(map(error, found, wanted)) < 2e-6


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("d", [8, 16])
def test_it_is_as_accurate_as_torch(built, d, spread):
    q, k, v, dout = given = inputs(600, 600, d, (2, 2), spread)
    wanted = exact(*given, FAR, 0)
    stock, causal, scale = CpuFlash(), Shown(causal=True), d**-0.5
    out, lse = stock.forward(q, k, v, causal, scale)
    torch_has = [out, lse, *stock.backward(dout, q, k, v, out, lse, causal, scale)]
    for mine, theirs, right in zip(compiled(*given, FAR, 0), torch_has, wanted, strict=True):
        as_good_as(mine, theirs, right, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(built, dtype):
    given = [x.to(dtype) for x in inputs(130, 130, 8)]
    found, wanted = compiled(*given, 40, 0), compiled(*(x.float() for x in given), 40, 0)
    assert all(x.dtype == torch.float32 for x in found)
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs.double()) < 1e-6


def test_scores_far_from_zero_and_a_nan(built):
    q, *_ = given = inputs(100, 100, 8)
    q *= 300  # scores of a thousand: exp of them has no float
    assert max(map(error, compiled(*given, FAR, 0), exact(*given, FAR, 0))) < 1e-4
    q[0, 1, 70, 2] = math.nan
    out, lse, *_ = compiled(*given, FAR, 0)
    bad = out.isnan().any(-1) | lse.isnan()
    assert bad.nonzero().tolist() == [[0, 1, 70]]


def test_strides_and_scale_are_those_of_the_tensors(built):
    q, k, v, _ = given = inputs(70, 70, 8)
    strided = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in given]
    assert not any(x.is_contiguous() for x in strided)
    for found, wanted in zip(compiled(*strided, 9, 0), compiled(*given, 9, 0), strict=True):
        assert error(found, wanted.double()) < 1e-6
    double, _ = native.narrow_forward(2 * q, k, v, (9, 0), 0.1)
    assert error(double, native.narrow_forward(q, k, v, (9, 0), 0.2)[0].double()) < 1e-6


def test_what_it_does_not_serve_is_refused(built, monkeypatch):
    def refusal(d, dtype=torch.float32):
        x = torch.zeros(4, 1, 2, d, dtype=dtype)
        with pytest.raises(ValueError, match="kernel narrow ") as found:
            registry.make("narrow", x, x, x)
        assert registry.make("auto", x, x, x).name == "aten"
        return str(found.value)

    assert "takes widths up to 16, got 17" in refusal(17)
    assert "torch.float16, got torch.float64" in refusal(8, torch.float64)
    monkeypatch.setattr(native, "FILE", "there is none")
    assert "needs the compiled library of csrc/, and there is no there is none: `make csrc`" in (
        refusal(8)
    )


BAD = {
    "k has other heads": (lambda q, k, v: (q, k[:, :1].expand(2, 3, 9, 8), v), "other sizes"),
    "too wide": (lambda q, k, v: [torch.zeros(1, 1, 4, 17)] * 3, "widths are 1 to 16, got 17"),
    "heads do not divide": (lambda q, k, v: (q[:, :3], k, v), "must divide"),
    "mixed": (lambda q, k, v: (q.bfloat16(), k, v), "another dtype"),
    "float64": (lambda q, k, v: (q.double(), k, v), "float32 accumulates"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_operator_touches_no_memory_that_is_not_its(built, case):
    change, words = BAD[case]
    q, k, v, _ = inputs(9, 9, 8)
    with pytest.raises(RuntimeError, match=words):
        native.narrow_forward(*change(q, k, v), (9, 0), 1.0)


def test_vectors_that_there_are_not(built):
    with pytest.raises(RuntimeError, match=r"vector must be 0, 4, 8 or 16, and at most .*got 5"):
        compiled(*inputs(9, 9, 8), 9, 0, vector=5)


def test_auto_takes_it_for_causal_masks_and_windows(built):
    x = torch.zeros(8, 1, 2, 8)
    for mask, name in {
        mb.masks.Causal(): "narrow",
        mb.masks.Window(3, 0): "narrow",
        mb.masks.Causal() & mb.masks.Window(3, 5): "narrow",
        mb.masks.Causal() | mb.masks.Window(3, 5): "aten",
        mb.masks.Documents([0, 4, 8]) & mb.masks.Causal(): "narrow",
        mb.masks.Dilated(2) & mb.masks.Causal(): "aten",
    }.items():
        assert registry.make("auto", x, x, x, mask=mask).name == name
    assert isinstance(registry.make("auto", x, x, x).operator, CpuNarrow)


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("spans", [[Span(0, 1, 60), Span(180, 1, 60)], [Span(1, 4, 120)]], ids=str)
def test_shards_of_zigzag_and_striped_order(built, spans, window):
    """A rank's own shard, as the ring computes it, beside torch's operator."""
    q, k, v, dout = (x.permute(2, 0, 1, 3).contiguous() for x in inputs(120, 120, 8))
    mask = mb.masks.Window(window, 0) if window else mb.masks.Causal()
    results = []
    for name in ("narrow", "aten"):
        kernel = registry.make(name, q, k, v)
        work = kernel.work_for(mask, spans, spans)
        out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf)
        scoring = mb.kernels.base.Scoring(8**-0.5)
        kernel.forward(q, k, v, work, scoring, out, lse)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        rows = mb.kernels.base.Rows(q, dout, lse, (dout * out).sum(-1), out)
        kernel.backward(rows, k, v, work, scoring, *grads)
        results.append([out, lse, *grads])
    assert max(map(error, results[0], [x.double() for x in results[1]])) < 2e-6
