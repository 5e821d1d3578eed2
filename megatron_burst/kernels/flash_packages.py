# SPDX-License-Identifier: Apache-2.0
"""The installed FlashAttention packages: which of their functions we call, and with what.

Decides what is passed besides the tensors of a call, and what releases call it. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .packages import FittedFunction, Package, Signature, function_of

# Our names of what every call is given.
FORWARD = ("q", "k", "v", "softmax_scale", "causal")
BACKWARD = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "softmax_scale", "causal",
            "deterministic")  # fmt: skip
# What a release may lack: then it is not asked for windows, or for many sequences at once.
WINDOW = ("window_size_left", "window_size_right")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ALIASES = {"causal": "is_causal", "lse": "softmax_lse"}  # what some releases call it

MARGIN = "sm_margin"  # multiprocessors that a kernel leaves free
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


@dataclass(frozen=True)
class FlashPackage(Package):
    """modules: where its functions may be, of which the first that is there counts; unlimited: what
    a side of a window is that has no end; takes_delta: as of `operators.Operator`.
    """

    modules: tuple[str, ...]
    forward: Function
    backward: Function
    unlimited: int | None = -1
    takes_delta: bool = False

    @property
    def backward_names(self) -> tuple[str, ...]:
        """Our names of what backward is given."""
        return (*BACKWARD, "dlse") if self.takes_delta else BACKWARD


PACKAGES = {
    "flash3": FlashPackage(
        "FlashAttention 3",
        "flash-attn-3",
        "FlashAttention 3 of 2025 or newer",
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        Function("_flash_attn_forward", {"num_splits": 1, MARGIN: 0}, CACHE),
        Function("_flash_attn_backward", {MARGIN: 0}, ("sequed_q", "sequed_k")),
    ),
    "flash4": FlashPackage(
        "FlashAttention 4",
        "flash-attn-4",
        "flash-attn-4 4.0.0b5 or newer",
        ("flash_attn.cute.interface",),
        Function("_flash_attn_fwd", {"return_lse": True}),
        Function("_flash_attn_bwd", {}),
        unlimited=None,
        takes_delta=True,
    ),
}


class FlashFunctions(NamedTuple):
    """Both functions of a package, whether both take windows and many sequences, and whether
    gradients can be the same bits every time.
    """

    forward: FittedFunction
    backward: FittedFunction
    windows: bool
    joins: bool
    deterministic: bool


def load(name: str) -> FlashFunctions:
    """The functions of the package of kernel `name`.

    Raises ValueError naming the package and what would work: `NotInstalled` if it is not there,
    else because it cannot be imported or its functions have other parameters.
    """
    package = PACKAGES[name]
    with package.blamed(name, "kernel='auto' (--burst-kernel auto)"):
        module = package.module(*package.modules)
        both = (function_of(module, one.name) for one in (package.forward, package.backward))
        return fitted(package, module.__name__, *both)


def fitted(
    package: FlashPackage, place: str, forward: Callable, backward: Callable
) -> FlashFunctions:
    """The functions of a package with the way to call each. Raises ValueError as `fit` does."""
    first = fit(place, forward, package.forward, FORWARD)
    second = fit(place, backward, package.backward, package.backward_names)
    both = first.names, second.names
    windows, joins = ([set(some) <= set(names) for names in both] for some in (WINDOW, LENGTHS))
    # FlashAttention 3 without them (before December 2025) may not clear the locks of dk and dv.
    return FlashFunctions(first, second, all(windows), all(joins), deterministic=windows[1])


def fit(place: str, function: Callable, known: Function, names: Sequence[str]) -> FittedFunction:
    """How a function of the module `place` is called with arguments of our names, and those of
    WINDOW and LENGTHS if it takes them.

    Raises ValueError if it has no parameter for one of them or for a constant, or wants one that we
    do not know.
    """
    shown = Signature(f"{place}.{known.name}", function)
    if len(shown.named) < len(shown.whole.parameters):
        raise ValueError(f"{shown.place} takes more than it names: {shown.whole}")
    aliases = {name: ALIASES.get(name, name) for name in names}
    spelled = {name: alias if alias in shown.named else name for name, alias in aliases.items()}
    for some in (WINDOW, LENGTHS):
        if all(name in shown.named for name in some):
            spelled |= {name: name for name in some}
    nothing = {name: None for name in known.unused if name in shown.required}
    constants: Mapping[str, Any] = {**known.constants, **nothing}
    shown.check([*spelled.values(), *constants])
    return FittedFunction(function, spelled, constants)
