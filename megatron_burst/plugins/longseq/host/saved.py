# SPDX-License-Identifier: Apache-2.0
"""Saved tensors of autograd and arguments of checkpoints, moved to the host until backward.

This module decides which tensors stay on the device: parameters and their views, tensor subclasses
and quantised tensors (their memory differs from their shape), expanded tensors (a copy would need
more memory), tensors that Megatron marks `_do_not_offload`, tensors of another device, and small
tensors. Torch's checkpoint holds its arguments until backward. It therefore gets a function without
arguments (`MovedArguments`). The first call uses the tensors on the device; later calls fetch them
from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .copies import MovedTensor

MIN_BYTES = 2**20  # launch time dominates smaller copies
_FLOAT8 = "float8"


def movable(tensor: torch.Tensor, device: str) -> bool:
    """Return whether a tensor is a plain activation on a device of type `device`.

    The module's docstring lists the tensors that are excluded. The size is not checked here.
    """
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
        return False
    return (
        tensor.device.type == device
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
        and _FLOAT8 not in str(tensor.dtype)
        and not getattr(tensor, "_do_not_offload", False)
    )


def hooks(
    move: Callable[[torch.Tensor], MovedTensor],
    selected: Callable[[torch.Tensor], bool],
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return saved-tensor hooks that move the tensors for which `selected` returns True.

    `move` returns a handle from which backward gets the tensor.
    """

    def pack(tensor: torch.Tensor) -> Any:
        # An output that is saved with its history would keep its own graph alive.
        return move(tensor) if selected(tensor) else tensor.detach()

    def unpack(packed: Any) -> torch.Tensor:
        return packed.get() if isinstance(packed, MovedTensor) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class MovedArguments:
    """Function without arguments that calls `function(*args)` and moves `args` at its first call.

    The first call passes the tensors in `args` that require gradients to `move`, which copies them
    to the host. Later calls fetch the moved tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        move: Callable[[torch.Tensor], MovedTensor],
    ):
        self._function, self._move = function, move
        leaves, self._tree = tree_flatten(args)
        self._first: list[Any] | None = leaves
        self._later: list[Any] = []

    def places(self) -> list[torch.Tensor]:
        """Return an empty tensor for each device of the arguments except CPUs.

        A checkpoint saves the random state of the devices of its arguments, so these tensors are
        passed to it as arguments.
        """
        leaves = [leaf for leaf in self._first or () if isinstance(leaf, torch.Tensor)]
        by_device = {leaf.device: leaf for leaf in leaves if leaf.device.type != "cpu"}
        return [leaf.detach().new_empty(0) for leaf in by_device.values()]

    def __call__(self, *_: torch.Tensor) -> Any:
        leaves, self._first = self._first, None
        if leaves is None:
            leaves = [
                _fetch(leaf) if isinstance(leaf, MovedTensor) else leaf for leaf in self._later
            ]
        else:
            self._later = [self._offloaded(leaf) for leaf in leaves]
        args = tree_unflatten(leaves, self._tree)
        del leaves
        return self._function(*args)

    def _offloaded(self, leaf: Any) -> Any:
        """Move an argument to the host and return its handle, or return the argument unchanged."""
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            moved = self._move(leaf)
            return moved if moved.moved else leaf
        return leaf


def _fetch(moved: MovedTensor) -> torch.Tensor:
    return moved.get().requires_grad_()
