# SPDX-License-Identifier: Apache-2.0
"""Functions of installed packages: whether a release fits, and how it is called.

A release is judged by the signatures of its functions, never by its version: one that lacks a
parameter that we pass, or requires one that we do not know, is refused by name. What a release
takes as `**kwargs` counts as lacking: some drop what they do not know. Nothing is imported before a
kernel asks for it. It needs no torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple


class NotInstalled(ValueError):
    """The package is not there at all."""


@dataclass(frozen=True)
class Package:
    """title and distribution: as people and as installers name it; fits: what to install."""

    title: str
    distribution: str
    fits: str

    @property
    def version(self) -> str | None:
        """The installed version, None if no installer left one."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def module(self, *names: str, root: str | None = None) -> ModuleType:
        """The first of these modules that is there.

        Raises ValueError: `NotInstalled` if there is none (nor `root`, where a module that lacks
        in an installed `root` is an error), else because one cannot be imported.
        """
        for name in names:
            try:
                return importlib.import_module(name)
            except Exception as error:  # a library that does not fit this torch may raise anything
                absent = error.name if isinstance(error, ModuleNotFoundError) else None
                if absent is None or not f"{root or name}.".startswith(f"{absent}."):
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    raise ValueError(f"{self.title} cannot be imported: {reason}") from error
        raise NotInstalled(f"{self.title} is not installed (package {self.distribution})")

    @contextmanager
    def blamed(self, kernel: str, remedy: str) -> Iterator[None]:
        """A ValueError raised inside names the kernel, what is installed and what would work."""
        try:
            yield
        except ValueError as error:
            installed = f", found {self.distribution} {self.version}" if self.version else ""
            raise type(error)(
                f"kernel {kernel}: {error}{installed}; install {self.fits}, or take {remedy}"
            ) from error


class Signature:
    """The parameters of a function that can be passed by name. place: of the function, for
    messages; of what `torch.library.custom_op` made of a function, those of the function.
    """

    def __init__(self, place: str, function: Callable | inspect.Signature):
        if not isinstance(function, inspect.Signature):
            function = inspect.signature(getattr(function, "_init_fn", function))
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.place, self.whole = place, function
        self.named = {n: p for n, p in function.parameters.items() if p.kind in kinds}
        self.required = {name for name, one in self.named.items() if one.default is one.empty}

    def check(self, passed: Sequence[str]) -> None:
        """Raise ValueError unless it has all that is passed, and requires nothing else."""
        missing = [name for name in passed if name not in self.named]
        if missing:
            raise ValueError(f"{self.place} has no parameter {', '.join(missing)}")
        unknown = sorted(self.required.difference(passed))
        if unknown:
            raise ValueError(f"{self.place} wants {', '.join(unknown)}, which is not known here")


class FittedFunction(NamedTuple):
    """A function and how it is called. names: our name of each argument -> that of the function;
    constants: what it is given besides, in every call.
    """

    function: Callable
    names: Mapping[str, str]
    constants: Mapping[str, Any]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to call the function with; `given` has our names, at least those of `names`."""
        return {theirs: given[ours] for ours, theirs in self.names.items()} | dict(self.constants)

    def __call__(self, given: Mapping[str, Any], **others: Any) -> Any:
        """The function's result; `others` replace constants."""
        return self.function(**self.arguments(given) | others)


def function_of(module: ModuleType, name: str) -> Callable:
    """A function of a module. Raises ValueError if there is none of this name."""
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module.__name__} has no function {name}")
    return function
