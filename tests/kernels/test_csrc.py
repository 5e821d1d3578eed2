"""`csrc/`: each compiled operator against its formula in float64, on the CPU and as a warp."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import csrc_library
import pytest
import torch
from csrc_library import SOURCES, as_good_as, by_library, by_torch, error, randn, wide

from megatron_burst.kernels.aten import stand_in
from megatron_burst.kernels.online_softmax import empty_result, merge_, row_delta
from megatron_burst.linear_cross_entropy.formula import Formula
from megatron_burst.linear_cross_entropy.rows import Columns, row_stats, softmax_gradient_

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler c++ here to build csrc/ with"
)


# --- merge ---------------------------------------------------------------------------------


def to_merge(dtype, layout, s=12, b=2, h=3, w=64):
    """Return (base, out, lse, part, part_lse) as the views that occur; out is rows of base."""
    acc = wide(dtype)
    base, base_lse = randn(3 * s, b, h, w, dtype=acc), randn(3 * s, b, h, dtype=acc, seed=1)
    part, part_lse = randn(s, b, h, w, dtype=dtype, seed=2), randn(s, b, h, dtype=acc, seed=3)
    out, lse = base[:s], base_lse[:s]
    if layout == "strided":
        out, lse = base[1::3], base_lse[1::3]
    if layout == "permuted":  # what [b, h, s, d] operators return, padded in width
        part = randn(b, h, s, w + 5, dtype=dtype, seed=2).permute(2, 0, 1, 3)[..., :w]
        part_lse = randn(b, h, s, dtype=acc, seed=3).permute(2, 0, 1)
    return base, out, lse, part, part_lse


@pytest.mark.parametrize("w", [1, 7, 64, 80])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge(built, monkeypatch, dtype, layout, w):
    _, out, lse, part, part_lse = to_merge(dtype, layout, w=w)
    exact = csrc_library.merged(out, lse, part, part_lse)
    copies = out.clone(), lse.clone()
    by_torch(monkeypatch, merge_, *copies, part, part_lse)
    by_library(merge_, out, lse, part, part_lse)
    for mine, theirs, right in zip((out, lse), copies, exact, strict=True):
        as_good_as(mine, theirs, right, dtype)


def test_merge_writes_its_rows_alone(built):
    base, out, lse, part, part_lse = to_merge(torch.float32, "strided")
    before = base.clone()
    by_library(merge_, out, lse, part, part_lse)
    assert torch.equal(base[0::3], before[0::3])
    assert torch.equal(base[2::3], before[2::3])
    assert not torch.equal(base[1::3], before[1::3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_saw_nothing(built, dtype):
    acc = wide(dtype)
    out, lse = empty_result(randn(4, 1, 2, 8, dtype=dtype), 8)
    part, part_lse = randn(4, 1, 2, 8, dtype=dtype), randn(4, 1, 2, dtype=acc)
    part_lse[:2] = -torch.inf  # neither side saw anything in rows 0 and 1, whatever is in the part
    by_library(merge_, out, lse, part, part_lse)
    part[:2] = 0
    assert torch.equal(out, part.to(acc))
    assert torch.equal(lse, part_lse)
    again = out.clone(), lse.clone()
    by_library(merge_, out, lse, torch.zeros_like(part), torch.full_like(lse, -torch.inf))
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


@pytest.mark.parametrize("shift", [-3e4, -100.0, 100.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_far_apart(built, dtype, shift):
    _, out, lse, part, part_lse = to_merge(dtype, "contiguous")
    part_lse += shift
    exact = csrc_library.merged(out, lse, part, part_lse)
    by_library(merge_, out, lse, part, part_lse)
    for mine, right in zip((out, lse), exact, strict=True):
        assert error(mine, right) <= (1e-12 if dtype == torch.float64 else 1e-6)


def test_a_nan_stays_visible(built):
    _, out, lse, part, part_lse = to_merge(torch.float32, "contiguous")
    part_lse[3, 1, 2] = torch.nan
    part[5, 0, 1, 4] = torch.nan
    by_library(merge_, out, lse, part, part_lse)
    assert lse.isnan().nonzero().tolist() == [[3, 1, 2]]
    rows = out.isnan().any(-1).nonzero().tolist()
    assert rows == [[3, 1, 2], [5, 0, 1]]
    assert out[5, 0, 1].isnan().sum() == 1


# --- delta and the stand-in ----------------------------------------------------------------


@pytest.mark.parametrize("w", [1, 5, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_delta(built, monkeypatch, dtype, w):
    dout = randn(9, 2, 6, w, dtype=dtype)[1:, :, 2:5]
    out = randn(2, 3, 8, w, dtype=dtype, seed=1).permute(2, 0, 1, 3)
    exact = (dout.double() * out.double()).sum(-1)
    theirs = by_torch(monkeypatch, row_delta, dout, out, wide(dtype))
    as_good_as(by_library(row_delta, dout, out, wide(dtype)), theirs, exact, dtype)


@pytest.mark.parametrize("w", [1, 5, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stand_in(built, monkeypatch, dtype, w):
    dout = randn(9, 2, 6, w, dtype=dtype)[1:, :, 2:5]
    delta = randn(2, 3, 8, dtype=wide(dtype), seed=1).permute(2, 0, 1)
    exact = csrc_library.stood_in(dout, delta)
    theirs = by_torch(monkeypatch, stand_in, dout, delta)
    mine = by_library(stand_in, dout, delta)
    as_good_as(mine, theirs, exact, dtype)
    implied = [(dout.double() * x.double()).sum(-1) for x in (mine, theirs)]
    limit = 1e-12 if dtype == torch.float64 else 1.1 * error(implied[1], delta.double()) + 1e-7
    assert error(implied[0], delta.double()) <= limit


@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float32, 1e-30), (torch.float64, 1e-250)])
def test_stand_in_of_tiny_rows_is_exact(built, dtype, tiny):
    dout, delta = randn(8, 1, 2, 64, dtype=dtype), randn(8, 1, 2, dtype=dtype, seed=1)
    ordinary = csrc_library.stood_in(dout, delta)
    made = by_library(stand_in, dout * tiny, delta * tiny)
    assert error(made, ordinary) <= (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stand_in_of_zero_rows_is_zero_and_of_nan_is_nan(built, dtype):
    dout, delta = randn(8, 1, 2, 16, dtype=dtype), randn(8, 1, 2, dtype=wide(dtype), seed=1)
    dout[3], delta[3] = 0, 0
    dout[5, 0, 1, 7] = torch.nan
    made = by_library(stand_in, dout, delta)
    assert made[3].count_nonzero() == 0
    assert made[5, 0, 1].isnan().all()
    assert made.isnan().sum() == 16


def far_rows(w):
    """Return (dout, delta, fits) of float16 rows; the stand-in of odd rows exceeds float16."""
    dout = randn(6, 2, 2, w, dtype=torch.float16) * 0.1
    dout[..., 0] = 1 if w > 1 else 0.1
    dout[3, 0, 1, w // 2] = 0
    size = torch.where(torch.arange(6) % 2 == 0, 2.0, 6e4)[:, None, None]
    delta = size * dout.float().abs().sum(-1)
    delta[1] *= -1
    most = delta.double() * dout.double().abs().amax(-1) / dout.double().square().sum(-1)
    return dout, delta, most.abs() <= 65504


@pytest.mark.parametrize("w", [5, 64, 200])
def test_stand_in_beyond_float16_spreads_over_the_row(built, monkeypatch, w):
    dout, delta, fits = far_rows(w)
    assert fits.any()
    assert not fits.all()
    theirs = by_torch(monkeypatch, stand_in, dout, delta)
    mine = by_library(stand_in, dout, delta)
    even = delta.double() / dout.double().abs().sum(-1)
    along = csrc_library.stood_in(dout, delta)
    exact = torch.where(fits[..., None], along, dout.double().sign() * even[..., None])
    for made in (mine, theirs):
        assert ((made.double() - exact).abs() <= 2**-10 * exact.abs()).all()


# --- the gradient of a tile of logits ------------------------------------------------------

FORMULAS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 5.0, "scale": 1.7},
    "tight softcap": {"softcap": 0.01},
    "wide softcap": {"softcap": 1e4},
    "z-loss": {"z_loss": 0.01},
    "smoothing": {"smoothing": 0.1},
    "all": {"softcap": 8.0, "scale": 0.5, "z_loss": 1e-3, "smoothing": 0.2},
}


def tile(dtype, v=300, first=100, real=280, spread=4.0):
    """Return z [n, v] of a rank with the vocabulary rows from `first` on; the last are padding."""
    n = 9
    z = randn(n, v, dtype=dtype) * spread
    z[:, real:] = torch.nan  # padding may hold anything
    labels = torch.randint(first, first + real, (n,), generator=torch.Generator().manual_seed(1))
    labels[:4] = torch.tensor([first - 1, first + real, -100, first + real - 1])
    weights = randn(n, dtype=wide(dtype), seed=2)
    weights[2] = 0
    return z, labels, weights, Columns(first, real)


@pytest.mark.parametrize("v", [300, 4095, 9000])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_logits(built, monkeypatch, dtype, formula, v):
    z, labels, weights, columns = tile(dtype, v, real=v - 20)
    formula = Formula(vocab_size=20000, **FORMULAS[formula])
    lse = row_stats(z, labels, columns, formula, wide(dtype)).lse + 0.5  # others have some too
    exact = csrc_library.gradient(z, labels, lse, weights, columns, formula)
    theirs = z.clone()
    by_torch(monkeypatch, softmax_gradient_, theirs, labels, lse, weights, columns, formula)
    by_library(softmax_gradient_, z, labels, lse, weights, columns, formula)
    as_good_as(z, theirs, exact, dtype)


@pytest.mark.parametrize(
    "formula", [name for name in FORMULAS if "cap" not in name and name != "all"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_of_exponentials(built, monkeypatch, dtype, formula):
    """The logits that `row_stats` leaves as exponentials."""
    z, labels, weights, columns = tile(dtype)
    formula = Formula(vocab_size=20000, **FORMULAS[formula])
    raw = z.clone()
    stats = row_stats(z, labels, columns, formula, dtype, consume=True)
    assert stats.peak is not None
    exact = csrc_library.gradient(raw, labels, stats.lse, weights, columns, formula)
    theirs, rest = z.clone(), (labels, stats.lse, weights, columns, formula, stats.peak)
    by_torch(monkeypatch, softmax_gradient_, theirs, *rest)
    by_library(softmax_gradient_, z, *rest)
    as_good_as(z, theirs, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_logits_far_out(built, dtype):
    """Probabilities that underflow are 0, NaN stays in its row, infinity means an empty row."""
    z, labels, weights, columns = tile(dtype)
    z[0, 5], z[1, :3], z[4, 7] = -3e4, -torch.inf, torch.nan
    weights[:] = 1
    formula = Formula(vocab_size=300)
    lse = torch.full((len(z),), 20.0, dtype=wide(dtype))
    by_library(softmax_gradient_, z, labels, lse, weights, columns, formula)
    assert z[0, 5] == 0
    assert z[1, :3].count_nonzero() == 0
    assert z.isnan().nonzero().tolist() == [[4, 7]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_weight_0_becomes_0_whatever_it_holds(built, dtype):
    for options in ({}, {"softcap": 3.0}):
        z, labels, weights, columns = tile(dtype)
        z[2], lse = torch.nan, torch.full((len(z),), 20.0, dtype=wide(dtype))
        lse[2] = torch.nan
        by_library(softmax_gradient_, z, labels, lse, weights, columns, Formula(300, **options))
        assert z[2].count_nonzero() == 0
        assert z[3].count_nonzero() > 0
        assert z.isfinite().all()


def test_all_padding_and_rows_of_a_larger_buffer(built):
    z, labels, weights, columns = tile(torch.float32)
    buffer = torch.full((9, 512), 7.0)
    buffer[:, :300] = z
    formula = Formula(vocab_size=300)
    lse = torch.full((9,), 20.0)
    by_library(softmax_gradient_, buffer[:, :300], labels, lse, weights, columns, formula)
    assert (buffer[:, 300:] == 7).all()
    assert buffer[:, 280:300].count_nonzero() == 0
    exact = csrc_library.gradient(z, labels, lse, weights, columns, formula)
    assert error(buffer[:, :300], exact) < 1e-6
    by_library(softmax_gradient_, z, labels, lse, weights, Columns(100, 0), formula)
    assert z.count_nonzero() == 0


# --- nothing to do, and what cannot be done ------------------------------------------------


def test_empty(built):
    for shape in [(0, 2, 3, 8), (4, 0, 3, 8), (4, 2, 3, 0)]:
        out, lse = torch.zeros(shape), torch.full(shape[:3], -torch.inf)
        by_library(merge_, out, lse, torch.zeros(shape), torch.zeros(shape[:3]))
        assert (lse == 0).all()
        assert by_library(row_delta, out, out, torch.float32).count_nonzero() == 0
        assert by_library(stand_in, out, lse).shape == shape
    z, none = torch.zeros(0, 5), torch.zeros(0)
    by_library(softmax_gradient_, z, none.long(), none, none, Columns(0, 5), Formula(5))


def softmax(**changes):
    """Return the arguments of the operator."""
    given = {
        "z": torch.zeros(4, 6), "index": torch.zeros(4).long(), "lse": torch.zeros(4),
        "of_softmax": torch.zeros(4), "of_label": torch.zeros(4), "of_all": torch.zeros(4),
        "real": 6, "scale": 1.0, "softcap": 0.0, "exponentials": False,
    }  # fmt: skip
    return "softmax_gradient_", tuple((given | changes).values())


x4, x3 = torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, 2)
REFUSED = {
    "another shape": ("merge_", (x4, x3, x4[:3], x3), "part has another size in dimension 0"),
    "another width": ("merge_", (x4, x3, x4[..., :7], x3), "part has another size in dimension 3"),
    "too few": ("merge_", (x4, x4, x4, x3), "lse must have 3 dimensions, got 4"),
    "of doubles": ("merge_", (x4, x3, x4.double(), x3), "float32 accumulates float32, bfloat16"),
    "in doubles": ("merge_", (x4.double(), x3.double(), x4, x3.double()), "float64 accumulates"),
    "lse of another kind": ("merge_", (x4, x3.double(), x4, x3), "lse has a wrong dtype"),
    "columns": (
        "merge_",
        (x4.transpose(0, 3).contiguous().transpose(0, 3), x3, x4, x3),
        "contiguous in",
    ),
    "out of another kind": ("delta_out", (x4, x4.bfloat16(), x3), "out has a wrong dtype"),
    "rows missing": ("stand_in_out", (x4, x3[:3], x4), "delta has another size in dimension 0"),
    "too many columns": (*softmax(real=7), "real must be 0 to 6, got 7"),
    "labels of another kind": (*softmax(index=torch.zeros(4)), "index has a wrong dtype"),
    "rows of another number": (
        *softmax(lse=torch.zeros(3)),
        "lse must be contiguous, with one number",
    ),
    "a tile of columns": (*softmax(z=torch.zeros(6, 4).t()), "z must have two dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_operators_touch_no_memory_that_is_not_theirs(built, case):
    name, arguments, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        getattr(torch.ops.megatron_burst, name)(*arguments)


# --- as a GPU would ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warp(tmp_path_factory):
    """Compute the formulas with 32 threads like the lanes of a warp; pointers and sizes."""
    built = tmp_path_factory.mktemp("warp") / "warp.so"
    include = f"{torch.__path__[0]}/include"
    source = Path(__file__).with_name("csrc_warp.cpp")
    subprocess.run(
        ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wno-unknown-pragmas",
         "-I", str(SOURCES), "-isystem", include, str(source), "-o", str(built)],
        check=True, timeout=300,
    )  # fmt: skip
    found = ctypes.CDLL(str(built))

    def call(name, tensors, *sizes, packs):
        assert all(t.is_contiguous() for t in tensors)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        assert getattr(found, name)(*pointers, *sizes) == packs

    return call


def sizes_of(x):
    s, b, h, w = x.shape
    return (*(ctypes.c_uint32(size) for size in (s, b, h)), ctypes.c_int64(w))


# A row of less than a pack for each lane, of one, of more than one; and what packs cannot take.
@pytest.mark.parametrize(("w", "packs"), [(64, 4), (128, 4), (260, 4), (45, 1)])
def test_a_warp_does_what_the_cpu_does(built, warp, w, packs):
    x, y = (randn(3, 2, 2, w, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    out, lse, other = (randn(3, 2, 2, *rest, dtype=torch.float32, seed=2) for rest in ([w], [], []))
    other[0] = lse[0] = -torch.inf
    out[0], x[1, 0, 0] = 0, 0
    wanted = out.clone(), lse.clone()
    merge_(*wanted, x, other)
    warp("merge", (out, lse, x, other), *sizes_of(x), packs=packs)
    assert error(out, wanted[0].double()) < 1e-6
    assert torch.equal(lse[0], wanted[1][0])
    assert error(lse[1:], wanted[1][1:].double()) < 1e-6
    delta = torch.empty(3, 2, 2)
    warp("delta", (x, y, delta), *sizes_of(x), packs=packs)
    assert error(delta, row_delta(x, y, torch.float32).double()) < 1e-6
    made = torch.empty_like(x)
    warp("stand_in", (x, delta, made), *sizes_of(x), packs=packs)
    assert error(made, stand_in(x, delta).double()) < 2**-7
    assert made[1, 0, 0].count_nonzero() == 0
    far, delta, _ = far_rows(w)
    made = torch.empty_like(far)
    warp("stand_in_half", (far, delta, made), *sizes_of(far), packs=packs)
    assert error(made, stand_in(far, delta).double()) < 2**-10


@pytest.mark.parametrize(("v", "packs"), [(300, 4), (4500, 4), (301, 1)])
def test_a_warp_makes_the_gradient_the_cpu_makes(built, warp, v, packs):
    z, labels, weights, columns = tile(torch.bfloat16, v, real=v - 18)
    formula = Formula(vocab_size=5000, softcap=8.0, scale=0.5, smoothing=0.1)
    lse = row_stats(z, labels, columns, formula, torch.float32).lse
    wanted, index = z.clone(), labels - columns.first
    softmax_gradient_(wanted, labels, lse, weights, columns, formula)
    weights = weights * formula.scale
    rows = index, lse, weights, -(1 - 0.1) * weights, weights * (0.1 / 5000)
    numbers = ctypes.c_int64(len(z)), ctypes.c_int32(v), ctypes.c_int32(columns.real)
    constants = ctypes.c_float(formula.scale), ctypes.c_float(formula.softcap)
    warp("softmax_gradient", (z, *rows), *numbers, *constants, packs=packs)
    assert error(z, wanted.double()) < 2**-7
