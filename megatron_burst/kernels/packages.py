# SPDX-License-Identifier: Apache-2.0
"""Functions of installed packages: whether a release fits, and how it is called.

The signatures of its functions decide whether a release fits, never its version. A release that
lacks a parameter that we pass, or requires an unknown one, is refused by name. Parameters in
`**kwargs` count as missing, because some releases ignore unknown ones. Packages are imported when a
kernel needs them. This module needs no torch.
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
    """The package is not installed."""


@dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        title: Name for readers.
        distribution: Name for installers.
        fits: What to install.
    """

    title: str
    distribution: str
    fits: str

    @property
    def version(self) -> str | None:
        """Return the installed version; None if there is no metadata."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def module(self, *names: str, root: str | None = None) -> ModuleType:
        """Import the first of these modules that exists.

        Args:
            *names: Modules to try.
            root: Installed package in which a missing module is an error. Default: each module
                itself.

        Raises:
            NotInstalled: None of the modules exists.
            ValueError: A module cannot be imported.
        """
        for name in names:
            try:
                return importlib.import_module(name)
            except Exception as error:  # a library for another torch may raise anything
                absent = error.name if isinstance(error, ModuleNotFoundError) else None
                if absent is None or not f"{root or name}.".startswith(f"{absent}."):
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    raise ValueError(f"{self.title} cannot be imported: {reason}") from error
        raise NotInstalled(f"{self.title} is not installed (package {self.distribution})")

    @contextmanager
    def blamed(self, kernel: str, remedy: str) -> Iterator[None]:
        """Add the kernel, the installed version and a remedy to a ValueError that is raised inside.

        Args:
            kernel: Name of the kernel.
            remedy: What to use instead.
        """
        try:
            yield
        except ValueError as error:
            installed = f", found {self.distribution} {self.version}" if self.version else ""
            raise type(error)(
                f"kernel {kernel}: {error}{installed}; install {self.fits}, or use {remedy}"
            ) from error


class Signature:
    """The parameters of a function that can be passed by name.

    For a result of `torch.library.custom_op`, the parameters of the wrapped function.

    Args:
        place: Name of the function, for messages.
        function: The function or its signature.
    """

    def __init__(self, place: str, function: Callable | inspect.Signature):
        if not isinstance(function, inspect.Signature):
            function = inspect.signature(getattr(function, "_init_fn", function))
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.place, self.whole = place, function
        self.named = {n: p for n, p in function.parameters.items() if p.kind in kinds}
        self.required = {
            name for name, parameter in self.named.items() if parameter.default is parameter.empty
        }

    def check(self, passed: Sequence[str]) -> None:
        """Check that the function has all passed parameters and requires no others.

        Raises:
            ValueError: It lacks one, or requires another one.
        """
        missing = [name for name in passed if name not in self.named]
        if missing:
            raise ValueError(f"{self.place} has no parameter {', '.join(missing)}")
        unknown = sorted(self.required.difference(passed))
        if unknown:
            raise ValueError(
                f"{self.place} requires {', '.join(unknown)}, which this version does not pass"
            )


class FittedFunction(NamedTuple):
    """A function and the names of its arguments.

    Attributes:
        function: The function.
        names: Our name of each argument -> name in the function.
        constants: Arguments of every call.
    """

    function: Callable
    names: Mapping[str, str]
    constants: Mapping[str, Any]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the function for values under our names."""
        return {name: values[our_name] for our_name, name in self.names.items()} | dict(
            self.constants
        )

    def __call__(self, values: Mapping[str, Any], **overrides: Any) -> Any:
        """Call the function; `overrides` replace constants."""
        return self.function(**self.arguments(values) | overrides)


def function_of(module: ModuleType, name: str) -> Callable:
    """Return a function of a module.

    Raises:
        ValueError: There is no function with this name.
    """
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module.__name__} has no function {name}")
    return function
