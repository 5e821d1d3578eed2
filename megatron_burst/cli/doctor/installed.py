"""Checks of what is installed: versions, local-attention kernels, Megatron's hooks.

Versions are read without importing anything. Each kernel runs on a small input and is compared with
the reference, and the hooks are installed into this Megatron and removed again. `TESTED` lists the
versions of Megatron-Core that the tests cover.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from ... import masks
from ...attention import attention
from ...comm.groups import Groups
from ...kernels import torch_release
from ...kernels.flash_packages import PACKAGES as FLASH
from ...kernels.flash_packages import load
from ...kernels.packages import NotInstalled
from ...kernels.registry import KERNELS, make
from ..patch import version_of
from .report import Finding, note, ok, problem

TESTED = ("0.16", "0.19")
INSTALL = 'pip install "megatron-burst[megatron]"'
# The largest error of a kernel that rounding explains, relative to its largest result.
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
WIDTH = 128
MASKS = {"causal": masks.Causal(), "other": masks.Window(63, 0)}
PACKAGES = {
    "Transformer Engine": ("transformer-engine", "transformer_engine"),
    "triton": ("triton", "pytorch-triton"),
}
ABSENT = {
    "Transformer Engine": "; Megatron's default, --transformer-impl transformer_engine, needs it",
    "triton": ", and not needed",
}


def version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def versions() -> Iterator[Finding]:
    """Python, torch, CUDA and NCCL, Megatron-Core, and the optional packages."""
    yield ok("Python", platform.python_version())
    yield ok("torch", torch.__version__)
    yield from torch_limits()
    cuda = torch.version.cuda
    if cuda and torch.cuda.is_available():
        yield ok("CUDA", cuda)
        yield ok("NCCL", ".".join(map(str, nccl.version())))
    else:
        built = f"torch is built for CUDA {cuda}" if cuda else "torch is built without CUDA"
        yield note("CUDA", f"{built}, and no GPU is visible: everything runs on the CPU with gloo")
    yield _megatron()
    for name, distributions in PACKAGES.items():
        release = version(*distributions)
        yield ok(name, release) if release else note(name, f"not installed{ABSENT[name]}")
    yield from flash_attention()


def torch_limits(release: str | None = None) -> Iterator[Finding]:
    """What a release of torch cannot do; None: the one that is imported."""
    for limit in torch_release.limits(release):
        said = f"{limit.part}: before {limit.remedy.split()[1]}, {limit.before}"
        yield problem("torch", said, limit.remedy) if limit.refused else note("torch", said)


def flash_attention() -> Iterator[Finding]:
    """Whether each FlashAttention package is installed, and its functions have known signatures."""
    for name, package in FLASH.items():
        release = package.version or "of unknown version"
        try:
            load(name)
        except NotInstalled:
            yield note(package.title, "not installed, and not needed")
        except ValueError as error:
            reason = str(error).split(";")[0].removeprefix(f"kernel {name}: ")
            yield note(package.title, f"not usable: {reason}", f"install {package.fits}")
        else:
            yield ok(package.title, f"{release}; its functions fit --burst-kernel {name}")


def _megatron() -> Finding:
    release = megatron_version()
    if release is None:
        return problem("Megatron-Core", "not installed", INSTALL)
    if ".".join(release.split(".")[:2]) in TESTED:
        return ok("Megatron-Core", release)
    return note("Megatron-Core", f"{release}; tested are {' and '.join(TESTED)}")


def megatron_version() -> str | None:
    """The version of the Megatron-Core that would be imported, or None.

    It is read from the source: a checkout may come before an installed wheel on the path.
    """
    try:
        spec = util.find_spec("megatron.core")
    except ImportError:
        return None
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        if Path(folder, "package_info.py").is_file():
            return version_of(Path(folder).parents[1])
    return version("megatron-core", "megatron_core")


def kernels() -> Iterator[Finding]:
    """Each local-attention kernel, run forward and backward on this machine's device, and the
    kernels that "auto" selects."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outcomes: dict[str, list[float | Exception]] = {}
    for name in KERNELS:
        outcomes[name] = [_outcome(name, device, mask) for mask in MASKS.values()]
        yield _kernel(name, device, outcomes[name])
    x = torch.empty(1, 1, 1, WIDTH, device=device, dtype=_dtype(device))
    taken = [make("auto", x, x, x, mask=mask).name for mask in MASKS.values()]
    words = ", ".join(f"{name} for {kind} masks" for name, kind in zip(taken, MASKS, strict=True))
    broken = {n for i, n in enumerate(taken) if not isinstance(outcomes[n][i], float)}
    if broken:
        others = [
            name for name, each in outcomes.items() if all(isinstance(x, float) for x in each)
        ]
        yield problem(
            "kernel auto",
            f"takes {words}, but {', '.join(sorted(broken))} does not work here",
            f"--burst-kernel {' or '.join(others) or 'reference'}",
        )
    else:
        yield ok("kernel auto", f"takes {words}")


