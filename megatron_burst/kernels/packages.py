# SPDX-License-Identifier: Apache-2.0
"""Functions of optional packages: compatibility checks of the installed release, and calls by name.

Compatibility is decided by the signatures of functions, never by the version of the package. If a
function lacks a parameter that we pass, or requires an unknown one, an error names the parameter.
Parameters in `**kwargs` count as missing, because some releases ignore unknown arguments. Packages
are imported when a kernel needs them. This module does not import torch.
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
    """Error: an optional package is not installed."""


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        title: Name of the package in messages.
        distribution: Name of the package for pip.
        fits: Text for messages that names the supported releases.
    """

    title: str
    distribution: str
    fits: str

    @property
    def version(self) -> str | None:
        """Return the installed version; None if the package has no metadata."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def module(self, *names: str, root: str | None = None) -> ModuleType:
        """Import and return the first of these modules that exists.

        Args:
            *names: Names of the modules to try, in this order.
            root: Package whose absence raises `NotInstalled`; absence of any other module raises
                ValueError. Default: the module itself.

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
        """Add kernel, installed version and remedy to a ValueError that is raised in this context.

        Args:
            kernel: Name of the kernel that uses the package.
            remedy: Alternative that the message recommends.
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

    For a function from `torch.library.custom_op`, these are the parameters of the wrapped function.

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
        """Check that the function can be called with these parameters, passed by name.

        Raises:
            ValueError: The function lacks a passed parameter, or requires another parameter.
        """
        missing = [name for name in passed if name not in self.named]
        if missing:
            raise ValueError(
                f"{self.place} has no parameter {', '.join(missing)}, which megatron_burst passes"
            )
        unknown = sorted(self.required.difference(passed))
        if unknown:
            raise ValueError(
                f"{self.place} requires {', '.join(unknown)}, which megatron_burst does not pass"
            )


class FittedFunction(NamedTuple):
    """A function of a package that is called with this project's argument names.

    Attributes:
        function: The function.
        names: The function's parameter names, by this project's argument names.
        constants: Values of arguments that are the same in every call, by parameter name.
    """

    function: Callable
    names: Mapping[str, str]
    constants: Mapping[str, Any]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the function. `values` are by this project's names."""
        return {name: values[our_name] for our_name, name in self.names.items()} | dict(
            self.constants
        )

    def __call__(self, values: Mapping[str, Any], **overrides: Any) -> Any:
        """Call the function with `arguments(values)`. `overrides` replaces constant arguments."""
        return self.function(**self.arguments(values) | overrides)


def function_of(module: ModuleType, name: str) -> Callable:
    """Return the function `name` of a module.

    Raises:
        ValueError: The module has no function with this name.
    """
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module.__name__} has no function {name}")
    return function
