"""What is installed here, and does it work: versions, local-attention kernels, Megatron's hooks.

Owns: what counts as tested. Each kernel is run on a small input rather than asked, and the hooks
are put into this Megatron and taken out again. Must not know the user's command.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

import torch
from torch.cuda import nccl

from .. import masks
from ..attention import attention
from ..groups import Groups
from ..kernels import TABLE
from .finding import Finding, note, ok, problem

TESTED = ("0.16", "0.19")
PACKAGES = {
    "Transformer Engine": ("transformer-engine", "transformer_engine"),
    "triton": ("triton", "pytorch-triton"),
    "flash-attn": ("flash-attn",),
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
    """Python, torch and what it was built with, Megatron-Core, optional packages."""
    yield ok("Python", platform.python_version())
    yield ok("torch", torch.__version__)
    cuda = torch.version.cuda
    if cuda and torch.cuda.is_available():
        yield ok("CUDA", cuda)
        yield ok("NCCL", ".".join(map(str, nccl.version())))
    else:
        built = f"torch is built for CUDA {cuda}" if cuda else "torch is built without CUDA"
        yield note("CUDA", f"{built}, and no GPU is visible: everything runs on the CPU with gloo")
    yield _megatron()
    for name, distributions in PACKAGES.items():
        found = version(*distributions)
        yield ok(name, found) if found else note(name, "not installed, and not needed")


def _megatron() -> Finding:
    found = version("megatron-core", "megatron_core")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron_burst.megatron  # noqa: F401
    except ImportError as error:
        reason = f"cannot be imported: {error}" if found else "not installed"
        return problem("Megatron-Core", reason, 'pip install "megatron-burst[megatron]"')
    found = sys.modules["megatron.core"].__version__  # a source tree may be ahead of the wheel
    if ".".join(found.split(".")[:2]) in TESTED:
        return ok("Megatron-Core", found)
    return note("Megatron-Core", f"{found}; tested are {' and '.join(TESTED)}")


def kernels() -> Iterator[Finding]:
    """Each local-attention kernel, run forward and backward on this machine's device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in TABLE:
        topic = f"kernel {name}"
        try:
            _run(name, device)
        except Exception as error:
            reason = str(error).split(";")[0].splitlines()[0]
            yield note(topic, f"not usable on {device.type}: {reason}")
        else:
            yield ok(topic, f"runs on {device.type}")


def _run(name: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(16, 1, 2, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
    )
    groups = Groups.in_process(intra=1)
    out = attention([q], [k], [v], groups=groups, mask=masks.Causal(), kernel=name)[0]
    out.sum().backward()
    if not all(x is not None and x.isfinite().all() for x in (out, q.grad, k.grad, v.grad)):
        raise ValueError("it returns values that are not finite")


def hooks() -> Iterator[Finding]:
    """Do the hooks fit this Megatron? They are installed and removed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron_burst.megatron as burst
            from megatron_burst.megatron.patched import patched_places
    except ImportError:
        return  # said among the versions
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
