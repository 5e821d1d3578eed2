"""What travels in one message: several tensors in one buffer, sealed.

One message instead of one per tensor, and a seal at the end of the buffer, because gloo takes a
short message for a long one in silence: what arrives must end with its size and its name. On
devices other than the CPU there is no seal: reading it would stop the device at every hop.
Knows nothing of ranks, chunks or transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Shapes = Sequence[tuple[torch.Size, torch.dtype]]
ALIGNMENT = 16  # bytes: what vectorised kernels want of the start of a tensor
SEAL = 16  # bytes: size and name, int64 each


class Parcel(NamedTuple):
    """`tensors` are views of `flat` (uint8); flat is None where they never travel."""

    flat: torch.Tensor | None
    tensors: tuple[torch.Tensor, ...]


def make(shapes: Shapes, device: torch.device) -> Parcel:
    """An empty parcel for tensors of these shapes and dtypes."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
    places = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    seal = SEAL * (device.type == "cpu")
    flat = torch.empty(sum(places) + seal, dtype=torch.uint8, device=device)
    tensors, start = [], 0
    for (shape, dtype), size, place in zip(shapes, sizes, places, strict=True):
        tensors.append(flat[start : start + size].view(dtype).view(shape))
        start += place
    return Parcel(flat, tuple(tensors))


def pack(tensors: Sequence[torch.Tensor], name: int) -> Parcel:
    """A sealed parcel with copies of these tensors."""
    parcel = make([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for target, source in zip(parcel.tensors, tensors, strict=True):
        target.copy_(source)
    seal_(parcel, name)
    return parcel


def seal_(parcel: Parcel, name: int) -> None:
    """Write size and name at the end; `name` is what sender and receiver both call it."""
    if parcel.flat is not None and parcel.flat.device.type == "cpu":
        parcel.flat[-SEAL:] = _seal(parcel.flat, name)


def unseal_(flat: torch.Tensor) -> None:
    """Before receiving: what memory held must not pass for a seal."""
    if flat.device.type == "cpu":
        flat[-SEAL:] = 0


def broken(flat: torch.Tensor, name: int) -> str | None:
    """What is wrong with the seal of a parcel that arrived, or None."""
    if flat.device.type != "cpu" or torch.equal(flat[-SEAL:], _seal(flat, name)):
        return None
    return (
        f"what arrived is not the message of {flat.numel()} bytes that was expected; the ranks do "
        "not run the same plan in the same order"
    )


def _seal(flat: torch.Tensor, name: int) -> torch.Tensor:
    return torch.tensor([flat.numel(), name], dtype=torch.int64).view(torch.uint8)
