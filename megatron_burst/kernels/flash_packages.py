# SPDX-License-Identifier: Apache-2.0
"""The installed FlashAttention packages: the functions that are called, and their arguments.

This module defines which arguments are constant, and maps this project's argument names to the
parameter names of the installed release. It does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from .packages import FittedFunction, Package, Signature, function_of

# Our names of the arguments of every call.
FORWARD = ("q", "k", "v", "softmax_scale", "causal")
BACKWARD = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "softmax_scale", "causal",
            "deterministic")  # fmt: skip
# Optional parameters. A release without them is not used for windows, for many sequences, or for
# lists of blocks.
WINDOW = ("window_size_left", "window_size_right")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
BLOCKS = ("mask_mod", "aux_tensors", "block_sparse_tensors")
ALIASES = {"causal": "is_causal", "lse": "softmax_lse"}  # names in some releases

MARGIN = "sm_margin"  # multiprocessors that a kernel leaves free
PACKED_HEADS = "pack_gqa"  # True: a block has rows of all query heads that share a key head
# LISTS is the type of lists of blocks. Releases with the function SUBTILES support blocks of 256
# columns on sm_100, which gradients of keys of width 192 need.
LISTS, SUBTILES = "BlockSparseTensorsTorch", "get_kv_subtile_factor"
LIST_FIELDS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size")
MASKS = ".flash4_masks"
CACHE = ("k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "seqused_q", "seqused_k",
         "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary",
         "q_descale", "k_descale", "v_descale")  # fmt: skip


class FlashFunction(NamedTuple):
    """A function of a package and its constant arguments.

    Attributes:
        name: Name of the function.
        constants: Value of each constant argument, by parameter name.
        unused: Parameters that this project does not use; they get None if a release requires them.
    """

    name: str
    constants: Mapping[str, Any]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlashPackage(Package):
    """A FlashAttention package.

    Attributes:
        modules: Modules that may contain the functions; the first that exists is used.
        forward: Forward function.
        backward: Backward function.
        unlimited: Value that means "no limit" for the left or right size of a window.
        takes_delta: True if the backward function gets delta (as `dlse`) in place of the output.
        blocks: Module that defines the type of block lists, and the first release whose block lists
            can be used; None if the package has no block lists.
    """

    modules: tuple[str, ...]
    forward: FlashFunction
    backward: FlashFunction
    unlimited: int | None = -1
    takes_delta: bool = False
    blocks: tuple[str, str] | None = None

    @property
    def backward_names(self) -> tuple[str, ...]:
        """Return this project's names of the arguments of the backward function."""
        return (*BACKWARD, "dlse") if self.takes_delta else BACKWARD


PACKAGES = {
    "flash3": FlashPackage(
        "FlashAttention 3",
        "flash-attn-3",
        "FlashAttention 3 of 2025 or newer",
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        FlashFunction("_flash_attn_forward", {"num_splits": 1, MARGIN: 0}, CACHE),
        FlashFunction("_flash_attn_backward", {MARGIN: 0}, ("sequed_q", "sequed_k")),
    ),
    "flash4": FlashPackage(
        "FlashAttention 4",
        "flash-attn-4",
        "flash-attn-4 4.0.0b5 or newer",
        ("flash_attn.cute.interface",),
        FlashFunction("_flash_attn_fwd", {"return_lse": True}),
        FlashFunction("_flash_attn_bwd", {}),
        unlimited=None,
        takes_delta=True,
        blocks=("flash_attn.cute.block_sparsity", "4.0.0b22"),
    ),
}


class BlockFunctions(NamedTuple):
    """Functions for calls with lists of blocks.

    Attributes:
        lists: Function that makes the package's lists of blocks.
        masks: Object with the mask functions of `flash4_masks` as attributes.
    """

    lists: Callable
    masks: Any


class FlashFunctions(NamedTuple):
    """Forward and backward function of an installed package.

    Attributes:
        forward: Forward function.
        backward: Backward function.
        windows: True if both functions support windows.
        joins: True if both functions support many sequences in one call.
        deterministic: True if the backward function can compute deterministic gradients.
        blocks: Functions for lists of blocks; None if the release has no usable ones.
    """

    forward: FittedFunction
    backward: FittedFunction
    windows: bool
    joins: bool
    deterministic: bool
    blocks: BlockFunctions | None = None


