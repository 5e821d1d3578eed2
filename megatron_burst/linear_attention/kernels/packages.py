"""The installed packages of linear attention: which of their functions we call, whether they fit.

A release is judged by the signatures of its functions, never by its version: one that lacks a
parameter that we pass, or requires one that we do not know, is refused by name. What a release
takes as `**kwargs` counts as lacking: some drop what they do not know. Nothing is imported before
`load`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Package(NamedTuple):
    """title and distribution: as people and as installers name it; fits: what to install;
    constants: passed to every function that has such a parameter."""

    title: str
    distribution: str
    fits: str
    constants: Mapping[str, Any]

    @property
    def version(self) -> str | None:
        """The installed version, None if no installer left one."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


PACKAGES = {
    # Heads behind rows, which early releases take only where they are told to.
    "fla": Package(
        "flash-linear-attention",
        "flash-linear-attention",
        "flash-linear-attention 0.4 or newer",
        {"head_first": False},
    ),
    "mamba_ssm": Package("Mamba", "mamba-ssm", "mamba-ssm 2.2 or newer", {}),
}


class Fit:
    """How a function with this signature is called with arguments of these names, which it must
    have, and of `optional` ones, which it may.

    Raises ValueError, naming `place`, if it has no parameter for one of them, or wants one that we
    do not know.
    """

    def __init__(
        self,
        place: str,
        signature: inspect.Signature,
        names: Sequence[str],
        optional: Sequence[str] = (),
        constants: Mapping[str, Any] | None = None,
    ):
        named = {n: p for n, p in signature.parameters.items() if p.kind in NAMED}
        missing = [name for name in names if name not in named]
        if missing:
            raise ValueError(f"{place} has no parameter {', '.join(missing)}")
        self.names = (*names, *(name for name in optional if name in named))
        known = constants or {}
        self.constants = {name: value for name, value in known.items() if name in named}
        wanted = {name for name, one in named.items() if one.default is one.empty}
        unknown = sorted(wanted.difference(self.names, self.constants))
        if unknown:
            raise ValueError(f"{place} wants {', '.join(unknown)}, which is not known here")

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to call the function with; optional arguments that it lacks are left out."""
        return {name: given[name] for name in self.names} | self.constants


class Loaded(NamedTuple):
    """A function, and how it is called."""

    function: Callable
    fit: Fit

    def __call__(self, **given: Any) -> Any:
        return self.function(**self.fit.arguments(given))


class NotInstalled(ValueError):
    """The package is not there at all."""


def installed(package: str) -> bool:
    """Is there such a package? Whether its functions fit is seen when one is called."""
    return importlib.util.find_spec(package) is not None


def load(package: str, path: str, names: Sequence[str], optional: Sequence[str] = ()) -> Loaded:
    """The function at the dotted `path`, to be called with arguments of these names.

    Raises ValueError naming the package and what would work: `NotInstalled` if it is not there,
    else because it cannot be imported or its function has other parameters.
    """
    found = PACKAGES[package]
    module, _, name = path.rpartition(".")
    try:
        function = _function(found, module, name)
        signature = inspect.signature(function)
        return Loaded(function, Fit(path, signature, names, optional, found.constants))
    except ValueError as error:
        version = f", found {found.distribution} {found.version}" if found.version else ""
        raise type(error)(
            f"kernel {package}: {error}{version}; install {found.fits}, or take kernel='torch'"
        ) from error


def _function(package: Package, module: str, name: str) -> Callable:
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # a library that does not fit this torch may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and absent == module.partition(".")[0]:
            raise NotInstalled(
                f"{package.title} is not installed (package {package.distribution})"
            ) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{package.title} cannot be imported: {reason}") from error
    if not callable(function):
        raise ValueError(f"{module} has no function {name}")
    return function