def _kernel(name: str, device: torch.device, outcomes: Sequence[float | Exception]) -> Finding:
    """A kernel with wrong results is a problem; one that cannot run is only a note."""
    topic = f"kernel {name}"
    wrong = next((each for each in outcomes if isinstance(each, Wrong)), None)
    if wrong is not None:
        return problem(topic, f"computes wrongly on {device.type}: {wrong}", "take another kernel")
    causal, window = outcomes
    if isinstance(causal, Exception):
        reason = str(causal).split(";")[0].splitlines()[0]
        return note(topic, f"not usable on {device.type}: {reason}")
    windows = "not usable" if isinstance(window, Exception) else f"within {window:.0e}"
    return ok(
        topic, f"runs on {device.type}, within {causal:.0e} of the reference; windows: {windows}"
    )


class Wrong(ArithmeticError):
    """A kernel ran, and its results are off by more than rounding."""


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _outcome(name: str, device: torch.device, mask: masks.Mask) -> float | Exception:
    """The error of a kernel, or the exception with which it failed."""
    try:
        return _compare(name, device, mask)
    except Exception as failure:
        return failure


def _compare(name: str, device: torch.device, mask: masks.Mask) -> float:
    """The largest error of a kernel's results over a ring of two, relative to the reference.

    The case has grouped heads, a length that is no power of two, and travelling queries, none of
    which torch's own operators are tested with. Raises `Wrong` for more than rounding.
    """
    dtype = _dtype(device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(200, 1, heads, WIDTH) for heads in (4, 2, 2)] * 2
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    results = [_ring(each, inputs, mask) for each in (name, "reference")]
    error = 0.0
    for result, right in zip(*results, strict=True):
        off = ((result - right).abs().max() / right.abs().max()).item()
        if not off <= ERROR[dtype]:  # written so that NaN fails, which max() would pass over
            raise Wrong(f"its results are off by {off:.1g} of the largest")
        error = max(error, off)
    return error


def _ring(kernel: Any, inputs: Sequence[torch.Tensor], mask: masks.Mask) -> list[torch.Tensor]:
    """Outputs and gradients of two ranks in this process, in float32."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    shards = [[leaves[i], leaves[i + 3]] for i in range(3)]
    groups = Groups.in_process(intra=2)
    outs = attention(*shards, groups=groups, mask=mask, kernel=kernel, side="query")
    (outs[0].float().square().sum() + outs[1].float().square().sum()).backward()
    return [x.detach().float() for x in (*outs, *(leaf.grad for leaf in leaves)) if x is not None]


def hooks() -> Iterator[Finding]:
    """Whether the hooks fit this Megatron: they are installed and removed again."""
    if megatron_version() is None:
        return  # a finding of `versions`
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ... import megatron as burst
            from ...megatron.attention import core_attention  # noqa: F401  imports Megatron-Core
            from ...megatron.patching import patched_places
    except ImportError as error:
        yield problem("Megatron-Core", f"cannot be imported: {error}", INSTALL)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            burst.install()
    except Exception as error:
        yield problem(
            "Megatron hooks",
            f"{type(error).__name__}: {error}",
            f"use Megatron-Core {' or '.join(TESTED)}, or report this line",
        )
        return
    burst.uninstall()
    seams = len(patched_places())
    patched = (
        f"; {seams} of its functions have a seam (`patches/`)" if seams else ", which is unpatched"
    )
    yield ok("Megatron hooks", f"fit this Megatron{patched}")
