"""What travels in one message: several tensors in one buffer, sealed.

One message instead of one per tensor, and a seal at the end of the buffer, because gloo takes a
short message for a long one in silence, and a message of the same size for any other. The seal
says how long the message is, whose plan and which call it belongs to, and what it holds; a rank
that is out of step gets an error instead of a number. A receive buffer has room for the longest
message of the grid: gloo ends the process when more arrives than fits. On devices other than the
CPU there is no seal: reading it would stop the device at every hop (`calls` compares there).
Knows nothing of ranks, chunks or transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Shapes = Sequence[tuple[torch.Size, torch.dtype]]
ALIGNMENT = 16  # bytes: what vectorised kernels want of the start of a tensor
SEAL = 5 * 8  # bytes: the length of the message and the fields of `Seal`, int64 each


class Stamp(NamedTuple):
    """Which call a message belongs to: digest of the plan, number of the call on its groups, and
    digest of the label that the caller gave it and of whether there is a sink."""

    plan: int = 0
    call: int = 0
    label: int = 0


UNSTAMPED = Stamp()  # what belongs to no call, as in a measurement


class Seal(NamedTuple):
    """What both ends of an exchange must call a message; all int64."""

    stamp: Stamp
    content: int  # digest of the pass and the chunk


class Parcel(NamedTuple):
    """`tensors` are views of `flat` (uint8), the message; flat is None where they never travel.

    room: the buffer of which flat is the beginning.
    """

    flat: torch.Tensor | None
    tensors: tuple[torch.Tensor, ...]
    room: torch.Tensor | None = None


def make(shapes: Shapes, device: torch.device, room: int = 0) -> Parcel:
    """An empty parcel for tensors of these shapes and dtypes; on the CPU at least `room` bytes."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
    places = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    sealed = device.type == "cpu"
    length = sum(places) + SEAL * sealed
    buffer = torch.empty(max(length, room * sealed), dtype=torch.uint8, device=device)
    flat, tensors, start = buffer[:length], [], 0
    for (shape, dtype), size, place in zip(shapes, sizes, places, strict=True):
        tensors.append(flat[start : start + size].view(dtype).view(shape))
        start += place
    return Parcel(flat, tuple(tensors), buffer)


def pack(tensors: Sequence[torch.Tensor], seal: Seal) -> Parcel:
    """A sealed parcel with copies of these tensors."""
    parcel = make([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for target, source in zip(parcel.tensors, tensors, strict=True):
        target.copy_(source)
    seal_(parcel, seal)
    return parcel


def seal_(parcel: Parcel, seal: Seal) -> None:
    """Write the seal at the end of the message."""
    if parcel.flat is not None and parcel.flat.device.type == "cpu":
        parcel.flat[-SEAL:] = _bytes(parcel.flat, seal)


def unseal_(flat: torch.Tensor) -> None:
    """Before receiving: what memory held must not pass for a seal."""
    if flat.device.type == "cpu":
        flat[-SEAL:] = 0


def broken(flat: torch.Tensor, seal: Seal) -> str | None:
    """What is wrong with the seal of a message that arrived, or None."""
    if flat.device.type != "cpu" or torch.equal(flat[-SEAL:], _bytes(flat, seal)):
        return None
    length, plan, call, label, _ = flat[-SEAL:].clone().view(torch.int64).tolist()
    stamp = seal.stamp
    if length != flat.numel():
        found = f"what arrived is not the message of {flat.numel()} bytes that was expected"
    elif call != stamp.call:
        found = f"attention call {stamp.call} of this rank got a message of call {call}"
    elif plan != stamp.plan:
        found = f"attention call {call} has another plan on the rank that sent the message"
    elif label != stamp.label:
        found = f"attention call {call} has another label or sink on the rank that sent the message"
    else:
        found = f"attention call {call} got a message of another pass or chunk"
    return f"{found}; the ranks do not run the same plans in the same order"


def _bytes(flat: torch.Tensor, seal: Seal) -> torch.Tensor:
    fields = [flat.numel(), *seal.stamp, seal.content]
    return torch.tensor(fields, dtype=torch.int64).view(torch.uint8)
