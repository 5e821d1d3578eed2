"""The installed FlashAttention packages: which of their functions we call, and whether they fit.

A release is judged by the signatures of its functions, never by its version: one that lacks a
parameter that we pass, or requires one that we do not know, is refused by name. This module also
decides what is passed besides the tensors of a call. Nothing is imported before `load`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

# Our names of what every call is given.
FORWARD = ("q", "k", "v", "softmax_scale", "causal")
BACKWARD = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "softmax_scale", "causal",
            "deterministic")  # fmt: skip
# What a release may lack: then it is not asked for windows.
WINDOW = ("window_size_left", "window_size_right")
ALIASES = {"causal": "is_causal", "lse": "softmax_lse"}  # what some releases call it

MARGIN = "sm_margin"  # multiprocessors that a kernel leaves free
PLAIN = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
CACHE = ("k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "seqused_q", "seqused_k",
         "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary",
         "q_descale", "k_descale", "v_descale")  # fmt: skip


class Function(NamedTuple):
    """A function of a package: its name, and what it is given besides a call's own arguments.

    constants: in every call. unused: None, where there is no default.
    """

    name: str
    constants: Mapping[str, Any]
    unused: tuple[str, ...] = ()


class Package(NamedTuple):
    """distribution: as installers name it; modules: where its functions may be, of which the first
    that is there counts; fits: what to install; unlimited: what a side of a window is that has no
    end; takes_delta: as of `operators.Operator`."""

    title: str
    distribution: str
    modules: tuple[str, ...]
    forward: Function
    backward: Function
    fits: str
    unlimited: int | None = -1
    takes_delta: bool = False

    @property
    def backward_names(self) -> tuple[str, ...]:
        """Our names of what backward is given."""
        return (*BACKWARD, "dlse") if self.takes_delta else BACKWARD

    @property
    def version(self) -> str | None:
        """The installed version, None if no installer left one."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


PACKAGES = {
    "flash2": Package(
        "FlashAttention 2",
        "flash-attn",
        ("flash_attn.flash_attn_interface",),
        Function("_flash_attn_forward", PLAIN | {"return_softmax": False}),
        Function("_flash_attn_backward", PLAIN),
        "flash-attn 2.7 or newer",
    ),
    "flash3": Package(
        "FlashAttention 3",
        "flash-attn-3",
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        Function("_flash_attn_forward", {"num_splits": 1, MARGIN: 0}, LENGTHS + CACHE),
        Function("_flash_attn_backward", {MARGIN: 0}, (*LENGTHS, "sequed_q", "sequed_k")),
        "FlashAttention 3 of 2025 or newer",
    ),
    "flash4": Package(
        "FlashAttention 4",
        "flash-attn-4",
        ("flash_attn.cute.interface",),
        Function("_flash_attn_fwd", {"return_lse": True}),
        Function("_flash_attn_bwd", {}),
        "flash-attn-4 4.0.0b5 or newer",
        unlimited=None,
        takes_delta=True,
    ),
}


class NotInstalled(ValueError):
    """The package is not there at all."""


class Fit:
    """How a function with this signature is called with arguments of our names, and WINDOW if it
    takes windows.

    Raises ValueError, naming `place`, if it has no parameter for one of them or for a constant, or
    wants one that we do not know.
    """

    def __init__(
        self, place: str, signature: inspect.Signature, function: Function, names: Sequence[str]
    ):
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        if len(parameters) < len(signature.parameters):
            raise ValueError(f"{place} takes more than it names: {signature}")
        wanted = {name for name, one in parameters.items() if one.default is one.empty}
        self.names = {name: _spelled(name, parameters) for name in names}
        self.windows = all(name in parameters for name in WINDOW)
        if self.windows:
            self.names |= {name: name for name in WINDOW}
        nothing = {name: None for name in function.unused if name in wanted}
        self.constants = {**function.constants, **nothing}
        passed = [*self.names.values(), *self.constants]
        missing = [name for name in passed if name not in parameters]
        if missing:
            raise ValueError(f"{place} has no parameter {', '.join(missing)}")
        unknown = sorted(wanted.difference(passed))
        if unknown:
            raise ValueError(f"{place} wants {', '.join(unknown)}, which is not known here")

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to call the function with; `given` has our names, all of them."""
        return {theirs: given[ours] for ours, theirs in self.names.items()} | self.constants


class Loaded(NamedTuple):
    """Both functions of a package, how each is called, whether both take windows, and whether
    gradients can be the same bits every time."""

    forward: Callable
    backward: Callable
    forward_fit: Fit
    backward_fit: Fit
    windows: bool
    deterministic: bool


def load(name: str) -> Loaded:
    """The functions of the package of kernel `name`.

    Raises ValueError naming the package and what would work: `NotInstalled` if it is not there,
    else because it cannot be imported or its functions have other parameters.
    """
    package = PACKAGES[name]
    try:
        module = _module(package)
        functions = [_function(module, one.name) for one in (package.forward, package.backward)]
        return fitted(package, module.__name__, *functions)
    except ValueError as error:
        found = f", found {package.distribution} {package.version}" if package.version else ""
        raise type(error)(
            f"kernel {name}: {error}{found}; install {package.fits}, or take kernel='auto' "
            "(--burst-kernel auto)"
        ) from error


def fitted(package: Package, place: str, forward: Callable, backward: Callable) -> Loaded:
    """The functions of a package with the way to call each. Raises ValueError as `Fit` does."""
    there, back = package.forward, package.backward
    first = Fit(f"{place}.{there.name}", signature(forward), there, FORWARD)
    second = Fit(f"{place}.{back.name}", signature(backward), back, package.backward_names)
    return Loaded(
        forward,
        backward,
        first,
        second,
        windows=first.windows and second.windows,
        # FlashAttention 3 without them (before December 2025) may not clear the locks of dk and dv.
        deterministic=second.windows,
    )


def signature(function: Callable) -> inspect.Signature:
    """Of a function; of what `torch.library.custom_op` made of one, that of the function."""
    return inspect.signature(getattr(function, "_init_fn", function))


def _spelled(name: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    alias = ALIASES.get(name, name)
    return alias if alias in parameters else name


def _module(package: Package) -> ModuleType:
    """The first of its modules that is there. Raises ValueError."""
    for name in package.modules:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a library that does not fit this torch may raise anything
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent is None or not f"{name}.".startswith(f"{absent}."):
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"{package.title} cannot be imported: {reason}") from error
    raise NotInstalled(f"{package.title} is not installed (package {package.distribution})")


def _function(module: ModuleType, name: str) -> Callable:
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module.__name__} has no function {name}")
    return function
