# SPDX-License-Identifier: Apache-2.0
"""Messages: several tensors in one buffer, with an envelope at its end.

One message instead of one per tensor, and an envelope, because gloo takes a short message for a
long one in silence, and a message of the same size for any other. The envelope (MPI's word) says
how long the message is, whose plan and which call it belongs to, and what it holds; a rank that is
out of step gets an error instead of a number. A receive buffer has room for the longest message of
the grid: gloo ends the process when more arrives than fits. On devices other than the CPU there is
no envelope: reading it would stop the device at every hop (`calls` compares there). There a rank
sends its own tensors one by one, in one batch, from where they lie, so that nothing is copied; what
it passes on, and sums, are one message there too, which costs the host half as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Shapes = Sequence[tuple[torch.Size, torch.dtype]]
ALIGNMENT = 16  # bytes: what vectorised kernels want of the start of a tensor
ENVELOPE = 5 * 8  # bytes: the length of the message and the fields of `Envelope`, int64 each


class CallTag(NamedTuple):
    """Which call a message belongs to: digest of the plan, number of the call on its groups, and
    digest of the label that the caller gave it and of whether there is a sink.
    """

    plan: int = 0
    call: int = 0
    label: int = 0


NO_CALL = CallTag()  # what belongs to no call, as in a measurement


class Envelope(NamedTuple):
    """What both ends of an exchange must call a message; all int64."""

    call: CallTag
    content: int  # digest of the pass and the chunk


class Message(NamedTuple):
    """`tensors` are views of `flat` (uint8), the message; flat is None where they never travel.

    room: the buffer of which flat is the beginning.
    """

    flat: torch.Tensor | None
    tensors: tuple[torch.Tensor, ...]
    room: torch.Tensor | None = None


class Cut(NamedTuple):
    """Where tensors of some shapes lie in a message: its bytes without the envelope, and of each
    dtype, shape, strides and the number of elements before it.
    """

    length: int
    parts: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]


def cut(shapes: Shapes) -> Cut:
    """Tensors of these shapes and dtypes, one behind the other, each aligned."""
    start, parts = 0, []
    for shape, dtype in shapes:
        size, strides = 1, []
        for n in reversed(shape):
            strides.insert(0, size)
            size *= n
        parts.append((dtype, shape, tuple(strides), start // dtype.itemsize))
        start += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return Cut(start, tuple(parts))


def empty(shapes: Shapes, device: torch.device, least: int = 0) -> Message:
    """An empty message for tensors of these shapes and dtypes; `least` as of `room_size`."""
    of = cut(shapes)
    return carve(torch.empty(room_size(of, device, least), dtype=torch.uint8, device=device), of)


def room_size(cut: Cut, device: torch.device, least: int = 0) -> int:
    """Bytes of a buffer for a message cut so, or for shorter ones; on the CPU at least `least`."""
    return max(cut.length + ENVELOPE, least) if device.type == "cpu" else cut.length


def carve(buffer: torch.Tensor, cut: Cut) -> Message:
    """A message cut so, at the beginning of a buffer."""
    length = cut.length + ENVELOPE if buffer.is_cpu else cut.length
    flat = buffer if length == buffer.numel() else buffer[:length]
    tensors = [
        flat.view(dtype).as_strided(shape, strides, before)
        for dtype, shape, strides, before in cut.parts
    ]
    return Message(flat, tuple(tensors), buffer)


def pack(tensors: Sequence[torch.Tensor], envelope: Envelope) -> Message:
    """A message with copies of these tensors."""
    message = empty([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for target, source in zip(message.tensors, tensors, strict=True):
        target.copy_(source)
    write_envelope_(message, envelope)
    return message


def write_envelope_(message: Message, envelope: Envelope) -> None:
    """Write the envelope at the end of the message."""
    if message.flat is not None and message.flat.device.type == "cpu":
        message.flat[-ENVELOPE:] = _bytes(message.flat, envelope)


def mismatch(flat: torch.Tensor, envelope: Envelope) -> str | None:
    """What is wrong with the envelope of a message that arrived, or None."""
    if flat.device.type != "cpu" or torch.equal(flat[-ENVELOPE:], _bytes(flat, envelope)):
        return None
    length, plan, call, label, _ = flat[-ENVELOPE:].clone().view(torch.int64).tolist()
    expected = envelope.call
    if length != flat.numel():
        found = f"what arrived is not the message of {flat.numel()} bytes that was expected"
    elif call != expected.call:
        found = f"call {expected.call} of this rank got a message of call {call}"
    elif plan != expected.plan:
        found = f"call {call} has another plan on the rank that sent the message"
    elif label != expected.label:
        found = (
            f"call {call} has another label or sink (or host memory on one rank only) on the rank "
            "that sent the message, or no label and was made by another line of the program"
        )
    else:
        found = f"call {call} got a message of another pass or chunk"
    return f"{found}; the ranks do not run the same plans in the same order"


def _bytes(flat: torch.Tensor, envelope: Envelope) -> torch.Tensor:
    fields = [flat.numel(), *envelope.call, envelope.content]
    return torch.tensor(fields, dtype=torch.int64).view(torch.uint8)
