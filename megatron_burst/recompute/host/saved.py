"""Hooks by which everything that autograd saves inside a block is moved to the host.

Decides what is left where it is: parameters and their views, subclasses of tensors and quantised
ones (their memory is not what they say), expanded ones (which take less memory than a copy would),
what Megatron marks `_do_not_offload`, tensors of another device, and what is too small to be worth
a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
