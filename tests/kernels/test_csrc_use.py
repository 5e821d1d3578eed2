"""`csrc/`: when the library is used, and how it is built, loaded and reported."""

import json
import os
import shutil
import subprocess
import sys

import far
import pytest
import torch
from csrc_library import NONE, ROOT, SOURCES, Calls, by_torch, error, randn
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_burst as mb
from megatron_burst.cli.doctor import library as doctor
from megatron_burst.kernels import native
from megatron_burst.kernels.online_softmax import row_delta
from megatron_burst.plugins.testing import in_process

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler c++ here to build csrc/ with"
)


class Other(torch.Tensor):
    pass


def to_dot(kind):
    dout, out = randn(4, 1, 2, 8, dtype=torch.float32), randn(4, 1, 2, 8, dtype=torch.float32)
    return {
        "expanded": lambda: (dout[..., :1].expand(4, 1, 2, 8), out),
        "mixed": lambda: (dout, out.double()),
        "subclass": lambda: (dout.as_subclass(Other), out),
        "needs grad": lambda: (dout.requires_grad_(), out),
    }[kind]()


@pytest.mark.parametrize("kind", ["expanded", "mixed", "subclass", "needs grad"])
def test_torch_does_the_rest(built, kind):
    """No compiled operator is called, and the result is correct."""
    dout, out = to_dot(kind)
    with Calls() as calls:
        found = row_delta(dout, out, torch.float32)
    assert calls.names == []
    assert found.requires_grad == (kind == "needs grad")
    exact = (dout.double() * out.double()).sum(-1).detach().as_subclass(torch.Tensor)
    assert error(found.detach().as_subclass(torch.Tensor), exact) < 1e-6


def test_what_has_no_numbers_is_not_ours(built):
    """Fake tensors and tensors of a compiler are not supported."""
    x, graphs = randn(4, 1, 2, 8, dtype=torch.float32), []
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert row_delta(fake, fake, torch.float32).shape == (4, 1, 2)

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    found = torch.compile(row_delta, backend=backend, fullgraph=True)(x, x, torch.float32)
    assert error(found, x.double().square().sum(-1)) < 1e-6
    assert len(graphs) == 1
    assert "megatron_burst" not in graphs[0]


# --- in the package ------------------------------------------------------------------------


def attention(dtype, side):
    q, dout = (randn(24, 2, 4, 24, dtype=dtype, seed=i) for i in (0, 1))
    k, v = (randn(24, 2, 2, 24, dtype=dtype, seed=i) for i in (2, 3))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    groups = in_process.groups(intra=3)
    shards = [list(x.chunk(3)) for x in tensors]
    outs = in_process.attention(
        *shards, groups=groups, mask=mb.masks.Causal(), layout="contiguous", side=side
    )
    whole = torch.cat(outs)
    whole.backward(dout)
    return [whole.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("side", ["query", "kv"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_uses_it_and_stays_what_it_was(built, monkeypatch, dtype, side):
    with Calls() as calls:
        mine = attention(dtype, side)
    wanted = {"merge_", "delta_out"} | ({"stand_in_out"} if side == "query" else set())
    assert set(calls.names) == wanted
    for got, has in zip(mine, by_torch(monkeypatch, attention, dtype, side), strict=True):
        assert error(got, has.double()) <= (1e-12 if dtype == torch.float64 else 2e-6)


def head(dtype, mode):
    hidden, weight = randn(30, 16, dtype=dtype), randn(50, 16, dtype=dtype, seed=1)
    labels = torch.arange(30) % 50
    tensors = [x.requires_grad_() for x in (hidden, weight)]
    loss = mb.linear_cross_entropy(
        *tensors, labels, mode=mode, label_smoothing=0.1, z_loss=1e-3, tile=8
    )
    loss.sum().backward()
    return [loss.detach(), *(x.grad for x in tensors)]


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_lm_head_uses_it_and_stays_what_it_was(built, monkeypatch, dtype, mode):
    with Calls() as calls:
        mine = head(dtype, mode)
    assert set(calls.names) == {"softmax_gradient_"}
    for got, has in zip(mine, by_torch(monkeypatch, head, dtype, mode), strict=True):
        assert error(got, has.double()) <= (1e-12 if dtype == torch.float64 else 2e-6)


def described():
    q = torch.zeros(8, 1, 2, 24)
    groups = in_process.groups(intra=1)
    return in_process.prepare([q], [q], [q], groups=groups, mask=mb.masks.Causal()).describe()


@pytest.mark.parametrize("axis", far.AXES)
def test_offsets_beyond_2_to_the_31(built, axis):
    with Calls() as calls:
        far.check_results(far.AXES[axis])
        far.check_logits()
    assert len(calls.names) == 8


def test_the_first_line_of_a_run_says_so(built, monkeypatch):
    assert "| kernel aten with csrc |" in described()
    assert "| kernel aten |" in by_torch(monkeypatch, described)


def asked():
    return [(found.level, found.topic, found.what) for found in doctor.library()]


def test_the_doctor_runs_it(built, monkeypatch):
    with Calls() as calls:
        assert asked() == [("ok", "csrc on cpu", "operators are used and correct")]
    assert sorted(calls.names) == sorted(native.OPERATORS)
    monkeypatch.setattr(native, "FILE", NONE)
    none = "not built, and not needed: torch's operators are used"
    assert asked() == [("absent", "csrc", none)]


def broken(name, monkeypatch):
    """Replace an operator by one that does nothing, cannot run, or is not called."""
    real = getattr(native, name)

    def failing(*arguments):
        raise RuntimeError("CUDA: no kernel image is available for execution on the device")

    def off(*arguments):
        found = real(*arguments)
        wrong = found[0] if isinstance(found, tuple) else found
        (wrong if isinstance(wrong, torch.Tensor) else arguments[0]).mul_(1 + 1e-4)
        return found

    for fault in (failing, off, lambda *arguments: None):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, fault)
            yield asked()


@pytest.mark.parametrize(
    "name",
    ["merge_", "delta", "stand_in", "softmax_gradient_"],
)
def test_the_doctor_sees_an_operator_that_is_wrong(built, monkeypatch, name):
    fails, off, silent = broken(name, monkeypatch)
    assert fails[0][:2] == ("problem", "csrc on cpu")
    assert "no kernel image" in fails[0][2]
    assert off == silent == [("problem", "csrc on cpu", f"wrong results: {name}")]


# --- loading and building ------------------------------------------------------------------


def test_a_library_that_cannot_be_used_is_a_warning(csrc_file, tmp_path, monkeypatch):
    broken = tmp_path / "libcsrc.so"
    broken.write_text("no library")
    monkeypatch.setattr(native, "_registered", lambda key: False)
    with pytest.warns(UserWarning, match=r"is not used: .*file too short; rebuild it"):
        assert native.load(str(broken)) == frozenset()
    lacking = tmp_path / "lacking.so"
    shutil.copy(csrc_file, lacking)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.warns(UserWarning, match="lacks operators that megatron_burst needs"):
        assert native.load(str(lacking)) == frozenset()


def test_a_library_of_another_version_is_known_by_its_arguments(built, monkeypatch):
    assert native._registered("CPU")
    monkeypatch.setitem(native.OPERATORS, "merge_", "out lse part")
    assert not native._registered("CPU")


def test_who_holds_a_tensor_sees_that_it_was_written_to(built):
    out, lse = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1)
    before = out._version, lse._version
    assert native.merge_(out, lse, torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1))
    assert out._version > before[0]
    assert lse._version > before[1]
    with torch.inference_mode():  # where nobody counts
        out, lse = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1)
        assert native.merge_(out, lse, torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1))