def load(name: str) -> FlashFunctions:
    """Return the forward and backward function of the installed package of a kernel.

    Args:
        name: Name of the kernel, "flash3" or "flash4".

    Raises:
        NotInstalled: The package is not installed.
        ValueError: The package cannot be imported, or its functions have unknown parameters. The
            message names a supported release.
    """
    package = PACKAGES[name]
    with package.blamed(name, "kernel='auto' (--burst-kernel auto)"):
        module = package.module(*package.modules)
        functions = (
            function_of(module, flash_function.name)
            for flash_function in (package.forward, package.backward)
        )
        loaded = fitted(package, module.__name__, *functions)
        return loaded._replace(blocks=_block_functions(package, loaded))


def fitted(
    package: FlashPackage, place: str, forward: Callable, backward: Callable
) -> FlashFunctions:
    """Check the parameters of the forward and the backward function; return `FlashFunctions`.

    The result has no functions for lists of blocks.

    Args:
        package: The package.
        place: Name of the functions' module, for messages.
        forward: Forward function.
        backward: Backward function.

    Raises:
        ValueError: A function lacks a parameter, or requires an unknown one; see `fit`.
    """
    first = fit(place, forward, package.forward, FORWARD)
    second = fit(place, backward, package.backward, package.backward_names)
    all_names = first.names, second.names
    windows, joins = (
        [set(optional) <= set(names) for names in all_names] for optional in (WINDOW, LENGTHS)
    )
    # Without the window parameters (before December 2025), backward of FlashAttention 3 may not
    # clear the locks of dk and dv.
    return FlashFunctions(first, second, all(windows), all(joins), deterministic=windows[1])


def _block_functions(package: FlashPackage, loaded: FlashFunctions) -> BlockFunctions | None:
    if package.blocks is None:
        return None
    try:
        names = vars(package.module(package.blocks[0]))
        return fitted_blocks(loaded, names, lambda: import_module(MASKS, __package__))
    except ValueError:  # the module does not exist, or is unknown
        return None


def fitted_blocks(
    loaded: FlashFunctions, names: Mapping[str, Any], masks: Callable[[], Any]
) -> BlockFunctions | None:
    """Return the functions for lists of blocks; None if the release has no usable ones.

    Args:
        loaded: Forward and backward function.
        names: Names that the module with the type of block lists defines.
        masks: Function that imports and returns the mask functions.
    """
    passed = loaded.forward.names, loaded.backward.names
    if not {LISTS, SUBTILES} <= set(names) or not all(set(BLOCKS) <= set(x) for x in passed):
        return None
    Signature(LISTS, names[LISTS]).check(LIST_FIELDS)
    return BlockFunctions(names[LISTS], masks())


def fit(
    place: str, function: Callable, flash_function: FlashFunction, names: Sequence[str]
) -> FittedFunction:
    """Check the parameters of a function, and return it as a `FittedFunction`.

    Its map `names` includes the names in `WINDOW`, `LENGTHS` and `BLOCKS` if the function has these
    parameters.

    Args:
        place: Name of the function's module, for messages.
        function: The function.
        flash_function: Name, constant arguments and unused parameters of the function.
        names: This project's names of the arguments that are always passed.

    Raises:
        ValueError: The function lacks a parameter, or requires an unknown one.
    """
    signature = Signature(f"{place}.{flash_function.name}", function)
    if len(signature.named) < len(signature.whole.parameters):
        raise ValueError(
            f"{signature.place} has parameters that cannot be passed by name: {signature.whole}"
        )
    aliases = {name: ALIASES.get(name, name) for name in names}
    spelled = {name: alias if alias in signature.named else name for name, alias in aliases.items()}
    for optional in (WINDOW, LENGTHS, BLOCKS):
        if all(name in signature.named for name in optional):
            spelled |= {name: name for name in optional}
    nothing = {name: None for name in flash_function.unused if name in signature.required}
    constants: Mapping[str, Any] = {**flash_function.constants, **nothing}
    signature.check([*spelled.values(), *constants])
    return FittedFunction(function, spelled, constants)
