# SPDX-License-Identifier: Apache-2.0
"""Checks of the installation: versions of packages, and whether our hooks fit Megatron-Core.

Versions are read without importing the packages. The hooks are installed into Megatron and removed
again. `TESTED` has the versions of Megatron-Core that the tests cover.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import torch
from torch.cuda import nccl

from ...kernels import torch_features
from ...kernels.flash_packages import PACKAGES as FLASH
from ...kernels.presence import package_presence
from ..patch import version_of
from .report import Finding, absent, note, ok, problem

TESTED, NEWEST = ("0.16", "0.19"), "0.19.2"
DEVELOPMENT = re.compile(r"[\d.]+(a|b|rc|dev)\d").match  # such as 2.9.0a0+50eac811a6.nv25.09
INSTALL = "pip install --no-deps 'megatron-core>=0.16' && pip install einops"
PACKAGES = {
    "Transformer Engine": ("transformer-engine", "transformer_engine"),
    "triton": ("triton", "pytorch-triton"),
}
UNNEEDED = "not installed, and not needed"


def version(*distributions: str) -> str | None:
    """Return the version of the first of `distributions` that is installed; None if none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def versions(megatron: bool) -> Iterator[Finding]:
    """Yield findings with the versions of Python, torch, CUDA, NCCL, Megatron-Core and others.

    Args:
        megatron: True if a missing Megatron-Core is a problem; otherwise it is a note.
    """
    yield ok("Python", platform.python_version())
    yield from torch_findings()
    cuda = torch.version.cuda
    if cuda and torch.cuda.is_available():
        yield ok("CUDA", cuda)
        yield ok("NCCL", ".".join(map(str, nccl.version())))
    else:
        built = f"torch is built for CUDA {cuda}" if cuda else "torch is built without CUDA"
        yield note("CUDA", f"{built}, and no GPU is visible: everything runs on the CPU with gloo")
    yield _megatron(megatron)
    for name, distributions in PACKAGES.items():
        release = version(*distributions)
        if release:
            yield ok(name, release)
        elif name == "triton":
            yield absent(name, UNNEEDED)
        else:
            needs = "Megatron's default, --transformer-impl transformer_engine, needs it"
            yield note(name, f"not installed; {needs}")
    yield from flash_attention()


def torch_findings() -> Iterator[Finding]:
    """Yield a finding with the version of torch, and one per feature that this version lacks."""
    version = str(torch.__version__)
    built = ", a development build; its features were checked" if DEVELOPMENT(version) else ""
    yield ok("torch", version + built)
    for feature in torch_features.lacking():
        text = f"{feature.part}: before {feature.since}, {feature.without}"
        is_required = feature.part == torch_features.PACKAGE
        yield problem("torch", text, feature.remedy) if is_required else note("torch", text)


def flash_attention() -> Iterator[Finding]:
    """Yield a finding per FlashAttention package: absent, usable by our kernels, or unusable."""
    for name, package in FLASH.items():
        presence = package_presence(name)
        if presence.usable is None:
            yield absent(package.title, UNNEEDED)
        elif presence.usable:
            yield ok(package.title, presence.text)
        else:
            yield note(package.title, presence.text, f"install {package.fits}")


def _megatron(needed: bool) -> Finding:
    release = megatron_version()
    if release is None and needed:
        return problem("Megatron-Core", "not installed", INSTALL)
    if release is None:
        return note("Megatron-Core", "not installed; Megatron commands need it", INSTALL)
    if ".".join(release.split(".")[:2]) in TESTED:
        newest = "" if release == NEWEST else f" (newest tested: {NEWEST})"
        return ok("Megatron-Core", release + newest)
    return note("Megatron-Core", f"{release}; tested versions: {' and '.join(TESTED)}")


def megatron_version() -> str | None:
    """Return the version of the Megatron-Core that would be imported, or None.

    The version is read from the source files, because a checkout may precede an installed wheel on
    `sys.path`.
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


def hooks() -> Iterator[Finding]:
    """Install this package's hooks into Megatron-Core, remove them, and report whether they fit.

    Yields:
        One finding; nothing if Megatron-Core is not installed.
    """
    if megatron_version() is None:
        return  # `versions` reports this
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
