"""Arguments of a checkpointed call, which wait on the host between its two runs.

Torch's checkpoint holds what it is called with until backward. It is handed a function without
arguments instead, that has them once, and from then on gets them from where they were moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .copies import Moved


class Arguments:
    """`function(*args)`, as often as it is called. Tensors in `args` that require a gradient go
    through `move` when it is called first, and are found with the same bits later."""

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
        state of random numbers."""
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
