# SPDX-License-Identifier: Apache-2.0
"""What autograd saves, and the arguments that a checkpoint holds, moved to the host until backward.

Decides what is left where it is: parameters and their views, subclasses of tensors and quantised
ones (their memory is not what they say), expanded ones (which take less memory than a copy would),
what Megatron marks `_do_not_offload`, tensors of another device, and what is too small to be worth
a copy. Torch's checkpoint holds what it is called with until backward; it is handed a function
without arguments instead, which has them once, and from then on gets them from where they were
moved (`Arguments`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .copies import Moved

MIN_BYTES = 2**20  # below it a copy costs about as much as its launch
_FLOAT8 = "float8"


def movable(tensor: torch.Tensor, device: str) -> bool:
    """Whether a tensor is plain memory of an activation on a device of this type."""
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
    move: Callable[[torch.Tensor], Moved],
    worth: Callable[[torch.Tensor], bool],
) -> torch.autograd.graph.saved_tensors_hooks:
    """What is `worth` it goes through `move`; everything else is saved as it is."""

    def pack(tensor: torch.Tensor) -> Any:
        # An output saved with its history would keep its own graph alive.
        return move(tensor) if worth(tensor) else tensor.detach()

    def unpack(packed: Any) -> torch.Tensor:
        return packed.get() if isinstance(packed, Moved) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Arguments:
    """`function(*args)`, as often as it is called. Tensors in `args` that require a gradient go
    through `move` when it is called first, and are found with the same bits later.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        move: Callable[[torch.Tensor], Moved],
    ):
        self._function, self._move = function, move
        leaves, self._tree = tree_flatten(args)
        self._first: list[Any] | None = leaves
        self._later: list[Any] = []

    def places(self) -> list[torch.Tensor]:
        """An empty tensor on each device of the arguments: of these devices a checkpoint keeps the
        state of random numbers.
        """
        leaves = [leaf for leaf in self._first or () if isinstance(leaf, torch.Tensor)]
        found = {leaf.device: leaf for leaf in leaves if leaf.device.type != "cpu"}
        return [leaf.detach().new_empty(0) for leaf in found.values()]

    def __call__(self, *_: torch.Tensor) -> Any:
        leaves, self._first = self._first, None
        if leaves is None:
            leaves = [_again(leaf) if isinstance(leaf, Moved) else leaf for leaf in self._later]
        else:
            self._later = [self._kept(leaf) for leaf in leaves]
        args = tree_unflatten(leaves, self._tree)
        del leaves
        return self._function(*args)

    def _kept(self, leaf: Any) -> Any:
        """What stands for an argument until it is needed again."""
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            moved = self._move(leaf)
            return moved if moved.moved else leaf
        return leaf


def _again(moved: Moved) -> torch.Tensor:
    return moved.get().requires_grad_()
