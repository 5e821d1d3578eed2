"""What the tests of `csrc/` share: the library, who called it, and the formulas it is held against.

The formulas are written out in float64 and share nothing with the package.
"""

import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.kernels import native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
NONE = "there is no such library"


def library(folder, *options):
    """The library of the package if it is loaded there; else it is built in `folder`.

    A process takes one: its operators cannot be defined twice.
    """
    if native.load(native.FILE):
        newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
        assert Path(native.FILE).stat().st_mtime >= newest, "old: python setup.py build_csrc"
        return native.FILE
    file = Path(folder, "libcsrc.so")
    if file.exists():  # by another process of these tests
        return str(file)
    command = [sys.executable, str(SOURCES / "build.py"), "--out", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(file)


class Calls(TorchDispatchMode):
    """Which of our operators were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        space, _, name = function.name().partition("::")
        self.names += [name] * (space == "megatron_burst")
        return function(*arguments, **(keywords or {}))


def by_torch(monkeypatch, function, *arguments):
    """The same without the library."""
    with monkeypatch.context() as patch, Calls() as calls:
        patch.setattr(native, "FILE", NONE)
        result = function(*arguments)
    assert not calls.names
    return result


def by_library(function, *arguments):
    with Calls() as calls:
        result = function(*arguments)
    assert len(calls.names) == 1
    return result


def randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def error(got, exact):
    """The largest difference over the largest number."""
    return ((got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300)).item()


def as_good_as(got, torch_has, exact, dtype):
    """float64 to the last few bits; others as good as torch's operators, but for two roundings."""
    assert got.dtype == torch_has.dtype
    assert got.shape == torch_has.shape
    limit = 2e-14 if dtype == torch.float64 else 1.5 * error(torch_has, exact) + 2.4e-7
    found = error(got, exact)
    assert found <= limit, (found, error(torch_has, exact))


def merged(out, lse, part, part_lse):
    """(out, lse) of what both saw: a mean with weights exp(lse)."""
    out, lse, part, part_lse = (x.double() for x in (out, lse, part, part_lse))
    top = torch.maximum(lse, part_lse)
    base = torch.where(top == -torch.inf, 0, top)
    mine, theirs = (lse - base).exp(), (part_lse - base).exp()
    whole = mine + theirs
    share = torch.where(whole == 0, 1, whole)
    mean = (out * mine[..., None] + part * theirs[..., None]) / share[..., None]
    return mean, top + torch.where(whole == 0, 1, whole).log()


def stood_in(dout, delta):
    """O' along dout with rowsum(dout * O') = delta; 0 where dout is 0. No row may be tiny."""
    dout, delta = dout.double(), delta.double()
    squares = (dout * dout).sum(-1)
    return (
        dout
        * torch.where(squares == 0, 0, delta / torch.where(squares == 0, 1, squares))[..., None]
    )


def gradient(z, labels, lse, weights, columns, formula):
    """weights times the derivative of the loss by z [n, v], column by column."""
    z, lse, weights = z.double(), lse.double(), weights.double()
    x = formula.scale * z
    slope = torch.full_like(x, formula.scale)
    if formula.softcap is not None:
        y = x / formula.softcap
        x, slope = formula.softcap * y.tanh(), formula.scale / y.cosh().square()
    derivative = (x - lse[:, None]).exp() * (1 + 2 * formula.z_loss * lse[:, None])
    derivative -= formula.smoothing / formula.vocab_size
    for row, label in enumerate((labels - columns.first).tolist()):
        if 0 <= label < columns.real:
            derivative[row, label] -= 1 - formula.smoothing
    result = weights[:, None] * derivative * slope
    result[:, columns.real :] = 0
    return result
