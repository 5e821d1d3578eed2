"""The input that a pipeline stage received: Megatron's schedule holds it until backward.

Its first layer saves it, so it travels to the host like every layer's input, and its memory on the
device would stay all the same. It is freed once it is on the host: backward reads the gradient and
the shape of the held tensor, never its elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megatron_burst.recompute.host.copies import Moved
from megatron_burst.recompute.host.mover import HostMemory


class _Held(NamedTuple):
    tensor: torch.Tensor
    moved: Moved


class Received:
    """What one forward pass received: a tensor, a list of tensors, or nothing."""

    def __init__(self, received: Any = None) -> None:
        found = received if isinstance(received, (list, tuple)) else [received]
        # A leaf: what the schedule made for receiving, and no result that others may read.
        self._waiting = [
            one
            for one in found
            if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf
        ]
        self._moved: list[_Held] = []
        self._saved: set[int] = set()

    def move(
        self, arguments: Iterable[torch.Tensor], fraction: float, host: HostMemory, least: int
    ) -> None:
        """Begin to copy what of it is an argument of the first layer; that the layer saves it
        later adds no copy. least: bytes below which it stays."""
        for one in arguments:
            if any(one is other for other in self._waiting):
                self._waiting = [other for other in self._waiting if other is not one]
                share = fraction if one.nbytes >= least else 0.0
                moved = host.move(one.detach(), share, shared=True)
                if moved.moved:
                    self._moved.append(_Held(one, moved))

    def saved(self, tensor: torch.Tensor) -> None:
        """A layer has saved this tensor, in a way that moves it."""
        if self._moved:
            self._saved.add(tensor.untyped_storage()._cdata)

    def free(self) -> None:
        """Free the memory of what was saved from the host's copy, after that copy. What a layer
        keeps in another way stays."""
        for tensor, moved in self._moved:
            storage = tensor.untyped_storage()
            if storage._cdata in self._saved and storage.resizable():
                moved.release()
                storage.resize_(0)
        self._moved.clear()