def test_the_doctor_names_a_library_that_cannot_be_used(tmp_path, monkeypatch):
    broken = tmp_path / "libcsrc.so"
    broken.write_text("no library")
    monkeypatch.setattr(native, "_registered", lambda key: False)
    monkeypatch.setattr(native, "FILE", str(broken))
    (found,) = doctor.library()
    assert found.level == "problem"
    assert "file too short" in found.what
    assert "build_csrc" in found.fix


ELSEWHERE = """
import json, sys, torch, csrc_library
from megatron_burst.kernels import native
from megatron_burst.kernels.online_softmax import merge_
native.FILE = sys.argv[1]
x, y = torch.randn(2, 6, 1, 2, 16, dtype=torch.float64)
lse, other = torch.randn(2, 6, 1, 2, dtype=torch.float64)
exact, _ = csrc_library.merged(x, lse, y, other)
merge_(x, lse, y, other)
error = (x - exact).abs().max().item()
print(json.dumps([torch.__version__, sorted(native.load(native.FILE)), error]))
"""


def elsewhere(python, file):
    """Return [torch's version, devices, an error] of another process."""
    done = subprocess.run(
        [python, "-c", ELSEWHERE, file],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def other_interpreters():
    """Return one environment that `make` created here for each torch other than this one."""
    pythons = {}
    for python in sorted(ROOT.glob(".venv*/bin/python")):
        command = [python, "-c", "from importlib.metadata import version; print(version('torch'))"]
        done = subprocess.run(command, capture_output=True, text=True)
        version = done.stdout.strip().split("+")[0]
        if done.returncode == 0 and version != torch.__version__.split("+")[0]:
            pythons[version] = str(python)
    return pythons


def test_the_same_library_on_another_torch(csrc_file):
    others = other_interpreters()
    if not others:
        pytest.skip("there is no second environment with another torch here (.venv*)")
    for version, python in others.items():
        imported, devices, worst = elsewhere(python, csrc_file)
        assert imported.split("+")[0] == version
        assert devices == sorted(native.load(csrc_file))
        assert worst < 1e-12


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_cuda_code_compiles_and_loads_without_a_gpu(tmp_path):
    """For one architecture; `make csrc-cuda` compiles all, and checks spills."""
    file, command = tmp_path / "libcsrc.so", [sys.executable, str(SOURCES / "build.py")]
    subprocess.run([*command, "--out", str(file), "--arch", "80"], check=True, timeout=900)
    _, devices, worst = elsewhere(sys.executable, str(file))
    assert devices == ["cpu", "cuda"]
    assert worst < 1e-12


@pytest.mark.parametrize("command", ["csrc/build.py --cpu --out {}", "setup.py -q build_csrc"])
def test_what_is_missing_is_named(tmp_path, command):
    """Also through setup.py, which needs setuptools; no file remains."""
    pytest.importorskip("setuptools")
    words = command.format(tmp_path / "x.so").split()
    nowhere = os.environ | {"PATH": str(tmp_path)}
    before = os.path.exists(native.FILE)
    done = subprocess.run(
        [sys.executable, *words], env=nowhere, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "there is no C++ compiler c++; install g++, or set --cxx" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert os.path.exists(native.FILE) == before
